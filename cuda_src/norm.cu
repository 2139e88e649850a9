// Rows of float32 through an RMS norm, and the row of a table that a step names.
//
//   rms_norm    out[t][i] = x[t][i] / sqrt(mean(x[t]^2) + eps) * norm[i]; one block per row. A thread adds up columns
//               threadIdx.x, + 256, ...; then lanes by halving distances, then the warps in order
//   take_kept   out[i] = rows[step[STEP_KEPT]][i]; out may be the first row
#include "common/ptx.cuh"
#include "common/tables.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
rms_norm(const float* x, int x_stride, const float* __restrict__ norm, float* out, int out_stride, int n, float eps) {
  __shared__ float parts[THREADS / 32];
  pdl_trigger();
  pdl_wait();
  const float* row = x + (size_t)blockIdx.x * x_stride;
  float* to = out + (size_t)blockIdx.x * out_stride;
  float sum = 0.f;
  for (int i = threadIdx.x; i < n; i += THREADS) {
    const float v = ldcg(row + i);
    sum = fmaf(v, v, sum);
  }
#pragma unroll
  for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
  if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = sum;
  __syncthreads();
  float total = 0.f;
#pragma unroll
  for (int w = 0; w < THREADS / 32; w++) total += parts[w];
  const float scale = 1.f / sqrtf(total / n + eps);
  for (int i = threadIdx.x; i < n; i += THREADS) to[i] = ldcg(row + i) * scale * norm[i];
}

extern "C" __global__ void __launch_bounds__(THREADS)
take_kept(const float* rows, int stride, const int* __restrict__ step, float* out, int n) {
  pdl_trigger();
  pdl_wait();
  const float* row = rows + (size_t)step[STEP_KEPT] * stride;
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i < n) out[i] = ldcg(row + i);
}
