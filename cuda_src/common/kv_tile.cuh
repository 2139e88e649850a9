// Tiles of keys and values as f16 in shared memory, in the order in which tensor cores take them, from pages of any
// order and type. Attention kernels read a tile with one 16-byte load per lane and two products; nothing is transposed.
//
// With lane = 4g + t of a warp, a uint4 = 8 halves (fragments of mma.m16n8k16, see ptx.cuh):
//
//   key tile    uint4 [tokens / 16][key blocks][parity: 2][lane]       key blocks = head dim / 32, rounded up
//               token 2g + parity of the 16, dims 4t..4t+3 and 16+4t..16+4t+3 of the 32 (zeros behind the head's end)
//               .x .y  b0 b1 of a first product over dims, .z .w of a second: k = 2t, 2t+1 are dims 4t, 4t+1 and
//               k = 2t+8, 2t+9 are dims 4t+2, 4t+3 (16 more in the second). Queries are to be placed alike
//   value tile  uint4 [head dim / 16][tokens / 16][slot of lane]
//               dim g of the 16, tokens 4t..4t+3 of the 16, then dim g + 8, the same tokens
//               .x .y  b0 b1 of a product over tokens for dims g, .z .w of one for dims g + 8: k = 2t, 2t+1 are
//               tokens 4t, 4t+1 and k = 2t+8, 2t+9 are tokens 4t+2, 4t+3
//
// As A fragments (decode: rows are tokens, or dims):  keys a0 = even.x, a1 = odd.x, a2 = even.y, a3 = odd.y (.z .w);
// values a0 = .x, a1 = .z, a2 = .y, a3 = .w.
//
// A key product gives scores of tokens 2g + parity in column g. So the four scores of columns 2t and 2t + 1 of both
// parities are of tokens 4t..4t+3, in the order even, odd, even, odd: what the product with the values takes.
//
// Stored f32 and bf16 numbers too large for f16 become the largest f16.
#pragma once
#include "common/fragments.cuh"
#include "common/kv_types.cuh"
#include "common/ptx.cuh"

DEVICE constexpr int key_blocks(int dim) { return (dim + 31) / 32; }
DEVICE constexpr int key_tile_bytes(int tokens, int dim) { return tokens * key_blocks(dim) * 64; }
DEVICE constexpr int value_tile_bytes(int tokens, int dim) { return tokens * dim * 2; }

// ---- reading tiles ----

DEVICE uint4 key_fragment(const uint4* tile, int blocks, int piece, int block, int parity, int lane) {
  return tile[((piece * blocks + block) * 2 + parity) * 32 + lane];
}
// Slots of lanes 16..31 are swapped in pairs of four, so that the writers of rows meet no bank twice.
DEVICE int value_slot(int lane) { return lane ^ (lane >> 2 & 4); }
DEVICE uint4 value_fragment(const uint4* tile, int steps, int dim_tile, int step, int lane) {
  return tile[(dim_tile * steps + step) * 32 + value_slot(lane)];
}

// ---- stored numbers to f16 ----

DEVICE u32 both(u16 h) { return (u32)h << 16 | h; }
DEVICE u32 u32_at(const u8* p) { return *(const u16*)p | (u32) * (const u16*)(p + 2) << 16; }   // 2-byte aligned
DEVICE u16 u16_at(const u8* p) { return *(const u16*)p; }
DEVICE u32 f2h2_within(float x, float y) {
  return f2h2(fminf(fmaxf(x, -65504.f), 65504.f), fminf(fmaxf(y, -65504.f), 65504.f));
}

// Four bytes each as 1024 + byte, exact in f16; ``bias`` (twice) brings them to the numbers they mean.
DEVICE uint2 whole_f16(u32 bytes, u32 bias) {
  return {hadd2(prmt(bytes, 0x64646464u, 0x4140), bias), hadd2(prmt(bytes, 0x64646464u, 0x4342), bias)};
}
DEVICE uint4 scaled(uint2 low, uint2 high, u16 d) {
  const u32 dd = both(d);
  return {hmul2(low.x, dd), hmul2(low.y, dd), hmul2(high.x, dd), hmul2(high.y, dd)};
}
DEVICE uint4 scaled(uint2 low, uint2 high, u16 d, u16 m) {
  const u32 dd = both(d), mm = both(m);
  return {hfma2(low.x, dd, mm), hfma2(low.y, dd, mm), hfma2(high.x, dd, mm), hfma2(high.y, dd, mm)};
}
constexpr u32 MINUS_1024 = 0xe400e400u, MINUS_1032 = 0xe408e408u, MINUS_1040 = 0xe410e410u, MINUS_1152 = 0xe480e480u;
constexpr u32 NIBBLES = 0x0f0f0f0fu;

// Bits 0..3 of ``bits`` as bit 4 of bytes 0..3.
DEVICE u32 fifths(u32 bits) { return ((bits & 15) * 0x00204081u & 0x01010101u) << 4; }

// iq4_nl's numbers + 128 for the nibbles of two bytes: low, high, low, high.
DEVICE u32 iq4_nl_bytes(u32 nibbles) {
  // table + 128:  1 24 45 63 | 79 93 106 118 | 129 141 153 166 | 181 197 217 241
  const u32 below = prmt(0x3f2d1801u, 0x766a5d4fu, nibbles & 0x7777);
  const u32 above = prmt(0xa6998d81u, 0xf1d9c5b5u, nibbles & 0x7777);
  return prmt(below, above, 0x3210 | (nibbles & 0x8888) >> 1);
}

// Eight numbers of a stored row: dims 4 quad .. + 3 of the block of 32, and those 16 further (zeros unless ``upper``).
template <int TYPE> DEVICE uint4 kv_eight(const u8* row, int block, int quad, bool upper = true) {
  const u8* const b = row + block * kv_block_bytes(TYPE);
  if constexpr (TYPE == KV_F32) {
    const float4 x = *(const float4*)(b + 16 * quad), y = upper ? *(const float4*)(b + 64 + 16 * quad) : float4{};
    return {f2h2_within(x.x, x.y), f2h2_within(x.z, x.w), f2h2_within(y.x, y.y), f2h2_within(y.z, y.w)};
  } else if constexpr (TYPE == KV_F16 || TYPE == KV_BF16) {
    const uint2 x = *(const uint2*)(b + 8 * quad), y = upper ? *(const uint2*)(b + 32 + 8 * quad) : uint2{};
    if constexpr (TYPE == KV_F16) return {x.x, x.y, y.x, y.y};
    auto narrow = [](u32 two) { return f2h2_within(bf2f_lo(two), bf2f_hi(two)); };
    return {narrow(x.x), narrow(x.y), narrow(y.x), narrow(y.y)};
  } else if constexpr (TYPE == KV_Q8_0) {
    const u32 low = u32_at(b + 2 + 4 * quad) ^ 0x80808080u, high = u32_at(b + 18 + 4 * quad) ^ 0x80808080u;
    return scaled(whole_f16(low, MINUS_1152), whole_f16(high, MINUS_1152), u16_at(b));
  } else if constexpr (TYPE == KV_IQ4_NL) {
    const u32 w = u32_at(b + 2 + 4 * quad), x = iq4_nl_bytes(w & 0xffff), y = iq4_nl_bytes(w >> 16);
    return scaled(whole_f16(prmt(x, y, 0x6420), MINUS_1152), whole_f16(prmt(x, y, 0x7531), MINUS_1152), u16_at(b));
  } else {
    constexpr bool fives = TYPE == KV_Q5_0 || TYPE == KV_Q5_1, affine = TYPE == KV_Q4_1 || TYPE == KV_Q5_1;
    constexpr int bits_at = affine ? 4 : 2;
    constexpr u32 bias = affine ? MINUS_1024 : fives ? MINUS_1040 : MINUS_1032;
    const u32 w = u32_at(b + bits_at + (fives ? 4 : 0) + 4 * quad);
    u32 low = w & NIBBLES, high = w >> 4 & NIBBLES;
    if constexpr (fives) {
      const u32 bits = u32_at(b + bits_at) >> 4 * quad;
      low |= fifths(bits), high |= fifths(bits >> 16);
    }
    if constexpr (affine) return scaled(whole_f16(low, bias), whole_f16(high, bias), u16_at(b), u16_at(b + 2));
    return scaled(whole_f16(low, bias), whole_f16(high, bias), u16_at(b));
  }
}

// ---- ROWS pages: threads thread, thread + THREADS, ... of a block fill a tile together; a barrier comes after ----
// ``rows``: the stored rows of the tile's first token on, STRIDE bytes apart, in global or shared memory.

template <int TYPE, int DIM, int STRIDE, int TOKENS, int THREADS>
DEVICE void open_key_rows(const u8* rows, uint4* tile, int thread) {
  constexpr int BLOCKS = key_blocks(DIM), UNITS = TOKENS * BLOCKS * 4;
#pragma unroll
  for (int first = 0; first < UNITS; first += THREADS) {
    const int unit = first + thread;
    if (UNITS % THREADS && unit >= UNITS) break;
    // Lanes: t, two neighbours g, blocks. So rows are read with few bank conflicts, and the tile is written without.
    const int t = unit & 3, block = (unit >> 3) % BLOCKS, rest = (unit >> 3) / BLOCKS;
    const int g = (rest & 3) * 2 + (unit >> 2 & 1), parity = rest >> 2 & 1, piece = rest >> 3;
    const bool upper = DIM % 32 == 0 || block < DIM / 32;
    const u8* const row = rows + (piece * 16 + g * 2 + parity) * STRIDE;
    tile[((piece * BLOCKS + block) * 2 + parity) * 32 + g * 4 + t] = kv_eight<TYPE>(row, block, t, upper);
  }
}

// FROM: tokens of the tile before ``first_token`` become zeros, whatever they hold.
template <int TYPE, int DIM, int STRIDE, int TOKENS, int THREADS, bool FROM>
DEVICE void open_value_rows(const u8* rows, uint4* tile, int thread, int first_token) {
  constexpr int BLOCKS = key_blocks(DIM), STEPS = TOKENS / 16, UNITS = STEPS * BLOCKS * 16;
#pragma unroll
  for (int first = 0; first < UNITS; first += THREADS) {
    const int unit = first + thread;
    if (UNITS % THREADS && unit >= UNITS) break;
    const int t = unit & 3, quad = unit >> 2 & 3, block = (unit >> 4) % BLOCKS, step = (unit >> 4) / BLOCKS;
    const bool upper = DIM % 32 == 0 || block < DIM / 32;
    uint4 x[4];   // of four tokens: dims 0 1 | 2 3 | 16 17 | 18 19 behind 4 quad
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x[i] = kv_eight<TYPE>(rows + (step * 16 + t * 4 + i) * STRIDE, block, quad, upper);
      if constexpr (FROM)
        if (step * 16 + t * 4 + i < first_token) x[i] = uint4{};
    }
    auto put = [&](int dim, u32 a, u32 b, u32 c, u32 d, u32 half) {
      const int lane = (dim & 7) * 4 + t;
      uint2* const at = (uint2*)(tile + ((dim >> 4) * STEPS + step) * 32 + value_slot(lane)) + (dim >> 3 & 1);
      *at = {prmt(a, b, half), prmt(c, d, half)};
    };
    const int dim = block * 32 + quad * 4;
    put(dim, x[0].x, x[1].x, x[2].x, x[3].x, 0x5410), put(dim + 1, x[0].x, x[1].x, x[2].x, x[3].x, 0x7632);
    put(dim + 2, x[0].y, x[1].y, x[2].y, x[3].y, 0x5410), put(dim + 3, x[0].y, x[1].y, x[2].y, x[3].y, 0x7632);
    if (!upper) continue;
    put(dim + 16, x[0].z, x[1].z, x[2].z, x[3].z, 0x5410), put(dim + 17, x[0].z, x[1].z, x[2].z, x[3].z, 0x7632);
    put(dim + 18, x[0].w, x[1].w, x[2].w, x[3].w, 0x5410), put(dim + 19, x[0].w, x[1].w, x[2].w, x[3].w, 0x7632);
  }
}

// ---- FRAGMENTS pages: the same, from stored pieces ----

// ``pieces``: K pieces of 16 tokens, as stored.
template <int TOKENS, int THREADS> DEVICE void open_key_pieces(const u8* pieces, uint4* tile, int thread) {
  constexpr int UNITS = TOKENS / 16 * 8 * 32;
#pragma unroll
  for (int first = 0; first < UNITS; first += THREADS) {
    const int unit = first + thread, lane = unit & 31, block = unit >> 5 & 7, piece = unit >> 8;
    if (UNITS % THREADS && unit >= UNITS) break;
    const u8* const at = pieces + piece * FRAGMENT_K_PIECE;
    const uint4 q = *(const uint4*)(at + (block * 32 + lane) * 16);
    const u8* const d = at + FRAGMENT_K_SCALES + (lane >> 2) * 32 + block * 2;
    uint4* const to = tile + (piece * 8 + block) * 64 + lane;
    to[0] = scaled(whole_f16(q.x, MINUS_1152), whole_f16(q.y, MINUS_1152), u16_at(d));
    to[32] = scaled(whole_f16(q.z, MINUS_1152), whole_f16(q.w, MINUS_1152), u16_at(d + 16));
  }
}

// ``quarter`` [16 dim tiles][lane][4 words] and ``scales`` f16 [8 blocks][64]: of 64 tokens, a quarter of a page, of
// which the tile takes TOKENS from step ``first_step`` of 16 on. FROM: as for rows.
template <int TOKENS, int THREADS, bool FROM>
DEVICE void open_value_pieces(
    const u8* quarter, const u8* scales, int first_step, uint4* tile, int thread, int first_token) {
  constexpr int STEPS = TOKENS / 16, UNITS = 16 * 32;
#pragma unroll
  for (int first = 0; first < UNITS; first += THREADS) {
    const int unit = first + thread, lane = unit & 31, dim_tile = unit >> 5;
    if (UNITS % THREADS && unit >= UNITS) break;
    const u32* const words = (const u32*)quarter + unit * 4 + first_step;
    const uint2* const d = (const uint2*)scales + (dim_tile >> 1) * 16 + first_step * 4 + (lane & 3);
    u32 w[STEPS];
    if constexpr (STEPS == 4) {
      const uint4 all = *(const uint4*)words;
      w[0] = all.x, w[1] = all.y, w[2] = all.z, w[3] = all.w;
    } else {
#pragma unroll
      for (int s = 0; s < STEPS; s++) w[s] = words[s];
    }
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      const u32 first_two = w[s], last_two = w[s] >> 8;   // tokens, in both halves
      uint2 dd = d[s * 4];
      if constexpr (FROM) {
        const int token = s * 16 + (lane & 3) * 4;
        dd = {from_token(dd.x, token, first_token), from_token(dd.y, token + 2, first_token)};
      }
      // 1024 + nibble - 1032, or (1024 + 16 nibble) / 16 - 72: the nibble - 8
      auto low = [](u32 x) { return hadd2((x & 0x000f000fu) | 0x64006400u, MINUS_1032); };
      auto high = [](u32 x) { return hfma2((x & 0x00f000f0u) | 0x64006400u, 0x2c002c00u, 0xd480d480u); };
      tile[(dim_tile * STEPS + s) * 32 + value_slot(lane)] = {
        hmul2(low(first_two), dd.x), hmul2(low(last_two), dd.y),
        hmul2(high(first_two), dd.x), hmul2(high(last_two), dd.y)};
    }
  }
}
