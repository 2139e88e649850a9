// Decode attention over FRAGMENTS pages (common/fragments.cuh): q8_0 keys and q4_0 values, heads of 256, pages of 256
// tokens. Adds a call's parts (common/tables.cuh) to the partials of their groups (common/partials.cuh).
//
//   q      f16 [kv heads][columns rounded up to 8][256], scaled by log2 e, dims in the order of fragment_query
//   pages  pool + slots[page] * slot_bytes
//
// A block adds the pages of its units (common/page_walk.cuh) one by one, one step of the running softmax each. It has
// 16 warps: for the scores, warp w owns tokens 16w.. of the page; for the output, dims 16w... A warp brings its own
// pieces of K and V; the block meets twice per page, to exchange maxima and weights. No sum depends on which tile or
// pass a column is in.
//
// Variants (-D)
//   ROWS, REP, KV_HEADS   rows of the step (T), query heads per kv head (R), kv heads (G)
//   TILES                 column tiles of 8 in one pass: at most 6, because of shared memory and registers
//   WINDOW                keys that a row sees at most; 0: all up to its own
//   RING                  1: pieces come through shared memory by bulk copies, two pages ahead (180 KiB)
//                         0: straight from memory, where there are no bulk copies or less shared memory; the same bits
#include "common/ptx.cuh"
#include "common/fragments.cuh"
#include "common/page_walk.cuh"
#include "common/partials.cuh"
#include "common/tables.cuh"

constexpr int COLUMNS = ROWS * REP;
constexpr int Q_COLUMNS = (COLUMNS + 7) / 8 * 8;
constexpr int PASS_COLUMNS = TILES * 8;
constexpr int PASSES = (COLUMNS + PASS_COLUMNS - 1) / PASS_COLUMNS;
constexpr int WARPS = 16;

// Shared memory: WARPS rings | queries | weights | maxima of two pages | barriers
constexpr int RING_V = 2 * FRAGMENT_K_PIECE;                     // of a warp's ring: two K pieces, then a V tile
constexpr int RING_V_SCALES = RING_V + FRAGMENT_V_TILE;
constexpr int WARP_RING = RING ? RING_V_SCALES + 512 : 0;
constexpr int QUERIES_AT = WARPS * WARP_RING;
constexpr int WEIGHT_ROW = 544;                                  // 256 halves and a pad against bank conflicts
constexpr int WEIGHTS_AT = QUERIES_AT + PASS_COLUMNS * 512;
constexpr int MAXIMA_AT = WEIGHTS_AT + PASS_COLUMNS * WEIGHT_ROW;
constexpr int BARRIERS_AT = MAXIMA_AT + 2 * PASS_COLUMNS * 4;    // with a ring, of a warp: K piece 0, K piece 1, V

constexpr int UNROLL = TILES >= 3 ? 1 : 2;

using Group = Partials<KV_HEADS, COLUMNS, FRAGMENT_DIM>;

// Where a warp's pieces of a page are read from.
#if RING
using Source = u32;
DEVICE u32 load32(Source at) { return lds32(at); }
DEVICE uint2 load64(Source at) { return lds64(at); }
DEVICE uint4 load128(Source at) { return lds128(at); }
#else
using Source = const u8*;
DEVICE u32 load32(Source at) { return *(const u32*)at; }
DEVICE uint2 load64(Source at) { return *(const uint2*)at; }
DEVICE uint4 load128(Source at) { return *(const uint4*)at; }
#endif

extern "C" __global__ void __launch_bounds__(512, 1)
attend_decode(const u16* q, const u8* pool, long long slot_bytes, const int* __restrict__ step_table,
              const int* __restrict__ slots, const PlanCall* __restrict__ call, const PlanPart* __restrict__ all_parts,
              float* scratch, int scratch_rows) {
  extern __shared__ __align__(128) u8 shared[];
  pdl_trigger();
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int position = step_table[STEP_POSITION];
  const PlanPart* parts = all_parts + call->first_part;
  const int units = call->parts * (KV_HEADS * PASSES);
  const int head = blockIdx.x % KV_HEADS, first_column = blockIdx.x / KV_HEADS % PASSES * PASS_COLUMNS;
  const Group groups = {scratch, scratch_rows};
  const u8* const head_pool = pool + head * FRAGMENT_HEAD;
  int* const maxima = (int*)(shared + MAXIMA_AT);

  const int first_seen = WINDOW ? max(0, position + 1 - WINDOW) : 0;   // by any row
  PageWalk<KV_HEADS * PASSES, (WINDOW > 0)> walk(parts, slots, units, first_seen / FRAGMENT_TOKENS);
#if RING
  const u32 ring = smem_u32(shared) + warp * WARP_RING, barrier = smem_u32(shared) + BARRIERS_AT + warp * 24;
  if (lane == 0) { mbar_init(barrier, 1); mbar_init(barrier + 8, 1); mbar_init(barrier + 16, 1); mbar_fence_init(); }
  __syncwarp();
  auto bring_k = [&](int half, int slot) {
    if (slot >= 0 && elect_one()) {
      mbar_expect(barrier + 8 * half, FRAGMENT_K_PIECE);
      bulk_g2s(ring + half * FRAGMENT_K_PIECE, head_pool + slot * slot_bytes + warp * FRAGMENT_K_PIECE,
               FRAGMENT_K_PIECE, barrier + 8 * half);
    }
  };
  auto bring_v = [&](int slot) {
    if (slot >= 0 && elect_one()) {
      const u8* piece = head_pool + slot * slot_bytes + FRAGMENT_V_PART + (warp >> 1) * FRAGMENT_V_PIECE;
      mbar_expect(barrier + 16, FRAGMENT_V_TILE + 512);
      bulk_g2s(ring + RING_V, piece + (warp & 1) * FRAGMENT_V_TILE, FRAGMENT_V_TILE, barrier + 16);
      bulk_g2s(ring + RING_V_SCALES, piece + FRAGMENT_V_SCALES, 512, barrier + 16);
    }
  };
  // Pages before the first one that this step writes were written by earlier steps: they may be read before the wait.
  // A tile before may have written them too, and then the launch is plain.
  const int page0 = walk.page;
  const int slot0 = walk.next();
  const int page1 = walk.page;
  int slot1 = walk.next(), slot2 = walk.next();      // of the pages one and two steps ahead
  const bool early = max(page0, page1) < position / FRAGMENT_TOKENS;
  if (!early) pdl_wait();
  bring_k(0, slot0); bring_v(slot0); bring_k(1, slot1);
  if (early) pdl_wait();
#else
  pdl_wait();
#endif

  // Queries: chunks of 16 bytes, exchanged in pairs of four in odd columns against bank conflicts.
  for (int i = threadIdx.x; i < PASS_COLUMNS * 32; i += 512) {
    const int column = i >> 5, chunk = i & 31;
    uint4 values = make_uint4(0, 0, 0, 0);
    if (first_column + column < Q_COLUMNS)
      values = ldcg4u(q + ((size_t)head * Q_COLUMNS + first_column + column) * FRAGMENT_DIM + chunk * 8);
    *(uint4*)(shared + QUERIES_AT + column * 512 + ((chunk ^ (column & 1) << 2) << 4)) = values;
  }
  for (int i = threadIdx.x; i < 2 * PASS_COLUMNS; i += 512) maxima[i] = ordered(PARTIAL_UNSEEN);
  __syncthreads();

  const u32 weights = smem_u32(shared) + WEIGHTS_AT + g * WEIGHT_ROW + 8 * t;
  const u32 queries = smem_u32(shared) + QUERIES_AT + g * 512 + t * 16;
  const u32 queries_of[2] = {queries + (g & 1) * 64, queries + (1 - (g & 1)) * 64};   // even and odd blocks of 32 dims
  const u32 maxima_u = smem_u32(shared) + MAXIMA_AT + 8 * t;
  u32 ones = 0x3c003c00u;
  opaque(ones);
  u32 steps = 0;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const PlanPart part = parts[unit / (KV_HEADS * PASSES)];
    float acc[TILES][4], m[TILES][2];            // of columns 8 n + 2 t + {0, 1}; acc of dims g and g + 8 of the warp's
    float l[4] = {0.f, 0.f, 0.f, 0.f};           // of column tile n == warp
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const int column = first_column + n * 8 + 2 * t + k;
        m[n][k] = PARTIAL_NOTHING; acc[n][k] = acc[n][2 + k] = 0.f;
        if (!part.fresh && column < COLUMNS) {
          const float* from = groups.acc(part.scratch_row, head, column) + warp * 16 + g;
          const float* ml = groups.m_and_l(part.scratch_row, head, column);
          m[n][k] = ldcg(ml); acc[n][k] = ldcg(from); acc[n][2 + k] = ldcg(from + 8);
          if (n == warp) l[k] = ldcg(ml + 1);
        }
      }
    const int begin = part_begin<(WINDOW > 0)>(part, first_seen / FRAGMENT_TOKENS);
    for (int page = begin; page < part.first_page + part.pages; page++, steps++) {
      const u32 half = steps & 1;
      int* const maxima_now = maxima + half * PASS_COLUMNS;
#if RING
      const Source k_piece = ring + half * FRAGMENT_K_PIECE, v_tile = ring + RING_V, v_scales = ring + RING_V_SCALES;
      mbar_wait(barrier + 8 * half, (steps >> 1) & 1);
#else
      const u8* const here = head_pool + slots[page] * slot_bytes;
      const Source k_piece = here + warp * FRAGMENT_K_PIECE;
      const Source v_piece = here + FRAGMENT_V_PART + (warp >> 1) * FRAGMENT_V_PIECE;
      const Source v_tile = v_piece + (warp & 1) * FRAGMENT_V_TILE, v_scales = v_piece + FRAGMENT_V_SCALES;
#endif
      // Scores of the warp's 16 tokens: rows g are tokens 2g, rows g + 8 tokens 2g + 1.
      float score[TILES][4];
#pragma unroll
      for (int n = 0; n < TILES; n++) score[n][0] = score[n][1] = score[n][2] = score[n][3] = 0.f;
      {
        Source keys = k_piece + lane * 16, scales = k_piece + FRAGMENT_K_SCALES + g * 32;
        u32 offset = 0;
#pragma unroll UNROLL
        for (int pair = 0; pair < 4; pair++) {
          const u32 even = load32(scales), odd = load32(scales + 16);      // tokens 2g, 2g + 1; two blocks each
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const uint4 bytes = load128(keys + e * 512);
            // bytes q + 128 become f16 1024 + q + 128, minus 1152 is q exactly
            const u32 a0 = hadd2(prmt(bytes.x, 0x64646464u, 0x4140), 0xe480e480u);
            const u32 a2 = hadd2(prmt(bytes.x, 0x64646464u, 0x4342), 0xe480e480u);
            const u32 b0 = hadd2(prmt(bytes.y, 0x64646464u, 0x4140), 0xe480e480u);
            const u32 b2 = hadd2(prmt(bytes.y, 0x64646464u, 0x4342), 0xe480e480u);
            const u32 a1 = hadd2(prmt(bytes.z, 0x64646464u, 0x4140), 0xe480e480u);
            const u32 a3 = hadd2(prmt(bytes.z, 0x64646464u, 0x4342), 0xe480e480u);
            const u32 b1 = hadd2(prmt(bytes.w, 0x64646464u, 0x4140), 0xe480e480u);
            const u32 b3 = hadd2(prmt(bytes.w, 0x64646464u, 0x4342), 0xe480e480u);
            const float d0 = e ? h2f_hi(even) : h2f_lo(even), d1 = e ? h2f_hi(odd) : h2f_lo(odd);
#pragma unroll
            for (int n = 0; n < TILES; n++) {
              const uint4 query = lds128(queries_of[e] + offset + n * (8 * 512));
              float c[4] = {0.f, 0.f, 0.f, 0.f};
              mma_f16(c, a0, a1, a2, a3, query.x, query.y);
              mma_f16(c, b0, b1, b2, b3, query.z, query.w);
              score[n][0] = fmaf(d0, c[0], score[n][0]); score[n][1] = fmaf(d0, c[1], score[n][1]);
              score[n][2] = fmaf(d1, c[2], score[n][2]); score[n][3] = fmaf(d1, c[3], score[n][3]);
            }
          }
          keys += 1024; scales += 4; offset += 128;
        }
      }
#if RING
      __syncwarp();
      bring_k(half, slot2);
#endif
      // Only the newest pages, and those where windows begin, hold tokens that a row must not see.
      const bool windows_begin = WINDOW && page * FRAGMENT_TOKENS <= position + ROWS - 1 - WINDOW;
      if ((page + 1) * FRAGMENT_TOKENS > position + 1 || windows_begin) {
        const int token = page * FRAGMENT_TOKENS + warp * 16 + 2 * g;
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
          for (int k = 0; k < 2; k++) {
            const int last = position + (first_column + n * 8 + 2 * t + k) / REP;
            if (token > last || (WINDOW && last - token >= WINDOW)) score[n][k] = PARTIAL_UNSEEN;
            if (token + 1 > last || (WINDOW && last - token - 1 >= WINDOW)) score[n][2 + k] = PARTIAL_UNSEEN;
          }
      }
#pragma unroll
      for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
          float v = fmaxf(score[n][k], score[n][2 + k]);
          v = fmaxf(v, __shfl_xor_sync(~0u, v, 4));
          v = fmaxf(v, __shfl_xor_sync(~0u, v, 8));
          v = fmaxf(v, __shfl_xor_sync(~0u, v, 16));
          smem_max(maxima_u + half * (PASS_COLUMNS * 4) + (n * 8 + k) * 4, ordered(v), lane < 4);
        }
      __syncthreads();                                     // maxima complete; the weights of the last page are used up
      for (int i = threadIdx.x; i < PASS_COLUMNS; i += 512)
        maxima[(half ^ 1) * PASS_COLUMNS + i] = ordered(PARTIAL_UNSEEN);
      float shrink[TILES][2];
#pragma unroll
      for (int n = 0; n < TILES; n++) {
        const int2 largest = *(const int2*)(maxima_now + n * 8 + 2 * t);
#pragma unroll
        for (int k = 0; k < 2; k++) {
          const float now = fmaxf(m[n][k], unordered(k ? largest.y : largest.x)), origin = PARTIAL_WEIGHT_LOG2 - now;
          shrink[n][k] = ex2(m[n][k] - now); m[n][k] = now;
          *(u32*)(shared + WEIGHTS_AT + (n * 8 + 2 * t + k) * WEIGHT_ROW + (warp * 16 + 2 * g) * 2) =
              f2h2(ex2(score[n][k] + origin), ex2(score[n][2 + k] + origin));
        }
      }
      __syncthreads();                                     // weights complete
#pragma unroll
      for (int n = 0; n < TILES; n++) {
        acc[n][0] *= shrink[n][0]; acc[n][1] *= shrink[n][1]; acc[n][2] *= shrink[n][0]; acc[n][3] *= shrink[n][1];
        if (n == warp) { l[0] *= shrink[n][0]; l[1] *= shrink[n][1]; }
      }
      // acc += V^T weights for the warp's 16 dims; l += ones weights for one column tile.
#if RING
      mbar_wait(barrier + 16, steps & 1);
#endif
      {
        Source values = v_tile + lane * 16, scales = v_scales + 8 * t;
        u32 here = weights, mine = weights + warp * (8 * WEIGHT_ROW);
#pragma unroll UNROLL
        for (int quarter = 0; quarter < 4; quarter++) {
          const uint4 bytes = load128(values);
          const u32 words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
          for (int h = 0; h < 4; h++) {
            const u32 low = words[h], high = low >> 8;
            uint2 scale = load64(scales + h * 32);
            if (WINDOW && windows_begin) {   // zero times what no row sees is not always zero
              const int token = page * FRAGMENT_TOKENS + quarter * 64 + h * 16 + 4 * t;
              scale = {from_token(scale.x, token, first_seen), from_token(scale.y, token + 2, first_seen)};
            }
            // nibbles n become n - 8 exactly: (1024 + n) - 1032, high ones (1024 + 16 n) / 16 - 72; then times scale
            const u32 a0 = hmul2(hadd2((low & 0x000f000fu) | 0x64006400u, 0xe408e408u), scale.x);
            const u32 a1 = hmul2(hfma2((low & 0x00f000f0u) | 0x64006400u, 0x2c002c00u, 0xd480d480u), scale.x);
            const u32 a2 = hmul2(hadd2((high & 0x000f000fu) | 0x64006400u, 0xe408e408u), scale.y);
            const u32 a3 = hmul2(hfma2((high & 0x00f000f0u) | 0x64006400u, 0x2c002c00u, 0xd480d480u), scale.y);
#pragma unroll
            for (int n = 0; n < TILES; n++) {
              const uint2 weight = lds64(here + n * (8 * WEIGHT_ROW) + h * 32);
              mma_f16(acc[n], a0, a1, a2, a3, weight.x, weight.y);
            }
          }
          if (warp < TILES) {
#pragma unroll
            for (int h = 0; h < 4; h++) {
              const uint2 weight = lds64(mine + h * 32);
              mma_f16(l, ones, ones, ones, ones, weight.x, weight.y);
            }
          }
          values += 512; scales += 128; here += 128; mine += 128;
        }
      }
#if RING
      __syncwarp();
      bring_v(slot1);
      slot1 = slot2; slot2 = walk.next();
#endif
    }
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const int column = first_column + n * 8 + 2 * t + k;
        if (column < COLUMNS) {
          float* to = groups.acc(part.scratch_row, head, column) + warp * 16 + g;
          to[0] = acc[n][k]; to[8] = acc[n][2 + k];
          float* ml = groups.m_and_l(part.scratch_row, head, column);
          if (n == warp && g == 0) *(float2*)ml = make_float2(m[n][k], l[k]);
        }
      }
  }
}
