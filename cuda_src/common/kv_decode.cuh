// Stored rows of K, in the formats of KvType, as float32: the numbers of kvs_core/device/host/ops/kv_codec.py, bit for
// bit, of rows whose values are not subnormal. Lanes of a warp hold a row as in ``kv_encode.cuh``.
//
// Products and sums are rounded one by one, as there.
#pragma once
#include "common/fragments.cuh"
#include "common/kv_types.cuh"
#include "common/ptx.cuh"

// Stored blocks are aligned to 2 bytes only.
DEVICE u32 get16(const u8* at) { return *(const u16*)at; }
DEVICE u32 get32(const u8* at) { return get16(at) | get16(at + 2) << 16; }

// What a byte of q8_0, or a number of a nibble and perhaps a fifth bit, stands for before it is scaled.
template <int TYPE> DEVICE float kv_whole(int q) {
  if constexpr (TYPE == KV_IQ4_NL) {
    constexpr float TABLE[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    float x = TABLE[0];
#pragma unroll
    for (int e = 1; e < 16; e++) x = q == e ? TABLE[e] : x;   // an index would put the table into memory
    return x;
  }
  constexpr int OFFSET = TYPE == KV_Q4_0 ? 8 : TYPE == KV_Q5_0 ? 16 : 0;
  return (float)(q - OFFSET);
}

// Values first .. first + N - 1 of a block of 32.
template <int TYPE, int N>
DEVICE void load_block(const u8* block, int first, float (&v)[N]) {
  constexpr bool AFFINE = TYPE == KV_Q4_1 || TYPE == KV_Q5_1, FIFTHS = TYPE == KV_Q5_0 || TYPE == KV_Q5_1;
  const float d = h2f((u16)get16(block)), m = AFFINE ? h2f((u16)get16(block + 2)) : 0.f;
  block += AFFINE ? 4 : 2;
  u32 fifths = 0;
  if constexpr (FIFTHS) {
    fifths = get32(block) >> first;
    block += 4;
  }
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const u32 four = TYPE == KV_Q8_0 ? get32(block + first + i) : get32(block + (first & 15) + i) >> (first & 16 ? 4 : 0);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const u32 byte = four >> 8 * j & 255;
      const int q = TYPE == KV_Q8_0 ? (int)(signed char)byte : (int)((byte & 15) | (fifths >> (i + j) & 1) << 4);
      const float x = __fmul_rn(kv_whole<TYPE>(q), d);
      v[i + j] = AFFINE ? __fadd_rn(x, m) : x;
    }
  }
}

// The lane's values of a row of D at ``row``, zeros beyond its end.
template <int TYPE, int D, int N>
DEVICE void load_row(const u8* row, float (&v)[N]) {
  const int first = (threadIdx.x & 31) * N;
#pragma unroll
  for (int i = 0; i < N; i++) v[i] = 0.f;
  if (first >= D) return;
  if constexpr (TYPE == KV_F32) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 x = *(const float4*)(row + (first + i) * 4);
      v[i] = x.x, v[i + 1] = x.y, v[i + 2] = x.z, v[i + 3] = x.w;
    }
  } else if constexpr (TYPE == KV_F16 || TYPE == KV_BF16) {
    constexpr bool HALF = TYPE == KV_F16;
#pragma unroll
    for (int i = 0; i < N; i += 8) {
      const uint4 w = *(const uint4*)(row + (first + i) * 2);
      const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        v[i + 2 * j] = HALF ? h2f_lo(words[j]) : bf2f_lo(words[j]);
        v[i + 2 * j + 1] = HALF ? h2f_hi(words[j]) : bf2f_hi(words[j]);
      }
    }
  } else {
    load_block<TYPE>(row + first / 32 * kv_block_bytes(TYPE), first & 31, v);
  }
}

// The lane's values of key ``token`` of a page in fragment order.   head: first byte of the head's K part
template <int N>
DEVICE void load_fragment_key(const u8* head, int token, float (&v)[N]) {
  const int first = (threadIdx.x & 31) * N;
  const float d = h2f(*(const u16*)(head + fragment_k_scale(token, first)));
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const u32 four = *(const u32*)(head + fragment_k(token, first + i)) ^ 0x80808080u;
#pragma unroll
    for (int j = 0; j < 4; j++) v[i + j] = __fmul_rn((float)(signed char)(four >> 8 * j & 255), d);
  }
}
