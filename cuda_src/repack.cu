// GGUF blocks to weight records (common/records.cuh), once, at load.  -DTYPE
// One warp per (row, 256 columns); grid (blocks of eight rows, n_in / 256 rounded up), 256 threads.
//   source     rows [0, n_rows) as in the file; the first is row first_row of the matrix
//   half_rows  0, or: the matrix has so many rows of gates, as many of ups, and so on; eight of each share a tile
//   records    [tiles][n_blocks][RECORD]: tile t holds rows 16 t ..; or rows 8 t .. of all gates, and those of all ups
// Rows [n_rows, n_written) and columns beyond n_in are written as zeros.
#include "common/records.cuh"

// Bytes at any address.
DEVICE u32 word_at(const u8* p) { return (u32)p[0] | (u32)p[1] << 8 | (u32)p[2] << 16 | (u32)p[3] << 24; }
DEVICE u16 half_at(const u8* p) { return (u16)(p[0] | p[1] << 8); }

extern "C" __global__ void __launch_bounds__(256)
repack(const u8* __restrict__ source, int n_rows, int n_written, int n_in, int first_row, int half_rows,
       u8* __restrict__ records) {
  const int lane = threadIdx.x & 31, i = blockIdx.x * 8 + (threadIdx.x >> 5), block = blockIdx.y, n_blocks = gridDim.y;
  if (i >= n_written) return;
  int row = first_row + i, u = (row >> 3) & 1, tile = row >> 4;
  if (half_rows) {   // both halves are whole groups of eight
    const int halves = row / half_rows;
    row += (halves / 2 - halves) * half_rows;
    u = halves & 1;
    tile = row >> 3;
  }
  const int g = row & 7, tile_row = g + 8 * u;
  u8* r = records + ((size_t)tile * n_blocks + block) * RECORD;
  const u8* in_row = source + (size_t)i * (n_in / BLOCK) * BLOCK_BYTES;
  // Block b of 32 columns lies in the file; of a type with blocks of 256 all eight do.
  const int blocks_here = i < n_rows ? min(8, (n_in - block * 256) / 32) : 0;
  const u8* in = in_row + (size_t)block * (256 / BLOCK) * BLOCK_BYTES;
  // Most types have 32 words of nibbles: (j, wide, t).
  [[maybe_unused]] const int t = lane & 3, wide = (lane >> 2) & 1, j = lane >> 3;
  // Where word (wide, t) of this row lies in a chunk whose lanes hold (row, half).
  [[maybe_unused]] const int word = (g * 4 + t) * 16 + u * 8 + wide * 4;

#if HAS_SUPER_SCALES
  constexpr int QUANTS = BLOCK_BYTES - 128;
  *(u32*)(r + j * 512 + word) = blocks_here ? word_at(in + QUANTS + lane * 4) : 0;
#if TYPE == Q5_K
  if (lane < 8) *(u32*)(r + FIFTH_BITS + word) = blocks_here ? word_at(in + 16 + lane * 4) : 0;
#endif
  if (lane < 4) *(u32*)(r + SCALES + tile_row * 16 + lane * 4) = blocks_here ? word_at(in + lane * 4) : 0;

#elif TYPE == Q6_K
  {
    const u32 low = blocks_here ? word_at(in + lane * 4) : 0;   // words (n, chunk, wide, t)
    *(u32*)(r + (lane >> 4) * 1536 + (j & 1) * 512 + word) = low << 2 | low >> 30;
  }
  if (lane < 16) {
    const u32 pairs = blocks_here ? word_at(in + 128 + lane * 4) ^ 0xaaaaaaaau : 0;   // words (n, wide, t)
    *(u32*)(r + j * 1536 + 1024 + word) = pairs;
  }
  if (lane < 4) *(u32*)(r + SCALES + tile_row * 16 + lane * 4) = blocks_here ? word_at(in + 192 + lane * 4) : 0;
  if (lane == 0) *(u16*)(r + SIX_BIT_D + tile_row * 2) = blocks_here ? half_at(in + 208) : 0;

#elif HAS_VALUE_TABLE
  {
    const int b = lane >> 2;   // words (b, t)
    const bool here = b < blocks_here;
    const u32 q = here ? word_at(TYPE == IQ4_XS ? in + 8 + lane * 4 : in + b * BLOCK_BYTES + 2 + t * 4) : 0;
    u32 nibbles = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) nibbles |= (q >> 8 * k & 15) << 4 * k | (q >> (8 * k + 4) & 15) << (16 + 4 * k);
    *(u32*)(r + (b >> 1) * 512 + (g * 4 + t) * 16 + (b & 1) * 8 + u * 4) = nibbles;
#if TYPE == IQ4_NL
    if (t == 0) *(u16*)(r + SCALES + tile_row * 16 + 2 * b) = here ? half_at(in + b * BLOCK_BYTES) : 0;
#endif
  }
#if TYPE == IQ4_XS
  // Low bits of scale b and b + 4 share a byte. High bits, the upper one flipped (6-bit scale - 32, signed), lie where
  // shifts of the word bring those of blocks 0-3, or of 4-7, to the upper ends of the bytes: 0, 8, 2, 10, 4, 12, 6, 14.
  if (lane == 0) {
    u32 high = 0, low = 0;
    if (blocks_here) {
      const u32 h = half_at(in + 2), l = word_at(in + 4);
#pragma unroll
      for (int b = 0; b < 8; b++) {
        high |= ((h >> 2 * b & 3) ^ 2) << ((b & 1) * 8 + (b >> 1) * 2);
        low |= (l >> 4 * b & 15) << ((b & 3) * 8 + (b >> 2) * 4);
      }
      high = high << 16 | half_at(in);
    }
    *(uint2*)(r + SCALES + tile_row * 8) = make_uint2(high, low);
  }
#endif

#elif HAS_BLOCK_NIBBLES
  {
    // Of blocks 2 j, 2 j + 1: the values of 16 columns are the low or the high nibbles of a block's bytes.
    constexpr int QUANTS = BLOCK_BYTES - 16;
    const u8* even = in + 2 * j * BLOCK_BYTES + QUANTS + t * 4;
    const u32 a = 2 * j < blocks_here ? word_at(even) : 0;
    const u32 b = 2 * j + 1 < blocks_here ? word_at(even + BLOCK_BYTES) : 0;
    *(u32*)(r + j * 512 + word) = wide ? (a >> 4 & 0x0f0f0f0fu) | (b & 0xf0f0f0f0u)
                                       : (a & 0x0f0f0f0fu) | (b & 0x0f0f0f0fu) << 4;
  }
#if HAS_FIFTH_BITS
  if (lane < 8) {   // of columns 16 wide + 4 t ..: bit b of a byte is block b's
    u32 fifth = 0;
    for (int b = 0; b < blocks_here; b++) {
      const u32 bits = word_at(in + b * BLOCK_BYTES + BLOCK_BYTES - 20) >> (16 * wide + 4 * t);
#pragma unroll
      for (int k = 0; k < 4; k++) fifth |= (bits >> k & 1) << (8 * k + b);
    }
    *(u32*)(r + FIFTH_BITS + word) = fifth;
  }
#endif
  if (lane < 8) {
    const u8* from = in + lane * BLOCK_BYTES;
    *(u16*)(r + SCALES + tile_row * 16 + 2 * lane) = lane < blocks_here ? half_at(from) : 0;
#if TYPE == Q4_1 || TYPE == Q5_1
    *(u16*)(r + MINIMA + tile_row * 16 + 2 * lane) = lane < blocks_here ? half_at(from + 2) : 0;
#endif
  }

#else   // Q8_0: 64 words (b, wide, t)
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const int b = j + 4 * k;
    const u8* from = in + b * BLOCK_BYTES + 2 + (wide * 4 + t) * 4;
    *(u32*)(r + b * 512 + word) = b < blocks_here ? word_at(from) : 0;
  }
  if (lane < 8) {
    const u8* from = in + lane * BLOCK_BYTES;
    *(u16*)(r + SCALES + tile_row * 16 + 2 * lane) = lane < blocks_here ? half_at(from) : 0;
  }
#endif
}
