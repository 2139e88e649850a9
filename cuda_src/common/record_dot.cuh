// The product of one weight record (records.cuh) and activation records (quant256.cuh) on the tensor cores.
//   -DTYPE  -DWIDE=0: up to 4 rows of activations | 1: up to 8  -DSINGLE=1 (with WIDE=0): one row
// WIDE=0 puts the high bytes of the rows in columns 0-3 and the low bytes in columns 4-7 of one product; WIDE=1 makes
// two products. Of a single row those four columns are the same, so that of the lanes of a pair one goes on with weight
// row g and the other with row g + 8. A row's sums are the same numbers in all of them.
// Weights enter as exact integers and sub-block scales are integers too where the type has them, so that what is summed
// in int32 is exact; float32 begins at the type's own 16-bit scale.
#pragma once
#include "common/quant256.cuh"
#include "common/records.cuh"

constexpr int PLANES = WIDE ? 2 : 1;
constexpr int CELLS = SINGLE ? 1 : 4;   // numbers of a product that a lane goes on with
#define FOR_PLANES _Pragma("unroll") for (int p = 0; p < PLANES; p++)
#define FOR_CELLS _Pragma("unroll") for (int k = 0; k < CELLS; k++)

typedef int Products[PLANES][4];   // per plane: (row g, columns 2 t, 2 t + 1), (row g + 8, the same columns)
typedef int Sums[PLANES][CELLS];   // the same cells; SINGLE: of the lane's own row, g or, for odd t, g + 8
typedef float Values[PLANES][CELLS];

template <class T, int N> DEVICE void clear(T (&s)[PLANES][N]) {
  FOR_PLANES {
#pragma unroll
    for (int k = 0; k < N; k++) s[p][k] = 0;
  }
}
// Cell k of a product.
template <class T> DEVICE T cell(const T (&c)[4], int k) { return SINGLE ? (threadIdx.x & 1) ? c[2] : c[0] : c[k]; }
// top, low: factors of the rows of cells 0 and 1, and of 2 and 3; SINGLE: top is that of the lane's own row.
DEVICE void add_scaled(Sums& s, const Products& c, int top, int low) {
  FOR_PLANES FOR_CELLS s[p][k] += (k < 2 ? top : low) * cell(c[p], k);
}
DEVICE void add_scaled(Values& v, const Products& c, float top, float low) {
  FOR_PLANES FOR_CELLS v[p][k] = __fmaf_rn(k < 2 ? top : low, (float)cell(c[p], k), v[p][k]);
}
DEVICE void set_scaled(Values& v, const Sums& s, float top, float low) {
  FOR_PLANES FOR_CELLS v[p][k] = __fmul_rn(k < 2 ? top : low, (float)s[p][k]);
}
// f16 number i of a row's eight.
DEVICE float half_of(const uint4& words, int i) {
  const u32 w[4] = {words.x, words.y, words.z, words.w};
  return (i & 1) ? h2f_hi(w[i >> 1]) : h2f_lo(w[i >> 1]);
}

// Activation operands of 64 columns: block h, plane p -> words 2 p, 2 p + 1.
struct Columns { u32 words[2][2 * PLANES]; };
DEVICE Columns load_columns(const u8* bytes, int plane_stride, int j) {
  Columns b;
  const uint4 high = *(const uint4*)(bytes + j * 64);
  b.words[0][0] = high.x, b.words[0][1] = high.y, b.words[1][0] = high.z, b.words[1][1] = high.w;
  if (WIDE) {
    const uint4 low = *(const uint4*)(bytes + plane_stride + j * 64);
    b.words[0][2 * PLANES - 2] = low.x, b.words[0][2 * PLANES - 1] = low.y;
    b.words[1][2 * PLANES - 2] = low.z, b.words[1][2 * PLANES - 1] = low.w;
  }
  return b;
}
DEVICE void multiply_u8(Products& c, u32 a0, u32 a1, u32 a2, u32 a3, const Columns& b, int h) {
  clear(c);
  FOR_PLANES mma_u8(c[p], a0, a1, a2, a3, b.words[h][2 * p], b.words[h][2 * p + 1]);
}
DEVICE void multiply_s8(Products& c, u32 a0, u32 a1, u32 a2, u32 a3, const Columns& b, int h) {
  clear(c);
  FOR_PLANES mma_s8(c[p], a0, a1, a2, a3, b.words[h][2 * p], b.words[h][2 * p + 1]);
}

// Nibbles of block b (the upper half of the byte for odd ones) with their fifth bits.
DEVICE u32 five_bits(u32 nibbles, u32 fifth, int b) {
  return (((b & 1) ? nibbles >> 4 : nibbles) & 0x0f0f0f0fu) |
         ((b < 4 ? fifth << (4 - b) : fifth >> (b - 4)) & 0x10101010u);
}

#if HAS_VALUE_TABLE
// IQ4 values by byte selection: a table for indices below 8 (all negative) and, reversed, value + 1 for the others (all
// positive). Selectors are the nibbles and their complements. Of a table whose half does not apply comes the replicated
// sign (-1 and 0), so the two products add up to the exact value. The complement is a multiply-add: the ALU is the
// bottleneck here.
struct ValueTable { u32 below[2], above[2], minus_one; };
DEVICE u32 value_table(int word) {
  return word == 0 ? 0xbfad9881u : word == 1 ? 0xf6eaddcfu : word == 2 ? 0x36465a72u : word == 3 ? 0x020e1a27u : ~0u;
}
DEVICE void multiply_iq4(Products& c, u32 top, u32 low, const ValueTable& table, const Columns& b, int h) {
  const u32 word[4] = {top, low, top >> 16, low >> 16};
  u32 below[4], above[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    below[i] = prmt(table.below[0], table.below[1], word[i]);
    above[i] = prmt(table.above[0], table.above[1], mad32(word[i], table.minus_one, table.minus_one));
  }
  clear(c);
  FOR_PLANES {
    mma_s8(c[p], below[0], below[1], below[2], below[3], b.words[h][2 * p], b.words[h][2 * p + 1]);
    mma_s8(c[p], above[0], above[1], above[2], above[3], b.words[h][2 * p], b.words[h][2 * p + 1]);
  }
}
#else
struct ValueTable {};
#endif

// v = sums over 256 columns of weight * byte.
//   record   in shared memory
//   bytes    of the lane's column (a row of activations), at 16 t;  sums: its digit sums, at ACT_SUMS + 8 t
//   pair     selector of the lane's two minima among the bytes of four blocks, in a register of its own
DEVICE void record_dot(Values& v, const u8* record, const u8* bytes, const u8* sums, int plane_stride, int lane,
                       u32 pair, const ValueTable& table) {
  const int g = lane >> 2;
  const int first_row = SINGLE ? g + 8 * (lane & 1) : g;   // of cells 0 and 1
  const u8* quants = record + lane * 16;
  const u8* heads = record + SCALES + first_row * HEAD_BYTES;
  Products c;
  Sums s;
  clear(s);
#if HAS_SUPER_SCALES
  const uint4 top = *(const uint4*)heads, low = SINGLE ? top : *(const uint4*)(heads + 128);
  const u32 top_scales[2] = {head_scales(top, false), head_scales(top, true)};
  const u32 low_scales[2] = {head_scales(low, false), head_scales(low, true)};
#if TYPE == Q4_K
  Sums s16;                                              // odd blocks: nibbles left in the upper half, 16 x their value
  clear(s16);
#else
  const uint4 fifth = *(const uint4*)(quants + FIFTH_BITS);
#endif
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const uint4 q = *(const uint4*)(quants + j * 512);
    const Columns b = load_columns(bytes, plane_stride, j);
#if TYPE == Q4_K
    const u32 even = 0x0f0f0f0fu, odd = 0xf0f0f0f0u;
    multiply_u8(c, q.x & even, q.z & even, q.y & even, q.w & even, b, 0);
    add_scaled(s, c, unsigned_byte(top_scales[j >> 1], (2 * j) & 3), unsigned_byte(low_scales[j >> 1], (2 * j) & 3));
    multiply_u8(c, q.x & odd, q.z & odd, q.y & odd, q.w & odd, b, 1);
    add_scaled(s16, c, unsigned_byte(top_scales[j >> 1], (2 * j + 1) & 3),
               unsigned_byte(low_scales[j >> 1], (2 * j + 1) & 3));
#else
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int i = 2 * j + h;
      multiply_u8(c, five_bits(q.x, fifth.x, i), five_bits(q.z, fifth.z, i), five_bits(q.y, fifth.y, i),
                  five_bits(q.w, fifth.w, i), b, h);
      add_scaled(s, c, unsigned_byte(top_scales[i >> 2], i & 3), unsigned_byte(low_scales[i >> 2], i & 3));
    }
#endif
  }
  // Minima: one f16 product with the digit sums. Bytes become f16 by way of 1024 + m; x 64 for the high digits.
  const bool later = (lane & 2) != 0;                    // t < 2: minima of blocks 0-3, else 4-7
  const u8* minima = record + SCALES + g * 16;
  const uint4 minima0 = SINGLE ? *(const uint4*)minima : top, minima1 = SINGLE ? *(const uint4*)(minima + 128) : low;
  const u32 m0 = hadd2(prmt(head_minima(minima0, later), 0x64646464u, pair), 0xe400e400u);
  const u32 m1 = hadd2(prmt(head_minima(minima1, later), 0x64646464u, pair), 0xe400e400u);
  const u32 m2 = hmul2(m0, 0x54005400u), m3 = hmul2(m1, 0x54005400u);
  const float unit = TYPE == Q4_K ? 0.0625f : 1.f;
  const float top_d = unit * h2f_lo(top.x), top_min = h2f_hi(top.x);
  const float low_d = unit * h2f_lo(low.x), low_min = h2f_hi(low.x);
  FOR_PLANES {
    const uint2 digits = *(const uint2*)(sums + p * plane_stride);
    float least[4] = {0.f, 0.f, 0.f, 0.f};
    mma_f16(least, m0, m1, m2, m3, digits.x, digits.y);
    FOR_CELLS {
#if TYPE == Q4_K
      const int sum = s[p][k] * 16 + s16[p][k];
#else
      const int sum = s[p][k];
#endif
      v[p][k] = __fmaf_rn(k < 2 ? top_d : low_d, (float)sum, -__fmul_rn(k < 2 ? top_min : low_min, cell(least, k)));
    }
  }
#elif TYPE == Q6_K
  const uint4 top = *(const uint4*)heads, low = SINGLE ? top : *(const uint4*)(heads + 128);
  const u32 top_scales[4] = {top.x, top.y, top.z, top.w}, low_scales[4] = {low.x, low.y, low.z, low.w};
#pragma unroll
  for (int n = 0; n < 2; n++) {                          // 128 columns
    const uint4 pairs = *(const uint4*)(quants + n * 1536 + 1024);
    const uint4 q0 = *(const uint4*)(quants + n * 1536), q1 = *(const uint4*)(quants + n * 1536 + 512);
#pragma unroll
    for (int w = 0; w < 2; w++) {                        // 64 columns: low, then high nibbles of q0, q1
      const Columns b = load_columns(bytes, plane_stride, n * 2 + w);
#pragma unroll
      for (int u = 0; u < 2; u++) {
        const uint4 q = u ? q1 : q0;
        const int pair_at = 2 * w + u, i = n * 4 + pair_at;   // 4 * (value - 32) in a byte: bit pair, nibble, 00
        const auto six_bits = [&](u32 nibbles, u32 bits) {
          return ((w ? __funnelshift_r(nibbles, nibbles, 4) : nibbles) & 0x3c3c3c3cu) |
                 ((pair_at < 3 ? bits << (6 - 2 * pair_at) : bits) & 0xc0c0c0c0u);
        };
        const u32 a0 = six_bits(q.x, pairs.x), a2 = six_bits(q.y, pairs.y);
        const u32 a1 = six_bits(q.z, pairs.z), a3 = six_bits(q.w, pairs.w);
        clear(c);
        FOR_PLANES mma_s8_k16(c[p], a0, a1, b.words[u][2 * p]);
        add_scaled(s, c, signed_byte(top_scales[i >> 1], (i & 1) * 2), signed_byte(low_scales[i >> 1], (i & 1) * 2));
        clear(c);
        FOR_PLANES mma_s8_k16(c[p], a2, a3, b.words[u][2 * p + 1]);
        add_scaled(s, c, signed_byte(top_scales[i >> 1], (i & 1) * 2 + 1),
                   signed_byte(low_scales[i >> 1], (i & 1) * 2 + 1));
      }
    }
  }
  const u8* factors = record + SIX_BIT_D + first_row * 2;
  set_scaled(v, s, 0.25f * h2f(*(const u16*)factors), SINGLE ? 0.f : 0.25f * h2f(*(const u16*)(factors + 16)));
#elif TYPE == IQ4_XS
  const uint2 top = *(const uint2*)heads, low = SINGLE ? top : *(const uint2*)(heads + 64);
  const u32 top_scales[2] = {iq4_scales(top, false), iq4_scales(top, true)};
  const u32 low_scales[2] = {iq4_scales(low, false), iq4_scales(low, true)};
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const uint4 q = *(const uint4*)(quants + j * 512);
    const Columns b = load_columns(bytes, plane_stride, j);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int i = 2 * j + h;
      multiply_iq4(c, h ? q.z : q.x, h ? q.w : q.y, table, b, h);
      add_scaled(s, c, signed_byte(top_scales[i >> 2], i & 3), signed_byte(low_scales[i >> 2], i & 3));
    }
  }
  set_scaled(v, s, 0.25f * h2f_lo(top.x), 0.25f * h2f_lo(low.x));
#else   // a float16 scale per 32 columns
  const uint4 top = *(const uint4*)heads, low = SINGLE ? top : *(const uint4*)(heads + 128);
#if HAS_FIFTH_BITS
  const uint4 fifth = *(const uint4*)(quants + FIFTH_BITS);
#endif
  clear(v);
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const Columns b = load_columns(bytes, plane_stride, j);
#if TYPE != Q8_0
    const uint4 q = *(const uint4*)(quants + j * 512);
#endif
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int i = 2 * j + h;
      float unit = 1.f;
#if TYPE == Q8_0
      const uint4 q = *(const uint4*)(quants + i * 512);
      multiply_s8(c, q.x, q.z, q.y, q.w, b, h);
#elif TYPE == IQ4_NL
      multiply_iq4(c, h ? q.z : q.x, h ? q.w : q.y, table, b, h);
#elif HAS_FIFTH_BITS
      multiply_u8(c, five_bits(q.x, fifth.x, i), five_bits(q.z, fifth.z, i), five_bits(q.y, fifth.y, i),
                  five_bits(q.w, fifth.w, i), b, h);
#else
      const u32 nibble = h ? 0xf0f0f0f0u : 0x0f0f0f0fu;  // odd blocks: 16 x their value
      unit = h ? 0.0625f : 1.f;
      multiply_u8(c, q.x & nibble, q.z & nibble, q.y & nibble, q.w & nibble, b, h);
#endif
      add_scaled(v, c, unit * half_of(top, i), unit * half_of(low, i));
    }
  }
#if HAS_BLOCK_NIBBLES
  // What is added to every value of a block: m, or -8 d, or -16 d. Lane t has those of blocks 2 t, 2 t + 1.
#if TYPE == Q4_1 || TYPE == Q5_1
  const u8* minima = record + MINIMA + g * 16 + (lane & 3) * 4;
  const u32 m0 = *(const u32*)minima, m1 = *(const u32*)(minima + 128);
#else
  const u8* scales = record + SCALES + g * 16 + (lane & 3) * 4;
  const u32 offset = TYPE == Q4_0 ? 0xc800c800u : 0xcc00cc00u;   // -8, -16
  const u32 m0 = hmul2(*(const u32*)scales, offset), m1 = hmul2(*(const u32*)(scales + 128), offset);
#endif
  FOR_PLANES {
    const uint2 digits = *(const uint2*)(sums + p * plane_stride);
    float low_part[4] = {0.f, 0.f, 0.f, 0.f}, high_part[4] = {0.f, 0.f, 0.f, 0.f};
    mma_f16(low_part, m0, m1, 0, 0, digits.x, 0);
    mma_f16(high_part, m0, m1, 0, 0, digits.y, 0);
    FOR_CELLS v[p][k] += __fmaf_rn(64.f, cell(high_part, k), cell(low_part, k));
  }
#endif
#endif
}
