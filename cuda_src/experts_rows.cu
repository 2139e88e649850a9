// Products of rows with the experts that they chose, weights as they are in the GGUF file:
//
//   y[slot][o] = factors[row] * sum over k of W_expert[o][k] * x[row][k]
//
// A slot is one expert of one row (experts.cu). x [rows][n_in] f32, contiguous, n_in a multiple of 4; weights as in
// common/gguf_blocks.cuh, the experts' n_out rows of row_bytes one behind the other.
//
// -DTYPE=F32 | F16 | BF16 | Q2_K | Q3_K   types that are not kept as records
// -DROWS=1  DECODE: grid row = slot
//        8  PREFILL: grid row = a group of up to 8 slots of one expert, which read its weights together
//
// A warp has a row of W; a lane adds up its eight columns of each tile of 256, the lanes are added by halving distances.
// Launched plainly: grid (n_out / 8 rounded up, slots or groups), 256 threads.
#include "common/gguf_blocks.cuh"

using Weights = Blocks<TYPE>;

DEVICE float add_quad(float sum, const float* w, const float4& x) {
  return fmaf(w[3], x.w, fmaf(w[2], x.z, fmaf(w[1], x.y, fmaf(w[0], x.x, sum))));
}

extern "C" __global__ void __launch_bounds__(256)
experts_rows(const u8* __restrict__ weights, long long row_bytes, int n_in, int n_out, const float* x, int per_row,
             const float* factors, const int* ids, const int* order, const int* groups, float* y, int y_stride) {
  const int lane = threadIdx.x & 31, n = blockIdx.x * 8 + (threadIdx.x >> 5);
#if ROWS == 1
  constexpr int rows = 1;
  const int expert = ids[blockIdx.y];
  const auto slot_of = [&](int) { return (int)blockIdx.y; };
#else
  const int* const group = groups + 4 * blockIdx.y;
  const int expert = group[0], first = group[1], rows = group[2];
  const auto slot_of = [&](int r) { return order[first + min(r, rows - 1)]; };
  if (rows == 0) return;
#endif
  if (n >= n_out) return;
  const u8* const row = weights + ((size_t)expert * n_out + n) * row_bytes;
  const float* from[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) from[r] = x + (size_t)(slot_of(r) / per_row) * n_in;
  float sums[ROWS] = {};
  for (int tile = 0; tile < tiles_of(n_in); tile++) {
    float w[8];
    Weights::values(Weights::load(row, tile, lane, n_in), lane, w);
#pragma unroll
    for (int quad = 0; quad < 2; quad++) {
      const int k = tile * TILE + Weights::first(lane) + quad * Weights::SECOND;
      if (k >= n_in) continue;
#pragma unroll
      for (int r = 0; r < ROWS; r++) sums[r] = add_quad(sums[r], w + 4 * quad, *(const float4*)(from[r] + k));
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
#pragma unroll
    for (int o = 16; o; o >>= 1) sums[r] += __shfl_xor_sync(~0u, sums[r], o);
    if (lane == 0 && r < rows)
      y[(size_t)slot_of(r) * y_stride + n] = (factors ? factors[slot_of(r) / per_row] : 1.f) * sums[r];
  }
}
