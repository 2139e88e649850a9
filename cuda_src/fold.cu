// Merging the partials of decode attention (common/partials.cuh): groups into segments, segments into the output.
//
//   fold     a call's folds: group partials into segment partials, which are stored
//   finish   the plan's last folds; then segments [0, header[PLAN_SEGMENTS]) in order, acc / l, V's Walsh-Hadamard
//            rotation undone, times sigmoid(gate): float32 rows, or activation records (common/quant256.cuh)
//
// The order is fixed: groups in order into their segment, segments in order, each step with the running maximum so far.
// Both kernels merge groups with fold_segments, and a stored segment is resumed as it was: the bits do not depend on
// when a fold happens.
//
// A block owns one (row, head); it has SEGMENT_LANES segments in work at a time, V_DIM / 4 threads each. Loads are on
// their way before the maxima that scale them are known.
//
// Variants (-D)
//   ROWS, REP, KV_HEADS, V_DIM   T, query heads per kv head, kv heads, Dv (a multiple of 8)
//   ROTATION                     width of V's Hadamard blocks, a power of two that divides Dv; 0: not rotated
//   GATED                        1: sigmoid(gate) multiplies the output
//   QUANTISE                     1: activation records instead of rows; Dv is 256 then
#include "common/ptx.cuh"
#include "common/partials.cuh"
#include "common/quant256.cuh"
#include "common/tables.cuh"

constexpr int HEADS = REP * KV_HEADS;
constexpr int COLUMNS = ROWS * REP;
constexpr int SEGMENT_GROUPS = 16;
constexpr int SEGMENT_LANES = V_DIM > 256 ? 8 : 16;      // a block has 1024 threads at most
constexpr int QUADS = V_DIM / 4;
constexpr int THREADS = SEGMENT_LANES * QUADS;
constexpr int AHEAD = 5;                                 // group partials in flight per thread

using Buffer = Partials<KV_HEADS, COLUMNS, V_DIM>;

struct Column { int row, head, kv_head, column; };
DEVICE Column column_of_block() {
  const int row = blockIdx.x / HEADS, head = blockIdx.x % HEADS;
  return {row, head, head / REP, row * REP + head % REP};
}

struct Merge { float shrink, weight, l; };               // how one group enters its segment
struct Folding {
  Merge merges[SEGMENT_LANES][SEGMENT_GROUPS];
  int partials[SEGMENT_LANES][SEGMENT_GROUPS];           // scratch row of each group
  int first[SEGMENT_LANES], end[SEGMENT_LANES];          // folds of each segment
  int resumed[SEGMENT_LANES];                            // the segment goes on from what is stored
  float m[SEGMENT_LANES];                                // after all its folds
};

DEVICE float merged(float sum, float shrink, float value, float weight) {
  return fmaf(value, weight, __fmul_rn(sum, shrink));
}

// Which folds belong to segments first_segment + [0, SEGMENT_LANES). Reads the plan alone.
DEVICE void find_folds(Folding& f, const PlanFold* folds, int n_folds, int first_segment) {
  __syncthreads();
  if (threadIdx.x < SEGMENT_LANES) { f.first[threadIdx.x] = f.end[threadIdx.x] = 0; f.resumed[threadIdx.x] = 1; }
  __syncthreads();
  for (int i = threadIdx.x; i < n_folds; i += THREADS) {
    const PlanFold fold = folds[i];
    const int lane = fold.segment - first_segment;
    if (lane < 0 || lane >= SEGMENT_LANES) continue;
    if (i == 0 || folds[i - 1].segment != fold.segment) { f.first[lane] = i; f.resumed[lane] = !fold.fresh; }
    if (i == n_folds - 1 || folds[i + 1].segment != fold.segment) f.end[lane] = i + 1;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < SEGMENT_LANES * SEGMENT_GROUPS; i += THREADS) {
    const int lane = i / SEGMENT_GROUPS, at = f.first[lane] + i % SEGMENT_GROUPS;
    if (at < f.end[lane]) f.partials[lane][i % SEGMENT_GROUPS] = folds[at].scratch_row;
  }
  __syncthreads();
}

// This thread's four values and l of segment first_segment + lane after its folds; f.m gets its maximum, seen by all
// after the next barrier. Segments from n_segments on, and those without folds that are not ``wanted``, give nothing.
DEVICE float4 fold_segments(
    Folding& f, const Buffer& groups, const Buffer& segments, const Column& at,
    int first_segment, int n_segments, int lane, int quad, float& l) {
  const bool stored = first_segment + lane < n_segments && f.resumed[lane];
  const int count = f.end[lane] - f.first[lane];
  const float* const mine = groups.acc(0, at.kv_head, at.column) + 4 * quad;
  const auto load = [&](int j) {
    if (j >= count) return make_float4(0.f, 0.f, 0.f, 0.f);
    return ldcg4(mine + (size_t)f.partials[lane][j] * (KV_HEADS * COLUMNS * V_DIM));
  };
  float4 ahead[AHEAD];
#pragma unroll
  for (int j = 0; j < AHEAD; j++) ahead[j] = load(j);
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  l = 0.f;
  if (stored) {
    sum = ldcg4(segments.acc(first_segment + lane, at.kv_head, at.column) + 4 * quad);
    l = ldcg(segments.m_and_l(first_segment + lane, at.kv_head, at.column) + 1);
  }
  // The maxima: 16 lanes of a warp per segment.
  for (int i = threadIdx.x; i < SEGMENT_LANES * SEGMENT_GROUPS; i += THREADS) {
    const int segment = i / SEGMENT_GROUPS, j = i % SEGMENT_GROUPS;
    const bool on = first_segment + segment < n_segments && f.resumed[segment];
    float before = PARTIAL_NOTHING;
    if (on) before = ldcg(segments.m_and_l(first_segment + segment, at.kv_head, at.column));
    float2 ml = make_float2(PARTIAL_NOTHING, 0.f);
    if (j < f.end[segment] - f.first[segment])
      ml = ldcg2(groups.m_and_l(f.partials[segment][j], at.kv_head, at.column));
    float largest = fmaxf(before, ml.x);                 // of the segment so far and groups 0..j
#pragma unroll
    for (int d = 1; d < SEGMENT_GROUPS; d <<= 1) {
      const float other = __shfl_up_sync(~0u, largest, d, SEGMENT_GROUPS);
      if (j >= d) largest = fmaxf(largest, other);
    }
    const float previous = __shfl_up_sync(~0u, largest, 1, SEGMENT_GROUPS);
    f.merges[segment][j] = {ex2((j ? previous : before) - largest), ex2(ml.x - largest), ml.y};
    if (j == SEGMENT_GROUPS - 1) f.m[segment] = largest;
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < SEGMENT_GROUPS; j++) {
    const float4 value = ahead[j % AHEAD];
    if (j + AHEAD < SEGMENT_GROUPS) ahead[j % AHEAD] = load(j + AHEAD);
    if (j < count) {
      const Merge step = f.merges[lane][j];
      sum.x = merged(sum.x, step.shrink, value.x, step.weight);
      sum.y = merged(sum.y, step.shrink, value.y, step.weight);
      sum.z = merged(sum.z, step.shrink, value.z, step.weight);
      sum.w = merged(sum.w, step.shrink, value.w, step.weight);
      l = merged(l, step.shrink, step.l, step.weight);
    }
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
fold(const PlanCall* __restrict__ call, const PlanFold* __restrict__ all_folds, float* group_partials, int n_groups,
     float* segment_partials, int n_segments) {
  __shared__ Folding f;
  pdl_trigger();
  const int lane = threadIdx.x / QUADS, quad = threadIdx.x % QUADS;
  const Column at = column_of_block();
  const Buffer groups = {group_partials, n_groups}, segments = {segment_partials, n_segments};
  const PlanFold* folds = all_folds + call->first_fold;
  const int n_folds = call->folds;
  const int begin = n_folds ? folds[0].segment : 0, end = n_folds ? folds[n_folds - 1].segment + 1 : 0;
  find_folds(f, folds, n_folds, begin);
  pdl_wait();
  for (int segment = begin; segment < end; segment += SEGMENT_LANES) {
    if (segment > begin) find_folds(f, folds, n_folds, segment);
    float l;
    const float4 sum = fold_segments(f, groups, segments, at, segment, end, lane, quad, l);
    if (f.end[lane] > f.first[lane]) {
      *(float4*)(segments.acc(segment + lane, at.kv_head, at.column) + 4 * quad) = sum;
      if (quad == 0) *(float2*)segments.m_and_l(segment + lane, at.kv_head, at.column) = make_float2(f.m[lane], l);
    }
  }
}

// v times the orthonormal Walsh-Hadamard matrix of each ROTATION values; thread d has value d. All threads call it.
DEVICE float rotated(float v, float* exchange) {
  if (ROTATION == 0) return v;
  const int d = threadIdx.x;
#pragma unroll
  for (int s = 1; s < ROTATION && s < 32; s <<= 1) {
    const float other = __shfl_xor_sync(~0u, v, s);
    v = (d & s) ? other - v : v + other;
  }
#pragma unroll
  for (int s = 32; s < ROTATION; s <<= 1) {
    __syncthreads();
    if (d < V_DIM) exchange[d] = v;
    __syncthreads();
    if (d < V_DIM) v = (d & s) ? exchange[d ^ s] - v : v + exchange[d ^ s];
  }
  return v * rsqrtf((float)ROTATION);
}

extern "C" __global__ void __launch_bounds__(THREADS)
finish(const int* __restrict__ header, const PlanFold* __restrict__ all_folds, float* group_partials, int n_groups,
       float* segment_partials, int n_segments, const float* gate, int gate_stride, void* out, int out_stride) {
  __shared__ Folding f;
  __shared__ __align__(16) float sums[SEGMENT_LANES][V_DIM];
  __shared__ float ls[SEGMENT_LANES];
  pdl_trigger();
  const int tid = threadIdx.x, lane = tid / QUADS, quad = tid % QUADS;
  const Column at = column_of_block();
  const Buffer groups = {group_partials, n_groups}, segments = {segment_partials, n_segments};
  const PlanFold* folds = all_folds + header[PLAN_FIRST_LAST_FOLD];
  const int n_folds = header[PLAN_LAST_FOLDS], end = header[PLAN_SEGMENTS];
  find_folds(f, folds, n_folds, 0);
  pdl_wait();
  float g = 0.f;
  if (GATED && tid < V_DIM) g = ldcg(gate + (size_t)at.row * gate_stride + at.head * (2 * V_DIM) + tid);
  float value = 0.f, m = PARTIAL_NOTHING, total = 0.f;   // of all segments so far; thread d has value d
  for (int segment = 0; segment < end; segment += SEGMENT_LANES) {
    if (segment) find_folds(f, folds, n_folds, segment);
    float l;
    const float4 sum = fold_segments(f, groups, segments, at, segment, end, lane, quad, l);
    *(float4*)(&sums[lane][4 * quad]) = sum;
    if (quad == 0) ls[lane] = l;
    __syncthreads();
    if (tid < V_DIM) {
#pragma unroll
      for (int s = 0; s < SEGMENT_LANES; s++) {
        if (segment + s >= end) continue;
        const float largest = fmaxf(m, f.m[s]), shrink = ex2(m - largest), weight = ex2(f.m[s] - largest);
        value = merged(value, shrink, sums[s][tid], weight);
        total = merged(total, shrink, ls[s], weight);
        m = largest;
      }
    }
  }
  float v = tid < V_DIM ? value / total : 0.f;
  __syncthreads();
  v = rotated(v, sums[0]);
  if (GATED) v = v / (1.f + __expf(-g));
  v += 0.f;                                              // no -0: a row alone merges fewer partials that hold nothing
#if QUANTISE
  __syncthreads();
  if (tid < V_DIM) sums[0][tid] = v;
  __syncthreads();
  if (tid < 32) {
    float mine[8];
#pragma unroll
    for (int i = 0; i < 8; i++) mine[i] = sums[0][8 * tid + i];
    quant256_to(mine, tid, (u8*)out, at.head, at.row, ROWS);
  }
#else
  if (tid < V_DIM) ((float*)out)[(size_t)at.row * out_stride + at.head * V_DIM + tid] = v;
#endif
}
