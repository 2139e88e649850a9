// A key, or a query, in a warp: lane l has values NK l .. NK l + NK - 1, zeros beyond the head's end. What turns it,
// rotates it and puts it into a page in fragment order; ``kv_encode.cuh`` puts it into one in row order.
//
// For sources with these compile-time facts:
//   DK                    head dim, a multiple of 8 up to 512
//   N_ROT, INTERLEAVED    values of a head that the rotary embedding turns; pairs (2i, 2i + 1) or (i, i + N_ROT / 2)
#pragma once
#include "common/fragments.cuh"
#include "common/kv_encode.cuh"
#include "common/ptx.cuh"

constexpr int NK = DK > 256 ? 16 : 8;   // values in a lane
static_assert(DK % 8 == 0 && DK <= 512, "head dim of keys");
static_assert(N_ROT % 2 == 0 && N_ROT <= DK, "rotary embedding");

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

// Stores key ``token`` of a page in fragment order.   head: first byte of the head's K part
DEVICE void store_fragment_key(u8* head, int token, const float (&v)[NK]) {
  const int first = (threadIdx.x & 31) * NK;
  Quants<NK> x;
  quantise_q8_0(v, x);
#pragma unroll
  for (int i = 0; i < NK; i += 4) *(u32*)(head + fragment_k(token, first + i)) = four_bytes(x.q, i) ^ 0x80808080u;
  if (first % 32 == 0) *(u16*)(head + fragment_k_scale(token, first)) = f2h(x.d);
}
