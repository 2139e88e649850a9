// Products of rows with the experts that they chose, weights in records:  y[slot][o] = sum_k W_expert[o][k] * x[row][k]
// A slot is one expert of one row (experts.cu). Rows are activation records (common/quant256.cuh).
//   -DTYPE    weight type, see records.cuh
//   -DWIDE=0  DECODE: grid row = slot | 1  PREFILL: grid row = a group of up to 8 slots of one expert, which read its
//             weights together
//   -DOUTPUT=PLAIN   columns 16 i .. of tile i
//           SWIGLU   tile rows 0-7 are gate rows, 8-15 the matching up rows: y[slot][c] = silu(gate c) * up c
//           GEGLU    the same with gelu(gate c)
//
// The experts' tiles lie one behind the other. ``slices`` warps share a tile's columns, 256 at a time in turn, and their
// sums are added in order: neither the grid nor the slots of a group are part of a slot's result. Weights and rows come
// straight from memory and L2: there are many warps, each with little to do. Launched plainly.
#include "common/gelu.cuh"
#define SINGLE 0
#include "common/record_dot.cuh"

#define PLAIN 0
#define SWIGLU 1
#define GEGLU 2

constexpr int WARPS = 8;

// Grid: any number of blocks up to the sets of WARPS / slices tiles x slots or groups.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
experts_records(const u8* __restrict__ weight, int n_tiles, int n_blocks, int slices,   // of an expert
                const u8* x, int x_rows, int per_row,       // records of x_rows rows; slots that share a row
                const float* factors,                       // [x_rows] of the results, or null
                const int* ids, const int* order, const int* groups,
                float* y, int y_stride) {
  __shared__ float parts[2][WARPS][128];
#if HAS_VALUE_TABLE
  __shared__ __align__(16) u32 words[8];
#endif
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#if WIDE
  const int* const group = groups + 4 * blockIdx.y;
  const int expert = group[0], first = group[1], rows = group[2];
  if (rows == 0) return;
  const auto slot_of = [&](int c) { return order[first + min(c, rows - 1)]; };
#else
  constexpr int rows = 1;
  const int expert = ids[blockIdx.y];
  const auto slot_of = [&](int) { return (int)blockIdx.y; };
#endif
#if HAS_VALUE_TABLE
  if (threadIdx.x < 5) words[threadIdx.x] = value_table(threadIdx.x);
  __syncthreads();
#endif

  // This lane's operands, as in matmul_decode.cu: columns without a slot repeat the last one.
  const int plane_stride = x_rows * ACT_BYTES;
  const auto place = [&](int c) {
    return (size_t)(slot_of(c) / per_row) * ACT_BYTES + (WIDE ? 0 : (size_t)(c >> 2) * plane_stride);
  };
  const int c0 = 2 * t, c1 = c0 + 1, slot0 = slot_of(c0), slot1 = slot_of(c1);
  const u8* const first_bytes = x + place(g);
  const u8* const steps0 = x + place(c0) + ACT_FACTOR + (WIDE ? plane_stride : 0);   // WIDE: of low bytes
  const u8* const steps1 = x + place(c1) + ACT_FACTOR + (WIDE ? plane_stride : 0);
  const float factor0 = factors ? factors[slot0 / per_row] : 1.f, factor1 = factors ? factors[slot1 / per_row] : 1.f;
  u32 pair = (t & 1) ? 0x4342 : 0x4140;
  opaque(pair);
  ValueTable table;
#if HAS_VALUE_TABLE   // read back, so that it stays in vector registers: as known constants each use would cost a move
  const uint4 four = lds128(smem_u32(words));
  table = {{four.x, four.y}, {four.z, four.w}, lds32(smem_u32(words + 4))};
#endif

  const auto store = [&](const float (&o)[4], int tile) {
    if (!WIDE && t > 0) return;   // the same column again, and low bytes' ones
    float* const out0 = y + (size_t)slot0 * y_stride;
    float* const out1 = y + (size_t)slot1 * y_stride;
#if OUTPUT == PLAIN
    const int top = tile * 16 + g;
    if (c0 < rows) out0[top] = o[0], out0[top + 8] = o[2];
    if (c1 < rows) out1[top] = o[1], out1[top + 8] = o[3];
#else
    const auto gated = [](float gate, float up) {
      return up * (OUTPUT == GEGLU ? gelu(gate) : gate / (1.f + __expf(-gate)));
    };
    if (c0 < rows) out0[tile * 8 + g] = gated(o[0], o[2]);
    if (c1 < rows) out1[tile * 8 + g] = gated(o[1], o[3]);
#endif
  };

  const int slice = warp % slices, at_once = WARPS / slices;
  for (int set = blockIdx.x * at_once, half = 0; set < n_tiles; set += gridDim.x * at_once, half ^= 1) {
    const int tile = set + warp / slices;
    float o[4] = {0.f, 0.f, 0.f, 0.f};
    if (tile < n_tiles) {
      const u8* const records = weight + ((size_t)expert * n_tiles + tile) * n_blocks * RECORD;
      Values acc;
      clear(acc);
#pragma unroll 1
      for (int block = slice; block < n_blocks; block += slices) {
        const size_t at = (size_t)block * 2 * plane_stride;
        const u8* const bytes = first_bytes + at;
        Values v;
        record_dot(v, records + (size_t)block * RECORD, bytes + t * 16, bytes + ACT_SUMS + t * 8, plane_stride, lane,
                   pair, table);
        const float x0 = *(const float*)(steps0 + at), x1 = *(const float*)(steps1 + at);
        FOR_PLANES {
          const float f0 = WIDE && p == 0 ? x0 * 256.f : x0, f1 = WIDE && p == 0 ? x1 * 256.f : x1;
          acc[p][0] = __fmaf_rn(f0, v[p][0], acc[p][0]), acc[p][1] = __fmaf_rn(f1, v[p][1], acc[p][1]);
          acc[p][2] = __fmaf_rn(f0, v[p][2], acc[p][2]), acc[p][3] = __fmaf_rn(f1, v[p][3], acc[p][3]);
        }
      }
      FOR_CELLS o[k] = (WIDE ? acc[0][k] + acc[PLANES - 1][k] : acc[0][k] + __shfl_xor_sync(~0u, acc[0][k], 2)) *
                       ((k & 1) ? factor1 : factor0);
    }
    float* const own = parts[half][warp] + lane * 4;
    if (slice > 0) *(float4*)own = make_float4(o[0], o[1], o[2], o[3]);
    __syncthreads();   // the other half of ``parts`` is free: its readers have arrived here
    if (slice > 0 || tile >= n_tiles) continue;
#pragma unroll 1
    for (int s = 1; s < slices; s++) {
      const float4 q = *(const float4*)(own + s * 128);
      o[0] += q.x, o[1] += q.y, o[2] += q.z, o[3] += q.w;
    }
    store(o, tile);
  }
}
