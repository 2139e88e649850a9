// Gated DeltaNet: norm and gate of the rows' outputs, in place.
//
//     out[t][h] = o / sqrt(mean(o^2) + eps) * norm * silu(z)       o = out[t][h] before; [DIM]
//
//   out   [rows][heads * DIM] f32
//   z     rows z_stride numbers apart, [heads * DIM] f32 each
//   norm  [DIM] f32
//
// A warp owns one head of one row; a block has 4 warps.
//
//   DIM   32, 64 or 128
#include "common/gdn.cuh"

constexpr int PER_LANE = DIM / 32;

extern "C" __global__ void __launch_bounds__(128) gdn_norm(
    float* out, const float* z, int z_stride, const float* __restrict__ norm, float eps, int rows, int heads) {
  const int i = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
  float weight[PER_LANE];
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) weight[j] = norm[j * 32 + lane];
  pdl_trigger();
  pdl_wait();
  if (i >= rows * heads) return;
  const int row = i / heads, head = i % heads;
  float* const o = out + ((size_t)row * heads + head) * DIM + lane;
  const float* const gate = z + (size_t)row * z_stride + head * DIM + lane;
  float x[PER_LANE], by[PER_LANE], squares = 0.f;
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) x[j] = ldcg(o + j * 32), by[j] = ldcg(gate + j * 32);
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) squares = fmaf(x[j], x[j], squares);
#pragma unroll
  for (int d = 16; d > 0; d /= 2) squares += __shfl_xor_sync(~0u, squares, d);
  const float unit = rsqrtf(squares * (1.f / DIM) + eps);
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) o[j * 32] = x[j] * unit * weight[j] * gdn_silu(by[j]);
}
