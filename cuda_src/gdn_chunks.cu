// Gated DeltaNet, prefill, first part: convolution, norms, gates and the products within chunks of 32 rows. What it
// leaves, and the maths, stand in common/gdn_chunk.cuh.
//
//   y, conv, dt_bias, a, ring_x      as in gdn_decode.cu; row 0 of y is at ``position``
//   operands, updates, keeps         scratch, of this pass's chunks
//
// One block makes one chunk of one value head; heads that share a key head repeat its work.
//
//   DIM     32, 64 or 128: numbers of a key and of a value head
//   TAPS    2..4, of the convolution
#include "common/gdn.cuh"
#include "common/gdn_chunk.cuh"

constexpr float Q_SCALE = DIM == 128 ? 0.08838834764831845f : DIM == 64 ? 0.125f : 0.17677669529663687f;
constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int STRIDE = DIM + 8;                        // of rows in shared memory: float2 fragments without conflicts
constexpr int SYSTEM_STRIDE = CHUNK + 8;
constexpr int SPAN = CHUNK * DIM / THREADS;            // rows that a thread convolves, of one channel

// The rows of a call: y's, before them what the ring holds, behind them zeros.
struct Inputs {
  const float *y, *ring;
  int stride, channels, rows, position, mask;
};

// out[i] = silu(convolution) at row first + i >= 0 of one channel.
DEVICE void convolve(float (&out)[SPAN], const Inputs& in, const float* conv, int channel, int first) {
  float x[TAPS - 1 + SPAN], tap[TAPS];
  const float* const from = in.y + (long long)first * in.stride + channel;
#pragma unroll
  for (int i = 0; i < TAPS - 1; i++) {
    const int row = first - (TAPS - 1) + i;
    const float* const past = in.ring + (size_t)((in.position + row) & in.mask) * in.channels + channel;
    x[i] = row < 0 ? *past : row < in.rows ? from[(long long)(i - (TAPS - 1)) * in.stride] : 0.f;
  }
#pragma unroll
  for (int i = 0; i < SPAN; i++) x[TAPS - 1 + i] = first + i < in.rows ? from[(long long)i * in.stride] : 0.f;
#pragma unroll
  for (int t = 0; t < TAPS; t++) tap[t] = conv[t * in.channels + channel];
#pragma unroll
  for (int i = 0; i < SPAN; i++) {
    float mixed = 0.f;
#pragma unroll
    for (int t = 0; t < TAPS; t++) mixed = fmaf(x[i + t], tap[t], mixed);
    out[i] = gdn_silu(mixed);
  }
}

DEVICE void store_tile(char* tiles, int tile, const FragmentB& b) {
  ((uint4*)tiles)[tile * 32 + threadIdx.x % 32] = make_uint4(b.r[0].high, b.r[1].high, b.r[0].low, b.r[1].low);
}
DEVICE void mma_split(float (&c)[4], const FragmentA& a, const FragmentB& b) {
  const uint4 words = make_uint4(b.r[0].high, b.r[1].high, b.r[0].low, b.r[1].low);
  mma_high_low(c, a, words), mma_low_high(c, a, words), mma_high_high(c, a, words);
}

// Fragments of a row-major matrix in shared memory, its rows i0 .., columns j0 ..: pairs lie in a row.
DEVICE FragmentA rows_a(const float* x, int stride, int i0, int j0) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  FragmentA a;
#pragma unroll
  for (int r = 0; r < 4; r++) {
    const float2 v = *(const float2*)(x + (i0 + g + 8 * (r & 1)) * stride + j0 + 2 * t + 8 * (r >> 1));
    a.r[r] = Split(v.x, v.y);
  }
  return a;
}
// B with n: row, k: column, every row times ``scale``.
DEVICE FragmentB rows_b(const float* x, int stride, int i0, int j0, float scale) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  FragmentB b;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float2 v = *(const float2*)(x + (i0 + g) * stride + j0 + 2 * t + 8 * r);
    b.r[r] = Split(v.x * scale, v.y * scale);
  }
  return b;
}
// Column j0 + g, rows i0 + 2t and the next.
DEVICE float2 down(const float* x, int stride, int i0, int j0) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const float* const p = x + (i0 + 2 * t) * stride + j0 + g;
  return make_float2(p[0], p[stride]);
}

// Decays, steps and their products, by one warp; lane = row.
struct Gates {
  float pair[CHUNK][CHUNK + 1];                        // M, 0 above the diagonal
  float grown[CHUNK], left[CHUNK], step[CHUNK];        // G, R, b
};

DEVICE void make_gates(Gates& gates, float decay, float step, float* keep) {
  const int lane = threadIdx.x % 32;
  float product = 1.f, all = 1.f;
#pragma unroll
  for (int i = 0; i < CHUNK; i++) {
    const float g = __shfl_sync(~0u, decay, i);
    all *= g;
    if (i > lane) product *= g;
    gates.pair[i][lane] = i >= lane ? product : 0.f;
    if (i == lane) gates.grown[i] = all;
  }
  gates.left[lane] = product, gates.step[lane] = step;
  if (lane == 0) *keep = all;
}

// Inverts I + the strictly lower part of ``system`` in place, by one warp: lane j solves for column j.
DEVICE void invert(float* system) {
  const int lane = threadIdx.x % 32;
  float column[CHUNK];
#pragma unroll
  for (int i = 0; i < CHUNK; i++) {
    float sum[4] = {i == lane ? 1.f : 0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      const float4 row = *(const float4*)(system + i * SYSTEM_STRIDE + j);
      sum[0] = fmaf(-row.x, column[j], sum[0]);
      if (j + 1 < i) sum[1] = fmaf(-row.y, column[j + 1], sum[1]);
      if (j + 2 < i) sum[2] = fmaf(-row.z, column[j + 2], sum[2]);
      if (j + 3 < i) sum[3] = fmaf(-row.w, column[j + 3], sum[3]);
    }
    column[i] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < CHUNK; i++) system[i * SYSTEM_STRIDE + lane] = column[i];
}

// first: row of the call at which chunk 0 of the grid begins
extern "C" __global__ void __launch_bounds__(THREADS) gdn_chunks(
    const float* y, int y_stride, const float* ring_x, int slots, const float* __restrict__ conv,
    const float* __restrict__ dt_bias, const float* __restrict__ a, float eps, int k_heads, int v_heads, int rows,
    int position, int first, char* operands, float* updates, float* keeps) {
  __shared__ __align__(16) float keys[CHUNK * STRIDE], others[CHUNK * STRIDE];     // others: queries, then values
  __shared__ __align__(16) float system[CHUNK * SYSTEM_STRIDE];
  __shared__ Gates gates;
  const int head = blockIdx.x, key_head = head % k_heads, tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const int g = lane / 4, t = lane % 4, begin = first + blockIdx.y * CHUNK;
  const int n_keys = k_heads * DIM, inner = v_heads * DIM, channels = 2 * n_keys + inner;
  const size_t unit = (size_t)blockIdx.y * v_heads + head;
  char* const to = operands + unit * OPERAND_BYTES;
  const Inputs in{y, ring_x, y_stride, channels, rows, position, slots - 1};

  const int dim = tid % DIM, at = tid / DIM * SPAN;
  float value[SPAN];
#pragma unroll 1
  for (int part = 0; part < 2; part++) {
    float* const to_shared = (part ? keys : others) + at * STRIDE + dim;
    convolve(value, in, conv, part * n_keys + key_head * DIM + dim, begin + at);
#pragma unroll
    for (int i = 0; i < SPAN; i++) to_shared[i * STRIDE] = value[i];
  }
  convolve(value, in, conv, 2 * n_keys + head * DIM + dim, begin + at);
  if (warp == 0) {                                     // a row behind the last keeps the state and adds nothing
    const int row = begin + lane;
    const float* const from = y + (size_t)row * y_stride + channels + inner + head;
    const bool real = row < rows;
    const float decay = real ? gdn_decay(from[v_heads] + dt_bias[head], a[head]) : 1.f;
    make_gates(gates, decay, real ? gdn_sigmoid(from[0]) : 0.f, keeps + unit);
  }
  __syncthreads();
#pragma unroll 4
  for (int i = warp; i < 2 * CHUNK; i += WARPS) {
    float* const part = (i < CHUNK ? keys : others) + i % CHUNK * STRIDE + lane;
    float squares = 0.f;
#pragma unroll
    for (int j = 0; j < DIM; j += 32) squares = fmaf(part[j], part[j], squares);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) squares += __shfl_xor_sync(~0u, squares, d);
    const float unit_length = rsqrtf(squares + eps) * (i < CHUNK ? 1.f : Q_SCALE);
#pragma unroll
    for (int j = 0; j < DIM; j += 32) part[j] *= unit_length;
  }
  __syncthreads();

  {                                                    // K K^T by warps 0, 1 and Q K^T by 2, 3: 16 rows each
    const int i0 = warp % 2 * 16;
    float c[ROW_TILES][4] = {};
#pragma unroll 2
    for (int s = 0; s < KEY_STEPS; s++) {
      const FragmentA left = rows_a(warp < 2 ? keys : others, STRIDE, i0, 16 * s);
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++)
        if (8 * n < i0 + 16) mma_split(c[n], left, rows_b(keys, STRIDE, 8 * n, 16 * s, 1.f));
    }
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int i = i0 + g + e / 2 * 8, j = 8 * n + 2 * t + e % 2;
        c[n][e] *= gates.pair[i][j];
        if (warp < 2) system[i * SYSTEM_STRIDE + j] = c[n][e] * gates.step[i];
      }
    if (warp >= 2)
#pragma unroll
      for (int s = 0; s < ROW_STEPS; s++)
        if (16 * s <= i0)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const float *const x = c[2 * s] + 2 * half, *const z = c[2 * s + 1] + 2 * half;
            store_tile(to + P_AT, s * ROW_TILES + i0 / 8 + half, {Split(x[0], x[1]), Split(z[0], z[1])});
          }
  }
  for (int tile = warp; tile < KEY_STEPS * ROW_TILES; tile += WARPS) {
    const int s = tile / ROW_TILES, n = tile % ROW_TILES;
    store_tile(to + Q_AT, tile, rows_b(others, STRIDE, 8 * n, 16 * s, gates.grown[8 * n + g]));
  }
  __syncthreads();

#pragma unroll
  for (int i = 0; i < SPAN; i++) others[(at + i) * STRIDE + dim] = value[i];
  if (warp == 0) invert(system);
  else
    for (int tile = warp - 1; tile < ROW_STEPS * KEY_TILES; tile += WARPS - 1) {
      const int i = tile / KEY_TILES * 16, j = tile % KEY_TILES * 8;
      FragmentB b;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float2 k = down(keys, STRIDE, i + 8 * r, j);
        const float* const left = gates.left + i + 8 * r + 2 * t;
        b.r[r] = Split(k.x * left[0], k.y * left[1]);
      }
      store_tile(to + K_AT, tile, b);
    }
  __syncthreads();

  {                                                    // -W: [row][key dim] in registers is what a tile's lanes hold
    FragmentA solve[ROW_STEPS][ROW_STEPS];             // -T b G
#pragma unroll
    for (int m = 0; m < ROW_STEPS; m++)
#pragma unroll
      for (int s = 0; s <= m; s++)
#pragma unroll
        for (int r = 0; r < 4; r++) {
          const int j = 16 * s + 2 * t + 8 * (r >> 1);
          const float2 x = *(const float2*)(system + (16 * m + g + 8 * (r & 1)) * SYSTEM_STRIDE + j);
          const float by = gates.step[j] * gates.grown[j], by_next = gates.step[j + 1] * gates.grown[j + 1];
          solve[m][s].r[r] = Split(-x.x * by, -x.y * by_next);
        }
    for (int key = warp; key < KEY_STEPS; key += WARPS) {
      float c[ROW_STEPS][2][4] = {};
#pragma unroll
      for (int s = 0; s < ROW_STEPS; s++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float2 x = down(keys, STRIDE, 16 * s, 16 * key + 8 * half);
          const float2 z = down(keys, STRIDE, 16 * s + 8, 16 * key + 8 * half);
          const FragmentB k{Split(x.x, x.y), Split(z.x, z.y)};
#pragma unroll
          for (int m = s; m < ROW_STEPS; m++) mma_split(c[m][half], solve[m][s], k);
        }
#pragma unroll
      for (int m = 0; m < ROW_STEPS; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float *const x = c[m][0] + 2 * half, *const z = c[m][1] + 2 * half;
          store_tile(to + W_AT, key * ROW_TILES + 2 * m + half, {Split(x[0], x[1]), Split(z[0], z[1])});
        }
    }
  }
  {                                                    // U^T
    FragmentB solve[ROW_STEPS][ROW_TILES];             // (T b)^T
#pragma unroll
    for (int s = 0; s < ROW_STEPS; s++)
#pragma unroll
      for (int n = 2 * s; n < ROW_TILES; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const int j = 16 * s + 2 * t + 8 * r;
          const float2 x = *(const float2*)(system + (8 * n + g) * SYSTEM_STRIDE + j);
          solve[s][n].r[r] = Split(x.x * gates.step[j], x.y * gates.step[j + 1]);
        }
    for (int column = warp; column < DIM / 16; column += WARPS) {
      float c[ROW_TILES][4] = {};
#pragma unroll
      for (int s = 0; s < ROW_STEPS; s++) {
        FragmentA v;
#pragma unroll
        for (int r = 0; r < 4; r++) {
          const float2 x = down(others, STRIDE, 16 * s + 8 * (r >> 1), 16 * column + 8 * (r & 1));
          v.r[r] = Split(x.x, x.y);
        }
#pragma unroll
        for (int n = 2 * s; n < ROW_TILES; n++) mma_split(c[n], v, solve[s][n]);
      }
      float4* const u = (float4*)(updates + unit * CHUNK * DIM) + column * ROW_TILES * 32 + lane;
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++) u[n * 32] = make_float4(c[n][0], c[n][1], c[n][2], c[n][3]);
    }
  }
  pdl_wait();                                          // ends after the scan of the pass before
}
