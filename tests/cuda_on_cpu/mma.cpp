// Tensor-core products: the lanes' fragments become matrices, are multiplied the slow way, and go back. ptx.cuh has the
// layouts. Results of 16-bit floats are rounded once, where a GPU may round or truncate several times.
#include "standin.h"

namespace cpu {
namespace {

template <class T> struct Eight {   // four values a register
  static constexpr int per_register = 4;
  using Number = int;
  static int at(u32 r, int i) { return (T)(r >> 8 * i); }
};
struct Half {
  static constexpr int per_register = 2;
  using Number = double;
  static double at(u32 r, int i) { return half_to_float((unsigned short)(r >> 16 * i)); }
};

template <class A, class B, int Deep> void multiply(void* const (&lanes)[32]) {
  constexpr int per = A::per_register, depth = 4 * per * Deep;
  using Number = typename A::Number;
  Number a[16][depth], b[8][depth];
  for (int l = 0; l < 32; l++) {
    if (!lanes[l]) fail("a tensor-core product needs all lanes of the warp, and lane %d has returned", l);
    const Fragments& of = *(const Fragments*)lanes[l];
    for (int d = 0; d < Deep; d++)
      for (int i = 0; i < per; i++) {
        const int k = 4 * per * d + per * (l % 4) + i;
        a[l / 4][k] = A::at(of.a[2 * d], i), a[l / 4 + 8][k] = A::at(of.a[2 * d + 1], i);
        b[l / 4][k] = B::at(of.b[d], i);
      }
  }
  for (int l = 0; l < 32; l++)
    for (int e = 0; e < 4; e++) {
      Fragments& of = *(Fragments*)lanes[l];
      const Number* row = a[l / 4 + e / 2 * 8];
      const Number* column = b[2 * (l % 4) + e % 2];
      Number sum = sizeof(Number) == 4 ? (Number)of.c.i[e] : (Number)of.c.f[e];
      for (int k = 0; k < depth; k++) sum += row[k] * column[k];
      if (sizeof(Number) == 4) of.c.i[e] = (int)sum;
      else of.c.f[e] = (float)sum;
    }
}

}  // namespace

void mma_s8_1(void* const (&lanes)[32]) { multiply<Eight<signed char>, Eight<signed char>, 1>(lanes); }
void mma_u8_1(void* const (&lanes)[32]) { multiply<Eight<unsigned char>, Eight<signed char>, 1>(lanes); }
void mma_s8_2(void* const (&lanes)[32]) { multiply<Eight<signed char>, Eight<signed char>, 2>(lanes); }
void mma_u8_2(void* const (&lanes)[32]) { multiply<Eight<unsigned char>, Eight<signed char>, 2>(lanes); }
void mma_f16_1(void* const (&lanes)[32]) { multiply<Half, Half, 1>(lanes); }
void mma_f16_2(void* const (&lanes)[32]) { multiply<Half, Half, 2>(lanes); }

}  // namespace cpu
