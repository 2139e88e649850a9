// write_kv: projected rows of an attention layer become queries, and keys and values in pages.
//
//   y  float32 [T] rows of y_stride:   H x (query [DK], gate [DK] if gated) | G x key [DK] | G x value [DV]
//   query   RMS norm, rotary embedding, Hadamard rotation, times q_scale, f16
//   key     RMS norm, rotary embedding, Hadamard rotation, as K_TYPE into its page
//   value   RMS norm without weights if V_NORM, Hadamard rotation, as V_TYPE into its page
//
//   q  DECODE 1: f16 [G][NC][DK], NC = T * R rounded up to 8, R = H / G; query head r of a KV head in row t is column
//                t * R + r; the columns beyond are zero. For FRAGMENTS pages, dims are in the order of the key bytes.
//      DECODE 0: f16 [T][H][DK]
//
// One warp does one head of one row: queries, then keys, then values.   grid (H + 2 G heads / WARPS, T), block 32 WARPS;
// without STORES H + G: the last G clear columns
// A lane has 8 consecutive values of the head (16 of a head above 256), so that a block of 32 is a few neighbouring
// lanes, a pair of the rotary embedding is in one lane or a fixed number of lanes apart, and every load has 16 bytes.
// A row's bits depend on that row and its position alone.
//
// Compile-time facts:
//   K_TYPE, V_TYPE           of kv_types.cuh
//   DK, DV                   head dims, multiples of 8 up to 512
//   K_ROTATION, V_ROTATION   Hadamard blocks, 0 for none
//   N_ROT, INTERLEAVED       values of a head that the rotary embedding turns; pairs (2i, 2i + 1) or (i, i + N_ROT / 2)
//   V_NORM                   1: values are normed
//   STORES                   0: y has queries alone, and no page changes
//   FRAGMENTS                1: byte order of fragments.cuh, 0: rows
//   DECODE                   form of q
#include "common/fragments.cuh"
#include "common/key_row.cuh"
#include "common/kv_encode.cuh"
#include "common/kv_types.cuh"
#include "common/ptx.cuh"
#include "common/tables.cuh"

constexpr int WARPS = 4;
constexpr int NV = DV > 256 ? 16 : 8;   // values of a value in a lane
static_assert(DV % 8 == 0 && DV <= 512, "head dim of values");
static_assert(!FRAGMENTS || (K_TYPE == KV_Q8_0 && V_TYPE == KV_Q4_0 && DK == 256 && DV == 256), "fragments");

// The lane's values of a head of D, zeros beyond its end.
template <int D, int N>
DEVICE void load_head(const float* head, float (&v)[N]) {
  const int first = (threadIdx.x & 31) * N;
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const float4 x = first + i < D ? ldcg4(head + first + i) : make_float4(0.f, 0.f, 0.f, 0.f);
    v[i] = x.x, v[i + 1] = x.y, v[i + 2] = x.z, v[i + 3] = x.w;
  }
}

// 1 / rms(v) of a head of D
template <int D, int N>
DEVICE float inverse_rms(const float (&v)[N], float eps) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < N; i++) sum = fmaf(v[i], v[i], sum);
#pragma unroll
  for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
  return rsqrtf(sum / D + eps);
}

// v = v / rms(v) * weight
DEVICE void rms_norm(float (&v)[NK], const float (&weight)[NK], float eps) {
  const float r = inverse_rms<DK>(v, eps);
#pragma unroll
  for (int i = 0; i < NK; i++) v[i] *= r * weight[i];
}

// Stores a query at ``row``, f16 [DK].
DEVICE void store_query(u16* row, const float (&v)[NK]) {
  const int first = (threadIdx.x & 31) * NK;
  u32 w[NK / 2];
#pragma unroll
  for (int i = 0; i < NK; i += 2) w[i / 2] = f2h2(v[i], v[i + 1]);
  if (first >= DK) return;
#pragma unroll
  for (int i = 0; i < NK; i += 8) {
    if constexpr (FRAGMENTS && DECODE) {
      *(uint2*)(row + fragment_query(first + i)) = make_uint2(w[i / 2], w[i / 2 + 1]);
      *(uint2*)(row + fragment_query(first + i + 4)) = make_uint2(w[i / 2 + 2], w[i / 2 + 3]);
    } else {
      *(uint4*)(row + first + i) = make_uint4(w[i / 2], w[i / 2 + 1], w[i / 2 + 2], w[i / 2 + 3]);
    }
  }
}

// Stores value ``token`` of a page in fragment order.   head: first byte of the head's K part
DEVICE void store_fragment_value(u8* head, int token, const float (&v)[NV]) {
  const int first = (threadIdx.x & 31) * NV;
  Quants<NV> x;
  quantise_symmetric<8>(v, x);
  u32 bytes[NV / 4];
#pragma unroll
  for (int i = 0; i < NV; i += 4) {
    const u32 low = four_bytes(x.q, i);
    bytes[i / 4] = low | __shfl_xor_sync(~0u, low, 1) << 4;   // the dims 8 further on, for the even lanes
  }
  if (!(first & 8)) {
    u8* const at = head + fragment_v(token, first);
#pragma unroll
    for (int i = 0; i < NV; i++) at[i * 64] = (u8)(bytes[i / 4] >> 8 * (i % 4));
  }
  if (first % 32 == 0) *(u16*)(head + fragment_v_scale(token, first)) = f2h(x.d);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) write_kv(
    const float* y, int y_stride,
    int heads, int kv_heads,
    int q_step,                    // columns from one query to the next
    const float* q_norm, const float* k_norm,   // [DK], or null
    float eps,
    const float* cs,               // [T][N_ROT / 2][2] cosine and sine of the step's rows
    float q_scale,                 // scale of the scores times log2(e)
    const int* step,               // step table
    const int* slots,              // slot of each page
    u8* pool, long long page_stride, int page_tokens,
    u16* q)
{
  const int rows = gridDim.y, t = blockIdx.y;
  const int unit = blockIdx.x * WARPS + __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const int keys = STORES ? kv_heads : 0;
  const bool is_query = unit < heads, is_key = !is_query && unit < heads + keys;
  const int head = is_query ? unit : is_key ? unit - heads : unit - heads - keys;   // its own kind's number
  const int position = step[STEP_POSITION] + t, page = position / page_tokens, token = position - page * page_tokens;
  const float* const weights = is_query ? q_norm : is_key ? k_norm : nullptr;
  float weight[NK];
  if (weights) load_head<DK>(weights, weight);
  const int k_part = page_tokens * kv_row_bytes(K_TYPE, DK), v_part = page_tokens * kv_row_bytes(V_TYPE, DV);
  u8* const at = is_query ? nullptr : pool + slots[page] * page_stride + head * (long long)(k_part + v_part);
  pdl_trigger();
  pdl_wait();
  if (unit >= heads + keys + kv_heads) return;

  const float* const row = y + (long long)t * y_stride;
  const int group = heads / kv_heads;   // query heads of a KV head
  const int columns = (rows * group + 7) & ~7;

  if (is_query || is_key) {
    float v[NK], cosine[NK], sine[NK];
    load_head<DK>(row + (is_query ? head * q_step : heads * q_step + head * DK), v);
    load_angles(cs + (long long)t * N_ROT, cosine, sine);
    if (weights) rms_norm(v, weight, eps);
    rotate_pairs(v, cosine, sine);
    rotate<K_ROTATION>(v);
    if (is_query) {
#pragma unroll
      for (int i = 0; i < NK; i++) v[i] *= q_scale;
      const int kv_head = head / group, r = head - kv_head * group;
      const long long place = DECODE ? kv_head * columns + t * group + r : (long long)t * heads + head;
      store_query(q + place * DK, v);
    } else if constexpr (FRAGMENTS) {
      store_fragment_key(at, token, v);
    } else {
      store_row<K_TYPE, DK>(at + token * kv_row_bytes(K_TYPE, DK), v);
    }
  } else {
    if constexpr (STORES) {
      float v[NV];
      load_head<DV>(row + heads * q_step + kv_heads * DK + head * DV, v);
      if constexpr (V_NORM) {
        const float r = inverse_rms<DV>(v, eps);
#pragma unroll
        for (int i = 0; i < NV; i++) v[i] *= r;
      }
      rotate<V_ROTATION>(v);
      if constexpr (FRAGMENTS) store_fragment_value(at, token, v);
      else store_row<V_TYPE, DV>(at + k_part + token * kv_row_bytes(V_TYPE, DV), v);
    }
    if (DECODE && t == 0) {   // the value's warp has the least to do: it clears the columns that no row has
      uint4* const spare = (uint4*)(q + (long long)(head * columns + rows * group) * DK);
      for (int i = lane; i < (columns - rows * group) * (DK / 8); i += 32) spare[i] = make_uint4(0, 0, 0, 0);
    }
  }
}
