// Weight records (common/records.cuh) to rows of float16, for the GEMM of prefill. One warp per record.  -DTYPE
//   out [last_row - first_row][n_in] float16: rows [first_row, last_row) of the matrix
// Tile i holds rows i tile_step + 0..7 and, half_step further, eight more (gate and up rows side by side, or 8).
#include "common/records.cuh"

// Four values d * byte + add, bytes signed.
DEVICE uint2 four(u32 bytes, float d, float add) {
  return make_uint2(f2h2(fmaf(d, (float)signed_byte(bytes, 0), add), fmaf(d, (float)signed_byte(bytes, 1), add)),
                    f2h2(fmaf(d, (float)signed_byte(bytes, 2), add), fmaf(d, (float)signed_byte(bytes, 3), add)));
}

extern "C" __global__ void __launch_bounds__(256)
dequant_records(const u8* __restrict__ weight, int first_tile, int n_tiles, int n_blocks, int n_in, int tile_step,
                int half_step, int first_row, int last_row, u16* __restrict__ out) {
  const long long index = (long long)blockIdx.x * 8 + (threadIdx.x >> 5);
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  if (index >= (long long)n_tiles * n_blocks) return;
  const int tile = first_tile + (int)(index / n_blocks), block = (int)(index % n_blocks);
  const u8* r = weight + ((size_t)tile * n_blocks + block) * RECORD;
  const u8* quants = r + lane * 16;
  u16* rows[2];
#pragma unroll
  for (int u = 0; u < 2; u++) {
    const int row = tile * tile_step + g + u * half_step;
    rows[u] = row >= first_row && row < last_row ? out + (size_t)(row - first_row) * n_in : nullptr;
  }
  // Columns 4 t .. 4 t + 3 of a half of 16 of block b of 32.
  const auto put = [&](int u, int b, int half, uint2 values) {
    const int column = block * 256 + b * 32 + half * 16 + 4 * t;
    if (rows[u] && column < n_in) *(uint2*)(rows[u] + column) = values;
  };
#if HAS_SUPER_SCALES || HAS_BLOCK_NIBBLES
#if HAS_FIFTH_BITS
  const uint4 f4 = *(const uint4*)(quants + FIFTH_BITS);
  const u32 fifth[4] = {f4.x, f4.y, f4.z, f4.w};
#endif
#if HAS_SUPER_SCALES
  uint4 head[2];
#pragma unroll
  for (int u = 0; u < 2; u++) head[u] = *(const uint4*)(r + SCALES + (g + 8 * u) * 16);
#endif
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const uint4 q4 = *(const uint4*)(quants + j * 512);
    const u32 q[4] = {q4.x, q4.y, q4.z, q4.w};
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int b = 2 * j + h;
      float d[2], add[2];
#pragma unroll
      for (int u = 0; u < 2; u++) {
#if HAS_SUPER_SCALES
        d[u] = h2f_lo(head[u].x) * (float)signed_byte(head_scales(head[u], b >= 4), b & 3);
        add[u] = -h2f_hi(head[u].x) * (float)signed_byte(head_minima(head[u], b >= 4), b & 3);
#else
        d[u] = h2f(*(const u16*)(r + SCALES + (g + 8 * u) * 16 + 2 * b));
#if TYPE == Q4_1 || TYPE == Q5_1
        add[u] = h2f(*(const u16*)(r + MINIMA + (g + 8 * u) * 16 + 2 * b));
#else
        add[u] = d[u] * (TYPE == Q4_0 ? -8.f : -16.f);
#endif
#endif
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        u32 value = (h ? q[i] >> 4 : q[i]) & 0x0f0f0f0fu;
#if HAS_FIFTH_BITS
        value |= (b < 4 ? fifth[i] << (4 - b) : fifth[i] >> (b - 4)) & 0x10101010u;
#endif
        put(i >> 1, b, i & 1, four(value, d[i >> 1], add[i >> 1]));
      }
    }
  }
#elif TYPE == Q6_K
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const uint4 p4 = *(const uint4*)(quants + n * 1536 + 1024);
    const u32 pairs[4] = {p4.x, p4.y, p4.z, p4.w};
#pragma unroll
    for (int w = 0; w < 2; w++) {
      const uint4 q4 = *(const uint4*)(quants + n * 1536 + w * 512);
      const u32 q[4] = {q4.x, q4.y, q4.z, q4.w};
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int pair = w + 2 * h, b = n * 4 + pair, row = g + 8 * (i >> 1);
          const u32 value = ((h ? __funnelshift_r(q[i], q[i], 4) : q[i]) & 0x3c3c3c3cu) |
                            ((pair < 3 ? pairs[i] << (6 - 2 * pair) : pairs[i]) & 0xc0c0c0c0u);
          const float scale = (float)*(const s8*)(r + SCALES + row * 16 + 2 * b + (i & 1));
          put(i >> 1, b, i & 1, four(value, 0.25f * h2f(*(const u16*)(r + SIX_BIT_D + row * 2)) * scale, 0.f));
        }
    }
  }
#elif HAS_VALUE_TABLE
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const uint4 q4 = *(const uint4*)(quants + j * 512);
    const u32 q[4] = {q4.x, q4.y, q4.z, q4.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int b = 2 * j + (i >> 1), u = i & 1;
        const u32 index = q[i] >> (16 * h), flipped = index ^ 0x8888u;
        const u32 below = prmt(0xbfad9881u, 0xf6eaddcfu, index), above = prmt(0x26190d01u, 0x71594535u, flipped);
        // From 0x80 (a plain byte) where the index is 8 or more and 0xff (its sign, repeated) where it is not.
        u32 negative = prmt(0x80808080u, 0x80808080u, flipped);
        negative = (negative & 0x7f7f7f7fu) | ((negative & 0x01010101u) << 7);
#if TYPE == IQ4_XS
        const uint2 head = *(const uint2*)(r + SCALES + (g + 8 * u) * 8);
        const float d = 0.25f * h2f_lo(head.x) * (float)signed_byte(iq4_scales(head, b >= 4), b & 3);
#else
        const float d = h2f(*(const u16*)(r + SCALES + (g + 8 * u) * 16 + 2 * b));
#endif
        put(u, b, h, four((below & negative) | (above & ~negative), d, 0.f));
      }
  }
#else   // Q8_0
#pragma unroll
  for (int b = 0; b < 8; b++) {
    const uint4 q4 = *(const uint4*)(quants + b * 512);
    const u32 q[4] = {q4.x, q4.y, q4.z, q4.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float d = h2f(*(const u16*)(r + SCALES + (g + 8 * (i >> 1)) * 16 + 2 * b));
      put(i >> 1, b, i & 1, four(q[i], d, 0.f));
    }
  }
#endif
}
