// Products of few activation rows with weights that stay as they are in the GGUF file; decode steps of 1..8 rows.
//
//   out[t][n] = bias[n] + scale(t) * sum over k of W[n][k] * x[t][k]
//   scale(t) = 1 / sqrt(mean square + eps), the factor of an RMS norm, from sums [t][ceil(n_in / 256)] of squares; or 1
//              where sums is null
//   x [T][x_stride] f32, rows aligned to 16 bytes if n_in divides by 4; bias [n_out] f32 or null
//   W [n_out] rows of row_bytes as in common/gguf_blocks.cuh; out [T][out_stride] f32
//
// -DTYPE=F32 | F16 | BF16 | Q8_0 | Q4_0 | Q4_1 | Q5_0 | Q5_1 | IQ4_NL | Q2_K | Q3_K | Q4_K | Q5_K | Q6_K | IQ4_XS
// -DROWS=1 | 2 | 4 | 6 | 8   rows a kernel is made for; more are that many to a grid row (y), each as if alone
//
// A row of W is cut into tiles of 256 columns, which are dealt to ``slices`` warps: warp s has tiles s, s + slices, ...
// A lane adds up its eight columns of each tile, the lanes are added by halving distances, the slices in order. Neither
// T nor the grid is part of that order; the launcher fixes the kernel and the slices by n_in and n_out alone.
//
//   matmul_rows       many rows of W: a warp has WARP_ROWS of them at a time, x is read from shared memory. Blocks stay
//                     and take one set of rows after the other; x is staged once if it fits, else chunk by chunk.
//   matmul_few_rows   few rows of W (gates, routers): a block of 16 slices per row, x straight from L2.
#include "common/quant256.cuh"
#include "common/gguf_blocks.cuh"

using Weights = Blocks<TYPE>;

// Sums of N values over the 32 lanes of a warp, added by distances 16, 8, 4, 2, 1. While N is even the lanes share the
// values: each keeps half of them. In the end a lane holds SHARE values, from index ``shared_sums`` returns on, and the
// lanes that differ only in COPIES hold the same.
template <int N, int DISTANCE = 16> struct Shares {
  static constexpr bool HALVES = N % 2 == 0;
  using Next = Shares<HALVES ? N / 2 : N, DISTANCE / 2>;
  static constexpr int SHARE = Next::SHARE, COPIES = (HALVES ? 0 : DISTANCE) | Next::COPIES;
  DEVICE static int add(float* v, int lane) {
    if constexpr (HALVES) {
      const bool upper = lane & DISTANCE;
#pragma unroll
      for (int i = 0; i < N / 2; i++) {
        const float keep = upper ? v[i + N / 2] : v[i], give = upper ? v[i] : v[i + N / 2];
        v[i] = keep + __shfl_xor_sync(~0u, give, DISTANCE);
      }
      return (upper ? N / 2 : 0) + Next::add(v, lane);
    } else {
#pragma unroll
      for (int i = 0; i < N; i++) v[i] += __shfl_xor_sync(~0u, v[i], DISTANCE);
      return Next::add(v, lane);
    }
  }
};
template <int N> struct Shares<N, 0> {
  static constexpr int SHARE = N, COPIES = 0;
  DEVICE static int add(float*, int) { return 0; }
};

// The rows of this block's grid row.
DEVICE void own_rows(const float*& x, int x_stride, const float*& sums, int n_in, float*& out, int out_stride,
                     int& n_rows) {
  const int first = blockIdx.y * ROWS;
  x += (size_t)first * x_stride, out += (size_t)first * out_stride;
  if (sums) sums += (size_t)first * tiles_of(n_in);
  n_rows = min(ROWS, n_rows - first);
}

// Columns k .. k + 3 of a row of x, zeros beyond n.
DEVICE float4 load_x(const float* row, int k, int n) {
  float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
  if ((n & 3) == 0) {
    if (k < n) v = ldcg4(row + k);
  } else {
    if (k < n) v.x = ldcg(row + k);
    if (k + 1 < n) v.y = ldcg(row + k + 1);
    if (k + 2 < n) v.z = ldcg(row + k + 2);
    if (k + 3 < n) v.w = ldcg(row + k + 3);
  }
  return v;
}
DEVICE float add_quad(float sum, const float* w, const float4& x) {
  return fmaf(w[3], x.w, fmaf(w[2], x.z, fmaf(w[1], x.y, fmaf(w[0], x.x, sum))));
}
// Warp t finds scale(t); visible after a barrier.
DEVICE void row_scales(float* scales, const float* sums, int n_rows, int n_in, float eps, int warp, int lane) {
  if (warp >= n_rows) return;
  float scale = 1.f;
  if (sums) {
    const float* row = sums + (size_t)warp * tiles_of(n_in);
    scale = rms_factor(load_sums(row, n_in, lane), row, n_in, eps, lane);
  }
  if (lane == 0) scales[warp] = scale;
}
DEVICE void store(float* out, int out_stride, const float* bias, const float* scales, int t, int n, float sum) {
  out[(size_t)t * out_stride + n] = fmaf(scales[t], sum, bias ? bias[n] : 0.f);
}

// ---- many rows ----

constexpr int WARPS = 8, WARP_ROWS = 4, BLOCKS_PER_SM = 2;
constexpr int STAGED_QUADS = ROWS < 4 ? 4 / ROWS : 1;   // of each row that a thread fetches at once

// x[t][256 chunk ..] for ``count`` tiles, [t][tile][quad][lane]: a warp's loads of a quad are 512 bytes in a row.
DEVICE void stage(float4* staged, const float* x, int x_stride, int n_rows, int n_in, int chunk, int count) {
  const int quads = count * 64;
  for (int at = threadIdx.x; at < quads; at += 32 * WARPS * STAGED_QUADS) {
    float4 v[STAGED_QUADS][ROWS];
#pragma unroll
    for (int u = 0; u < STAGED_QUADS; u++) {
      const int i = at + u * 32 * WARPS;
      const int k = (chunk + (i >> 6)) * TILE + Weights::first(i & 31) + (i >> 5 & 1) * Weights::SECOND;
#pragma unroll
      for (int t = 0; t < ROWS; t++) v[u][t] = load_x(x + (size_t)min(t, n_rows - 1) * x_stride, k, n_in);
    }
#pragma unroll
    for (int u = 0; u < STAGED_QUADS; u++) {
      const int i = at + u * 32 * WARPS;
#pragma unroll
      for (int t = 0; t < ROWS; t++)
        if (i < quads) staged[t * quads + i] = v[u][t];
    }
  }
}

// A warp's tiles of a set are dealt to AHEAD slots of registers in turn. A slot that was used is filled at once with
// its next tile, if need be of the block's next set, so that loads never pause: 16 (Q2_K) to 96 KB (F16) are under way
// on a multiprocessor at ROWS <= 2. As many slots as fit in the registers, four at most.
constexpr int SLOT_WORDS = WARP_ROWS * (int)sizeof(Weights::Raw) / 4, FREE_WORDS = ROWS <= 2 ? 48 : 36;
constexpr int AHEAD = FREE_WORDS < 2 * SLOT_WORDS ? 1 : FREE_WORDS < 4 * SLOT_WORDS ? FREE_WORDS / SLOT_WORDS : 4;

// Grid x: any number of blocks up to the sets of WARP_ROWS * WARPS / slices rows. Dynamic shared memory: ROWS KiB per
// tile of a chunk. slices <= tiles and divides WARPS.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS_PER_SM)
matmul_rows(const float* x, int x_stride, const float* sums_of_squares, float eps, const u8* weights,
            long long row_bytes, int n_in, int n_out, const float* bias, float* out, int out_stride, int n_rows,
            int slices, int chunk_tiles) {
  extern __shared__ float4 staged[];
  __shared__ float scales[ROWS], parts[2][WARPS][WARP_ROWS * ROWS];
  own_rows(x, x_stride, sums_of_squares, n_in, out, out_stride, n_rows);
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const int slice = warp % slices, set_rows = WARP_ROWS * (WARPS / slices);
  const int tiles = tiles_of(n_in), sets = (n_out + set_rows - 1) / set_rows;
  Weights::Raw slots[AHEAD][WARP_ROWS];
  const auto fill = [&](Weights::Raw* slot, int set, int tile) {
    if (set >= sets || tile >= tiles) return;
#pragma unroll
    for (int r = 0; r < WARP_ROWS; r++) {
      const int row = min(set * set_rows + warp / slices * WARP_ROWS + r, n_out - 1);
      slot[r] = Weights::load(weights + row * row_bytes, tile, lane, n_in);
    }
  };
  fill(slots[0], blockIdx.x, slice);
  pdl_trigger();
  pdl_wait();
  row_scales(scales, sums_of_squares, n_rows, n_in, eps, warp, lane);
  const bool whole = chunk_tiles >= tiles;
  if (whole) stage(staged, x, x_stride, n_rows, n_in, 0, tiles);
#pragma unroll
  for (int j = 1; j < AHEAD; j++) fill(slots[j], blockIdx.x, slice + j * slices);
  __syncthreads();

  for (int set = blockIdx.x, half = 0; set < sets; set += gridDim.x, half ^= 1) {
    float sums[WARP_ROWS * ROWS] = {};
    int first = slice;   // tile of slot 0
    for (int chunk = 0; chunk < tiles; chunk += chunk_tiles) {
      const int count = min(chunk_tiles, tiles - chunk), end = chunk + count;
      if (!whole) {
        __syncthreads();   // everybody is done with the chunk before
        stage(staged, x, x_stride, n_rows, n_in, chunk, count);
        __syncthreads();
      }
      for (; first < end; first += AHEAD * slices) {
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
          const int tile = first + j * slices;
          if (tile < chunk || tile >= end) continue;
          float w[WARP_ROWS][8];
#pragma unroll
          for (int r = 0; r < WARP_ROWS; r++) Weights::values(slots[j][r], lane, w[r]);
          const bool more = tile + AHEAD * slices < tiles;
          fill(slots[j], more ? set : set + (int)gridDim.x, more ? tile + AHEAD * slices : slice + j * slices);
          const float4* at = staged + (tile - chunk) * 64 + lane;
#pragma unroll
          for (int t = 0; t < ROWS; t++) {
            const float4 a = at[t * count * 64], b = at[t * count * 64 + 32];
#pragma unroll
            for (int r = 0; r < WARP_ROWS; r++) {
              float& sum = sums[r * ROWS + t];
              sum = add_quad(add_quad(sum, w[r], a), w[r] + 4, b);
            }
          }
        }
        if (first + (AHEAD - 1) * slices >= end) break;   // the other slots' tiles are in the next chunk, or nowhere
      }
    }
    using Sums = Shares<WARP_ROWS * ROWS>;
    const int share = Sums::add(sums, lane);
    if ((lane & Sums::COPIES) == 0) {
#pragma unroll
      for (int i = 0; i < Sums::SHARE; i++) parts[half][warp][share + i] = sums[i];
    }
    __syncthreads();   // the other half of ``parts`` is free: its readers have arrived here
    const int t = threadIdx.x / set_rows, r = threadIdx.x % set_rows, n = set * set_rows + r;
    if (t < n_rows && n < n_out) {
      float sum = 0.f;
      for (int s = 0; s < slices; s++) sum += parts[half][r / WARP_ROWS * slices + s][r % WARP_ROWS * ROWS + t];
      store(out, out_stride, bias, scales, t, n, sum);
    }
  }
}

// ---- few rows ----

constexpr int FEW_SLICES = 16;
constexpr int FEW_TILES = ROWS <= 4 ? 2 : 1;   // fetched at once

// Grid x: n_out.
extern "C" __global__ void __launch_bounds__(32 * FEW_SLICES)
matmul_few_rows(const float* x, int x_stride, const float* sums_of_squares, float eps, const u8* weights,
                long long row_bytes, int n_in, int n_out, const float* bias, float* out, int out_stride, int n_rows) {
  __shared__ float scales[ROWS], parts[FEW_SLICES][ROWS];
  own_rows(x, x_stride, sums_of_squares, n_in, out, out_stride, n_rows);
  const int slice = threadIdx.x >> 5, lane = threadIdx.x & 31, tiles = tiles_of(n_in);
  const u8* row = weights + blockIdx.x * row_bytes;
  Weights::Raw raw[FEW_TILES];
  const auto fetch = [&](int tile) {
#pragma unroll
    for (int j = 0; j < FEW_TILES; j++)
      if (tile + j * FEW_SLICES < tiles) raw[j] = Weights::load(row, tile + j * FEW_SLICES, lane, n_in);
  };
  fetch(slice);
  pdl_trigger();
  pdl_wait();
  row_scales(scales, sums_of_squares, n_rows, n_in, eps, slice, lane);
  float sums[ROWS] = {};
  for (int tile = slice; tile < tiles; tile += FEW_TILES * FEW_SLICES) {
    if (tile != slice) fetch(tile);
    float4 v[FEW_TILES][ROWS][2];
#pragma unroll
    for (int j = 0; j < FEW_TILES; j++)
#pragma unroll
      for (int quad = 0; quad < 2; quad++) {
        const int k = (tile + j * FEW_SLICES) * TILE + Weights::first(lane) + quad * Weights::SECOND;
#pragma unroll
        for (int t = 0; t < ROWS; t++) v[j][t][quad] = load_x(x + (size_t)min(t, n_rows - 1) * x_stride, k, n_in);
      }
#pragma unroll
    for (int j = 0; j < FEW_TILES; j++) {
      if (tile + j * FEW_SLICES >= tiles) break;
      float w[8];
      Weights::values(raw[j], lane, w);
#pragma unroll
      for (int t = 0; t < ROWS; t++)
#pragma unroll
        for (int quad = 0; quad < 2; quad++) sums[t] = add_quad(sums[t], w + 4 * quad, v[j][t][quad]);
    }
  }
  using Sums = Shares<ROWS>;
  const int first = Sums::add(sums, lane);
  if ((lane & Sums::COPIES) == 0) {
#pragma unroll
    for (int i = 0; i < Sums::SHARE; i++) parts[slice][first + i] = sums[i];
  }
  __syncthreads();
  const int t = threadIdx.x;
  if (t < n_rows) {
    float sum = 0.f;
#pragma unroll
    for (int s = 0; s < FEW_SLICES; s++) sum += parts[s][t];
    store(out, out_stride, bias, scales, t, blockIdx.x, sum);
  }
}
