// Order of the bytes in FRAGMENTS pages (kvs_core/paging/geometry.py): q8_0 keys and q4_0 values, heads of 256, pages
// of 256 tokens, every piece in the order in which a lane of mma.m16n8k16 takes it. For the writer and the readers.
//
//   page        kv heads x 106,496 bytes:   K part 16 x 4352 | V part 8 x 4608
//   K piece     16 tokens, 4352 bytes:      [dims / 32: 8][lane: 32][16 bytes] | f16 scales [token: 16][dims / 32: 8]
//               lane 4g + t:  token 2g dims 4t..4t+3, 16+4t..16+4t+3 | token 2g+1 the same   (dims within the 32)
//               a byte is q + 128
//   V piece     32 dims, 4608 bytes:        [dims / 16: 2][tokens / 64: 4][lane: 32][4 words] | f16 scales [token: 256]
//               lane 4g + t, word w of quarter c:  tokens 16 (4c + w) + 4t + {0, 2, 1, 3} in bytes 0..3, each byte
//               dim g in its low nibble and dim g+8 in its high one   (dims within the 16; nibbles as in q4_0: q + 8)
//
// Queries for these pages lie in the order of the K bytes: within every 32 dims, dim 16u + 4t + b is at 8t + 4u + b
// (u = 0..1, t = 0..3, b = 0..3). So the 8 halves from 8t on are lane t's B fragments of two products: product u takes
// dims 16u + 4t + {0, 1} as its k = 2t, 2t+1 and {2, 3} as its k = 2t+8, 2t+9, as the key bytes of that lane do.
// Decode queries are stored so; prefill queries stay in plain order, and their reader places them.
#pragma once

constexpr int FRAGMENT_TOKENS = 256;        // of a page
constexpr int FRAGMENT_DIM = 256;           // of a head
constexpr int FRAGMENT_K_PIECE = 4352;      // 16 tokens
constexpr int FRAGMENT_K_SCALES = 4096;     // offset of the scales in a K piece
constexpr int FRAGMENT_V_PIECE = 4608;      // 32 dims
constexpr int FRAGMENT_V_TILE = 2048;       // 16 dims of a V piece
constexpr int FRAGMENT_V_SCALES = 4096;     // offset of the scales in a V piece
constexpr int FRAGMENT_V_PART = 16 * FRAGMENT_K_PIECE;                       // offset of the V part in a head: 69,632
constexpr int FRAGMENT_HEAD = FRAGMENT_V_PART + 8 * FRAGMENT_V_PIECE;        // bytes of a head: 106,496

// Byte offsets from the beginning of the head.

// byte of key (token, dim); dims dim..dim+3 follow each other if dim is a multiple of 4
__device__ __forceinline__ int fragment_k(int token, int dim) {
  return (token >> 4) * FRAGMENT_K_PIECE + (dim >> 5) * 512 + (((token >> 1) & 7) * 4 + ((dim >> 2) & 3)) * 16
       + (token & 1) * 8 + ((dim >> 4) & 1) * 4 + (dim & 3);
}
// f16 scale of the block of 32 that key (token, dim) is in
__device__ __forceinline__ int fragment_k_scale(int token, int dim) {
  return (token >> 4) * FRAGMENT_K_PIECE + FRAGMENT_K_SCALES + (token & 15) * 16 + (dim >> 5) * 2;
}
// byte that holds value (token, dim) in its low nibble if dim & 8 is 0, else in its high one; dim + 1 is 64 bytes on
__device__ __forceinline__ int fragment_v(int token, int dim) {
  return FRAGMENT_V_PART + (dim >> 5) * FRAGMENT_V_PIECE + ((dim >> 4) & 1) * FRAGMENT_V_TILE + (token >> 6) * 512
       + ((dim & 7) * 4 + ((token >> 2) & 3)) * 16 + ((token >> 4) & 3) * 4 + (((token >> 1) & 1) | ((token & 1) << 1));
}
// f16 scale of the block of 32 that value (token, dim) is in
__device__ __forceinline__ int fragment_v_scale(int token, int dim) {
  return FRAGMENT_V_PART + (dim >> 5) * FRAGMENT_V_PIECE + FRAGMENT_V_SCALES + token * 2;
}
// two scales, of ``token`` and the next one; those of tokens before ``first`` become 0, whatever they hold
__device__ __forceinline__ unsigned from_token(unsigned scales, int token, int first) {
  return token >= first ? scales : token + 1 == first ? scales & 0xffff0000u : 0u;
}
// place of dim in the row of a decode query for these pages
__device__ __forceinline__ int fragment_query(int dim) {
  return (dim & ~31) + ((dim >> 2) & 3) * 8 + ((dim >> 4) & 1) * 4 + (dim & 3);
}
