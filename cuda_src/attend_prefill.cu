// Prefill attention over pages of any order and type, with tensor cores: adds the attention of T rows over consecutive
// pages to their running partial, which finish_prefill.cu ends.
//
//   q        f16 [T][H][K_DIM], scaled by log2 e
//   pages    pool + slots[page] * slot_bytes; in a page, a kv head's K part, then its V part
//   running  f32: acc [T][H][V_DIM], then (l, m) [T][H][2]. m is the largest score in units of log2; a weight is
//            2^(score - m + 8), which keeps small ones alive in f16 and cancels in acc / l
//
// A block owns PAIRS neighbouring (row, query head) pairs of one kv head: a key opened to f16 serves them all. It walks
// the keys in tiles of KEYS, one step of the running softmax each, from the first one that its first row sees as far as
// its last row sees. Tiles begin at multiples of KEYS, which divides a page, and the state is stored as it is: the bits
// depend neither on slots nor on how the pages are split into launches.
//
// A group of SHARERS warps owns 16 * QUERY_TILES of the pairs. Reading shared memory is what limits the kernel, so a
// warp has two query tiles for every fragment of keys and values that it reads. Where registers do not hold the sums of
// both, two warps share them: each scores half of the keys, for the maxima and weights of both, and sums half of the
// dims. Where a tile is too small to be halved, both score all of it.
//
// The raw bytes of a tile come by background copies, one half step ahead. A step has two halves, a barrier after each:
//
//        scores of tile i, its weights        |  acc += weights * values of tile i
//        open the values of tile i            |  open the keys of tile i + 1
//        copies: raw keys of tile i + 1       |  copies: raw values of tile i + 1
//
// In each half, one half of the warps multiplies first and the other opens first: tensor cores and ALUs are both busy.
//
// Compile-time facts (-D)
//   K_TYPE, V_TYPE, K_DIM, V_DIM   types (common/kv_types.cuh) and head dims, multiples of 16 up to 256, or 512
//   PAGE, FRAGMENTS                tokens of a page; 1: the page order of common/fragments.cuh, 0: ROWS
//   QUERY_TILES, SHARERS           2 and 1 up to V_DIM 128, 2 and 2 up to 256; 1 and 1 where tiles are too small to share;
//                                  1 and 2 beyond 256
//   WARPS, KEYS                    as many as there is shared memory for
//   WINDOW                         keys that a row sees at most; 0: all up to its own
#include "common/kv_tile.cuh"
#include "common/partials.cuh"

constexpr int THREADS = WARPS * 32, GROUPS = WARPS / SHARERS;
constexpr int GROUP_PAIRS = QUERY_TILES * 16, PAIRS = GROUPS * GROUP_PAIRS;
constexpr int STEPS = KEYS / 16;                       // of a product over keys
constexpr int SCORERS = STEPS % SHARERS ? 1 : SHARERS; // warps among which the scores of a group are shared
constexpr int OWN_STEPS = STEPS / SCORERS;             // those whose scores a warp computes
constexpr int K_BLOCKS = key_blocks(K_DIM), V_TILES = V_DIM / 16;
constexpr int OWN_TILES = V_TILES / SHARERS;           // those that a warp sums
static_assert(OWN_STEPS * SCORERS == STEPS && OWN_TILES * SHARERS == V_TILES, "equal shares");
constexpr int K_ROW = kv_row_bytes(K_TYPE, K_DIM), V_ROW = kv_row_bytes(V_TYPE, V_DIM);
constexpr int HEAD_BYTES = PAGE * (K_ROW + V_ROW);

// Raw rows of a multiple of 128 bytes get 16 more between them, or all rows would lie in the same banks.
constexpr int K_STRIDE = K_ROW % 128 ? K_ROW : K_ROW + 16, V_STRIDE = V_ROW % 128 ? V_ROW : V_ROW + 16;
constexpr int QUARTER_SCALES = 16 * 512;               // of 64 tokens' V pieces: nibbles, then scales
constexpr int RAW_K = FRAGMENTS ? STEPS * FRAGMENT_K_PIECE : KEYS * K_STRIDE;
constexpr int RAW_V = FRAGMENTS ? QUARTER_SCALES + 8 * 128 : KEYS * V_STRIDE;

// Shared memory: queries | keys | values | raw keys | raw values | weights and maxima that are shared
constexpr int KEYS_AT = key_tile_bytes(PAIRS, K_DIM);   // queries take as much as so many keys
constexpr int VALUES_AT = KEYS_AT + key_tile_bytes(KEYS, K_DIM);
constexpr int RAW_K_AT = VALUES_AT + value_tile_bytes(KEYS, V_DIM);
constexpr int RAW_V_AT = RAW_K_AT + RAW_K;
constexpr int WEIGHTS_AT = RAW_V_AT + RAW_V;
constexpr int MAXIMA_AT = WEIGHTS_AT + PAIRS * KEYS * 2;

// KEYS rows of ROW bytes from ``from`` into shared memory, STRIDE apart.
template <int ROW, int STRIDE> DEVICE void copy_rows(const u8* from, u32 to, int thread) {
  for (int i = thread; i < KEYS * ROW / 16; i += THREADS) {
    const int row = STRIDE == ROW ? 0 : i / (ROW / 16);
    cp_async16(to + i * 16 + row * (STRIDE - ROW), from + i * 16);
  }
}
// Raw keys, and values, of the tile that begins at token ``token`` of a page. ``head``: its kv head's part.
DEVICE void copy_keys(const u8* head, int token, u32 to, int thread) {
  if constexpr (FRAGMENTS) {
    const u8* const from = head + token / 16 * FRAGMENT_K_PIECE;
    for (int i = thread; i < RAW_K / 16; i += THREADS) cp_async16(to + i * 16, from + i * 16);
  } else {
    copy_rows<K_ROW, K_STRIDE>(head + token * K_ROW, to, thread);
  }
}
DEVICE void copy_values(const u8* head, int token, u32 to, int thread) {
  if constexpr (FRAGMENTS) {
    const int quarter = token / 64;
    for (int i = thread; i < RAW_V / 16; i += THREADS) {   // 16 tiles x 32 pieces, then 8 blocks x 8 pieces of scales
      const int tile = i >> 5, lane = i & 31, scale = i - 512;
      const int at = i < 512
        ? (tile >> 1) * FRAGMENT_V_PIECE + (tile & 1) * FRAGMENT_V_TILE + quarter * 512 + lane * 16
        : (scale >> 3) * FRAGMENT_V_PIECE + FRAGMENT_V_SCALES + quarter * 128 + (scale & 7) * 16;
      cp_async16(to + i * 16, head + FRAGMENT_V_PART + at);
    }
  } else {
    copy_rows<V_ROW, V_STRIDE>(head + PAGE * K_ROW + token * V_ROW, to, thread);
  }
}
DEVICE void open_keys(const u8* raw, uint4* tile, int thread) {
  if constexpr (FRAGMENTS) open_key_pieces<KEYS, THREADS>(raw, tile, thread);
  else open_key_rows<K_TYPE, K_DIM, K_STRIDE, KEYS, THREADS>(raw, tile, thread);
}
// ``first``: token of the tile before which no row of the block sees any.
DEVICE void open_values(const u8* raw, int token, uint4* tile, int thread, int first) {
  constexpr bool FROM = WINDOW > 0;
  if constexpr (FRAGMENTS)
    open_value_pieces<KEYS, THREADS, FROM>(
        raw, raw + QUARTER_SCALES, STEPS == 4 ? 0 : token / 16 % 4, tile, thread, first);
  else
    open_value_rows<V_TYPE, V_DIM, V_STRIDE, KEYS, THREADS, FROM>(raw, tile, thread, first);
}

// A fragments of 16 queries, two per 32 dims, with the dims where the key tile has them.
DEVICE void place_queries(const u16* top, const u16* low, uint4* to, int lane) {
#pragma unroll
  for (int i = 0; i < K_BLOCKS * 2; i++) {
    const int dim = i * 16 + (lane & 3) * 4;
    const bool there = K_DIM % 32 == 0 || i * 16 < K_DIM;
    const uint2 a = top && there ? *(const uint2*)(top + dim) : uint2{};
    const uint2 b = low && there ? *(const uint2*)(low + dim) : uint2{};
    to[i * 32 + lane] = {a.x, b.x, a.y, b.y};
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 256 / THREADS)   // all registers in use
attend_prefill(const u16* q, const u8* pool, long long slot_bytes, const int* slots, float* running, int rows,
               int heads, int kv_heads, int position, int first_page, int end_page, int fresh) {
  extern __shared__ __align__(128) u8 shared[];
  uint4* const keys = (uint4*)(shared + KEYS_AT);
  uint4* const values = (uint4*)(shared + VALUES_AT);
  u8* const raw_k = shared + RAW_K_AT;
  u8* const raw_v = shared + RAW_V_AT;
  const int thread = threadIdx.x, warp = __shfl_sync(~0u, thread >> 5, 0);
  const int lane = thread & 31, g = lane >> 2, t = lane & 3;
  const int group = warp / SHARERS, share = warp % SHARERS;
  const int scorer = SCORERS > 1 ? share : 0;
  uint4* const queries = (uint4*)shared + group * QUERY_TILES * K_BLOCKS * 64;
  uint4* const shared_weights = (uint4*)(shared + WEIGHTS_AT) + group * QUERY_TILES * STEPS * 32;
  float* const maxima = (float*)(shared + MAXIMA_AT) + group * SHARERS * GROUP_PAIRS;

  const int per_kv_head = heads / kv_heads, kv_head = blockIdx.y, pairs = rows * per_kv_head;
  const int first_pair = (gridDim.x - 1 - blockIdx.x) * PAIRS;   // the longest walks first
  const int last_row = ((first_pair + PAIRS < pairs ? first_pair + PAIRS : pairs) - 1) / per_kv_head;
  const int first_seen = WINDOW ? max(0, position + first_pair / per_kv_head + 1 - WINDOW) : 0;   // by any row
  const int first_key = WINDOW ? max(first_page * PAGE, first_seen / KEYS * KEYS) : first_page * PAGE;
  const int seen = position + last_row + 1;
  const int end_key = end_page * PAGE < seen ? end_page * PAGE : seen;
  const int tiles = end_key > first_key ? (end_key - first_key + KEYS - 1) / KEYS : 0;
  if (tiles == 0 && !fresh) return;

  // This lane's pairs: g and g + 8 of every 16.
  const int group_pair = first_pair + group * GROUP_PAIRS;
  const int least_row = (group_pair < pairs ? group_pair : pairs - 1) / per_kv_head;
  const int most_row = ((group_pair + GROUP_PAIRS < pairs ? group_pair + GROUP_PAIRS : pairs) - 1) / per_kv_head;
  int row[QUERY_TILES * 2], place[QUERY_TILES * 2];                // step row; row * heads + head, -1: no such pair
#pragma unroll
  for (int i = 0; i < QUERY_TILES * 2; i++) {
    const int pair = group_pair + g + i * 8;
    row[i] = (pair < pairs ? pair : pairs - 1) / per_kv_head;
    place[i] = pair < pairs ? row[i] * heads + kv_head * per_kv_head + pair % per_kv_head : -1;
  }

  auto head_at = [&](int key) {
    return pool + slots[key / PAGE] * slot_bytes + (size_t)kv_head * HEAD_BYTES;
  };
  if (tiles) {
    const u8* const head = head_at(first_key);
    const int token = WINDOW ? first_key % PAGE : 0;
    copy_keys(head, token, smem_u32(raw_k), thread);
    copy_values(head, token, smem_u32(raw_v), thread);
  }
  cp_async_commit();
  auto query = [&](int i) { return place[i] < 0 ? nullptr : q + (size_t)place[i] * K_DIM; };
#pragma unroll
  for (int m = 0; m < QUERY_TILES; m++)
    if (m % SHARERS == share) place_queries(query(m * 2), query(m * 2 + 1), queries + m * K_BLOCKS * 64, lane);

  float acc[QUERY_TILES][OWN_TILES * 2][4], sum[QUERY_TILES][4], most[QUERY_TILES * 2];
  float* const own_dims = running + share * OWN_TILES * 16 + t * 2;
  float* const sums = running + (size_t)rows * heads * V_DIM;
#pragma unroll
  for (int i = 0; i < QUERY_TILES * 2; i++) {
    const bool resumed = !fresh && place[i] >= 0;
    const size_t at = resumed ? place[i] : 0;
#pragma unroll
    for (int n = 0; n < OWN_TILES * 2; n++) {
      const float2 a = resumed ? *(const float2*)(own_dims + at * V_DIM + n * 8) : float2{0.f, 0.f};
      acc[i / 2][n][i % 2 * 2] = a.x, acc[i / 2][n][i % 2 * 2 + 1] = a.y;
    }
    const float2 state = resumed ? *(const float2*)(sums + at * 2) : float2{0.f, PARTIAL_NOTHING};
    sum[i / 2][i % 2 * 2] = sum[i / 2][i % 2 * 2 + 1] = state.x, most[i] = state.y;
  }

  cp_async_wait<0>();
  __syncthreads();
  if (tiles) open_keys(raw_k, keys, thread);
  __syncthreads();

  const bool opens_first = group >= GROUPS / 2;
  for (int i = 0; i < tiles; i++) {
    const int key = first_key + i * KEYS, next = key + KEYS;
    u32 weights[QUERY_TILES][OWN_STEPS][4];                        // A fragments
    float fade[QUERY_TILES * 2];                                   // of what was summed before
    const u8* const head = i + 1 < tiles ? head_at(next) : nullptr;
    if (head) copy_keys(head, next % PAGE, smem_u32(raw_k), thread);
    cp_async_commit();
#pragma unroll 1
    for (int turn = 0; turn < 2; turn++) {
      if ((turn == 0) == opens_first) {
        open_values(raw_v, key % PAGE, values, thread, first_seen - key);
        continue;
      }
      float score[QUERY_TILES][OWN_STEPS * 2][4] = {};             // of tokens 16 step + 2 column + parity
#pragma unroll
      for (int b = 0; b < K_BLOCKS; b++) {
        uint4 x[QUERY_TILES], y[QUERY_TILES];
#pragma unroll
        for (int m = 0; m < QUERY_TILES; m++) {
          x[m] = queries[(m * K_BLOCKS + b) * 64 + lane];
          y[m] = queries[(m * K_BLOCKS + b) * 64 + 32 + lane];
        }
#pragma unroll
        for (int n = 0; n < OWN_STEPS * 2; n++) {
          const uint4 k = key_fragment(keys, K_BLOCKS, scorer * OWN_STEPS + (n >> 1), b, n & 1, lane);
#pragma unroll
          for (int m = 0; m < QUERY_TILES; m++) {
            mma_f16(score[m][n], x[m].x, x[m].y, x[m].z, x[m].w, k.x, k.y);
            mma_f16(score[m][n], y[m].x, y[m].y, y[m].z, y[m].w, k.z, k.w);
          }
        }
      }
      // Not all rows of the group see all of the tile.
      const bool cut = next > position + least_row + 1 || (WINDOW && key <= position + most_row - WINDOW);
      float top[QUERY_TILES * 2];
#pragma unroll
      for (int i = 0; i < QUERY_TILES * 2; i++) {
        float(&s)[OWN_STEPS * 2][4] = score[i / 2];
        const int c = i % 2 * 2;                                   // this pair's two columns, in all of s
        if (cut) {
          const int unseen = position + row[i] + 1 - key - scorer * OWN_STEPS * 16 - t * 4;
#pragma unroll
          for (int n = 0; n < OWN_STEPS * 2; n++) {
            const int token = (n >> 1) * 16 + (n & 1);
            if (token >= unseen || (WINDOW && unseen - token > WINDOW)) s[n][c] = PARTIAL_UNSEEN;
            if (token + 2 >= unseen || (WINDOW && unseen - token - 2 > WINDOW)) s[n][c + 1] = PARTIAL_UNSEEN;
          }
        }
        top[i] = most[i];
#pragma unroll
        for (int n = 0; n < OWN_STEPS * 2; n++) top[i] = fmaxf(top[i], fmaxf(s[n][c], s[n][c + 1]));
        top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 1));
        top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 2));
        if (SCORERS > 1 && t == 0) maxima[share * GROUP_PAIRS + i * 8 + g] = top[i];
      }
      if (SCORERS > 1) barrier_of(1 + group, SHARERS * 32);
#pragma unroll
      for (int i = 0; i < QUERY_TILES * 2; i++) {
        if (SCORERS > 1) top[i] = fmaxf(top[i], maxima[(share ^ 1) * GROUP_PAIRS + i * 8 + g]);
        fade[i] = ex2(most[i] - top[i]);
        most[i] = top[i];
        const float shift = PARTIAL_WEIGHT_LOG2 - top[i];
        const int c = i % 2 * 2;
#pragma unroll
        for (int n = 0; n < OWN_STEPS; n++) {                      // tokens 4t, 4t + 1, then 4t + 2, 4t + 3
          const float(&even)[4] = score[i / 2][n * 2], (&odd)[4] = score[i / 2][n * 2 + 1];
          weights[i / 2][n][i % 2] = f2h2(ex2(even[c] + shift), ex2(odd[c] + shift));
          weights[i / 2][n][i % 2 + 2] = f2h2(ex2(even[c + 1] + shift), ex2(odd[c + 1] + shift));
        }
      }
      if (SCORERS > 1) {
#pragma unroll
        for (int m = 0; m < QUERY_TILES; m++)
#pragma unroll
          for (int n = 0; n < OWN_STEPS; n++) {
            const u32(&w)[4] = weights[m][n];
            shared_weights[(m * STEPS + share * OWN_STEPS + n) * 32 + lane] = {w[0], w[1], w[2], w[3]};
          }
      }
    }
    cp_async_wait<0>();
    __syncthreads();

    if (head) copy_values(head, next % PAGE, smem_u32(raw_v), thread);
    cp_async_commit();
#pragma unroll 1
    for (int turn = 0; turn < 2; turn++) {
      if ((turn == 0) == opens_first) {
        if (head) open_keys(raw_k, keys, thread);
        continue;
      }
#pragma unroll
      for (int m = 0; m < QUERY_TILES; m++) {
        const float top = fade[m * 2], low = fade[m * 2 + 1];
        if (!__any_sync(~0u, top != 1.f || low != 1.f)) continue;
        sum[m][0] *= top, sum[m][1] *= top, sum[m][2] *= low, sum[m][3] *= low;
#pragma unroll
        for (int n = 0; n < OWN_TILES * 2; n++)
          acc[m][n][0] *= top, acc[m][n][1] *= top, acc[m][n][2] *= low, acc[m][n][3] *= low;
      }
#pragma unroll
      for (int s = 0; s < STEPS; s++) {
        constexpr u32 ONES = 0x3c003c00u;
        uint4 w[QUERY_TILES];
#pragma unroll
        for (int m = 0; m < QUERY_TILES; m++) {
          const u32(&own)[4] = weights[m][s % OWN_STEPS];
          w[m] = SCORERS > 1 ? shared_weights[(m * STEPS + s) * 32 + lane] : uint4{own[0], own[1], own[2], own[3]};
          mma_f16(sum[m], w[m].x, w[m].y, w[m].z, w[m].w, ONES, ONES);
        }
#pragma unroll
        for (int n = 0; n < OWN_TILES; n++) {
          const uint4 v = value_fragment(values, STEPS, share * OWN_TILES + n, s, lane);
#pragma unroll
          for (int m = 0; m < QUERY_TILES; m++) {
            mma_f16(acc[m][n * 2], w[m].x, w[m].y, w[m].z, w[m].w, v.x, v.y);
            mma_f16(acc[m][n * 2 + 1], w[m].x, w[m].y, w[m].z, w[m].w, v.z, v.w);
          }
        }
      }
    }
    cp_async_wait<0>();
    __syncthreads();
  }

#pragma unroll
  for (int i = 0; i < QUERY_TILES * 2; i++) {
    if (place[i] < 0) continue;
    const size_t at = place[i];
#pragma unroll
    for (int n = 0; n < OWN_TILES * 2; n++) {
      const float(&a)[4] = acc[i / 2][n];
      *(float2*)(own_dims + at * V_DIM + n * 8) = {a[i % 2 * 2], a[i % 2 * 2 + 1]};
    }
    if (t == 0 && share == 0) *(float2*)(sums + at * 2) = {sum[i / 2][i % 2 * 2], most[i]};
  }
}
