// The rows of prefill products: float32 rows become float16 rows for a GEMM, and its float32 results are completed.
//
// One block owns one row in every kernel. A float16 row holds value / scale, where scale is a power of two that follows
// from the row's peak, the largest |value| of the row:
//
//     peak in [2^-10, 2^15]   scale 1: nothing to undo, and no value overflows or loses bits that matter
//     otherwise               scale 2^floor(log2(peak)), held in [2^-40, 2^40]
//
// Peaks stay in device memory, float32 [T]; who consumes a product multiplies by the scale. A row of scale 1 costs one
// load there. NaN and infinity pass through.
//
//     rms_rows      x [T, E] -> RMS-normed rows [T, E]
//     round_rows    rows [T, n] float32 -> [T, n]
//     swiglu_rows   gates and ups [T, 2n] -> columns [first, first + n) of rows [T, F]
//     geglu_rows    the same with gelu(gate)
//     divide_rows   x /= scale, before a product is added to it: exact down to 2^-126, below which is 0 (-ftz)
//     finish_rows   y = y * scale + bias
//
// Launched plainly, one after the other. float16 rows and products are contiguous, others ``stride`` numbers apart; E,
// n, F and the strides of what is read are multiples of 4, first is even.
#include "common/gelu.cuh"
#include "common/ptx.cuh"

constexpr int BLOCK = 256;
constexpr int WARPS = BLOCK / 32;
constexpr float LEAST_PEAK = 1.f / 1024, MOST_PEAK = 32768.f;
constexpr u32 LEAST_SCALE = (127u - 40) << 23, MOST_SCALE = (127u + 40) << 23;   // bits of 2^-40 and 2^40

// The scale of a row with that peak. An empty row has none, and a broken one keeps its infinity.
DEVICE float scale_of(float peak) {
  if ((peak >= LEAST_PEAK && peak <= MOST_PEAK) || peak == 0.f || !(peak < __uint_as_float(0x7f800000u))) return 1.f;
  const u32 power = __float_as_uint(peak) & 0x7f800000u;
  return __uint_as_float(power < LEAST_SCALE ? LEAST_SCALE : power > MOST_SCALE ? MOST_SCALE : power);
}
// 1 / scale for such a power of two, exactly.
DEVICE float inverse(float scale) { return __uint_as_float((254u << 23) - __float_as_uint(scale)); }

struct Sum {
  DEVICE static float of(float a, float b) { return a + b; }
};
struct Max {
  DEVICE static float of(float a, float b) { return fmaxf(a, b); }
};
// One value of all threads' values, for all threads, in a fixed order. ``parts`` is in shared memory, one use per call.
template <class Merge> DEVICE float over_block(float value, float* parts) {
#pragma unroll
  for (int step = 16; step; step >>= 1) value = Merge::of(value, __shfl_xor_sync(~0u, value, step));
  if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = value;
  __syncthreads();
  value = parts[0];
#pragma unroll
  for (int warp = 1; warp < WARPS; warp++) value = Merge::of(value, parts[warp]);
  return value;
}
DEVICE float largest(float4 v) { return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))); }
DEVICE uint2 halves(float4 v, float factor) {
  return make_uint2(f2h2(v.x * factor, v.y * factor), f2h2(v.z * factor, v.w * factor));
}

extern "C" __global__ void __launch_bounds__(BLOCK)
rms_rows(const float* x, int stride, const float* weight, float eps, int n, u16* out, float* peaks) {
  __shared__ float sums[WARPS], tops[WARPS];
  const float4* const from = (const float4*)(x + (size_t)blockIdx.x * stride);
  const float4* const factors = (const float4*)weight;
  uint2* const to = (uint2*)(out + (size_t)blockIdx.x * n);
  float sum = 0.f, top = 0.f;
  for (int i = threadIdx.x; i < n / 4; i += BLOCK) {
    const float4 v = from[i], w = factors[i];
    sum += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
    top = fmaxf(top, largest(make_float4(v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w)));
  }
  sum = over_block<Sum>(sum, sums);
  const float norm = 1.f / sqrtf(sum / (float)n + eps);
  const float peak = over_block<Max>(top, tops) * norm;
  const float factor = norm * inverse(scale_of(peak));
  if (threadIdx.x == 0) peaks[blockIdx.x] = peak;
  for (int i = threadIdx.x; i < n / 4; i += BLOCK) {
    const float4 v = from[i], w = factors[i];
    to[i] = halves(make_float4(v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w), factor);
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
round_rows(const float* rows, int stride, int n, u16* out, float* peaks) {
  __shared__ float tops[WARPS];
  const float4* const from = (const float4*)(rows + (size_t)blockIdx.x * stride);
  uint2* const to = (uint2*)(out + (size_t)blockIdx.x * n);
  float top = 0.f;
  for (int i = threadIdx.x; i < n / 4; i += BLOCK) top = fmaxf(top, largest(from[i]));
  top = over_block<Max>(top, tops);
  const float factor = inverse(scale_of(top));
  if (threadIdx.x == 0) peaks[blockIdx.x] = top;
  for (int i = threadIdx.x; i < n / 4; i += BLOCK) to[i] = halves(from[i], factor);
}

template <bool GELU> DEVICE float gated(float gate, float up) {
  return GELU ? gelu(gate) * up : gate / (1.f + ex2(gate * -1.4426950408889634f)) * up;
}

// products [T, 2n]: n gates, then n ups. bias: null, or [2F], gates' first. The row's peak grows from call to call; if
// its scale changes, this block rounds its columns again and moves the earlier ones.
template <bool GELU>
DEVICE void gated_rows(const float* products, int n, const float* peaks_in, const float* bias, int first, int width,
                       u16* out, float* peaks) {
  __shared__ float tops[WARPS];
  const float2* const gates = (const float2*)(products + (size_t)blockIdx.x * 2 * n);
  const float2* const ups = gates + n / 2;
  u16* const row = out + (size_t)blockIdx.x * width;
  u32* const to = (u32*)(row + first);
  const float scale_in = scale_of(peaks_in[blockIdx.x]);
  auto columns = [&](int i) {   // two of them
    float2 g = gates[i], u = ups[i];
    g.x *= scale_in, g.y *= scale_in, u.x *= scale_in, u.y *= scale_in;
    if (bias) {
      const float* const add = bias + first + 2 * i;
      g.x += add[0], g.y += add[1], u.x += add[width], u.y += add[width + 1];
    }
    return make_float2(gated<GELU>(g.x, u.x), gated<GELU>(g.y, u.y));
  };
  float top = first ? peaks[blockIdx.x] : 0.f;
  const float expected = scale_of(top), factor = inverse(expected);
  for (int i = threadIdx.x; i < n / 2; i += BLOCK) {
    const float2 v = columns(i);
    top = fmaxf(top, fmaxf(fabsf(v.x), fabsf(v.y)));
    to[i] = f2h2(v.x * factor, v.y * factor);
  }
  top = over_block<Max>(top, tops);   // its barrier also parts the writes above from those below
  const float scale = scale_of(top);
  if (threadIdx.x == 0) peaks[blockIdx.x] = top;
  if (scale == expected) return;
  const float move = expected * inverse(scale);
  for (int i = threadIdx.x; i < first; i += BLOCK) row[i] = f2h(h2f(row[i]) * move);
  for (int i = threadIdx.x; i < n / 2; i += BLOCK) {
    const float2 v = columns(i);
    to[i] = f2h2(v.x * inverse(scale), v.y * inverse(scale));
  }
}
extern "C" __global__ void __launch_bounds__(BLOCK)
swiglu_rows(const float* products, int n, const float* peaks_in, const float* bias, int first, int width, u16* out,
            float* peaks) {
  gated_rows<false>(products, n, peaks_in, bias, first, width, out, peaks);
}
extern "C" __global__ void __launch_bounds__(BLOCK)
geglu_rows(const float* products, int n, const float* peaks_in, const float* bias, int first, int width, u16* out,
           float* peaks) {
  gated_rows<true>(products, n, peaks_in, bias, first, width, out, peaks);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
divide_rows(float* x, int stride, int n, const float* peaks) {
  const float scale = scale_of(peaks[blockIdx.x]);
  if (scale == 1.f) return;
  float* const row = x + (size_t)blockIdx.x * stride;
  for (int i = threadIdx.x; i < n; i += BLOCK) row[i] *= inverse(scale);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
finish_rows(float* y, int stride, int n, const float* peaks, const float* bias) {
  const float scale = scale_of(peaks[blockIdx.x]);
  if (scale == 1.f && !bias) return;
  float* const row = y + (size_t)blockIdx.x * stride;
  for (int i = threadIdx.x; i < n; i += BLOCK) row[i] = row[i] * scale + (bias ? bias[i] : 0.f);
}
