// Group and segment partials of decode attention: a running softmax per row and head, kept by attend_decode*.cu and
// merged by fold.cu. A buffer of n partials is n * T * H * (Dv + 2) floats:
//
//   acc [n][kv heads][columns][Dv]       sum of weight * v
//   m, l [n][kv heads][columns][2]       largest score in units of log2, sum of weights
//
// columns = T * R; column t * R + r is query head r of the kv head in step row t. A weight is 2^(score - m + 8): the
// factor keeps small ones alive in f16 and cancels in acc / l.
#pragma once
#include "common/ptx.cuh"

constexpr float PARTIAL_NOTHING = -1e20f;   // m before the first key: far below any score
constexpr float PARTIAL_UNSEEN = -1e30f;    // score of a key that a row must not see: its weight is exactly 0
constexpr float PARTIAL_WEIGHT_LOG2 = 8.f;

template <int KV_HEADS_, int COLUMNS_, int V_DIM_> struct Partials {
  float* base;
  int count;
  DEVICE float* acc(int partial, int head, int column) const {
    return base + ((size_t)(partial * KV_HEADS_ + head) * COLUMNS_ + column) * V_DIM_;
  }
  DEVICE float* m_and_l(int partial, int head, int column) const {
    const size_t accs = (size_t)count * (KV_HEADS_ * COLUMNS_ * V_DIM_);
    return base + accs + ((partial * KV_HEADS_ + head) * COLUMNS_ + column) * 2;
  }
};

// Integers in the order of the floats they come from, for smem_max; the map is its own inverse.
DEVICE int ordered(float f) {
  const int b = __float_as_int(f);
  return b >= 0 ? b : b ^ 0x7fffffff;
}
DEVICE float unordered(int b) { return __int_as_float(b >= 0 ? b : b ^ 0x7fffffff); }
