// Picks from logits [T, V] float32: the largest, the k largest with their total, and a draw among these.
//
// V is cut into slices of SLICE logits. A first kernel finds each slice's part of the answer, one block per slice and
// row; a second one, a block per row, merges the parts.
//
//     slice_values, slice_ids   [T, slices * k]    k of each slice (fewer only in the last one), by id
//     slice_sums                [T, slices, 2]     m = largest logit, l = sum of exp(logit - m)
//
// Order: NaN is larger than everything, -0 equals 0, of equal logits the lower id comes first. All of it is exact, and
// sums have a fixed order.
//
// The k-th largest of a list is found by its digits: 11 + 11 + 10 bits of the key, counted in shared memory, so that
// already the first digit spreads logits over many counters.
#include "common/ptx.cuh"

constexpr int SLICE = 8192;
constexpr int SLICE_BLOCK = 512;
constexpr int MERGE_BLOCK = 1024;
constexpr int EACH = SLICE / SLICE_BLOCK;
constexpr int MOST_K = 256;
constexpr int BINS = 2048;
constexpr float NONE = -3.402823466e38f;

// Monotonic: a larger logit has a larger key.
DEVICE u32 key_of(float logit) {
  const u32 bits = __float_as_uint(logit);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return ~0u;
  if (bits == 0x80000000u) return bits;
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
DEVICE float logit_of(u32 key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }
// Larger for a larger key, and for a lower id of equal keys.
DEVICE u64 ordered(u32 key, u32 id) { return (u64)key << 32 | (u32)~id; }
DEVICE u32 id_of(u64 order) { return ~(u32)order; }

// The largest of all threads' values, for thread 0.
template <int BLOCK> DEVICE u64 largest(u64 value, u64* parts) {
  for (int step = 16; step; step >>= 1) {
    const u64 other = __shfl_xor_sync(~0u, value, step);
    value = other > value ? other : value;
  }
  if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = value;
  __syncthreads();
  for (int warp = 0; warp < BLOCK / 32; warp++) value = parts[warp] > value ? parts[warp] : value;
  return value;
}

extern "C" __global__ void __launch_bounds__(SLICE_BLOCK)
argmax_slices(const float* logits, int n_vocab, float* slice_values, int* slice_ids) {
  __shared__ u64 parts[SLICE_BLOCK / 32];
  pdl_trigger();
  pdl_wait();
  const float* const row = logits + (size_t)blockIdx.y * n_vocab;
  float v[EACH];
#pragma unroll
  for (int j = 0; j < EACH; j++) {   // all loads first
    const int id = blockIdx.x * SLICE + j * SLICE_BLOCK + threadIdx.x;
    v[j] = id < n_vocab ? ldcg(row + id) : 0.f;
  }
  u64 best = 0;
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    const int id = blockIdx.x * SLICE + j * SLICE_BLOCK + threadIdx.x;
    const u64 order = id < n_vocab ? ordered(key_of(v[j]), id) : 0;
    best = order > best ? order : best;
  }
  best = largest<SLICE_BLOCK>(best, parts);
  if (threadIdx.x) return;
  slice_values[blockIdx.y * gridDim.x + blockIdx.x] = logit_of((u32)(best >> 32));
  slice_ids[blockIdx.y * gridDim.x + blockIdx.x] = (int)id_of(best);
}

// Block of 32 threads per row.
extern "C" __global__ void __launch_bounds__(32)
argmax_merge(const float* slice_values, const int* slice_ids, int slices, int* ids) {
  __shared__ u64 parts[1];
  pdl_trigger();
  pdl_wait();
  u64 best = 0;
  for (int i = threadIdx.x; i < slices; i += 32) {
    const int at = blockIdx.x * slices + i;
    const u64 order = ordered(key_of(ldcg(slice_values + at)), ldcg_u32(slice_ids + at));
    best = order > best ? order : best;
  }
  best = largest<32>(best, parts);
  if (threadIdx.x == 0) ids[blockIdx.x] = (int)id_of(best);
}

// Sum of the values of the threads before this one; ``total`` is that of all. ``parts`` may be used again at once.
template <int BLOCK> DEVICE u32 sum_before(u32 value, u32* parts, u32& total) {
  const int lane = threadIdx.x & 31, own = threadIdx.x >> 5;
  u32 sum = value;
  for (int step = 1; step < 32; step <<= 1) {
    const u32 other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) parts[own] = sum;
  __syncthreads();
  u32 before = 0;
  total = 0;
#pragma unroll
  for (int warp = 0; warp < BLOCK / 32; warp++) {
    if (warp == own) before = total;
    total += parts[warp];
  }
  __syncthreads();
  return before + sum - value;
}

struct Counts {
  u32 bins[BINS];
  u32 parts[32];
  u32 digit, above;
};

// The k-th largest of key(0) .. key(n - 1); thread t is asked for i = t, t + BLOCK, ... only. 1 <= k <= n.
// ``ties`` of the keys equal to it are among the k largest.
template <int BLOCK, class Key> DEVICE u32 kth_largest(int n, u32 k, Key key, Counts& counts, u32& ties) {
  constexpr int OWN = BINS / BLOCK;
  u32 found = 0, known = 0;
  ties = k;
  for (int pass = 0; pass < 3; pass++) {
    const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;
    const u32 digits = pass == 2 ? 1024 : 2048;
    for (int i = threadIdx.x; i < BINS; i += BLOCK) counts.bins[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += BLOCK) {
      const u32 value = key(i);
      if ((value & known) == found) atomicAdd(&counts.bins[value >> shift & (digits - 1)], 1u);
    }
    __syncthreads();
    // Thread t owns counters from BINS - 1 - t * OWN downwards.
    u32 own = 0, total;
    for (int i = 0; i < OWN; i++) own += counts.bins[BINS - 1 - threadIdx.x * OWN - i];
    u32 before = sum_before<BLOCK>(own, counts.parts, total);
    if (before < ties && before + own >= ties) {   // one thread
      u32 digit = BINS - 1 - threadIdx.x * OWN;
      while (before + counts.bins[digit] < ties) before += counts.bins[digit--];
      counts.digit = digit;
      counts.above = before;
    }
    __syncthreads();
    found |= counts.digit << shift;
    known |= (digits - 1) << shift;
    ties -= counts.above;
  }
  return found;
}

// Calls emit(rank, i) for the keys above ``least`` and the first ``ties`` keys equal to it, rank in order of i.
template <int BLOCK, class Key, class Emit>
DEVICE void select(int n, u32 least, u32 ties, Key key, Emit emit, Counts& counts) {
  u32 above = 0, equal = 0;
  for (int start = 0; start < n; start += BLOCK) {
    const int i = start + threadIdx.x;
    const u32 value = i < n ? key(i) : 0;
    const bool is_above = i < n && value > least, is_equal = i < n && value == least;
    u32 total;
    const u32 before = sum_before<BLOCK>((u32)is_above | (u32)is_equal << 16, counts.parts, total);
    const u32 equal_before = equal + (before >> 16);
    const u32 rank = above + (before & 0xffff) + (equal_before < ties ? equal_before : ties);
    if (is_above || (is_equal && equal_before < ties)) emit(rank, i);
    above += total & 0xffff;
    equal += total >> 16;
  }
}

DEVICE float warp_max(float v) {
  for (int step = 16; step; step >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, step));
  return v;
}
DEVICE float warp_sum(float v) {
  for (int step = 16; step; step >>= 1) v += __shfl_xor_sync(~0u, v, step);
  return v;
}

extern "C" __global__ void __launch_bounds__(SLICE_BLOCK)
top_slices(const float* logits, int n_vocab, int k, float* slice_values, int* slice_ids, float* slice_sums) {
  __shared__ u32 keys[SLICE];
  __shared__ Counts counts;
  __shared__ float maxima[SLICE_BLOCK / 32], sums[SLICE_BLOCK / 32];
  pdl_trigger();
  pdl_wait();
  const int first = blockIdx.x * SLICE;
  const int n = n_vocab - first < SLICE ? n_vocab - first : SLICE;
  const float* const slice = logits + (size_t)blockIdx.y * n_vocab + first;
  float v[EACH];
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    const int i = j * SLICE_BLOCK + threadIdx.x;
    v[j] = i < n ? ldcg(slice + i) : __uint_as_float(0xff800000u);
  }
  float m = NONE;   // finite, so that a slice of -inf has the sum 0
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    m = fmaxf(m, v[j]);
    keys[j * SLICE_BLOCK + threadIdx.x] = key_of(v[j]);
  }
  m = warp_max(m);
  if ((threadIdx.x & 31) == 0) maxima[threadIdx.x >> 5] = m;
  __syncthreads();
  for (int warp = 0; warp < SLICE_BLOCK / 32; warp++) m = fmaxf(m, maxima[warp]);
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < EACH; j++) sum += expf(v[j] - m);
  sum = warp_sum(sum);
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = sum;

  auto key = [&](int i) { return keys[i]; };
  u32 ties;
  const u32 least = kth_largest<SLICE_BLOCK>(n, k < n ? k : n, key, counts, ties);
  const size_t at = ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * k;
  select<SLICE_BLOCK>(n, least, ties, key, [&](u32 rank, int i) {
    slice_values[at + rank] = logit_of(keys[i]);
    slice_ids[at + rank] = first + i;
  }, counts);

  if (threadIdx.x) return;   // the barriers above lie behind the writes of ``sums``
  float total = 0.f;
  for (int warp = 0; warp < SLICE_BLOCK / 32; warp++) total += sums[warp];
  float* const out = slice_sums + 2 * ((size_t)blockIdx.y * gridDim.x + blockIdx.x);
  out[0] = m;
  out[1] = total;
}

// ids, values [T, k]: largest first. log_totals [T]: ln of the sum of exp(logit) over the row.
extern "C" __global__ void __launch_bounds__(MERGE_BLOCK)
top_merge(const float* slice_values, const int* slice_ids, const float* slice_sums, int n_vocab, int slices, int k,
          int* ids, float* values, float* log_totals) {
  __shared__ Counts counts;
  __shared__ u64 winners[MOST_K];
  pdl_trigger();
  pdl_wait();
  const size_t at = (size_t)blockIdx.x * slices * k;
  const int last = n_vocab - (slices - 1) * SLICE;
  const int n = (slices - 1) * k + (last < k ? last : k);
  auto key = [&](int i) { return key_of(ldcg(slice_values + at + i)); };
  u32 ties;
  const u32 least = kth_largest<MERGE_BLOCK>(n, k, key, counts, ties);
  select<MERGE_BLOCK>(n, least, ties, key, [&](u32 rank, int i) {
    winners[rank] = ordered(key(i), ldcg_u32(slice_ids + at + i));
  }, counts);
  __syncthreads();
  if (threadIdx.x < k) {   // all orders differ: its place is the number of larger ones
    const u64 own = winners[threadIdx.x];
    int place = 0;
    for (int i = 0; i < k; i++) place += winners[i] > own;
    ids[(size_t)blockIdx.x * k + place] = (int)id_of(own);
    values[(size_t)blockIdx.x * k + place] = logit_of((u32)(own >> 32));
  }
  if (threadIdx.x >= MERGE_BLOCK - 32) {   // a warp that has no winner
    const int lane = threadIdx.x & 31;
    const float* const sums = slice_sums + 2 * (size_t)blockIdx.x * slices;
    float m = NONE, total = 0.f;
    for (int i = lane; i < slices; i += 32) m = fmaxf(m, ldcg(sums + 2 * i));
    m = warp_max(m);
    for (int i = lane; i < slices; i += 32) total += ldcg(sums + 2 * i + 1) * expf(ldcg(sums + 2 * i) - m);
    total = warp_sum(total);
    if (lane == 0) log_totals[blockIdx.x] = m + logf(total);
  }
}

// ids[t] = the candidate whose running sum of exp((value - largest) / temperature), from the largest on, first reaches
// u[t] of the total; never one of weight 0. A total that is no number gives the first candidate: the row's first NaN or
// infinity.
extern "C" __global__ void __launch_bounds__(MOST_K)
draw(const int* top_ids, const float* top_values, int k, float temperature, const float* uniform, int* ids) {
  __shared__ float weights[MOST_K];
  pdl_trigger();
  pdl_wait();
  const float* const values = top_values + (size_t)blockIdx.x * k;
  if (threadIdx.x < k) weights[threadIdx.x] = expf((ldcg(values + threadIdx.x) - ldcg(values)) / temperature);
  __syncthreads();
  if (threadIdx.x) return;
  float total = 0.f;   // one after the other: running sums that never fall
  for (int i = 0; i < k; i++) total += weights[i];
  const float target = ldcg(uniform + blockIdx.x) * total;
  int place = 0;
  for (float running = weights[0]; running < target; running += weights[place]) place++;
  ids[blockIdx.x] = (int)ldcg_u32(top_ids + (size_t)blockIdx.x * k + place);
}
