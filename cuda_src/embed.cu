// The first kernels of a step: rows of the embedding table, and the angles of its positions.
//
//   embed        x[t] = row tokens[t] of the table times factor, zeros if there is none   x [T][n] f32
//   rope_table   cs[t][i] = (cos, sin)(angle) * magnitude, angle = (position + t) * inv_freq[i], in float64
//
// The table is rows as in common/gguf_blocks.cuh, in pinned host memory or anywhere the GPU can read. embed comes with
// -DTYPE=F32 | F16 | BF16 | Q8_0 | Q4_0 | Q4_1 | Q5_0 | Q5_1 | IQ4_NL | Q2_K | Q3_K | Q4_K | Q5_K | Q6_K | IQ4_XS,
// a warp per tile of 256 values; rope_table without, a thread per pair.
//
// Tokens, position and table are constants of the step: they are read before the wait.
#include "common/gguf_blocks.cuh"
#include "common/tables.cuh"

#ifdef TYPE

// Grid: tiles / 8, T.
extern "C" __global__ void __launch_bounds__(256)
embed(const u8* table, long long row_bytes, int n, int n_vocab, const int* tokens, float factor, float* x) {
  using Table = Blocks<TYPE>;
  const int tile = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  const u32 token = ldcg_u32(tokens + blockIdx.y);
  pdl_trigger();
  float v[8] = {};
  if (token < (u32)n_vocab && tile < tiles_of(n))
    Table::values(Table::load(table + token * row_bytes, tile, lane, n), lane, v);
  if (factor != 1.f) {
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] *= factor;
  }
  pdl_wait();
  float* row = x + (size_t)blockIdx.y * n;
  const int k = tile * TILE + Table::first(lane);
  store_quad(row, k, n, v);
  store_quad(row, k + Table::SECOND, n, v + 4);
}

#else

// inv_freq is followed by the magnitude. step: the step table, or null and ``position`` counts. Grid: pairs / 64, T.
extern "C" __global__ void __launch_bounds__(64)
rope_table(const double* inv_freq, int pairs, const int* step, int position, float2* cs) {
  const int i = blockIdx.x * 64 + threadIdx.x;
  if (step) position = (int)ldcg_u32(step + STEP_POSITION);
  pdl_trigger();
  float2 v = make_float2(0.f, 0.f);
  if (i < pairs) {
    const double angle = (double)(position + (int)blockIdx.y) * inv_freq[i], magnitude = inv_freq[pairs];
    v = make_float2((float)(magnitude * cos(angle)), (float)(magnitude * sin(angle)));
  }
  pdl_wait();
  if (i < pairs) cs[(size_t)blockIdx.y * pairs + i] = v;
}

#endif
