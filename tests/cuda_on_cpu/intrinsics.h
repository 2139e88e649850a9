// Functions of one thread: mathematics, conversions, bits, loads, atomics.
#pragma once

extern "C" {
float fabsf(float) noexcept;
float sqrtf(float) noexcept;
float expf(float) noexcept;
float exp2f(float) noexcept;
float expm1f(float) noexcept;
float logf(float) noexcept;
float log2f(float) noexcept;
float log1pf(float) noexcept;
float powf(float, float) noexcept;
float sinf(float) noexcept;
float cosf(float) noexcept;
float tanhf(float) noexcept;
float floorf(float) noexcept;
float ceilf(float) noexcept;
float rintf(float) noexcept;
float roundf(float) noexcept;
float truncf(float) noexcept;
float fmodf(float, float) noexcept;
float fmaxf(float, float) noexcept;
float fminf(float, float) noexcept;
float fmaf(float, float, float) noexcept;
float ldexpf(float, int) noexcept;
float copysignf(float, float) noexcept;
double exp(double) noexcept;
double exp2(double) noexcept;
double log(double) noexcept;
double sqrt(double) noexcept;
double pow(double, double) noexcept;
double sin(double) noexcept;
double cos(double) noexcept;
double fabs(double) noexcept;
double floor(double) noexcept;
double rint(double) noexcept;
double fma(double, double, double) noexcept;
double ldexp(double, int) noexcept;
double nearbyint(double) noexcept;
int abs(int) noexcept;
int printf(const char*, ...);
void* memcpy(void*, const void*, size_t) noexcept;
void* memset(void*, int, size_t) noexcept;
}

#define KVS_MIN_MAX(type)                                             \
  inline type min(type a, type b) { return b < a ? b : a; }           \
  inline type max(type a, type b) { return a < b ? b : a; }
KVS_MIN_MAX(int)
KVS_MIN_MAX(unsigned)
KVS_MIN_MAX(long)
KVS_MIN_MAX(unsigned long)
KVS_MIN_MAX(long long)
KVS_MIN_MAX(unsigned long long)
inline unsigned min(int a, unsigned b) { return min((unsigned)a, b); }
inline unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }
inline unsigned max(int a, unsigned b) { return max((unsigned)a, b); }
inline unsigned max(unsigned a, int b) { return max(a, (unsigned)b); }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool signbit(float x) { return __builtin_signbit(x); }
inline void sincosf(float x, float* s, float* c) { *s = sinf(x), *c = cosf(x); }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0.f), 1.f); }

// Fast versions: accurate here.
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline void __sincosf(float x, float* s, float* c) { sincosf(x, s, c); }
inline float __fdividef(float a, float b) { return a / b; }
// Rounded once, never contracted: the builder compiles with -ffp-contract=off.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __frsqrt_rn(float a) { return (float)(1.0 / sqrt((double)a)); }

namespace cpu {
template <class To, class From> To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
template <class I> I clamped(double x, double low, double high) {   // float to integer saturates, and NaN is 0
  return x != x ? 0 : x < low ? (I)low : x > high ? (I)high : (I)x;
}
inline int to_int(double x) { return clamped<int>(x, -2147483648.0, 2147483647.0); }
inline unsigned to_uint(double x) { return clamped<unsigned>(x, 0.0, 4294967295.0); }
}  // namespace cpu

inline int __float_as_int(float x) { return cpu::bits<int>(x); }
inline unsigned __float_as_uint(float x) { return cpu::bits<unsigned>(x); }
inline float __int_as_float(int x) { return cpu::bits<float>(x); }
inline float __uint_as_float(unsigned x) { return cpu::bits<float>(x); }
inline long long __double_as_longlong(double x) { return cpu::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return cpu::bits<double>(x); }
inline int __float2int_rn(float x) { return cpu::to_int(rintf(x)); }
inline int __float2int_rz(float x) { return cpu::to_int(truncf(x)); }
inline int __float2int_rd(float x) { return cpu::to_int(floorf(x)); }
inline int __float2int_ru(float x) { return cpu::to_int(ceilf(x)); }
inline unsigned __float2uint_rn(float x) { return cpu::to_uint(rintf(x)); }
inline unsigned __float2uint_rz(float x) { return cpu::to_uint(truncf(x)); }
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }
inline float __double2float_rn(double x) { return (float)x; }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned r = 0;
  for (int i = 0; i < 32; i++) r |= (x >> i & 1) << (31 - i);
  return r;
}
inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)((((unsigned long long)high << 32 | low) << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)(((unsigned long long)high << 32 | low) >> (shift & 31));
}

namespace cpu {
inline u32 prmt(u32 a, u32 b, u32 selector) {
  const u64 bytes = (u64)b << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; i++) {
    const u32 nibble = selector >> 4 * i & 15;
    u32 byte = (u32)(bytes >> 8 * (nibble & 7)) & 255;
    if (nibble & 8) byte = byte & 128 ? 255 : 0;
    r |= byte << 8 * i;
  }
  return r;
}
template <class A, class B, class S> S dp4a(u32 a, u32 b, S c) {
  for (int i = 0; i < 4; i++) c += (S)(A)(a >> 8 * i) * (S)(B)(b >> 8 * i);
  return c;
}
}  // namespace cpu

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) { return cpu::prmt(a, b, selector & 0x7777); }
inline int __dp4a(int a, int b, int c) { return cpu::dp4a<signed char, signed char>((unsigned)a, (unsigned)b, c); }
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) { return cpu::dp4a<unsigned char, unsigned char>(a, b, c); }

template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> T __ldcs(const T* p) { return *p; }
template <class T> void __stcg(T* p, T value) { *p = value; }
template <class T> void __stcs(T* p, T value) { *p = value; }

// ---- 16-bit floats, the twins of ptx.cuh ----

namespace cpu {
// To nearest, ties to even; of any value, so that a fused sum is rounded once.
inline unsigned short to_half(double x) {
  const unsigned short sign = __builtin_signbit(x) ? 0x8000 : 0;
  const double size = fabs(x);
  if (size != size) return 0x7fff;
  if (size >= 65520.0) return sign | 0x7c00;
  int exponent = -14;
  if (size >= 0x1p-14) exponent = (int)(bits<u64>(size) >> 52) - 1023;
  // In steps of a half's last bit; a mantissa that rounds up to 2048 carries into the exponent.
  const int steps = (int)nearbyint(size * bits<double>((u64)(1023 + 10 - exponent) << 52));
  return sign | (unsigned short)(((exponent + 14) << 10) + steps);
}
inline float half_to_float(unsigned short h) {
  const u32 sign = (u32)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
  if (exponent == 31) return bits<float>(sign | 0x7f800000u | mantissa << 13);
  if (exponent == 0) return bits<float>(sign | bits<u32>((float)mantissa * 0x1p-24f));
  return bits<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}
inline u32 half2_fma(u32 a, u32 b, u32 c) {
  u32 r = 0;
  for (int s = 0; s < 32; s += 16) {
    const auto part = [s](u32 v) { return (double)half_to_float((unsigned short)(v >> s)); };
    r |= (u32)to_half(fma(part(a), part(b), part(c))) << s;
  }
  return r;
}
}  // namespace cpu

// ---- atomics: fibers do not interrupt each other ----

namespace cpu {
template <class T, class F> T atomic(T* at, F changed) {
  const T old = *at;
  *at = changed(old);
  stirred = true;
  return old;
}
}  // namespace cpu

#define KVS_ATOMIC(name, type, result)                                                                             \
  inline type name(type* at, type v) {                                                                             \
    return cpu::atomic(at, [v]([[maybe_unused]] type old) { return (type)(result); });                             \
  }
#define KVS_ATOMICS(name, result)                                                                                  \
  KVS_ATOMIC(name, int, result) KVS_ATOMIC(name, unsigned, result) KVS_ATOMIC(name, unsigned long long, result)
KVS_ATOMICS(atomicAdd, old + v)
KVS_ATOMICS(atomicMax, old < v ? v : old)
KVS_ATOMICS(atomicMin, v < old ? v : old)
KVS_ATOMICS(atomicExch, v)
KVS_ATOMICS(atomicAnd, old & v)
KVS_ATOMICS(atomicOr, old | v)
KVS_ATOMICS(atomicXor, old ^ v)
KVS_ATOMIC(atomicSub, int, old - v)
KVS_ATOMIC(atomicSub, unsigned, old - v)
KVS_ATOMIC(atomicExch, float, v)
inline unsigned atomicInc(unsigned* at, unsigned top) {
  return cpu::atomic(at, [top](unsigned old) { return old >= top ? 0u : old + 1; });
}
template <class T> T atomicCAS(T* at, T expected, T value) {
  return cpu::atomic(at, [=](T old) { return old == expected ? value : old; });
}
