// Functions of a warp: its lanes meet (cpu::meet), the last one works the results out for all.
#pragma once

namespace cpu {
struct Shuffle {
  u64 value, result;
  int source;   // lane
  static void compute(void* const (&lanes)[32]) {
    for (void* each : lanes) {
      if (!each) continue;
      Shuffle& to = *(Shuffle*)each;
      const Shuffle* from = (Shuffle*)lanes[to.source];
      to.result = from ? from->value : ~0ull;   // a lane outside the mask: undefined on a GPU
    }
  }
};
template <class T> T shuffle(u32 mask, T value, int source) {
  static_assert(sizeof(T) <= 8, "");
  Shuffle brought{0, 0, source};
  memcpy(&brought.value, &value, sizeof value);
  meet(mask, Shuffle::compute, &brought);
  memcpy(&value, &brought.result, sizeof value);
  return value;
}
// The lane to read from, in segments of ``width``; a lane without a partner reads its own value.
inline int partner(int lane, int wanted, int width) {
  const int first = lane & -width;
  return wanted >= first && wanted < first + width ? wanted : lane;
}

struct Vote {
  u32 mine, ballot;
  static void compute(void* const (&lanes)[32]) {
    u32 ballot = 0;
    for (int l = 0; l < 32; l++)
      if (lanes[l] && ((Vote*)lanes[l])->mine) ballot |= 1u << l;
    for (void* each : lanes)
      if (each) ((Vote*)each)->ballot = ballot;
  }
};
template <class T> struct Reduction {
  T mine, result;
  template <class F> static void fold(void* const (&lanes)[32], F step) {
    bool any = false;
    T total{};
    for (void* each : lanes)
      if (each) total = any ? step(total, ((Reduction*)each)->mine) : ((Reduction*)each)->mine, any = true;
    for (void* each : lanes)
      if (each) ((Reduction*)each)->result = total;
  }
};
inline void nothing(void* const (&)[32]) {}
}  // namespace cpu

inline void __syncwarp(unsigned mask = ~0u) { cpu::meet(mask, cpu::nothing, &mask); }

template <class T> T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  return cpu::shuffle(mask, value, ((int)cpu::here->lane & -width) | (lane & (width - 1)));
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const int lane = (int)cpu::here->lane, wanted = lane ^ bits;
  // A partner in an earlier segment is read, one in a later segment is not.
  return cpu::shuffle(mask, value, wanted < (lane & -width) + width ? wanted : lane);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
  const int lane = (int)cpu::here->lane;
  return cpu::shuffle(mask, value, cpu::partner(lane, lane - (int)by, width));
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
  const int lane = (int)cpu::here->lane;
  return cpu::shuffle(mask, value, cpu::partner(lane, lane + (int)by, width));
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  cpu::Vote brought{predicate != 0, 0};
  cpu::meet(mask, cpu::Vote::compute, &brought);
  return brought.ballot;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

// Integer reductions of a warp, from sm_80 on.
#if __CUDA_ARCH__ >= 800
#define KVS_REDUCE(name, type, step)                                                                          \
  inline type name(unsigned mask, type value) {                                                               \
    cpu::Reduction<type> brought{value, 0};                                                                   \
    cpu::meet(mask, [](void* const (&lanes)[32]) {                                                            \
      cpu::Reduction<type>::fold(lanes, [](type a, type b) { return (type)(step); });                         \
    }, &brought);                                                                                             \
    return brought.result;                                                                                    \
  }
KVS_REDUCE(__reduce_add_sync, int, a + b)
KVS_REDUCE(__reduce_add_sync, unsigned, a + b)
KVS_REDUCE(__reduce_max_sync, int, max(a, b))
KVS_REDUCE(__reduce_max_sync, unsigned, max(a, b))
KVS_REDUCE(__reduce_min_sync, int, min(a, b))
KVS_REDUCE(__reduce_min_sync, unsigned, min(a, b))
KVS_REDUCE(__reduce_or_sync, unsigned, a | b)
#endif

// ---- tensor cores; fragments as described in ptx.cuh ----

namespace cpu {
struct F16 {};
struct Fragments {
  u32 a[4], b[2];
  union { int i[4]; float f[4]; } c;
};
// In mma.cpp, for A of 16 rows and ``deep`` registers deep (1: a0, a1, b0; 2: all).
Compute mma_s8_1, mma_s8_2, mma_u8_1, mma_u8_2, mma_f16_1, mma_f16_2;
template <class T, int Deep> constexpr Compute* mma_compute = nullptr;
template <> constexpr Compute* mma_compute<signed char, 1> = mma_s8_1;
template <> constexpr Compute* mma_compute<signed char, 2> = mma_s8_2;
template <> constexpr Compute* mma_compute<unsigned char, 2> = mma_u8_2;
template <> constexpr Compute* mma_compute<F16, 1> = mma_f16_1;
template <> constexpr Compute* mma_compute<F16, 2> = mma_f16_2;

template <class T, class C, int Deep>
void mma(C (&c)[4], const u32 (&a)[2 * Deep], const u32 (&b)[Deep]) {
  Fragments brought{};
  memcpy(brought.a, a, sizeof a);
  memcpy(brought.b, b, sizeof b);
  memcpy(&brought.c, c, sizeof c);
  meet(~0u, mma_compute<T, Deep>, &brought);
  memcpy(c, &brought.c, sizeof c);
}
// The m8n8k16 shape: the upper half of a product that is one register deep.
template <class T> void mma_8x8(int& c0, int& c1, u32 a, u32 b) {
  Fragments brought{{a}, {b}, {{c0, c1}}};
  meet(~0u, (T)-1 < 0 ? mma_s8_1 : mma_u8_1, &brought);
  c0 = brought.c.i[0], c1 = brought.c.i[1];
}

}  // namespace cpu
