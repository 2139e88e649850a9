// Rows of K and V into the formats of KvType (kvs_core/paging/geometry.py); the numbers of
// kvs_core/device/host/ops/kv_codec.py, byte for byte, from equal float32 values that are neither NaN nor subnormal.
//
// A warp holds a row: lane l has values N l .. N l + N - 1, N = 8 or 16, zeros beyond the row's end. A block of 32
// values is 32 / N neighbouring lanes. All 32 lanes call these functions.
//
// Products and sums go through __fmul_rn and the like: joined to one fused operation they would round differently.
// Infinite and NaN values are stored as the formats can; of a block they spoil no neighbour.
#pragma once
#include "common/kv_types.cuh"
#include "common/ptx.cuh"

// The first of a block's values with the largest key.
template <int N, typename Key>
DEVICE float first_largest(const float (&v)[N], Key key) {
  float best = v[0];
#pragma unroll
  for (int i = 1; i < N; i++) best = key(v[i]) > key(best) ? v[i] : best;
#pragma unroll
  for (int step = 1; step < 32 / N; step *= 2) {
    const float other = __shfl_xor_sync(~0u, best, step);
    const bool before = (threadIdx.x & step) != 0;
    if (key(other) > key(best) || (before && key(other) == key(best))) best = other;
  }
  return best;
}

// A block, quantised: x = d * (q - the type's offset) + m. Every lane has its own N of the q, and d and m of its block.
template <int N>
struct Quants {
  int q[N];
  float d, m;
};

DEVICE float inverse(float d) { return d != 0.f ? __fdiv_rn(1.f, d) : 0.f; }

template <int N>
DEVICE void quantise_q8_0(const float (&v)[N], Quants<N>& out) {
  float largest = fabsf(v[0]);
#pragma unroll
  for (int i = 1; i < N; i++) largest = fmaxf(largest, fabsf(v[i]));
#pragma unroll
  for (int step = 1; step < 32 / N; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  out.d = __fdiv_rn(largest, 127.f);
  const float id = inverse(out.d);
#pragma unroll
  for (int i = 0; i < N; i++) out.q[i] = (int)roundf(__fmul_rn(v[i], id));   // halves go away from zero
}

// q4_0 and q5_0: the value of largest size becomes -levels.
template <int LEVELS, int N>
DEVICE void quantise_symmetric(const float (&v)[N], Quants<N>& out) {
  const float largest = first_largest(v, [](float x) { return fabsf(x); });
  out.d = __fmul_rn(__fadd_rn(largest, 0.f), -1.f / LEVELS);   // + 0: not from -0
  const float id = inverse(out.d);
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int q = (int)__fadd_rn(__fmul_rn(v[i], id), LEVELS + 0.5f);
    out.q[i] = max(0, min(q, 2 * LEVELS - 1));
  }
}

// q4_1 and q5_1: the smallest value becomes 0, the largest TOP.
template <int TOP, int N>
DEVICE void quantise_affine(const float (&v)[N], Quants<N>& out) {
  out.m = first_largest(v, [](float x) { return -x; });
  const float high = first_largest(v, [](float x) { return x; });
  out.d = __fdiv_rn(__fsub_rn(high, out.m), (float)TOP);
  const float id = inverse(out.d);
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int q = (int)__fadd_rn(__fmul_rn(__fsub_rn(v[i], out.m), id), 0.5f);
    out.q[i] = max(0, min(q, TOP));
  }
}

// iq4_nl: entries nearest to the values scaled by the largest one; then d by least squares with weights x^2.
template <int N>
DEVICE void quantise_iq4_nl(const float (&v)[N], Quants<N>& out) {
  constexpr float TABLE[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  const float largest = first_largest(v, [](float x) { return fabsf(x); });
  const float id = inverse(__fdiv_rn(__fadd_rn(largest, 0.f), TABLE[0]));
  float entry[N];
#pragma unroll
  for (int i = 0; i < N; i++) {
    const float x = __fmul_rn(v[i], id);
    out.q[i] = 0;
    entry[i] = TABLE[0];
#pragma unroll
    for (int e = 1; e < 16; e++) {
      const bool past = x >= (TABLE[e - 1] + TABLE[e]) * 0.5f;   // a value between two goes to the higher entry
      out.q[i] += past;
      entry[i] = past ? TABLE[e] : entry[i];
    }
  }
  // The sums run in value order, from lane to lane: every lane adds its values to what the last turn's lane had, and
  // the lane whose turn it is passes the result on.
  float fit = 0.f, norm = 0.f;
#pragma unroll
  for (int turn = 0; turn < 32 / N; turn++) {
#pragma unroll
    for (int i = 0; i < N; i++) {
      const float weighted = __fmul_rn(__fmul_rn(v[i], v[i]), entry[i]);
      fit = __fadd_rn(fit, __fmul_rn(weighted, v[i]));
      norm = __fadd_rn(norm, __fmul_rn(weighted, entry[i]));
    }
    const int source = (threadIdx.x & 31 & ~(32 / N - 1)) + turn;
    fit = __shfl_sync(~0u, fit, source);
    norm = __shfl_sync(~0u, norm, source);
  }
  out.d = fabsf(largest) >= 1e-15f ? __fdiv_rn(fit, norm) : 0.f;
}

template <int TYPE, int N>
DEVICE void quantise(const float (&v)[N], Quants<N>& out) {
  if constexpr (TYPE == KV_Q8_0) quantise_q8_0(v, out);
  else if constexpr (TYPE == KV_Q4_0) quantise_symmetric<8>(v, out);
  else if constexpr (TYPE == KV_Q4_1) quantise_affine<15>(v, out);
  else if constexpr (TYPE == KV_Q5_0) quantise_symmetric<16>(v, out);
  else if constexpr (TYPE == KV_Q5_1) quantise_affine<31>(v, out);
  else quantise_iq4_nl(v, out);
}

// Values i .. i + 3 as the bytes of a word, the first one lowest.
template <int N>
DEVICE u32 four_bytes(const int (&q)[N], int i) {
  return ((u32)q[i] & 255) | ((u32)q[i + 1] & 255) << 8 | ((u32)q[i + 2] & 255) << 16 | ((u32)q[i + 3] & 255) << 24;
}

// Stored blocks are aligned to 2 bytes only.
DEVICE void put16(u8* at, u32 value) { *(u16*)at = (u16)value; }
DEVICE void put32(u8* at, u32 value) {
  put16(at, value);
  put16(at + 2, value >> 16);
}

// Stores a block's d, m, fifth bits and nibbles or bytes at ``block``, its first byte; only lanes with ``live`` store.
template <int TYPE, int N>
DEVICE void store_block(u8* block, const Quants<N>& x, bool live) {
  constexpr int LANES = 32 / N;
  constexpr bool AFFINE = TYPE == KV_Q4_1 || TYPE == KV_Q5_1, FIFTHS = TYPE == KV_Q5_0 || TYPE == KV_Q5_1;
  const int part = threadIdx.x & (LANES - 1);
  if (live && part == 0) {
    put16(block, f2h(x.d));
    if constexpr (AFFINE) put16(block + 2, f2h(x.m));
  }
  block += AFFINE ? 4 : 2;
  if constexpr (TYPE == KV_Q8_0) {
#pragma unroll
    for (int i = 0; i < N; i += 4)
      if (live) put32(block + part * N + i, four_bytes(x.q, i));
  } else {
    if constexpr (FIFTHS) {
      u32 bits = 0;
#pragma unroll
      for (int i = 0; i < N; i++) bits |= ((u32)x.q[i] >> 4 & 1) << i;
      bits <<= part * N;
#pragma unroll
      for (int step = 1; step < LANES; step *= 2) bits |= __shfl_xor_sync(~0u, bits, step);
      if (live && part == 0) put32(block, bits);
      block += 4;
    }
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const u32 low = four_bytes(x.q, i) & 0x0f0f0f0fu;
      const u32 high = __shfl_xor_sync(~0u, low, LANES / 2);   // values 16 further on, for the lanes of the first 16
      if (live && part < LANES / 2) put32(block + part * N + i, low | high << 4);
    }
  }
}

// Stores a row of D values at ``row``.
template <int TYPE, int D, int N>
DEVICE void store_row(u8* row, const float (&v)[N]) {
  const int lane = threadIdx.x & 31, first = lane * N;
  const bool live = first < D;
  if constexpr (TYPE == KV_F32) {
#pragma unroll
    for (int i = 0; i < N; i += 4)
      if (live) *(float4*)(row + (first + i) * 4) = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
  } else if constexpr (TYPE == KV_F16 || TYPE == KV_BF16) {
    constexpr bool HALF = TYPE == KV_F16;
#pragma unroll
    for (int i = 0; i < N; i += 8) {
      u32 w[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float a = v[i + 2 * j], b = v[i + 2 * j + 1];
        w[j] = HALF ? f2h2(a, b) : f2bf2(a, b);
      }
      if (live) *(uint4*)(row + (first + i) * 2) = make_uint4(w[0], w[1], w[2], w[3]);
    }
  } else {
    static_assert(D % 32 == 0, "a row must fill whole blocks");
    Quants<N> x;
    quantise<TYPE>(v, x);
    store_block<TYPE>(row + first / 32 * kv_block_bytes(TYPE), x, live);
  }
}
