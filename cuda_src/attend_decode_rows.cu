// Decode attention over ROWS pages: any types of K and V, any page length that is a multiple of 32, head sizes that are
// multiples of 16. Adds a call's parts (common/tables.cuh) to the partials of their groups (common/partials.cuh).
//
//   q      f16 [kv heads][columns rounded up to 8][K_DIM], scaled by log2 e
//   pages  pool + slots[page] * slot_bytes; per kv head K rows, then V rows (kvs_core/paging/geometry.py)
//
// A block adds the pages of its units (common/page_walk.cuh) in tiles of TILE tokens, one step of the running softmax
// each. A tile becomes f16 in shared memory (common/kv_tile.cuh). For the scores, warp w owns tokens 16w.. of the tile;
// for the output, dims 16w.., 16 (w + WARPS).., ... Three barriers per tile:
//
//   keys opened | scores, values opened, maxima | weights | acc += V^T weights, next keys opened
//
// No sum depends on which column tile or pass a column is in. Tiles that no row sees are left out, but for one in a
// page that is not.
//
// Variants (-D)
//   ROWS, REP, KV_HEADS               rows of the step (T), query heads per kv head (R), kv heads (G)
//   K_TYPE, V_TYPE, K_DIM, V_DIM      types as KV_...; sizes of a head
//   PAGE_TOKENS, TILE                 tokens of a page, and of a tile: 32 or 64, which divides it
//   WARPS                             of a block
//   TILES                             column tiles of 8 in one pass, at most WARPS
//   WINDOW                            keys that a row sees at most; 0: all up to its own
//   RING                              tiles that bulk copies are ahead, as stored, in shared memory; 0: tiles are
//                                     opened straight from memory. The same bits
//   SM_BLOCKS                         of one multiprocessor: bounds the registers
#include "common/ptx.cuh"
#include "common/kv_tile.cuh"
#include "common/page_walk.cuh"
#include "common/partials.cuh"
#include "common/tables.cuh"

constexpr int COLUMNS = ROWS * REP;
constexpr int Q_COLUMNS = (COLUMNS + 7) / 8 * 8;
constexpr int PASS_COLUMNS = TILES * 8;
constexpr int PASSES = (COLUMNS + PASS_COLUMNS - 1) / PASS_COLUMNS;
constexpr int THREADS = WARPS * 32;
constexpr int PIECES = TILE / 16;
constexpr int BLOCKS_OF_32 = key_blocks(K_DIM);
constexpr int DIM_TILES = V_DIM / 16;
constexpr int DIMS = (DIM_TILES + WARPS - 1) / WARPS;             // dim tiles of a warp
constexpr int PIECES_OF_WARP = (PIECES + WARPS - 1) / WARPS;

constexpr int K_ROW = kv_row_bytes(K_TYPE, K_DIM), V_ROW = kv_row_bytes(V_TYPE, V_DIM);
constexpr int HEAD_BYTES = PAGE_TOKENS * (K_ROW + V_ROW);
constexpr int K_STORED = TILE * K_ROW, V_STORED = TILE * V_ROW;   // a tile as stored; multiples of 16

// Shared memory: stored tiles | keys | values | queries | weights | maxima of two tiles | barriers
constexpr int KEYS_AT = RING * (K_STORED + V_STORED);
constexpr int VALUES_AT = KEYS_AT + key_tile_bytes(TILE, K_DIM);
constexpr int QUERIES_AT = VALUES_AT + value_tile_bytes(TILE, V_DIM);
constexpr int QUERY_ROW = (BLOCKS_OF_32 | 1) * 64;                // an odd number of 64 bytes: no bank conflicts
constexpr int WEIGHTS_AT = QUERIES_AT + PASS_COLUMNS * QUERY_ROW;
constexpr int WEIGHT_ROW = TILE * 2 + 32;
constexpr int MAXIMA_AT = WEIGHTS_AT + PASS_COLUMNS * WEIGHT_ROW;
constexpr int BARRIERS_AT = MAXIMA_AT + 2 * PASS_COLUMNS * 4;

using Group = Partials<KV_HEADS, COLUMNS, V_DIM>;

// Tiles of a page up to the last one that a row of the step sees; at least one.
DEVICE int tiles_of(int page, int position) {
  const int seen = position + ROWS - page * PAGE_TOKENS;
  return max(1, min(PAGE_TOKENS, seen + TILE - 1) / TILE);
}

// The first of them that a row sees, or the last one. ``first_seen``: the first token that any row sees.
DEVICE int first_tile_of(int page, int position, int first_seen) {
  if (WINDOW == 0) return 0;
  return min(max(0, first_seen - page * PAGE_TOKENS) / TILE, tiles_of(page, position) - 1);
}

extern "C" __global__ void __launch_bounds__(THREADS, SM_BLOCKS)
attend_decode_rows(const u16* q, const u8* pool, long long slot_bytes, const int* __restrict__ step_table,
                   const int* __restrict__ slots, const PlanCall* __restrict__ call,
                   const PlanPart* __restrict__ all_parts, float* scratch, int scratch_rows) {
  extern __shared__ __align__(128) u8 shared[];
  pdl_trigger();
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int position = step_table[STEP_POSITION];
  const PlanPart* parts = all_parts + call->first_part;
  const int units = call->parts * (KV_HEADS * PASSES);
  const int head = blockIdx.x % KV_HEADS, first_column = blockIdx.x / KV_HEADS % PASSES * PASS_COLUMNS;
  const Group groups = {scratch, scratch_rows};
  const u8* const head_pool = pool + (size_t)head * HEAD_BYTES;
  uint4* const keys = (uint4*)(shared + KEYS_AT);
  uint4* const values = (uint4*)(shared + VALUES_AT);
  int* const maxima = (int*)(shared + MAXIMA_AT);
  const int first_seen = WINDOW ? max(0, position + 1 - WINDOW) : 0;   // by any row

#if RING
  const u32 barriers = smem_u32(shared) + BARRIERS_AT;
  if (threadIdx.x == 0) {
    for (int i = 0; i < RING; i++) mbar_init(barriers + 8 * i, 1);
    mbar_fence_init();
  }
  // The first warp brings tiles, one elected lane of it.
  PageWalk<KV_HEADS * PASSES, (WINDOW > 0)> walk(parts, slots, units, first_seen / PAGE_TOKENS);
  int slot_ahead = walk.slot(), tile_ahead = first_tile_of(walk.page, position, first_seen);   // of the next tile
  auto bring = [&](int stage) {
    if (walk.done()) return;
    if (elect_one()) {
      const u8* const from = head_pool + slot_ahead * slot_bytes;
      const u32 to = smem_u32(shared) + stage * (K_STORED + V_STORED);
      mbar_expect(barriers + 8 * stage, K_STORED + V_STORED);
      bulk_g2s(to, from + tile_ahead * K_STORED, K_STORED, barriers + 8 * stage);
      bulk_g2s(to + K_STORED, from + PAGE_TOKENS * K_ROW + tile_ahead * V_STORED, V_STORED, barriers + 8 * stage);
    }
    __syncwarp();
    if (++tile_ahead == tiles_of(walk.page, position)) {
      walk.step();
      slot_ahead = walk.slot(), tile_ahead = first_tile_of(walk.page, position, first_seen);
    }
  };
  __syncthreads();
  // Pages before the first one that this step writes were written by earlier steps: they may be read before the wait.
  // A tile before may have written them too, and then the launch is plain.
  bool waited = false;
  if (warp == 0)
    for (int stage = 0; stage < RING; stage++) {
      if (!waited && !walk.done() && walk.page >= position / PAGE_TOKENS) { pdl_wait(); waited = true; }
      bring(stage);
    }
  if (!waited) pdl_wait();
#else
  pdl_wait();
#endif

  // Queries: every 32 dims in the order of the keys' tile, zeros behind the head's end.
  for (int i = threadIdx.x; i < PASS_COLUMNS * BLOCKS_OF_32 * 8; i += THREADS) {
    const int column = i / (BLOCKS_OF_32 * 8), dim = i % (BLOCKS_OF_32 * 8) * 4;
    uint2 four = make_uint2(0, 0);
    if (first_column + column < Q_COLUMNS && dim < K_DIM) {
      const u16* from = q + ((size_t)head * Q_COLUMNS + first_column + column) * K_DIM + dim;
      four = make_uint2(ldcg_u32(from), ldcg_u32(from + 2));
    }
    *(uint2*)(shared + QUERIES_AT + column * QUERY_ROW + fragment_query(dim) * 2) = four;
  }
  for (int i = threadIdx.x; i < 2 * PASS_COLUMNS; i += THREADS) maxima[i] = ordered(PARTIAL_UNSEEN);

  const u32 queries = smem_u32(shared) + QUERIES_AT + g * QUERY_ROW + t * 16;
  const u32 weights = smem_u32(shared) + WEIGHTS_AT + g * WEIGHT_ROW + t * 8;
  const u32 maxima_u = smem_u32(shared) + MAXIMA_AT + t * 8;
  const u32 ones = 0x3c003c00u;
  u32 steps = 0;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const PlanPart part = parts[unit / (KV_HEADS * PASSES)];
    float acc[DIMS][TILES][4], m[TILES][2];      // of columns 8 n + 2 t + {0, 1}; acc of dims g and g + 8 of a dim tile
    float l[4] = {0.f, 0.f, 0.f, 0.f};           // of column tile n == warp
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const int column = first_column + n * 8 + 2 * t + k;
        const bool resumed = !part.fresh && column < COLUMNS;
        const float* ml = groups.m_and_l(part.scratch_row, head, column);
        m[n][k] = resumed ? ldcg(ml) : PARTIAL_NOTHING;
        if (n == warp && resumed) l[k] = ldcg(ml + 1);
#pragma unroll
        for (int i = 0; i < DIMS; i++) {
          const int dim_tile = warp + i * WARPS;
          const float* from = groups.acc(part.scratch_row, head, column) + dim_tile * 16 + g;
          const bool on = resumed && dim_tile < DIM_TILES;
          acc[i][n][k] = on ? ldcg(from) : 0.f;
          acc[i][n][2 + k] = on ? ldcg(from + 8) : 0.f;
        }
      }
    const int begin = part_begin<(WINDOW > 0)>(part, first_seen / PAGE_TOKENS);
    for (int page = begin; page < part.first_page + part.pages; page++) {
#if !RING
      const u8* const stored = head_pool + slots[page] * slot_bytes;
#endif
      const int tiles = tiles_of(page, position);
      for (int tile = first_tile_of(page, position, first_seen); tile < tiles; tile++, steps++) {
        const u32 half = steps & 1;
        int* const maxima_now = maxima + half * PASS_COLUMNS;
#if RING
        const int stage = steps % RING;
        const u8* const k_rows = shared + stage * (K_STORED + V_STORED);
        const u8* const v_rows = k_rows + K_STORED;
        mbar_wait(barriers + 8 * stage, steps / RING & 1);
#else
        const u8* const k_rows = stored + tile * K_STORED;
        const u8* const v_rows = stored + PAGE_TOKENS * K_ROW + tile * V_STORED;
#endif
        open_key_rows<K_TYPE, K_DIM, K_ROW, TILE, THREADS>(k_rows, keys, threadIdx.x);
        __syncthreads();                         // keys are open; the values and weights of the tile before are used up
        float score[PIECES_OF_WARP][TILES][4];   // rows g are tokens 2g of a piece of 16, rows g + 8 tokens 2g + 1
#pragma unroll
        for (int i = 0; i < PIECES_OF_WARP; i++) {
          const int piece = warp + i * WARPS;
          if (piece >= PIECES) break;
#pragma unroll
          for (int n = 0; n < TILES; n++) score[i][n][0] = score[i][n][1] = score[i][n][2] = score[i][n][3] = 0.f;
#pragma unroll 4
          for (int block = 0; block < BLOCKS_OF_32; block++) {
            const uint4 even = key_fragment(keys, BLOCKS_OF_32, piece, block, 0, lane);
            const uint4 odd = key_fragment(keys, BLOCKS_OF_32, piece, block, 1, lane);
#pragma unroll
            for (int n = 0; n < TILES; n++) {
              const uint4 query = lds128(queries + n * (8 * QUERY_ROW) + block * 64);
              mma_f16(score[i][n], even.x, odd.x, even.y, odd.y, query.x, query.y);
              mma_f16(score[i][n], even.z, odd.z, even.w, odd.w, query.z, query.w);
            }
          }
          const int token = page * PAGE_TOKENS + tile * TILE + piece * 16 + 2 * g;
          const bool windows_begin = WINDOW && page * PAGE_TOKENS + tile * TILE <= position + ROWS - 1 - WINDOW;
          // Some row must not see all of the tile.
          if (page * PAGE_TOKENS + (tile + 1) * TILE > position + 1 || windows_begin) {
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
              for (int k = 0; k < 2; k++) {
                const int last = position + (first_column + n * 8 + 2 * t + k) / REP;
                if (token > last || (WINDOW && last - token >= WINDOW)) score[i][n][k] = PARTIAL_UNSEEN;
                if (token + 1 > last || (WINDOW && last - token - 1 >= WINDOW)) score[i][n][2 + k] = PARTIAL_UNSEEN;
              }
          }
#pragma unroll
          for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int k = 0; k < 2; k++) {
              float v = fmaxf(score[i][n][k], score[i][n][2 + k]);
              v = fmaxf(v, __shfl_xor_sync(~0u, v, 4));
              v = fmaxf(v, __shfl_xor_sync(~0u, v, 8));
              v = fmaxf(v, __shfl_xor_sync(~0u, v, 16));
              smem_max(maxima_u + half * (PASS_COLUMNS * 4) + (n * 8 + k) * 4, ordered(v), lane < 4);
            }
        }
        open_value_rows<V_TYPE, V_DIM, V_ROW, TILE, THREADS, (WINDOW > 0)>(
            v_rows, values, threadIdx.x, first_seen - page * PAGE_TOKENS - tile * TILE);
        __syncthreads();                         // maxima are complete; the stored tile is used up
#if RING
        if (warp == 0) bring(stage);
#endif
        for (int i = threadIdx.x; i < PASS_COLUMNS; i += THREADS)
          maxima[(half ^ 1) * PASS_COLUMNS + i] = ordered(PARTIAL_UNSEEN);
        float shrink[TILES][2];
#pragma unroll
        for (int n = 0; n < TILES; n++) {
          const int2 largest = *(const int2*)(maxima_now + n * 8 + 2 * t);
#pragma unroll
          for (int k = 0; k < 2; k++) {
            const float now = fmaxf(m[n][k], unordered(k ? largest.y : largest.x)), origin = PARTIAL_WEIGHT_LOG2 - now;
            shrink[n][k] = ex2(m[n][k] - now);
            m[n][k] = now;
#pragma unroll
            for (int i = 0; i < PIECES_OF_WARP; i++) {
              const int piece = warp + i * WARPS;
              if (piece < PIECES)
                *(u32*)(shared + WEIGHTS_AT + (n * 8 + 2 * t + k) * WEIGHT_ROW + (piece * 16 + 2 * g) * 2) =
                    f2h2(ex2(score[i][n][k] + origin), ex2(score[i][n][2 + k] + origin));
            }
          }
        }
        __syncthreads();                         // weights are complete, values open
#pragma unroll
        for (int n = 0; n < TILES; n++) {
#pragma unroll
          for (int i = 0; i < DIMS; i++)
#pragma unroll
            for (int k = 0; k < 4; k++) acc[i][n][k] *= shrink[n][k & 1];
          if (n == warp) { l[0] *= shrink[n][0]; l[1] *= shrink[n][1]; }
        }
#pragma unroll
        for (int step = 0; step < PIECES; step++) {
          uint2 weight[TILES];
#pragma unroll
          for (int n = 0; n < TILES; n++) weight[n] = lds64(weights + n * (8 * WEIGHT_ROW) + step * 32);
#pragma unroll
          for (int i = 0; i < DIMS; i++) {
            const int dim_tile = warp + i * WARPS;
            if (dim_tile >= DIM_TILES) break;
            const uint4 v = value_fragment(values, PIECES, dim_tile, step, lane);
#pragma unroll
            for (int n = 0; n < TILES; n++) mma_f16(acc[i][n], v.x, v.z, v.y, v.w, weight[n].x, weight[n].y);
          }
          if (warp < TILES) {
            const uint2 mine = lds64(weights + warp * (8 * WEIGHT_ROW) + step * 32);
            mma_f16(l, ones, ones, ones, ones, mine.x, mine.y);
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const int column = first_column + n * 8 + 2 * t + k;
        if (column >= COLUMNS) continue;
#pragma unroll
        for (int i = 0; i < DIMS; i++) {
          const int dim_tile = warp + i * WARPS;
          if (dim_tile >= DIM_TILES) break;
          float* to = groups.acc(part.scratch_row, head, column) + dim_tile * 16 + g;
          to[0] = acc[i][n][k];
          to[8] = acc[i][n][2 + k];
        }
        float* ml = groups.m_and_l(part.scratch_row, head, column);
        if (n == warp && g == 0) *(float2*)ml = make_float2(m[n][k], l[k]);
      }
  }
}
