// Gated DeltaNet, prefill, second part: one pass over the state, chunk by chunk; its operands, and the maths, stand in
// common/gdn_chunk.cuh.
//
//   state, ring_x, y                 as in gdn_decode.cu; row 0 of y is at ``position``
//   operands, updates, keeps         scratch, of this pass's chunks
//   out                              [rows][v_heads * DIM] f32: o, before its norm and gate
//
// One block owns 64 columns of one head's state (or all, if there are fewer), a warp 16 of them, in registers and as
// S^T: what a product leaves as C fragments the next takes as A fragments, and no warp needs another's numbers.
//
//   DIM     32, 64 or 128: numbers of a key and of a value head
//   TAPS    2..4, of the convolution
//   STAGES  2: a chunk's operands are fetched under the work on the one before; 1: with half the shared memory
#include "common/gdn_chunk.cuh"

constexpr int WARPS = DIM < 64 ? DIM / 16 : 4, THREADS = 32 * WARPS;
constexpr int BLOCKS = DIM / (16 * WARPS);   // of a head

// A fragments of 16 columns from C fragments of their numbers: tiles 2s and 2s + 1 hold the 16 of step s.
DEVICE FragmentA as_a(const float (&x)[4], const float (&z)[4]) {
  return {{Split(x[0], x[1]), Split(x[2], x[3]), Split(z[0], z[1]), Split(z[2], z[3])}};
}

DEVICE void fetch(u32 shared, const char* operands) {
#pragma unroll 4
  for (int i = threadIdx.x * 16; i < OPERAND_BYTES; i += THREADS * 16) cp_async16(shared + i, operands + i);
  cp_async_commit();
}

DEVICE void load_updates(float4 (&u)[ROW_TILES], float& keep, const float* updates, const float* keeps, size_t unit,
                         int tile) {
  const float* const from = updates + unit * CHUNK * DIM + (tile * ROW_TILES * 32 + threadIdx.x % 32) * 4;
#pragma unroll
  for (int n = 0; n < ROW_TILES; n++) u[n] = ldcg4(from + n * 128);
  keep = ldcg(keeps + unit);
}

// first: row of the call at which chunk 0 begins; last: whether this pass ends the call, and so keeps its last inputs
extern "C" __global__ void __launch_bounds__(THREADS) gdn_scan(
    float* state, float* ring_x, int slots, const float* y, int y_stride, int k_heads, int v_heads, int rows,
    int position, int first, int chunks, int last, const char* operands, const float* updates, const float* keeps,
    float* out) {
  extern __shared__ __align__(16) char staged[];
  const int head = blockIdx.x / BLOCKS, tid = threadIdx.x, lane = tid % 32, g = lane / 4, t = lane % 4;
  const int tile = blockIdx.x % BLOCKS * WARPS + tid / 32;      // the warp's 16 columns
  const int inner = v_heads * DIM;
  const char* const from = operands + (size_t)head * OPERAND_BYTES;       // of chunk 0; the next is v_heads on
  const size_t chunk_bytes = (size_t)v_heads * OPERAND_BYTES;
  const u32 stage = smem_u32(staged);
  pdl_wait();
  pdl_trigger();                                       // in this order: who comes next relies on all before this scan
  if (STAGES == 2) fetch(stage, from);

  float s[KEY_TILES][4];                               // S^T: 16 columns x key dims
  float* const column = state + ((size_t)head * DIM + 16 * tile + g) * DIM + 2 * t;
#pragma unroll
  for (int m = 0; m < KEY_TILES; m++) {
    const float2 x = ldcg2(column + 8 * m), z = ldcg2(column + 8 * DIM + 8 * m);
    s[m][0] = x.x, s[m][1] = x.y, s[m][2] = z.x, s[m][3] = z.y;
  }
  float4 u[ROW_TILES];                                 // U^T and G_last, loaded a chunk ahead
  float keep;
  load_updates(u, keep, updates, keeps, head, tile);
  for (int chunk = 0; chunk < chunks; chunk++) {
    float d[ROW_TILES][4], o[ROW_TILES][4] = {};       // D^T, O^T: 16 columns x rows
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) d[n][0] = u[n].x, d[n][1] = u[n].y, d[n][2] = u[n].z, d[n][3] = u[n].w;
    const float kept = keep;
    load_updates(u, keep, updates, keeps, (size_t)min(chunk + 1, chunks - 1) * v_heads + head, tile);
    const char* here = staged;
    if (STAGES == 2) {
      here += (chunk & 1) * OPERAND_BYTES;
      if (chunk + 1 < chunks) {
        fetch(stage + (~chunk & 1) * OPERAND_BYTES, from + (chunk + 1) * chunk_bytes);
        cp_async_wait<1>();
      } else cp_async_wait<0>();
    } else {
      fetch(stage, from + chunk * chunk_bytes);
      cp_async_wait<0>();
    }
    __syncthreads();
    const uint4* const tiles = (const uint4*)here + lane;

#pragma unroll
    for (int k = 0; k < KEY_STEPS; k++) {
      const FragmentA state_a = as_a(s[2 * k], s[2 * k + 1]);
      uint4 w[ROW_TILES], q[ROW_TILES];
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++) {
        w[n] = tiles[W_AT / 16 + (k * ROW_TILES + n) * 32];
        q[n] = tiles[Q_AT / 16 + (k * ROW_TILES + n) * 32];
      }
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++) mma_high_low(d[n], state_a, w[n]), mma_high_low(o[n], state_a, q[n]);
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++) mma_low_high(d[n], state_a, w[n]), mma_low_high(o[n], state_a, q[n]);
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++) mma_high_high(d[n], state_a, w[n]), mma_high_high(o[n], state_a, q[n]);
    }
#pragma unroll
    for (int m = 0; m < KEY_TILES; m++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[m][e] *= kept;
#pragma unroll
    for (int k = 0; k < ROW_STEPS; k++) {
      const FragmentA update = as_a(d[2 * k], d[2 * k + 1]);
      uint4 p[ROW_TILES];
#pragma unroll
      for (int n = 2 * k; n < ROW_TILES; n++) p[n] = tiles[P_AT / 16 + (k * ROW_TILES + n) * 32];
#pragma unroll
      for (int n = 2 * k; n < ROW_TILES; n++) mma_high_low(o[n], update, p[n]);
#pragma unroll
      for (int n = 2 * k; n < ROW_TILES; n++) mma_low_high(o[n], update, p[n]);
#pragma unroll
      for (int n = 2 * k; n < ROW_TILES; n++) mma_high_high(o[n], update, p[n]);
#pragma unroll
      for (int m = 0; m < KEY_TILES; m += 4) {
        uint4 b[4];
#pragma unroll
        for (int i = 0; i < 4; i++) b[i] = tiles[K_AT / 16 + (k * KEY_TILES + m + i) * 32];
#pragma unroll
        for (int i = 0; i < 4; i++) mma_high_low(s[m + i], update, b[i]);
#pragma unroll
        for (int i = 0; i < 4; i++) mma_low_high(s[m + i], update, b[i]);
#pragma unroll
        for (int i = 0; i < 4; i++) mma_high_high(s[m + i], update, b[i]);
      }
    }
    __syncthreads();                                   // the stage may be filled again
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int row = first + chunk * CHUNK + 8 * n + 2 * t + e % 2;
        if (row < rows) out[(size_t)row * inner + head * DIM + 16 * tile + g + e / 2 * 8] = o[n][e];
      }
  }
#pragma unroll
  for (int m = 0; m < KEY_TILES; m++) {
    *(float2*)(column + 8 * m) = make_float2(s[m][0], s[m][1]);
    *(float2*)(column + 8 * DIM + 8 * m) = make_float2(s[m][2], s[m][3]);
  }
  if (last) {
    const int channels = 2 * k_heads * DIM + inner;
    for (int row = max(0, rows - (TAPS - 1)); row < rows; row++)
      for (int c = blockIdx.x * THREADS + tid; c < channels; c += gridDim.x * THREADS)
        ring_x[(size_t)((position + row) & (slots - 1)) * channels + c] = y[(size_t)row * y_stride + c];
  }
}
