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
#include "common/kv_encode.cuh"
#include "common/kv_types.cuh"
#include "common/ptx.cuh"
#include "common/tables.cuh"

constexpr int WARPS = 4;
constexpr int NK = DK > 256 ? 16 : 8;   // values of a key or query in a lane
constexpr int NV = DV > 256 ? 16 : 8;
static_assert(DK % 8 == 0 && DK <= 512 && DV % 8 == 0 && DV <= 512, "head dims");
static_assert(N_ROT % 2 == 0 && N_ROT <= DK, "rotary embedding");
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

constexpr int HALF = N_ROT / 2;
// Place in its lane of the value HALF further on, and of the one HALF before.
DEVICE constexpr int place_up(int i) { return (i + HALF) % NK; }
DEVICE constexpr int place_down(int i) { return (i + (HALF / NK + 1) * NK - HALF) % NK; }

// Cosine and sine of this lane's values below N_ROT.   cs [N_ROT / 2][2], this row's
DEVICE void load_angles(const float* cs, float (&cosine)[NK], float (&sine)[NK]) {
  const int first = (threadIdx.x & 31) * NK;
  if constexpr (INTERLEAVED) {
#pragma unroll
    for (int i = 0; i < NK; i += 2) {
      const float2 angle = first + i < N_ROT ? ldcg2(cs + first + i) : make_float2(1.f, 0.f);
      cosine[i] = cosine[i + 1] = angle.x;
      sine[i] = sine[i + 1] = angle.y;
    }
  } else if constexpr (HALF % NK == 0) {
    const float* mine = cs + 2 * (first < HALF ? first : first - HALF);
#pragma unroll
    for (int i = 0; i < NK; i += 2) {
      const float4 two = first < N_ROT ? ldcg4(mine + 2 * i) : make_float4(1.f, 0.f, 1.f, 0.f);
      cosine[i] = two.x, sine[i] = two.y, cosine[i + 1] = two.z, sine[i + 1] = two.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < NK; i++) {
      const int dim = first + i;
      const float2 angle = dim < N_ROT ? ldcg2(cs + 2 * (dim < HALF ? dim : dim - HALF)) : make_float2(1.f, 0.f);
      cosine[i] = angle.x, sine[i] = angle.y;
    }
  }
}

// Turns pairs (a, b) to (a cos - b sin, b cos + a sin), rounded as the host does.
DEVICE void rotate_pairs(float (&v)[NK], const float (&cosine)[NK], const float (&sine)[NK]) {
  const int lane = threadIdx.x & 31, first = lane * NK;
  float other[NK];
#pragma unroll
  for (int i = 0; i < NK; i++) {
    if constexpr (INTERLEAVED) {
      other[i] = v[i ^ 1];
    } else {
      const int dim = first + i, above = (dim + HALF) / NK & 31, below = (dim >= HALF ? dim - HALF : 0) / NK;
      if (place_up(i) == place_down(i)) {
        other[i] = __shfl_sync(~0u, v[place_up(i)], dim < HALF ? above : below);
      } else {
        const float up = __shfl_sync(~0u, v[place_up(i)], above), down = __shfl_sync(~0u, v[place_down(i)], below);
        other[i] = dim < HALF ? up : down;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < NK; i++) {
    const int dim = first + i;
    const bool left = INTERLEAVED ? (i & 1) == 0 : dim < HALF;
    const float kept = __fmul_rn(v[i], cosine[i]), mixed = __fmul_rn(other[i], sine[i]);
    if (dim < N_ROT) v[i] = left ? __fsub_rn(kept, mixed) : __fadd_rn(kept, mixed);
  }
}

// Walsh-Hadamard transform of every BLOCK values, without its factor: sums and differences at distances 1, 2, 4, ...
template <int BLOCK, int N>
DEVICE void hadamard(float (&v)[N]) {
#pragma unroll
  for (int step = 1; step < N && step < BLOCK; step *= 2)
#pragma unroll
    for (int i = 0; i < N; i++)
      if (!(i & step)) {
        const float a = v[i], b = v[i + step];
        v[i] = a + b;
        v[i + step] = a - b;
      }
#pragma unroll
  for (int step = 1; step * N < BLOCK; step *= 2) {
    const bool upper = (threadIdx.x & step) != 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
      const float other = __shfl_xor_sync(~0u, v[i], step);
      v[i] = upper ? other - v[i] : v[i] + other;
    }
  }
}

// 1 / sqrt(block), of a power of two
DEVICE constexpr float hadamard_factor(int block) {
  double factor = 1;
  for (; block >= 4; block /= 4) factor /= 2;
  return (float)(block == 2 ? factor * 0.70710678118654752440 : factor);
}

template <int BLOCK, int N>
DEVICE void rotate(float (&v)[N]) {
  if constexpr (BLOCK > 0) {
    hadamard<BLOCK>(v);
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = __fmul_rn(v[i], hadamard_factor(BLOCK));
  }
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

// Stores key or value ``token`` of a page in fragment order.   head: first byte of the head's K part
DEVICE void store_fragment_key(u8* head, int token, const float (&v)[NK]) {
  const int first = (threadIdx.x & 31) * NK;
  Quants<NK> x;
  quantise_q8_0(v, x);
#pragma unroll
  for (int i = 0; i < NK; i += 4) *(u32*)(head + fragment_k(token, first + i)) = four_bytes(x.q, i) ^ 0x80808080u;
  if (first % 32 == 0) *(u16*)(head + fragment_k_scale(token, first)) = f2h(x.d);
}
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
