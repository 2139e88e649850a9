// Activation records: rows of numbers in 16-bit fixed point, the form that matmul_decode.cu multiplies.
//
//   x [rows][n] -> records [n / 256][plane][rows] of 320 bytes; plane 0 holds high bytes, plane 1 low bytes:
//   value = step * (256 * high + low),   step = largest magnitude of the row's 256 values / 32639
//
//   256 B  signed bytes; in each 64 values the byte of value o is at 16 (o%16 / 4) + 8 (o / 32) + 4 (o/16 % 2) + o%4:
//          one 16-byte load gives a lane its tensor-core operands of two blocks of 32
//    32 B  per t = 0..3: sums over blocks 2t, 2t + 1 of this plane's bytes, two low digits (f16), then two high ones;
//          sum = 64 * high + low
//     4 B  factor of this plane's bytes: 256 * step or step (f32);  28 B unused: columns of 320 bytes do not meet in
//          a bank of shared memory
//
// n is rounded up to 256; values beyond it are zero.
#pragma once
#include "common/ptx.cuh"

constexpr int ACT_BYTES = 320;
constexpr int ACT_SUMS = 256, ACT_FACTOR = 288;   // places in a record

// Record of a plane. ``rows`` in the whole buffer.
DEVICE u8* act_record(u8* records, int block, int plane, int row, int rows) {
  return records + ((size_t)(block * 2 + plane) * rows + row) * ACT_BYTES;
}

// Where in a record the bytes of values 8 lane .. 8 lane + 3 are; those of the next four are 16 further.
DEVICE int act_byte(int lane) {
  const int o = (8 * lane) & 63;
  return (lane >> 3) * 64 + ((o & 15) >> 2) * 16 + (o >> 5) * 8 + ((o >> 4) & 1) * 4;
}

// One warp writes both records of 256 values: lane l has values 8 l .. 8 l + 7.
DEVICE void quant256(const float (&v)[8], int lane, u8* high_record, u8* low_record) {
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) most = fmaxf(most, fabsf(v[i]));
#pragma unroll
  for (int o = 16; o; o >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
  const float scale = most > 0.f ? __fdividef(32639.f, most) : 0.f;
  u32 high[2], low[2];
  int high_sum = 0, low_sum = 0;
#pragma unroll
  for (int e = 0; e < 2; e++) {
    int h[4], l[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int q = __float2int_rn(__fmul_rn(v[4 * e + i], scale));
      h[i] = (q + 128) >> 8;
      l[i] = q - (h[i] << 8);
    }
    high[e] = prmt(prmt(h[0], h[1], 0x0040), prmt(h[2], h[3], 0x0040), 0x5410);
    low[e] = prmt(prmt(l[0], l[1], 0x0040), prmt(l[2], l[3], 0x0040), 0x5410);
    high_sum = __dp4a((int)high[e], 0x01010101, high_sum);
    low_sum = __dp4a((int)low[e], 0x01010101, low_sum);
  }
  const int at = act_byte(lane);
  *(u32*)(high_record + at) = high[0], *(u32*)(high_record + at + 16) = high[1];
  *(u32*)(low_record + at) = low[0], *(u32*)(low_record + at + 16) = low[1];
#pragma unroll
  for (int d = 1; d < 4; d <<= 1) {
    high_sum += __shfl_xor_sync(~0u, high_sum, d);
    low_sum += __shfl_xor_sync(~0u, low_sum, d);
  }
  if ((lane & 3) < 2) {   // of the four lanes of a block of 32, one writes each plane's digits
    const int sum = (lane & 1) ? low_sum : high_sum, d1 = (sum + 32) >> 6, d0 = sum - (d1 << 6), block = lane >> 2;
    u8* p = ((lane & 1) ? low_record : high_record) + ACT_SUMS + (block >> 1) * 8 + (block & 1) * 2;
    *(u16*)p = f2h((float)d0), *(u16*)(p + 4) = f2h((float)d1);
  }
  if (lane == 0) {
    const float step = most * (1.f / 32639.f);
    *(float*)(high_record + ACT_FACTOR) = step * 256.f, *(float*)(low_record + ACT_FACTOR) = step;
  }
}

// The same into a buffer of records: 256-block ``block`` of row ``row``.
DEVICE void quant256_to(const float (&v)[8], int lane, u8* records, int block, int row, int rows) {
  quant256(v, lane, act_record(records, block, 0, row, rows), act_record(records, block, 1, row, rows));
}

// Values [first, first + 8) of a row of n numbers that an earlier kernel wrote, zeros beyond its end. n is a multiple
// of 4 and the row begins at 16 bytes.
DEVICE void load8(float (&v)[8], const float* row, int first, int n) {
  const float4 zero = make_float4(0.f, 0.f, 0.f, 0.f);
  const float4 a = first < n ? ldcg4(row + first) : zero, b = first + 4 < n ? ldcg4(row + first + 4) : zero;
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

// A row's factor of the RMS norm, 1 / sqrt(mean + eps), from its blocks' sums of squares [(n + 255) / 256]. By one
// warp, every lane gets it. Split in two, so that the loads can be on their way while other work is done.
constexpr int SUMS_AHEAD = 3;
struct RowSums { float part[SUMS_AHEAD]; };
DEVICE RowSums load_sums(const float* sums, int n, int lane) {
  RowSums s;
#pragma unroll
  for (int j = 0; j < SUMS_AHEAD; j++) s.part[j] = lane + 32 * j < (n + 255) / 256 ? ldcg(sums + lane + 32 * j) : 0.f;
  return s;
}
DEVICE float rms_factor(const RowSums& s, const float* sums, int n, float eps, int lane) {
  float sum = (s.part[0] + s.part[1]) + s.part[2];
#pragma unroll 1
  for (int i = lane + 32 * SUMS_AHEAD; i < (n + 255) / 256; i += 32) sum += ldcg(sums + i);   // n > 24,576
#pragma unroll
  for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
  return rsqrtf(sum / n + eps);
}

// Gated norm of a lane's 8 values of a 256-block, heads of 128: v / rms(head) * norm * silu(z).   norm [128]
DEVICE void gated_norm8(float (&v)[8], const float (&z)[8], const float* norm, int lane, float eps) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) sum += v[i] * v[i];
#pragma unroll
  for (int d = 8; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
  const float r = rsqrtf(sum / 128.f + eps);
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] *= r * norm[(lane & 15) * 8 + i] * __fdividef(z[i], 1.f + __expf(-z[i]));
}
