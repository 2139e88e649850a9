// Weight records: tiles of 16 rows x 256 columns of a quantised matrix, made of GGUF blocks by repack.cu. As many bytes
// as in the file, all 16-byte aligned, a tile's columns one contiguous run: weights [row tiles][n_in / 256][RECORD].
// -DTYPE=Q8_0 | Q4_K | Q5_K | Q6_K | IQ4_XS | Q4_0 | Q4_1 | Q5_0 | Q5_1 | IQ4_NL
//
// A record is quants in chunks of 512 bytes, 16 per lane (lane 4 g + t, g: tile rows g and g + 8, t: four columns of
// 16), so that one 16-byte load is a tensor-core operand; then scales, row by row. "words (row, half)" of a lane:
// row g, columns 4 t ..; row g, columns 16 + 4 t ..; row g + 8, the same two.
//
//   Q8_0    8 chunks (32 columns)  words (row, half)                                    | 16 x 8 d (f16)
//   Q4_K    4 chunks (64 columns)  words (row, half), nibbles: columns c | c + 32       | 16 x 16-byte heads as in GGUF
//   Q5_K    4 chunks as Q4_K | 1 chunk of fifth bits: words (row, half), bit b of a byte: block b | 16 x 16-byte heads
//   Q6_K    per 128 columns: 2 chunks of low nibbles, rotated left by 2 bits: columns c | c + 64; 1 chunk of bit pairs,
//           the upper bit of each flipped           | 16 x 16 scales | 16 d
//   IQ4_XS  4 chunks (64 columns)  block, row; a word is nibbles of columns 4 t .. then 16 + 4 t ..
//           | 16 x (d, high bits of the scales, low bits): see repack.cu
//   IQ4_NL  4 chunks as IQ4_XS                              | 16 x 8 d
//   Q4_0    4 chunks as Q4_K       Q4_1: the same           | 16 x 8 d | Q4_1: 16 x 8 m
//   Q5_0    4 + 1 chunks as Q5_K   Q5_1: the same           | 16 x 8 d | Q5_1: 16 x 8 m
#pragma once
#include "common/ptx.cuh"

#define Q8_0 0
#define Q4_K 1
#define Q5_K 2
#define Q6_K 3
#define IQ4_XS 4
#define Q4_0 5
#define Q4_1 6
#define Q5_0 7
#define Q5_1 8
#define IQ4_NL 9

// GGUF: values and bytes of a block; bytes of 256 columns of a row are those of a record / 16.
constexpr int TYPE_BLOCK[10] = {32, 256, 256, 256, 256, 32, 32, 32, 32, 32};
constexpr int TYPE_BLOCK_BYTES[10] = {34, 144, 176, 210, 136, 18, 20, 22, 24, 18};
constexpr int BLOCK = TYPE_BLOCK[TYPE], BLOCK_BYTES = TYPE_BLOCK_BYTES[TYPE];
constexpr int RECORD = 16 * BLOCK_BYTES * (256 / BLOCK);

#define HAS_SUPER_SCALES (TYPE == Q4_K || TYPE == Q5_K)                                   // 6-bit scales and minima
#define HAS_FIFTH_BITS (TYPE == Q5_K || TYPE == Q5_0 || TYPE == Q5_1)
#define HAS_BLOCK_NIBBLES (TYPE == Q4_0 || TYPE == Q4_1 || TYPE == Q5_0 || TYPE == Q5_1)  // d (and m) per 32 columns
#define HAS_VALUE_TABLE (TYPE == IQ4_XS || TYPE == IQ4_NL)

// Where the scales begin.
constexpr int SCALES = TYPE == Q8_0 ? 4096 : TYPE == Q6_K ? 3072 : HAS_FIFTH_BITS ? 2560 : 2048;
constexpr int HEAD_BYTES = TYPE == IQ4_XS ? 8 : 16;     // of a row there
constexpr int FIFTH_BITS = 2048;
constexpr int MINIMA = SCALES + 256;    // Q4_1, Q5_1
constexpr int SIX_BIT_D = 3328;         // Q6_K

// The 16-byte head of a Q4_K or Q5_K block is d | dmin << 16 and 12 bytes of scales and minima: those of blocks 0-3 or
// 4-7 as bytes.
DEVICE u32 head_minima(uint4 head, bool second) {
  return second ? ((head.w >> 4) & 0x0f0f0f0fu) | ((head.z >> 2) & 0x30303030u) : head.z & 0x3f3f3f3fu;
}
DEVICE u32 head_scales(uint4 head, bool second) {
  return second ? (head.w & 0x0f0f0f0fu) | ((head.y >> 2) & 0x30303030u) : head.y & 0x3f3f3f3fu;
}
// Scales of blocks 0-3 or 4-7 of an IQ4_XS row head {d | high bits << 16, low bits}: bytes 4 * (scale - 32), signed.
DEVICE u32 iq4_scales(uint2 head, bool second) {
  const u32 high = head.x >> 16;
  return second ? ((head.y >> 2) & 0x3c3c3c3cu) | (((high << 2) | (high << 16)) & 0xc0c0c0c0u)
                : ((head.y << 2) & 0x3c3c3c3cu) | (((high << 6) | (high << 20)) & 0xc0c0c0c0u);
}
DEVICE int signed_byte(u32 x, int j) { return (int)prmt(x, 0, 0x8880 + 0x1111 * j); }
DEVICE int unsigned_byte(u32 x, int j) { return (int)prmt(x, 0, 0x4440 + j); }
