// Rows of f32 to activation records (common/quant256.cuh), and the steps that go with it. One warp per (256 values,
// row); grid (blocks of four 256-blocks, rows), 128 threads. Rows of n numbers lie ``stride`` numbers apart. Those of
// add_quant and apply_parts begin at 16 bytes if n is a multiple of 4; of the others n always is, and they do.
#include "common/gelu.cuh"
#include "common/quant256.cuh"

struct Place { int lane, block, first, row; };
DEVICE Place place() {
  Place p;
  p.lane = threadIdx.x & 31, p.block = blockIdx.x * 4 + (threadIdx.x >> 5), p.row = blockIdx.y;
  p.first = p.block * 256 + p.lane * 8;
  return p;
}
DEVICE void store8(float* row, const float (&v)[8], int first, int n) {
  if (first < n) *(float4*)(row + first) = make_float4(v[0], v[1], v[2], v[3]);
  if (first + 4 < n) *(float4*)(row + first + 4) = make_float4(v[4], v[5], v[6], v[7]);
}
// The same for rows of any length and at any address, if not QUADS.
template <bool QUADS> DEVICE void load8_of(float (&v)[8], const float* row, int first, int n) {
  if constexpr (QUADS) {
    load8(v, row, first, n);
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = first + i < n ? ldcg(row + first + i) : 0.f;
  }
}
template <bool QUADS> DEVICE void store8_of(float* row, const float (&v)[8], int first, int n) {
  if constexpr (QUADS) {
    store8(row, v, first, n);
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (first + i < n) row[first + i] = v[i];
  }
}

constexpr int MOST_PARTS = 4;

// v = x + parts in order, written back to x.   parts [n_parts][rows][part_stride], part_stride a multiple of 4
template <bool QUADS>
DEVICE void add_parts(float (&v)[8], float* x, const float* parts, int n_parts, int part_stride, const Place& p,
                      int rows, int n) {
  float q[MOST_PARTS][8];
  load8_of<QUADS>(v, x, p.first, n);
#pragma unroll
  for (int s = 0; s < MOST_PARTS; s++)   // all loads before the first sum
    if (s < n_parts) load8_of<QUADS>(q[s], parts + ((size_t)s * rows + p.row) * part_stride, p.first, n);
#pragma unroll
  for (int s = 0; s < MOST_PARTS; s++)
    if (s < n_parts) {
#pragma unroll
      for (int i = 0; i < 8; i++) v[i] += q[s][i];
    }
  if (n_parts) store8_of<QUADS>(x, v, p.first, n);
}

template <bool QUADS>
DEVICE void add_and_norm(const Place& p, float* x, const float* parts, int n_parts, int part_stride, const float* norm,
                         int rows, int n, u8* records, float* normed, float* sums) {
  float w[8], v[8];
#pragma unroll
  for (int i = 0; i < 8; i++) w[i] = 0.f;
  if (QUADS && p.first + 8 <= n) {
    *(float4*)w = *(const float4*)(norm + p.first), *(float4*)(w + 4) = *(const float4*)(norm + p.first + 4);
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (p.first + i < n) w[i] = norm[p.first + i];
  }
  pdl_trigger();
  pdl_wait();
  if (p.block * 256 >= n) return;
  add_parts<QUADS>(v, x, parts, n_parts, part_stride, p, rows, n);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) sum += v[i] * v[i];
#pragma unroll
  for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
  if (p.lane == 0) sums[p.row * ((n + 255) / 256) + p.block] = sum;
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] *= w[i];
  if (normed) store8_of<QUADS>(normed + (size_t)p.row * n, v, p.first, n);
  if (records) quant256_to(v, p.lane, records, p.block, p.row, rows);
}

// Residual add and RMS norm without a sum over the row: x += parts; x * norm as records and as f32 rows; sums of
// squares [row][block]. A product of x * norm is scaled by 1 / sqrt(mean square + eps) afterwards.
//   records  or null    normed  [rows][n] or null
extern "C" __global__ void __launch_bounds__(128)
add_quant(float* x, int stride, const float* parts, int n_parts, int part_stride, const float* __restrict__ norm,
          int rows, int n, u8* records, float* normed, float* sums) {
  const Place p = place();
  float* row = x + (size_t)p.row * stride;
  if (n % 4 == 0) add_and_norm<true>(p, row, parts, n_parts, part_stride, norm, rows, n, records, normed, sums);
  else add_and_norm<false>(p, row, parts, n_parts, part_stride, norm, rows, n, records, normed, sums);
}

// x += parts alone.
extern "C" __global__ void __launch_bounds__(128)
apply_parts(float* x, int stride, const float* parts, int n_parts, int part_stride, int rows, int n) {
  pdl_trigger();
  pdl_wait();
  const Place p = place();
  if (p.block * 256 >= n) return;
  float v[8];
  float* row = x + (size_t)p.row * stride;
  if (n % 4 == 0) add_parts<true>(v, row, parts, n_parts, part_stride, p, rows, n);
  else add_parts<false>(v, row, parts, n_parts, part_stride, p, rows, n);
}

// Records of x.
extern "C" __global__ void __launch_bounds__(128) quant(const float* x, int stride, int rows, int n, u8* records) {
  pdl_trigger();
  pdl_wait();
  const Place p = place();
  if (p.block * 256 >= n) return;
  float v[8];
  load8(v, x + (size_t)p.row * stride, p.first, n);
  quant256_to(v, p.lane, records, p.block, p.row, rows);
}

// Rows of x that is records.   out [rows][n]
extern "C" __global__ void __launch_bounds__(128) unquant(const u8* records, int rows, int n, float* out) {
  pdl_trigger();
  pdl_wait();
  const Place p = place();
  if (p.block * 256 >= n) return;
  const u8* high = act_record((u8*)records, p.block, 0, p.row, rows);
  const u8* low = act_record((u8*)records, p.block, 1, p.row, rows);
  const float step = ldcg((const float*)(low + ACT_FACTOR));
  const int at = act_byte(p.lane);
  float v[8];
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const u32 h = ldcg_u32(high + at + 16 * e), l = ldcg_u32(low + at + 16 * e);
#pragma unroll
    for (int i = 0; i < 4; i++) v[4 * e + i] = step * (float)(256 * (s8)(h >> 8 * i) + (s8)(l >> 8 * i));
  }
  store8(out + (size_t)p.row * n, v, p.first, n);
}

// Rows normed per head of 128 and gated: see gated_norm8.   out [rows][n], n a multiple of 256
extern "C" __global__ void __launch_bounds__(128)
gated_norm(const float* x, int stride, const float* z, int z_stride, const float* __restrict__ norm, int n, float eps,
           float* out) {
  pdl_trigger();
  pdl_wait();
  const Place p = place();
  if (p.block * 256 >= n) return;
  float v[8], gate[8];
  load8(v, x + (size_t)p.row * stride, p.first, n);
  load8(gate, z + (size_t)p.row * z_stride, p.first, n);
  gated_norm8(v, gate, norm, p.lane, eps);
  store8(out + (size_t)p.row * n, v, p.first, n);
}

// out[row][c] = silu(y[row][c]) * y[row][n + c], or of gelu.   y [rows][2 n]; out rows out_stride apart
template <bool GELU> DEVICE void gated(const float* y, int n, float* out, int out_stride) {
  pdl_trigger();
  pdl_wait();
  const int c = blockIdx.x * 128 + threadIdx.x;
  if (c >= n) return;
  const float* row = y + (size_t)blockIdx.y * 2 * n;
  const float gate = ldcg(row + c), up = ldcg(row + n + c);
  out[(size_t)blockIdx.y * out_stride + c] = up * (GELU ? gelu(gate) : gate / (1.f + __expf(-gate)));
}
extern "C" __global__ void __launch_bounds__(128) swiglu(const float* y, int n, float* out, int out_stride) {
  gated<false>(y, n, out, out_stride);
}
extern "C" __global__ void __launch_bounds__(128) geglu(const float* y, int n, float* out, int out_stride) {
  gated<true>(y, n, out, out_stride);
}
