// Ends prefill attention: normalises the running partial of attend_prefill.cu, undoes V's rotation, gates.
//
//   running  f32: acc [T][H][V_DIM], then (l, m) [T][H][2]
//   y        f32 [T][y_columns]: if gated, head h's gates begin at (2 h + 1) V_DIM
//   out      f32 [T][H][V_DIM]
//
// A warp owns a (row, head): lane has its dims lane + 32 i.
//
// Compile-time facts (-D)
//   V_DIM, V_ROTATION   head dim; width of V's Hadamard blocks, a power of two, or 0
#include "common/ptx.cuh"

extern "C" __global__ void __launch_bounds__(256)
finish_prefill(const float* running, const float* y, float* out, int rows, int heads, int y_columns, int gated) {
  constexpr int N = (V_DIM + 31) / 32;
  const int lane = threadIdx.x & 31, pair = blockIdx.x * 8 + (threadIdx.x >> 5);
  if (pair >= rows * heads) return;
  const float total = running[(size_t)rows * heads * V_DIM + pair * 2];
  float x[N];
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int dim = i * 32 + lane;
    x[i] = dim < V_DIM ? running[(size_t)pair * V_DIM + dim] / total : 0.f;
  }
#pragma unroll
  for (int width = 1; width < 32 && width < V_ROTATION; width *= 2)
#pragma unroll
    for (int i = 0; i < N; i++) {
      const float other = __shfl_xor_sync(~0u, x[i], width);
      x[i] = lane & width ? other - x[i] : x[i] + other;
    }
#pragma unroll
  for (int apart = 1; apart < V_ROTATION / 32; apart *= 2)
#pragma unroll
    for (int i = 0; i < N; i++) {
      if (i & apart) continue;
      const float a = x[i], b = x[i + apart];
      x[i] = a + b, x[i + apart] = a - b;
    }
  const float* const gates = y + (size_t)(pair / heads) * y_columns + (pair % heads * 2 + 1) * V_DIM;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int dim = i * 32 + lane;
    if (dim >= V_DIM) continue;
    float value = V_ROTATION ? x[i] * rsqrtf((float)V_ROTATION) : x[i];
    if (gated) value *= 1.f / (1.f + __expf(-gates[dim]));
    out[(size_t)pair * V_DIM + dim] = value;
  }
}
