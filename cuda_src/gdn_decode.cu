// Gated DeltaNet, decode: rows with deferred commit (DESIGN "recurrent layers"). Per value head, with a row's key k and
// query q of unit length, its value v, decay g and step b:
//
//     d = b (v - g S^T k);   S = g S + k d^T;   o = S^T q / sqrt(DIM)
//
//   state       [v_heads][DIM: column][DIM: key dim] f32: each head's S transposed, after every applied row
//   ring_*      [slots][...] f32, at slot position % slots: x [channels], k [k_heads][DIM], decay [v_heads],
//               d [v_heads][DIM]. A row that was taken back is overwritten by the next one at its position
//   y           [ROWS][y_stride] f32: q [k_heads][DIM] | k [k_heads][DIM] | v [v_heads][DIM] | z [v_heads][DIM]
//               | beta [v_heads] | alpha [v_heads]; q, k, v before the convolution
//   conv        [TAPS][channels] f32, the last tap meets the row itself; dt_bias, a [v_heads]
//   out         [ROWS][v_heads * DIM] f32: o, before its norm and gate
//
// One block owns 32 columns of one head's state, 8 threads a column; it applies the pending rows, stores the columns,
// and goes on with its own rows without storing them. What it reads of state and rings it reads before pdl_wait: an
// earlier step wrote it, or a tile before in the same step, and then the launch is plain. Committing a row repeats the
// one update S = g S + k d^T, without a sum, so it has the bits it had as a draft; every sum is within one column in one
// order, so a row's bits do not depend on ROWS.
//
//   DIM   32, 64 or 128: numbers of a key and of a value head
//   ROWS  1..8
//   TAPS  2..4, of the convolution
#include "common/gdn.cuh"
#include "common/tables.cuh"

constexpr int COLS = 32;                                        // columns of a block
constexpr int LANES = 8;                                        // threads of a column
constexpr int THREADS = COLS * LANES;
constexpr int SLICES = DIM / COLS;                              // blocks of a head
constexpr int QUADS = DIM / (4 * LANES);                        // a thread's numbers of its column, by fours:
                                                                // key dims 4 (lane + 8 j) .., j < QUADS
constexpr int INPUTS = 2 * DIM + COLS;                          // channels of a block: q, k, its columns of v
constexpr int TURNS = (INPUTS + THREADS - 1) / THREADS;         // channels of a thread
constexpr float Q_SCALE = DIM == 128 ? 0.08838834764831845f : DIM == 64 ? 0.125f : 0.17677669529663687f;

struct Rings { float *x, *k, *decay, *d; };

// What a block owns.
struct Place {
  int head, key_head, slice, lane, column;                      // column: within the head
  DEVICE Place(int k_heads)
      : head(blockIdx.x / SLICES), key_head(head % k_heads), slice(blockIdx.x % SLICES), lane(threadIdx.x % LANES),
        column(slice * COLS + threadIdx.x / LANES) {}
};

// s = g s + k d, in this one form wherever a row meets the state.
DEVICE void update(float4& s, const float4& k, float g, float d) {
  s.x = fmaf(k.x, d, g * s.x), s.y = fmaf(k.y, d, g * s.y), s.z = fmaf(k.z, d, g * s.z), s.w = fmaf(k.w, d, g * s.w);
}

// Loads a thread's part of the state, applies the rows at [position - pending, position), stores it if there were any.
DEVICE void load_and_apply(float4 (&s)[QUADS], float* state, const Rings& ring, const Place& at, int slots, int k_heads,
                           int v_heads, int position, int pending, bool store = true) {
  float* const column = state + ((size_t)at.head * DIM + at.column) * DIM;
#pragma unroll
  for (int j = 0; j < QUADS; j++) s[j] = ldcg4(column + 4 * (at.lane + LANES * j));
#pragma unroll 1
  for (int i = pending; i > 0; i--) {
    const int slot = (position - i) & (slots - 1);
    const float g = ldcg(ring.decay + slot * v_heads + at.head);
    const float d = ldcg(ring.d + ((size_t)slot * v_heads + at.head) * DIM + at.column);
    const float* const k = ring.k + ((size_t)slot * k_heads + at.key_head) * DIM;
    float4 row[QUADS];
#pragma unroll
    for (int j = 0; j < QUADS; j++) row[j] = ldcg4(k + 4 * (at.lane + LANES * j));
#pragma unroll
    for (int j = 0; j < QUADS; j++) update(s[j], row[j], g, d);
  }
  if (store && pending > 0)
#pragma unroll
    for (int j = 0; j < QUADS; j++) *(float4*)(column + 4 * (at.lane + LANES * j)) = s[j];
}

// Sum over the 8 threads of a column.
DEVICE float column_sum(float x) {
#pragma unroll
  for (int d = 1; d < LANES; d *= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

// Products of a thread's numbers, as four sums that end as one.
struct Dot {
  float x = 0.f, y = 0.f, z = 0.f, w = 0.f;
  DEVICE void add(const float4& a, const float4& b) {
    x = fmaf(a.x, b.x, x), y = fmaf(a.y, b.y, y), z = fmaf(a.z, b.z, z), w = fmaf(a.w, b.w, w);
  }
  DEVICE float sum() const { return column_sum((x + y) + (z + w)); }
};

extern "C" __global__ void __launch_bounds__(THREADS) gdn_apply(
    float* state, float* ring_k, float* ring_decay, float* ring_d, int slots, int k_heads, int v_heads, int position,
    int pending) {
  float4 s[QUADS];
  load_and_apply(s, state, {nullptr, ring_k, ring_decay, ring_d}, Place(k_heads), slots, k_heads, v_heads, position,
                 pending);
}

extern "C" __global__ void __launch_bounds__(THREADS) gdn_decode(
    float* state, float* ring_x, float* ring_k, float* ring_decay, float* ring_d, int slots, int k_heads, int v_heads,
    const int* __restrict__ step, const float* y, int y_stride, const float* __restrict__ conv,
    const float* __restrict__ dt_bias, const float* __restrict__ a, float eps, float* out) {
  __shared__ __align__(16) float shared_q[ROWS][DIM], shared_k[ROWS][DIM], shared_v[ROWS][COLS];
  __shared__ float shared_decay[ROWS], shared_beta[ROWS];
  const Rings ring{ring_x, ring_k, ring_decay, ring_d};
  const Place at(k_heads);
  const int tid = threadIdx.x, mask = slots - 1;
  const int keys = k_heads * DIM, inner = v_heads * DIM, channels = 2 * keys + inner;
  const int position = step[STEP_POSITION];
  const bool owns_keys = at.head < k_heads && at.slice == 0;    // of the blocks that read a key head, one writes rings

  float4 s[QUADS];
  load_and_apply(s, state, ring, at, slots, k_heads, v_heads, position, step[STEP_PENDING],
                 step[STEP_STORE] != 0);

  // What the convolution needs besides the new rows.
  int channel[TURNS];
  float tap[TURNS][TAPS], past[TURNS][TAPS - 1];
#pragma unroll
  for (int e = 0; e < TURNS; e++) {
    const int i = tid + e * THREADS;
    if (i >= INPUTS) continue;
    channel[e] = i < DIM ? at.key_head * DIM + i
               : i < 2 * DIM ? keys + at.key_head * DIM + i - DIM
               : 2 * keys + at.head * DIM + at.slice * COLS + i - 2 * DIM;
#pragma unroll
    for (int t = 0; t < TAPS; t++) tap[e][t] = conv[t * channels + channel[e]];
#pragma unroll
    for (int t = 0; t < TAPS - 1; t++)
      past[e][t] = ldcg(ring.x + (size_t)((position - (TAPS - 1) + t) & mask) * channels + channel[e]);
  }
  const float bias = dt_bias[at.head], rate = a[at.head];
  pdl_trigger();
  pdl_wait();

  float input[TURNS][ROWS], beta = 0.f, alpha = 0.f;
  if (tid < ROWS) {
    const float* const gates = y + (size_t)tid * y_stride + channels + inner + at.head;
    beta = ldcg(gates), alpha = ldcg(gates + v_heads);
  }
#pragma unroll
  for (int e = 0; e < TURNS; e++)
    if (tid + e * THREADS < INPUTS)
#pragma unroll
      for (int r = 0; r < ROWS; r++) input[e][r] = ldcg(y + (size_t)r * y_stride + channel[e]);
  if (tid < ROWS) {
    const float g = gdn_decay(alpha + bias, rate);
    shared_decay[tid] = g, shared_beta[tid] = gdn_sigmoid(beta);
    if (at.slice == 0) ring.decay[((position + tid) & mask) * v_heads + at.head] = g;
  }
#pragma unroll
  for (int e = 0; e < TURNS; e++) {
    const int i = tid + e * THREADS;
    if (i >= INPUTS) continue;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const float x = input[e][r];
      float mixed = past[e][0] * tap[e][0];
#pragma unroll
      for (int t = 1; t < TAPS - 1; t++) mixed = fmaf(past[e][t], tap[e][t], mixed);
      mixed = gdn_silu(fmaf(x, tap[e][TAPS - 1], mixed));
      if (i < DIM) shared_q[r][i] = mixed;
      else if (i < 2 * DIM) shared_k[r][i - DIM] = mixed;
      else shared_v[r][i - 2 * DIM] = mixed;
      if (i >= 2 * DIM || owns_keys) ring.x[(size_t)((position + r) & mask) * channels + channel[e]] = x;
#pragma unroll
      for (int t = 0; t < TAPS - 2; t++) past[e][t] = past[e][t + 1];
      past[e][TAPS - 2] = x;
    }
  }
  __syncthreads();
  for (int i = tid / 32; i < 2 * ROWS; i += THREADS / 32) {     // a warp makes one query or key a unit vector
    constexpr int PER_LANE = DIM / 32;
    const int r = i / 2, lane = tid % 32;
    float* const part = (i % 2 ? shared_k[r] : shared_q[r]) + lane * PER_LANE;
    float squares = 0.f;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) squares = fmaf(part[j], part[j], squares);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) squares += __shfl_xor_sync(~0u, squares, d);
    const float unit = rsqrtf(squares + eps) * (i % 2 ? 1.f : Q_SCALE);
    float* const saved = ring.k + ((size_t)((position + r) & mask) * k_heads + at.key_head) * DIM + lane * PER_LANE;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
      part[j] *= unit;
      if (i % 2 && owns_keys) saved[j] = part[j];
    }
  }
  __syncthreads();

#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const float g = shared_decay[r];
    const float4* const k = (const float4*)shared_k[r] + at.lane;
    const float4* const q = (const float4*)shared_q[r] + at.lane;
    float4 row[QUADS];
    Dot known;
#pragma unroll
    for (int j = 0; j < QUADS; j++) row[j] = k[LANES * j], known.add(s[j], row[j]);
    const float d = shared_beta[r] * fmaf(-g, known.sum(), shared_v[r][tid / LANES]);
    Dot read;
#pragma unroll
    for (int j = 0; j < QUADS; j++) update(s[j], row[j], g, d), read.add(s[j], q[LANES * j]);
    const float o = read.sum();
    if (at.lane == 0) {
      out[(size_t)r * inner + at.head * DIM + at.column] = o;
      ring.d[((size_t)((position + r) & mask) * v_heads + at.head) * DIM + at.column] = d;
    }
  }
}
