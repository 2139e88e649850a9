// Embeddings of a token per layer: what a step's rows get for every layer, and what a layer takes of it.
//
//   per_layer_inputs   out[t][l] = (out[t][l] + v / sqrt(mean(v^2) + eps) * norm) * sqrt(1/2), v = projected[t][l] * factor
//                      out, projected f32 [T][L P]; out has the table's rows, times sqrt(P); norm [P]
//                      a block per (layer, row): sums as in norm.cu
//   per_layer_gate     rows[t][i] = gelu(rows[t][i]) * inputs[t][i]   rows f32 [T][P]; inputs ``stride`` numbers apart
//
// A row's bits do not depend on the others.
#include "common/block_sum.cuh"
#include "common/gelu.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
per_layer_inputs(float* out, const float* projected, const float* __restrict__ norm, int n, float factor, float eps) {
  __shared__ float parts[THREADS / 32];
  pdl_trigger();
  pdl_wait();
  const size_t at = ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * n;
  float sum = 0.f;
  for (int i = threadIdx.x; i < n; i += THREADS) {
    const float v = ldcg(projected + at + i) * factor;
    sum = fmaf(v, v, sum);
  }
  const float scale = factor / sqrtf(block_sum<THREADS / 32>(sum, parts) / n + eps);
  for (int i = threadIdx.x; i < n; i += THREADS)
    out[at + i] = (ldcg(out + at + i) + ldcg(projected + at + i) * scale * norm[i]) * 0.70710678118654752f;
}

extern "C" __global__ void __launch_bounds__(THREADS)
per_layer_gate(float* rows, const float* inputs, int stride, int n) {
  pdl_trigger();
  pdl_wait();
  const int i = blockIdx.x * THREADS + threadIdx.x;
  float* at = rows + (size_t)blockIdx.y * n + i;
  if (i < n) *at = gelu(ldcg(at)) * ldcg(inputs + (size_t)blockIdx.y * stride + i);
}
