// Products of 1..8 rows with a quantised matrix:  y[row][o] = sum_k weight[o][k] * x[row][k]
// Weights are records of 16 rows x 256 columns (common/records.cuh), streamed once from memory at its full rate; rows
// are 16-bit fixed point (common/quant256.cuh), staged once per block in shared memory.
//   -DTYPE    weight type, see records.cuh
//   -DWIDE=0  up to 4 rows | 1  up to 8 | with WIDE=0, -DSINGLE=1  one row: see record_dot.cuh
//   -DWARPS   per block
//   -DINPUT=RECORDS     x is activation records; with ``sums`` the result is scaled by the rows' RMS norm factor
//           ROWS        x is f32 rows, quantised while they are staged: saves a kernel, pays for up to 3 rows
//           GATED_NORM  the same of rows normed per head of 128 and gated by silu(z)
//   -DOUTPUT=PLAIN   y = product + bias
//           SWIGLU   tile rows 0-7 are gate rows, 8-15 the matching up rows: y[row][c] = silu(gate c) * up c
//           GEGLU    the same with gelu(gate c)
//
// A block is a range of columns (grid x) x a range of row tiles (grid y). Its (tile, 256 columns) items are dealt to
// the warps as equal contiguous runs; each warp streams its run through a ring of its own. Tiles that a run does not
// have whole are summed in the order of the warps. Where kernels overlap, a multiprocessor has room for one block (by
// its shared memory): two would spread unevenly, and the later kernel would slow the earlier. A row's result depends
// neither on the number of rows nor on the depth of the rings.
//
// Shared memory: rings [WARPS][stages][RECORD], in the end the parts of cut tiles | barriers | activation records of
// the block's columns [blocks][plane][rows] | 8 row factors | value table
#include "common/gelu.cuh"
#include "common/record_dot.cuh"

#define RECORDS 0
#define ROWS 1
#define GATED_NORM 2
#define PLAIN 0
#define SWIGLU 1
#define GEGLU 2

// Filled while the kernel before still runs: more would flood the memory it needs. By what is fastest on an H200; known
// to the compiler, since a count that is not costs registers in the loop below.
constexpr int STAGES_AHEAD = TYPE == Q4_K || (!WIDE && (TYPE == Q5_K || TYPE == Q6_K)) ? 3 : 2;

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
matmul_decode(const u8* __restrict__ weight, int n_tiles, int n_blocks, int stages,
              const u8* x,             // RECORDS: [n_blocks][2][x_stride][320]; else f32 [rows], x_stride numbers apart
              int x_stride, int n_rows, int n_in,
              const float* sums,       // RECORDS: sums of squares [rows][n_blocks] of a row before its norm, or null
              float eps,
              const float* z, int z_stride, const float* __restrict__ norm,   // GATED_NORM: gate rows; weights [128]
              const float* __restrict__ bias,                                 // [n_out] or null
              float* __restrict__ y, int y_stride, long long split_stride,    // split s is s split_stride further
              int n_out, int tile_step, int half_step) {   // tile i: columns i tile_step + 0..7, and half_step on
  extern __shared__ __align__(128) u8 shared[];
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);   // seen to be uniform: loop control stays off vector units
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  // Unsigned and of 32 bits, which n_tiles x grid y keeps to: nothing is copied before these quotients are there.
  const u32 split = blockIdx.x, part = blockIdx.y;
  const int first_block = n_blocks * split / gridDim.x, per_tile = n_blocks * (split + 1) / gridDim.x - first_block;
  const int first_tile = n_tiles * part / gridDim.y;
  const int items = (n_tiles * (part + 1) / gridDim.y - first_tile) * per_tile;
  const int begin = items * warp / WARPS, end = items * (warp + 1) / WARPS;

  const int rows = SINGLE ? 1 : n_rows;   // known to the compiler
  const int plane_stride = rows * ACT_BYTES, ring_bytes = stages * RECORD;
  u64* barriers = (u64*)(shared + ((WARPS * ring_bytes + 127) & ~127));
  u8* acts = (u8*)barriers + ((WARPS * stages * 8 + 127) & ~127);
  float* factors = (float*)(acts + per_tile * 2 * plane_stride);
  const u32 first_barrier = smem_u32(barriers + warp * stages), ring = smem_u32(shared) + warp * ring_bytes;
  if (lane < stages) {
    ring_init(first_barrier + 8 * lane);
    ring_fence_init();
  }
  __syncwarp();

  // The copies' cursor: where the next record lies, how many are left, its place in the tile.
  const u64 policy = policy_evict_first();
  int tile = first_tile + (u32)begin / (u32)per_tile;
  int column = begin - (tile - first_tile) * per_tile, left = end - begin, copied_column = column;
  const u8* source = weight + ((size_t)tile * n_blocks + first_block + column) * RECORD;
  const size_t hop = (size_t)(n_blocks - per_tile) * RECORD;
  const auto enqueue_copy = [&](u32 at, u32 barrier) {
    if (left > 0) {
      ring_copy<RECORD>(at, source, barrier, policy);
      source += RECORD, left--, copied_column++;
      if (copied_column == per_tile) copied_column = 0, source += hop;
    }
    ring_close();
  };
  pdl_trigger();   // so far and up to the wait only weights are touched: any run-ahead is safe
#pragma unroll
  for (int s = 0; s < STAGES_AHEAD; s++)
    if (s < stages) enqueue_copy(ring + s * RECORD, first_barrier + 8 * s);
  pdl_wait();

  // Activations to shared memory by plain loads: a bulk copy would queue behind the rings'.
#if INPUT == RECORDS
  RowSums row_sums;
  if (sums && warp < rows) row_sums = load_sums(sums + (size_t)warp * n_blocks, n_in, lane);
  const int run = rows * (ACT_BYTES / 16), pieces = per_tile * 2 * run;   // of 16 bytes; a run is a plane of a block
  const u8* from = x + (size_t)first_block * 2 * x_stride * ACT_BYTES;
  if (x_stride == rows) {
#pragma unroll 1
    for (int i = threadIdx.x; i < pieces; i += 4 * WARPS * 32) {
      uint4 v[4];
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (i + j * WARPS * 32 < pieces) v[j] = ldcg4u(from + (i + j * WARPS * 32) * 16);
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (i + j * WARPS * 32 < pieces) *(uint4*)(acts + (i + j * WARPS * 32) * 16) = v[j];
    }
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < pieces; i += WARPS * 32)
      *(uint4*)(acts + i * 16) = ldcg4u(from + (size_t)(i / run) * x_stride * ACT_BYTES + i % run * 16);
  }
#pragma unroll 1
  for (int row = warp; row < rows; row += WARPS) {
    const float* own = sums + (size_t)row * n_blocks;
    if (sums && row != warp) row_sums = load_sums(own, n_in, lane);
    const float factor = sums ? rms_factor(row_sums, own, n_in, eps, lane) : 1.f;
    if (lane == 0) factors[row] = factor;
  }
#else
  {
    const int turns = per_tile * rows;   // one row's 256 values per warp and turn, the next ones on their way
    float next[8], next_z[8];
    const auto fetch = [&](int i) {
      const int block = i / rows, row = i - block * rows, first = (first_block + block) * 256 + lane * 8;
      load8(next, (const float*)x + (size_t)row * x_stride, first, n_in);
      if (INPUT == GATED_NORM) load8(next_z, z + (size_t)row * z_stride, first, n_in);
    };
    if (warp < turns) fetch(warp);
    for (int i = warp; i < turns; i += WARPS) {
      float v[8], gate[8];
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] = next[j], gate[j] = next_z[j];
      if (i + WARPS < turns) fetch(i + WARPS);
      const int block = i / rows, row = i - block * rows;
      if (INPUT == GATED_NORM) gated_norm8(v, gate, norm, lane, eps);
      quant256_to(v, lane, acts, block, row, rows);
    }
  }
  if (threadIdx.x < 8) factors[threadIdx.x] = 1.f;
#endif
#if HAS_VALUE_TABLE
  if (threadIdx.x < 5) ((u32*)(factors + 8))[threadIdx.x] = value_table(threadIdx.x);
#endif
  // The rest of the ring: behind the loads above, which it would hold up; other warps need not be waited for.
#pragma unroll 1
  for (int s = STAGES_AHEAD; s < stages; s++) enqueue_copy(ring + s * RECORD, first_barrier + 8 * s);
  __syncthreads();

  // This lane's operands: bytes and digit sums of column g, factors of columns 2 t, 2 t + 1. Columns without a row
  // repeat the last one; what comes of them is not stored.
  const auto place = [&](int c) {
    const int row = min(WIDE ? c : c & 3, rows - 1);
    return row * ACT_BYTES + (WIDE ? 0 : (c >> 2) * plane_stride);
  };
  const int c0 = 2 * t, c1 = c0 + 1;
  const u32 first = (u32)(acts - shared) + column * 2 * plane_stride;
  const u32 first_step = first + ACT_FACTOR + (WIDE ? plane_stride : 0);   // WIDE: of low bytes
  u32 at_bytes = first + place(g) + t * 16, at_step0 = first_step + place(c0), at_step1 = first_step + place(c1);
  opaque(at_bytes), opaque(at_step0), opaque(at_step1);   // else worked out again for each record
  const u8 *bytes = shared + at_bytes, *step0 = shared + at_step0, *step1 = shared + at_step1;
  const u8* digits = shared + first + place(g) + ACT_SUMS + t * 8;
  const float factor0 = factors[min(WIDE ? c0 : c0 & 3, rows - 1)];
  const float factor1 = factors[min(WIDE ? c1 : c1 & 3, rows - 1)];
  u32 pair = (t & 1) ? 0x4342 : 0x4140;
  opaque(pair);
  ValueTable table;
#if HAS_VALUE_TABLE   // read back, so that it stays in vector registers: as known constants each use would cost a move
  const uint4 words = lds128(smem_u32(factors + 8));
  table = {{words.x, words.y}, {words.z, words.w}, lds32(smem_u32(factors + 12))};
#endif

  const auto store = [&](const float (&o)[CELLS], int tile) {
#if SINGLE
    // Lane t = 0 has row g of the tile and t = 1 row g + 8.
#if OUTPUT == PLAIN
    const int row = tile * tile_step + g + (t & 1) * half_step;
    if (t < 2 && row < n_out) y[split * split_stride + row] = o[0] + (bias && split == 0 ? bias[row] : 0.f);
#else
    const float up = __shfl_xor_sync(~0u, o[0], 1);
    if (t == 0) y[tile * tile_step + g] = up * (OUTPUT == GEGLU ? gelu(o[0]) : o[0] / (1.f + __expf(-o[0])));
#endif
#else
    if (!WIDE && t >= 2) return;   // low bytes' columns: already added to the others
#if OUTPUT == GEGLU
    const int c = tile * tile_step + g;
    if (c0 < rows) y[(size_t)c0 * y_stride + c] = o[2] * gelu(o[0]);
    if (c1 < rows) y[(size_t)c1 * y_stride + c] = o[3] * gelu(o[1]);
#elif OUTPUT == SWIGLU
    const int c = tile * tile_step + g;
    if (c0 < rows) y[(size_t)c0 * y_stride + c] = o[2] * (o[0] / (1.f + __expf(-o[0])));
    if (c1 < rows) y[(size_t)c1 * y_stride + c] = o[3] * (o[1] / (1.f + __expf(-o[1])));
#else
    const int top = tile * tile_step + g, low = top + half_step;
    float* out = y + split * split_stride;
    if (top < n_out) {
      const float b = bias && split == 0 ? bias[top] : 0.f;
      if (c0 < rows) out[(size_t)c0 * y_stride + top] = o[0] + b;
      if (c1 < rows) out[(size_t)c1 * y_stride + top] = o[1] + b;
    }
    if (low < n_out) {
      const float b = bias && split == 0 ? bias[low] : 0.f;
      if (c0 < rows) out[(size_t)c0 * y_stride + low] = o[2] + b;
      if (c1 < rows) out[(size_t)c1 * y_stride + low] = o[3] + b;
    }
#endif
#endif
  };

  // Parts of cut tiles: of one begun by an earlier warp | of one begun here and not finished.
  float head[CELLS] = {}, tail[CELLS] = {};
  u32 at = ring, barrier = first_barrier, phase = 0;
  int open_until = 0;   // items up to the end of a tile begun here and not finished
  for (int i = begin; i < end;) {   // a tile, or what this run has of it
    const bool whole = column == 0;
    const int n = min(per_tile - column, end - i);
    const bool finished = column + n == per_tile;
    Values acc;
    clear(acc);
#pragma unroll 1
    for (int k = n; k > 0; k--) {
      ring_wait(barrier, phase, stages);
      Values v;
      record_dot(v, (const u8*)smem_ptr(at), bytes, digits, plane_stride, lane, pair, table);
      const float x0 = *(const float*)step0, x1 = SINGLE ? x0 : *(const float*)step1;
      FOR_PLANES {
        const float f0 = WIDE && p == 0 ? x0 * 256.f : x0, f1 = WIDE && p == 0 ? x1 * 256.f : x1;
        FOR_CELLS acc[p][k] = __fmaf_rn((k & 1) ? f1 : f0, v[p][k], acc[p][k]);
      }
      __syncwarp();
      enqueue_copy(at, barrier);
      at += RECORD, barrier += 8;
      if (at == ring + ring_bytes) at = ring, barrier = first_barrier, phase ^= 1;
      const int next = 2 * plane_stride;
      bytes += next, digits += next, step0 += next, step1 += next;
    }
    float o[CELLS];   // high + low bytes
    FOR_CELLS o[k] = (WIDE ? acc[0][k] + acc[PLANES - 1][k] : acc[0][k] + __shfl_xor_sync(~0u, acc[0][k], 2)) *
                     ((k & 1) ? factor1 : factor0);
    if (whole && finished) {
      store(o, tile);
    } else if (whole) {
      FOR_CELLS tail[k] = o[k];
      open_until = i + per_tile;
    } else {
      FOR_CELLS head[k] = o[k];
    }
    i += n;
    if (finished) {
      const int back = per_tile * 2 * plane_stride;
      column = 0, tile++, bytes -= back, digits -= back, step0 -= back, step1 -= back;
    }
  }

  __syncthreads();   // the rings are done with
  float* const parts = (float*)shared + lane * CELLS;
  constexpr int PART = 32 * CELLS;   // numbers of a warp
  FOR_CELLS parts[warp * PART + k] = head[k];
  __syncthreads();
  // The warp that began a cut tile finishes it, adding the later warps' parts in order.
  if (open_until) {
#pragma unroll 1
    for (int other = warp + 1; other < WARPS; other++) {
      const int other_begin = items * other / WARPS, other_end = items * (other + 1) / WARPS;
      if (other_begin >= open_until) break;
      if (other_end == other_begin) continue;
      FOR_CELLS tail[k] += parts[other * PART + k];
    }
    store(tail, tile);
  }
}
