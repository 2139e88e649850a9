// Weights as they stand in a GGUF file: a row is blocks of 32 or 256 values, back to back, or plain numbers.
//
// A warp takes a row in tiles of 256 values. Lane l has eight of them: four from Blocks<TYPE>::first(l) on and four
// more SECOND values further, chosen so that the loads of a warp touch one run of bytes. A tile is loaded as raw
// bytes, so that several can be under way, and then turned into values. Those are, bit for bit, what
// kvs_core/formats/quants.py has: products and sums are rounded one by one. Values beyond a row's end are zero.
//
// A matrix begins at 16 bytes. Its blocks then are aligned to the power of two that divides their size: 2 for Q8_0,
// Q4_0, Q5_0, IQ4_NL, Q3_K and Q6_K, 4 for Q4_1 and Q2_K, 8 for Q5_1 and IQ4_XS, 16 for Q4_K and Q5_K. Rows of plain
// numbers are aligned to four of them if their length is a multiple of 4. Block layouts: ggml's ggml-common.h.
#pragma once
#include "common/ptx.cuh"

enum BlockType { F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS };

constexpr int TILE = 256;
DEVICE int tiles_of(int n) { return (n + TILE - 1) / TILE; }

// ---- parts of blocks ----

DEVICE u32 load_u16(const u8* p) { return *(const u16*)p; }
DEVICE u32 load_u32(const u8* p) { return *(const u32*)p; }
DEVICE u32 load_two_u16(const u8* p) { return load_u16(p) | load_u16(p + 2) << 16; }   // at an even address
DEVICE u32 byte_of(u32 word, int i) { return word >> 8 * i & 0xff; }

// Byte i of a word minus ``zero``, exactly: the byte goes into the mantissa of 2^23.
DEVICE float byte_value(u32 word, int i, float zero) {
  return __uint_as_float(prmt(word, 0x4b000000u, 0x7440u + i)) - (8388608.f + zero);
}
// Four values (byte - zero) * scale.
DEVICE void scaled_quad(float* v, u32 bytes, float zero, float scale) {
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] = __fmul_rn(byte_value(bytes, i, zero), scale);
}
// Four values byte * scale + least.
DEVICE void shifted_quad(float* v, u32 bytes, float scale, float least) {
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] = __fadd_rn(__fmul_rn(byte_value(bytes, i, 0.f), scale), least);
}
DEVICE u32 low_nibbles(u32 word) { return word & 0x0f0f0f0fu; }
DEVICE u32 high_nibbles(u32 word) { return word >> 4 & 0x0f0f0f0fu; }
// Bits 0..3 as bit 4 of four bytes.
DEVICE u32 fifth_bits(u32 bits) { return ((bits & 15) * 0x00204081u & 0x01010101u) << 4; }

// The table of IQ4_NL and IQ4_XS, plus 128: -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113.
constexpr float IQ4_ZERO = 128.f;
DEVICE u32 iq4_four(u32 nibbles) {   // of the low 16 bits
  const u32 index = nibbles & 0x7777u;
  const u32 lower = prmt(0x3f2d1801u, 0x766a5d4fu, index), upper = prmt(0xa6998d81u, 0xf1d9c5b5u, index);
  return prmt(lower, upper, 0x3210u | (nibbles & 0x8888u) >> 1);
}
DEVICE void iq4_quads(float* v, u32 word, float scale) {   // low nibbles of four bytes, then the high ones
  const u32 a = iq4_four(word), b = iq4_four(word >> 16);
  scaled_quad(v, prmt(a, b, 0x6420), IQ4_ZERO, scale);
  scaled_quad(v + 4, prmt(a, b, 0x7531), IQ4_ZERO, scale);
}

// ---- types ----

template <int TYPE> struct Blocks;

// Plain numbers: quads 128 values apart.
template <class Raw4> struct PlainBlocks {
  static constexpr int SECOND = 128;
  struct Raw { Raw4 quad[2]; };
  DEVICE static int first(int lane) { return 4 * lane; }
};
template <> struct Blocks<F32> : PlainBlocks<float4> {
  DEVICE static Raw load(const u8* row, int tile, int lane, int n) {
    Raw r = {};
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int k = tile * TILE + first(lane) + j * SECOND;
      const float* p = (const float*)row + k;
      if ((n & 3) == 0) {
        if (k < n) r.quad[j] = *(const float4*)p;
      } else {
        if (k < n) r.quad[j].x = p[0];
        if (k + 1 < n) r.quad[j].y = p[1];
        if (k + 2 < n) r.quad[j].z = p[2];
        if (k + 3 < n) r.quad[j].w = p[3];
      }
    }
    return r;
  }
  DEVICE static void values(const Raw& r, int, float (&v)[8]) {
#pragma unroll
    for (int j = 0; j < 2; j++)
      v[4 * j] = r.quad[j].x, v[4 * j + 1] = r.quad[j].y, v[4 * j + 2] = r.quad[j].z, v[4 * j + 3] = r.quad[j].w;
  }
};
struct ShortBlocks : PlainBlocks<uint2> {
  DEVICE static Raw load(const u8* row, int tile, int lane, int n) {
    Raw r = {};
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int k = tile * TILE + first(lane) + j * SECOND;
      const u16* p = (const u16*)row + k;
      if ((n & 3) == 0) {
        if (k < n) r.quad[j] = *(const uint2*)p;
      } else {
        if (k < n) r.quad[j].x = p[0];
        if (k + 1 < n) r.quad[j].x |= (u32)p[1] << 16;
        if (k + 2 < n) r.quad[j].y = p[2];
        if (k + 3 < n) r.quad[j].y |= (u32)p[3] << 16;
      }
    }
    return r;
  }
};
template <> struct Blocks<F16> : ShortBlocks {
  DEVICE static void values(const Raw& r, int, float (&v)[8]) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      v[4 * j] = h2f_lo(r.quad[j].x), v[4 * j + 1] = h2f_hi(r.quad[j].x);
      v[4 * j + 2] = h2f_lo(r.quad[j].y), v[4 * j + 3] = h2f_hi(r.quad[j].y);
    }
  }
};
template <> struct Blocks<BF16> : ShortBlocks {
  DEVICE static void values(const Raw& r, int, float (&v)[8]) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      v[4 * j] = bf2f_lo(r.quad[j].x), v[4 * j + 1] = bf2f_hi(r.quad[j].x);
      v[4 * j + 2] = bf2f_lo(r.quad[j].y), v[4 * j + 3] = bf2f_hi(r.quad[j].y);
    }
  }
};

// Blocks of 32 values: four lanes have one.
DEVICE int block32(int tile, int lane) { return tile * (TILE / 32) + (lane >> 2); }

// Q8_0, 34 bytes: d f16, q s8 [32];  q * d.   Eight values in a row.
template <> struct Blocks<Q8_0> {
  static constexpr int SECOND = 4;
  struct Raw { u32 q[2], d; };
  DEVICE static int first(int lane) { return 8 * lane; }
  DEVICE static Raw load(const u8* row, int tile, int lane, int n) {
    Raw r = {};
    if (block32(tile, lane) * 32 < n) {
      const u8* p = row + (size_t)block32(tile, lane) * 34;
      const u8* q = p + 2 + (lane & 3) * 8;
      r.q[0] = load_two_u16(q), r.q[1] = load_two_u16(q + 4), r.d = load_u16(p);
    }
    return r;
  }
  DEVICE static void values(const Raw& r, int, float (&v)[8]) {
    const float d = h2f((u16)r.d);
    scaled_quad(v, r.q[0] ^ 0x80808080u, 128.f, d);
    scaled_quad(v + 4, r.q[1] ^ 0x80808080u, 128.f, d);
  }
};

// Blocks of 32 nibbles: byte j has values j and j + 16.
struct NibbleBlocks {
  static constexpr int SECOND = 16;
  DEVICE static int first(int lane) { return 32 * (lane >> 2) + 4 * (lane & 3); }
};
// Q4_0, 18 bytes: d f16, q [16];  (q - 8) * d
template <> struct Blocks<Q4_0> : NibbleBlocks {
  struct Raw { u32 q, d; };
  DEVICE static Raw load(const u8* row, int tile, int lane, int n) {
    Raw r = {};
    if (block32(tile, lane) * 32 < n) {
      const u8* p = row + (size_t)block32(tile, lane) * 18;
      r.q = load_two_u16(p + 2 + 4 * (lane & 3)), r.d = load_u16(p);
    }
    return r;
  }
  DEVICE static void values(const Raw& r, int, float (&v)[8]) {
    const float d = h2f((u16)r.d);
    scaled_quad(v, low_nibbles(r.q), 8.f, d);
    scaled_quad(v + 4, high_nibbles(r.q), 8.f, d);
  }
};
// Q4_1, 20 bytes: d, m f16, q [16];  q * d + m
template <> struct Blocks<Q4_1> : NibbleBlocks {
  struct Raw { u32 q, dm; };
  DEVICE static Raw load(const u8* row, int tile, int lane, int n) {
    Raw r = {};
    if (block32(tile, lane) * 32 < n) {
      const u8* p = row + (size_t)block32(tile, lane) * 20;
      r.q = load_u32(p + 4 + 4 * (lane & 3)), r.dm = load_u32(p);
    }
    return r;
  }
  DEVICE static void values(const Raw& r, int, float (&v)[8]) {
    const float d = h2f_lo(r.dm), m = h2f_hi(r.dm);
    shifted_quad(v, low_nibbles(r.q), d, m);
    shifted_quad(v + 4, high_nibbles(r.q), d, m);
  }
};
// Q5_0, 22 bytes: d f16, fifth bits u32 (bit j: value j), q [16];  (q - 16) * d
template <> struct Blocks<Q5_0> : NibbleBlocks {
  struct Raw { u32 q, fifth, d; };
  DEVICE static Raw load(const u8* row, int tile, int lane, int n) {
    Raw r = {};
    if (block32(tile, lane) * 32 < n) {
      const u8* p = row + (size_t)block32(tile, lane) * 22;
      r.q = load_two_u16(p + 6 + 4 * (lane & 3)), r.fifth = load_two_u16(p + 2), r.d = load_u16(p);
    }
    return r;
  }
  DEVICE static void values(const Raw& r, int lane, float (&v)[8]) {
    const float d = h2f((u16)r.d);
    const u32 fifth = r.fifth >> 4 * (lane & 3);
    scaled_quad(v, low_nibbles(r.q) | fifth_bits(fifth), 16.f, d);
    scaled_quad(v + 4, high_nibbles(r.q) | fifth_bits(fifth >> 16), 16.f, d);
  }
};
// Q5_1, 24 bytes: d, m f16, fifth bits u32, q [16];  q * d + m
template <> struct Blocks<Q5_1> : NibbleBlocks {
  struct Raw { u32 q, fifth, dm; };
  DEVICE static Raw load(const u8* row, int tile, int lane, int n) {
    Raw r = {};
    if (block32(tile, lane) * 32 < n) {
      const u8* p = row + (size_t)block32(tile, lane) * 24;
      r.q = load_u32(p + 8 + 4 * (lane & 3)), r.fifth = load_u32(p + 4), r.dm = load_u32(p);
    }
    return r;
  }
  DEVICE static void values(const Raw& r, int lane, float (&v)[8]) {
    const float d = h2f_lo(r.dm), m = h2f_hi(r.dm);
    const u32 fifth = r.fifth >> 4 * (lane & 3);
    shifted_quad(v, low_nibbles(r.q) | fifth_bits(fifth), d, m);
    shifted_quad(v + 4, high_nibbles(r.q) | fifth_bits(fifth >> 16), d, m);
  }
};
// IQ4_NL, 18 bytes: d f16, q [16];  table[q] * d
template <> struct Blocks<IQ4_NL> : NibbleBlocks {
  struct Raw { u32 q, d; };
  DEVICE static Raw load(const u8* row, int tile, int lane, int n) {
    const Blocks<Q4_0>::Raw same = Blocks<Q4_0>::load(row, tile, lane, n);
    return {same.q, same.d};
  }
  DEVICE static void values(const Raw& r, int, float (&v)[8]) { iq4_quads(v, r.q, h2f((u16)r.d)); }
};
// IQ4_XS, 136 bytes, 256 values: d f16, high pairs of 8 scales u16, their low nibbles [4], q [8][16];
// table[q] * (d (scale - 32))
template <> struct Blocks<IQ4_XS> : NibbleBlocks {
  struct Raw { u32 q; uint2 head; };
  DEVICE static Raw load(const u8* row, int tile, int lane, int) {
    const u8* p = row + (size_t)tile * 136;
    return {load_u32(p + 8 + 4 * lane), *(const uint2*)p};
  }
  DEVICE static void values(const Raw& r, int lane, float (&v)[8]) {
    const int b = lane >> 2;
    const u32 scale = (r.head.y >> 4 * b & 15) | (r.head.x >> (16 + 2 * b) & 3) << 4;
    iq4_quads(v, r.q, __fmul_rn(h2f_lo(r.head.x), (float)((int)scale - 32)));
  }
};

// Q4_K, 144 bytes: d, dmin f16, 8 scales and minima of 6 bits [12], q nibbles [128]: byte j of 32 in group g has values
// 64 g + j and 64 g + 32 + j;  q * (d scale) - dmin least
struct ScaledNibbles {
  static constexpr int SECOND = 32;
  DEVICE static int first(int lane) { return 64 * (lane >> 3) + 4 * (lane & 7); }
  // Scales and minima of a lane's two quads. Of the 12 bytes, 0-3 and 4-7 have the first four scales and minima in the
  // low 6 bits; 8-11 the low nibbles of the last four, whose upper 2 bits are the upper 2 of bytes 0-7.
  DEVICE static void values(const uint4& head, u32 low, u32 high, int lane, float (&v)[8]) {
    const int group = lane >> 3, at = 2 * (group & 1);
    const bool last = group >= 2;
    const u32 scales = last ? (head.w & 0x0f0f0f0fu) | (head.y >> 2 & 0x30303030u) : head.y & 0x3f3f3f3fu;
    const u32 minima = last ? (head.w >> 4 & 0x0f0f0f0fu) | (head.z >> 2 & 0x30303030u) : head.z & 0x3f3f3f3fu;
    const float d = h2f_lo(head.x), dmin = h2f_hi(head.x);
#pragma unroll
    for (int j = 0; j < 2; j++)
      shifted_quad(v + 4 * j, j ? high : low, __fmul_rn(d, (float)byte_of(scales, at + j)),
                   -__fmul_rn(dmin, (float)byte_of(minima, at + j)));
  }
};
template <> struct Blocks<Q4_K> : ScaledNibbles {
  struct Raw { uint4 head; u32 q; };
  DEVICE static Raw load(const u8* row, int tile, int lane, int) {
    const u8* p = row + (size_t)tile * 144;
    return {*(const uint4*)p, load_u32(p + 16 + 4 * lane)};
  }
  DEVICE static void values(const Raw& r, int lane, float (&v)[8]) {
    ScaledNibbles::values(r.head, low_nibbles(r.q), high_nibbles(r.q), lane, v);
  }
};
// Q5_K, 176 bytes: as Q4_K with fifth bits [32] before the nibbles: bit b of byte j belongs to value 32 b + j.
template <> struct Blocks<Q5_K> : ScaledNibbles {
  struct Raw { uint4 head; u32 q, fifth; };
  DEVICE static Raw load(const u8* row, int tile, int lane, int) {
    const u8* p = row + (size_t)tile * 176;
    return {*(const uint4*)p, load_u32(p + 48 + 4 * lane), load_u32(p + 16 + 4 * (lane & 7))};
  }
  DEVICE static void values(const Raw& r, int lane, float (&v)[8]) {
    const u32 fifth = r.fifth >> 2 * (lane >> 3);
    ScaledNibbles::values(r.head, low_nibbles(r.q) | (fifth & 0x01010101u) << 4,
                          high_nibbles(r.q) | (fifth & 0x02020202u) << 3, lane, v);
  }
};

// Q6_K, 210 bytes: low nibbles [128], high pairs [64], 16 scales s8, d f16. Per half of 128 values, byte j of 64 has
// the nibbles of values j and j + 64, byte j of 32 the pairs of values j, j + 32, j + 64, j + 96;
// (q - 32) * (d scale)
template <> struct Blocks<Q6_K> {
  static constexpr int SECOND = 64;
  struct Raw { u32 low, high, d; int scale[2]; };
  DEVICE static int first(int lane) { return 128 * (lane >> 4) + 4 * (lane & 15); }
  DEVICE static Raw load(const u8* row, int tile, int lane, int) {
    const u8* p = row + (size_t)tile * 210;
    const s8* scale = (const s8*)p + 192 + 8 * (lane >> 4) + (lane >> 2 & 3);
    return {load_two_u16(p + 4 * lane), load_two_u16(p + 128 + 32 * (lane >> 4) + 4 * (lane & 7)), load_u16(p + 208),
            {scale[0], scale[4]}};
  }
  DEVICE static void values(const Raw& r, int lane, float (&v)[8]) {
    const float d = h2f((u16)r.d);
    const u32 high = r.high >> (lane >> 2 & 2);
    scaled_quad(v, low_nibbles(r.low) | (high & 0x03030303u) << 4, 32.f, __fmul_rn(d, (float)r.scale[0]));
    scaled_quad(v + 4, high_nibbles(r.low) | (high & 0x30303030u), 32.f, __fmul_rn(d, (float)r.scale[1]));
  }
};

// Pairs of bits. Per half of 128 values, byte j of 32 has values j, j + 32, j + 64, j + 96.
struct PairBlocks {
  static constexpr int SECOND = 32;
  DEVICE static int first(int lane) { return 64 * (lane >> 3) + 4 * (lane & 7); }
  DEVICE static int byte(int lane) { return 32 * (lane >> 4) + 4 * (lane & 7); }
};
// Q2_K, 84 bytes: 16 x (scale, least) nibbles, q [64], d, dmin f16;  q * (d scale) - dmin least
template <> struct Blocks<Q2_K> : PairBlocks {
  struct Raw { u32 q, scales, d; };
  DEVICE static Raw load(const u8* row, int tile, int lane, int) {
    const u8* p = row + (size_t)tile * 84;
    return {load_u32(p + 16 + byte(lane)), load_u32(p + 4 * (lane >> 3)), load_u32(p + 80)};
  }
  DEVICE static void values(const Raw& r, int lane, float (&v)[8]) {
    const float d = h2f_lo(r.d), dmin = h2f_hi(r.d);
    const u32 q = r.q >> (lane >> 1 & 4);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const u32 scale = byte_of(r.scales, (lane >> 2 & 1) + 2 * j);
      shifted_quad(v + 4 * j, q >> 2 * j & 0x03030303u, __fmul_rn(d, (float)(scale & 15)),
                   -__fmul_rn(dmin, (float)(scale >> 4)));
    }
  }
};
// Q3_K, 110 bytes: third bits [32] (bit b of byte j: value 32 b + j), q [64], 16 scales of 6 bits [12], d f16;
// (q - 4) * (d (scale - 32)).   Scale j: a nibble of byte j % 8 (the low one if j < 8), and above it pair j / 4 of byte
// 8 + j % 4.
template <> struct Blocks<Q3_K> : PairBlocks {
  struct Raw { u32 q, third, scale_low, scale_high, d; };
  DEVICE static Raw load(const u8* row, int tile, int lane, int) {
    const u8* p = row + (size_t)tile * 110;
    return {load_two_u16(p + 32 + byte(lane)), load_two_u16(p + 4 * (lane & 7)),
            load_two_u16(p + 96 + (lane >> 1 & 4)), load_two_u16(p + 104), load_u16(p + 108)};
  }
  DEVICE static void values(const Raw& r, int lane, float (&v)[8]) {
    const float d = h2f((u16)r.d);
    const int half = lane >> 4, quarter = lane >> 3;
    const u32 q = r.q >> (lane >> 1 & 4), third = r.third >> 2 * quarter;
    const u32 scales = (r.scale_low >> 4 * half & 0x0f0f0f0fu) | (r.scale_high >> 2 * quarter & 0x03030303u) << 4;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int scale = (int)byte_of(scales, (lane >> 2 & 1) + 2 * j) - 32;
      scaled_quad(v + 4 * j, (q >> 2 * j & 0x03030303u) | (third >> j & 0x01010101u) << 2, 4.f,
                  __fmul_rn(d, (float)scale));
    }
  }
};

// Columns k .. k + 3 of a row of n numbers that begins at 16 bytes if n is a multiple of 4.
DEVICE void store_quad(float* row, int k, int n, const float* v) {
  if ((n & 3) == 0) {
    if (k < n) *(float4*)(row + k) = make_float4(v[0], v[1], v[2], v[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (k + i < n) row[k + i] = v[i];
  }
}
