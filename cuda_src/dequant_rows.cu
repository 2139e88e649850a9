// Weights as they stand in a GGUF file to plain numbers, for the large products of prefill.
//
//   out[row][k] = W[row][k]   W rows of row_bytes as in common/gguf_blocks.cuh; out [n_rows][n_in], contiguous
//
// -DTYPE=F32 | F16 | BF16 | Q8_0 | Q4_0 | Q4_1 | Q5_0 | Q5_1 | IQ4_NL | Q2_K | Q3_K | Q4_K | Q5_K | Q6_K | IQ4_XS
// -DOUT=F16    float16, rounded to nearest; what is beyond its range becomes +-65504
//       F32    float32, the values of kvs_core/formats/quants.py bit for bit
//
// A warp takes four consecutive tiles of 256 values, counted over all rows; a block has 8 warps.
#include "common/gguf_blocks.cuh"

using Weights = Blocks<TYPE>;
constexpr int WARP_TILES = 4;

DEVICE float in_range(float v) { return fminf(fmaxf(v, -65504.f), 65504.f); }

DEVICE void store_quad(u16* row, int k, int n, const float* v) {
  float r[4];
#pragma unroll
  for (int i = 0; i < 4; i++) r[i] = in_range(v[i]);
  if ((n & 3) == 0) {
    if (k < n) *(uint2*)(row + k) = make_uint2(f2h2(r[0], r[1]), f2h2(r[2], r[3]));
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (k + i < n) row[k + i] = f2h(r[i]);
  }
}
template <int FORM> struct Number { using Type = float; };
template <> struct Number<F16> { using Type = u16; };

extern "C" __global__ void __launch_bounds__(256)
dequant_rows(const u8* weights, long long row_bytes, int n_in, int n_rows, Number<OUT>::Type* out) {
  const int lane = threadIdx.x & 31, tiles = tiles_of(n_in), all_tiles = n_rows * tiles;
  const int first = (blockIdx.x * 8 + (threadIdx.x >> 5)) * WARP_TILES;
  Weights::Raw raw[WARP_TILES];
#pragma unroll
  for (int j = 0; j < WARP_TILES; j++)
    if (first + j < all_tiles)
      raw[j] = Weights::load(weights + (first + j) / tiles * row_bytes, (first + j) % tiles, lane, n_in);
#pragma unroll
  for (int j = 0; j < WARP_TILES; j++) {
    if (first + j >= all_tiles) return;
    float v[8];
    Weights::values(raw[j], lane, v);
    const int k = (first + j) % tiles * TILE + Weights::first(lane);
    Number<OUT>::Type* row = out + (size_t)((first + j) / tiles) * n_in;
    store_quad(row, k, n_in, v);
    store_quad(row, k + Weights::SECOND, n_in, v + 4);
  }
}
