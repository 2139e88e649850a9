// A mixture of experts, but for its products: which experts a row takes, rows by expert, and the weighted sum.
//   choose_experts   logits of the router -> a row's experts, by number, and their shares; the shared expert's gate
//   group_slots      PREFILL: a slot is one expert of one row; slots of an expert in groups of up to 8
//   combine_experts  x += the experts' rows times their shares, by number, then the shared expert's times its gate
//   mix_experts      the same beside a dense feed-forward part: both sums, and the sum of those, go through RMS norms
//
//   ids     int32 [T][used]        numbers of a row's experts, rising: slot = row * used + place
//   shares  float32 [T][used + 1]  their weights, then that of the shared expert
//   order   int32 [T * used]       slots by expert, those of one expert by row
//   groups  int32 [T * used / 8 + experts][4]  expert, first place in ``order``, slots (perhaps none), 0
#include "common/block_sum.cuh"
#include "common/quant256.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;

// Unsigned integers in the order of numbers; a NaN comes last.
DEVICE u32 key_of(float v) {
  const u32 bits = __float_as_uint(v);
  return v != v ? 0 : (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
}
DEVICE float of_key(u32 key) { return __uint_as_float((key & 0x80000000u) ? key & 0x7fffffffu : ~key); }

// A row's block; dynamic shared memory: keys, ranks and odds, 4 bytes of each for every expert, counted in whole fours:
// the compiler reads keys by four up to the last, and what it reads beyond that nobody may write meanwhile. The softmax
// over all experts, scaled to the sum 1 over those chosen, is the softmax over those alone.
extern "C" __global__ void __launch_bounds__(THREADS)
choose_experts(const float* logits,               // [T][count]
               int count, int used,
               float logit_scale,                 // of the logits in the softmax, > 0
               const float* __restrict__ gains,   // [count] factors on the shares, or null
               const float* normed,               // [T][n] x * norm, not yet scaled to rms 1
               const float* sums, float eps, int n,   // [T][n / 256 rounded up] sums of squares of x
               const float* __restrict__ gate,    // [n], or null
               int* ids, float* shares,
               float* factors) {                  // [T] what scales x to rms 1
  extern __shared__ u32 keys[];
  const int fours = (count + 3) & ~3;
  int* const ranks = (int*)(keys + fours);
  float* const odds = (float*)(ranks + fours);    // by rank
  __shared__ float parts[WARPS];
  const int row = blockIdx.x, lane = threadIdx.x & 31;
  pdl_trigger();
  pdl_wait();
  for (int e = threadIdx.x; e < count; e += THREADS) keys[e] = key_of(ldcg(logits + (size_t)row * count + e));
  const float* const own = sums + (size_t)row * ((n + 255) / 256);
  const float factor = rms_factor(load_sums(own, n, lane), own, n, eps, lane);
  float dot = 0.f;
  if (gate)
    for (int i = threadIdx.x; i < n; i += THREADS) dot = fmaf(ldcg(normed + (size_t)row * n + i), gate[i], dot);
#pragma unroll
  for (int o = 16; o; o >>= 1) dot += __shfl_xor_sync(~0u, dot, o);
  if (lane == 0) parts[threadIdx.x >> 5] = dot;
  __syncthreads();
  for (int e = threadIdx.x; e < count; e += THREADS) {
    const u32 key = keys[e];
    int rank = 0;
    for (int other = 0; other < count; other++) rank += keys[other] > key || (keys[other] == key && other < e);
    ranks[e] = rank;
    if (rank < used) odds[rank] = of_key(key);
  }
  __syncthreads();
  const float most = odds[0];
  float sum = 0.f;
  for (int rank = 0; rank < used; rank++) sum += __expf((odds[rank] - most) * logit_scale);
  for (int e = threadIdx.x; e < count; e += THREADS) {
    if (ranks[e] >= used) continue;
    int place = 0;
    for (int other = 0; other < e; other++) place += ranks[other] < used;
    ids[row * used + place] = e;
    const float share = __expf((odds[ranks[e]] - most) * logit_scale) / sum;
    shares[row * (used + 1) + place] = gains ? share * gains[e] : share;
  }
  if (threadIdx.x == 0) {
    dot = 0.f;
    for (int warp = 0; warp < WARPS; warp++) dot += parts[warp];
    shares[row * (used + 1) + used] = 1.f / (1.f + __expf(-factor * dot));
    factors[row] = factor;
  }
}

// An expert's block, one warp. Expert e has the groups from before / 8 + e on, ``before`` the slots of lower experts:
// no two meet, and between them are groups without slots.
extern "C" __global__ void __launch_bounds__(32) group_slots(const int* ids, int n_slots, int* order, int* groups) {
  const int expert = blockIdx.x, lane = threadIdx.x;
  int before = 0, mine = 0;
  for (int i = 0; i < n_slots; i += 32) {
    const int id = i + lane < n_slots ? ids[i + lane] : 0x7fffffff;
    before += __popc(__ballot_sync(~0u, id < expert));
    mine += __popc(__ballot_sync(~0u, id == expert));
  }
  for (int i = 0, place = before; i < n_slots; i += 32) {
    const bool is_mine = i + lane < n_slots && ids[i + lane] == expert;
    const u32 all = __ballot_sync(~0u, is_mine);
    if (is_mine) order[place + __popc(all & ((1u << lane) - 1))] = i + lane;
    place += __popc(all);
  }
  const int begin = before / 8 + expert, end = (before + mine) / 8 + expert + 1;
  for (int i = lane; i < end - begin; i += 32) {
    int* const group = groups + 4 * (begin + i);
    group[0] = expert, group[1] = before + 8 * i, group[2] = max(0, min(8, mine - 8 * i)), group[3] = 0;
  }
}

// Grid (blocks of 512 columns, T), 128 threads, four columns each; n is a multiple of 4, rows begin at 16 bytes.
extern "C" __global__ void __launch_bounds__(128)
combine_experts(float* x, int stride, const float* y,   // [T * used][n]
                const float* shares, int used,
                const float* shared, int n_parts, int part_stride,   // [n_parts][T][part_stride], added up; or no parts
                int n) {
  pdl_trigger();
  pdl_wait();
  const int row = blockIdx.y, c = (blockIdx.x * 128 + threadIdx.x) * 4;
  if (c >= n) return;
  const float* const weights = shares + row * (used + 1);
  float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
  const auto add = [&](float w, const float4& v) {
    total.x = fmaf(w, v.x, total.x), total.y = fmaf(w, v.y, total.y);
    total.z = fmaf(w, v.z, total.z), total.w = fmaf(w, v.w, total.w);
  };
  for (int i = 0; i < used; i++) add(ldcg(weights + i), ldcg4(y + ((size_t)row * used + i) * n + c));
  const float gate = ldcg(weights + used);
  for (int s = 0; s < n_parts; s++) add(gate, ldcg4(shared + ((size_t)s * gridDim.y + row) * part_stride + c));
  float4* const out = (float4*)(x + (size_t)row * stride + c);
  const float4 old = ldcg4((const float*)out);
  *out = make_float4(old.x + total.x, old.y + total.y, old.z + total.z, old.w + total.w);
}

// x += rms(a * dense_norm + b * sum_norm) * post_norm, a = rms(sum of dense parts), b = rms(the experts' weighted sum).
// A block per row; columns as in combine_experts, a thread has its own all the time. Both sums take the places of the
// row's first dense part and of its first slot.
constexpr int MIX_THREADS = 512;
extern "C" __global__ void __launch_bounds__(MIX_THREADS)
mix_experts(float* x, int stride, float* y,             // [T * used][n]
            const float* shares, int used,
            float* dense, int n_parts, int part_stride,   // [n_parts][T][part_stride]
            const float* __restrict__ dense_norm, const float* __restrict__ sum_norm,
            const float* __restrict__ post_norm, int n, float eps) {
  constexpr int WARPS_OF_MIX = MIX_THREADS / 32;
  __shared__ float parts[3][WARPS_OF_MIX];
  pdl_trigger();
  pdl_wait();
  const int row = blockIdx.x, first = threadIdx.x * 4;
  float* const own = y + (size_t)row * used * n;
  float* const beside = dense + (size_t)row * part_stride;
  const size_t step = (size_t)gridDim.x * part_stride;
  const float* const weights = shares + row * (used + 1);
  const auto squares = [](float sum, const float4& v) {
    return fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, fmaf(v.x, v.x, sum))));
  };
  float dense_sum = 0.f, experts_sum = 0.f, sum = 0.f;
  for (int c = first; c < n; c += MIX_THREADS * 4) {
    float4 d = ldcg4(beside + c), e = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int p = 1; p < n_parts; p++) {
      const float4 v = ldcg4(beside + p * step + c);
      d.x += v.x, d.y += v.y, d.z += v.z, d.w += v.w;
    }
    for (int i = 0; i < used; i++) {
      const float w = ldcg(weights + i);
      const float4 v = ldcg4(own + (size_t)i * n + c);
      e.x = fmaf(w, v.x, e.x), e.y = fmaf(w, v.y, e.y), e.z = fmaf(w, v.z, e.z), e.w = fmaf(w, v.w, e.w);
    }
    *(float4*)(beside + c) = d, *(float4*)(own + c) = e;
    dense_sum = squares(dense_sum, d), experts_sum = squares(experts_sum, e);
  }
  const float a = 1.f / sqrtf(block_sum<WARPS_OF_MIX>(dense_sum, parts[0]) / n + eps);
  const float b = 1.f / sqrtf(block_sum<WARPS_OF_MIX>(experts_sum, parts[1]) / n + eps);
  for (int c = first; c < n; c += MIX_THREADS * 4) {
    const float4 d = ldcg4(beside + c), e = ldcg4(own + c);
    const float4 f = *(const float4*)(dense_norm + c), g = *(const float4*)(sum_norm + c);
    const float4 v = make_float4(d.x * a * f.x + e.x * b * g.x, d.y * a * f.y + e.y * b * g.y,
                                 d.z * a * f.z + e.z * b * g.z, d.w * a * f.w + e.w * b * g.w);
    *(float4*)(own + c) = v;
    sum = squares(sum, v);
  }
  const float scale = 1.f / sqrtf(block_sum<WARPS_OF_MIX>(sum, parts[2]) / n + eps);
  for (int c = first; c < n; c += MIX_THREADS * 4) {
    float4* const out = (float4*)(x + (size_t)row * stride + c);
    const float4 old = ldcg4((const float*)out), v = ldcg4(own + c), w = *(const float4*)(post_norm + c);
    *out = make_float4(old.x + v.x * scale * w.x, old.y + v.y * scale * w.y, old.z + v.z * scale * w.z,
                       old.w + v.w * scale * w.w);
  }
}
