// Rows of float32 through an RMS norm or a soft cap, and the row of a table that a step names.
//
//   rms_norm    out[t][i] = x[t][i] / sqrt(mean(x[t]^2) + eps) * norm[i]; one block per row. A thread adds up columns
//               threadIdx.x, + 256, ...; then lanes by halving distances, then the warps in order
//   add_normed  x[t][i] += v[i] / sqrt(mean(v^2) + eps) * norm[i], v = parts[0][t] + parts[1][t] + ..., in that order;
//               block and sums as in rms_norm. v takes the place of parts[0][t]
//   softcap     x[t][i] = cap * tanh(x[t][i] / cap)
//   scale_rows  x[t][i] = x[t][i] * factor
//   take_kept   out[i] = rows[step[STEP_KEPT]][i]; out may be the first row
#include "common/block_sum.cuh"
#include "common/tables.cuh"

constexpr int THREADS = 256;

// 1 / sqrt(mean + eps) of a row of n squares, from each thread's sum of some of them.
DEVICE float rms_factor(float sum, int n, float eps) {
  __shared__ float parts[THREADS / 32];
  return 1.f / sqrtf(block_sum<THREADS / 32>(sum, parts) / n + eps);
}

extern "C" __global__ void __launch_bounds__(THREADS)
rms_norm(const float* x, int x_stride, const float* __restrict__ norm, float* out, int out_stride, int n, float eps) {
  pdl_trigger();
  pdl_wait();
  const float* row = x + (size_t)blockIdx.x * x_stride;
  float* to = out + (size_t)blockIdx.x * out_stride;
  float sum = 0.f;
  for (int i = threadIdx.x; i < n; i += THREADS) {
    const float v = ldcg(row + i);
    sum = fmaf(v, v, sum);
  }
  const float scale = rms_factor(sum, n, eps);
  for (int i = threadIdx.x; i < n; i += THREADS) to[i] = ldcg(row + i) * scale * norm[i];
}

// parts [n_parts][gridDim.x][part_stride]
extern "C" __global__ void __launch_bounds__(THREADS)
add_normed(float* parts, int n_parts, int part_stride, const float* __restrict__ norm, float* x, int x_stride, int n,
           float eps) {
  pdl_trigger();
  pdl_wait();
  float* own = parts + (size_t)blockIdx.x * part_stride;
  float* row = x + (size_t)blockIdx.x * x_stride;
  const size_t step = (size_t)gridDim.x * part_stride;
  float sum = 0.f;
  for (int i = threadIdx.x; i < n; i += THREADS) {
    float v = ldcg(own + i);
    for (int p = 1; p < n_parts; p++) v += ldcg(own + p * step + i);
    if (n_parts > 1) own[i] = v;
    sum = fmaf(v, v, sum);
  }
  const float scale = rms_factor(sum, n, eps);
  for (int i = threadIdx.x; i < n; i += THREADS) row[i] += ldcg(own + i) * scale * norm[i];
}

extern "C" __global__ void __launch_bounds__(THREADS) softcap(float* x, int stride, int n, float cap) {
  pdl_trigger();
  pdl_wait();
  const int i = blockIdx.x * THREADS + threadIdx.x;
  float* at = x + (size_t)blockIdx.y * stride + i;
  if (i < n) *at = cap * tanhf(ldcg(at) / cap);
}

extern "C" __global__ void __launch_bounds__(THREADS) scale_rows(float* x, int stride, int n, float factor) {
  pdl_trigger();
  pdl_wait();
  const int i = blockIdx.x * THREADS + threadIdx.x;
  float* at = x + (size_t)blockIdx.y * stride + i;
  if (i < n) *at = ldcg(at) * factor;
}

extern "C" __global__ void __launch_bounds__(THREADS)
take_kept(const float* rows, int stride, const int* __restrict__ step, float* out, int n) {
  pdl_trigger();
  pdl_wait();
  const float* row = rows + (size_t)step[STEP_KEPT] * stride;
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i < n) out[i] = ldcg(row + i);
}
