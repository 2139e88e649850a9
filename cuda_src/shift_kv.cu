// shift_kv: rows of two consecutive pages come together in a third, keys turned to other positions.
//
//   source   | .. first, from ``from`` on: row 0, 1, 2 ..   |   second: .. row rows - 1 | ..
//   page     | .. from ``to`` on: row 0 .. rows - 1 | ..        what lies before and behind keeps its bytes
//
//   key     decoded, Hadamard rotation undone, turned, rotated again, encoded again
//   value   its bytes are moved
//
// One warp does one head's key or value of one row: a row's bytes depend on that row and the angles alone. The page is
// none of the sources.   grid (rows / WARPS, G, 2: keys, values), block 32 WARPS
//
// Bits: those of kvs_core/device/host/ops/kv_shift.py, whose operations are done in its order, each rounded as there;
// only where a value is subnormal they may differ, since NVRTC is told -ftz=true. Angles come from the host.
//
// Compile-time facts:
//   K_TYPE, V_TYPE       of kv_types.cuh
//   DK, DV               head dims, multiples of 8 up to 512
//   K_ROTATION           Hadamard block of keys, 0 for none
//   N_ROT, INTERLEAVED   as in key_row.cuh
//   FRAGMENTS            1: byte order of fragments.cuh, 0: rows
#include "common/fragments.cuh"
#include "common/key_row.cuh"
#include "common/kv_decode.cuh"
#include "common/kv_encode.cuh"
#include "common/kv_types.cuh"
#include "common/ptx.cuh"

constexpr int WARPS = 4;
constexpr int K_ROW = kv_row_bytes(K_TYPE, DK), V_ROW = kv_row_bytes(V_TYPE, DV);
static_assert(!FRAGMENTS || (K_TYPE == KV_Q8_0 && V_TYPE == KV_Q4_0 && DK == 256 && DV == 256), "fragments");

// Moves the value of a row, from and to these bytes.
DEVICE void move_row(const u8* source, u8* row) {
  const int lane = threadIdx.x & 31;
  if constexpr (V_ROW % 16 == 0) {
    for (int i = lane; i < V_ROW / 16; i += 32) ((uint4*)row)[i] = ((const uint4*)source)[i];
  } else if constexpr (V_ROW % 4 == 0) {
    for (int i = lane; i < V_ROW / 4; i += 32) ((u32*)row)[i] = ((const u32*)source)[i];
  } else {
    for (int i = lane; i < V_ROW / 2; i += 32) ((u16*)row)[i] = ((const u16*)source)[i];
  }
}

// The same in fragment order, from token to token of two heads.
DEVICE void move_fragment_value(const u8* source, int from, u8* head, int to) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = lane; i < FRAGMENT_DIM / 2; i += 32) {
    const int dim = i / 8 * 16 + i % 8;   // its byte has dim + 8 too
    head[fragment_v(to, dim)] = source[fragment_v(from, dim)];
  }
  if (lane < FRAGMENT_DIM / 32)
    *(u16*)(head + fragment_v_scale(to, lane * 32)) = *(const u16*)(source + fragment_v_scale(from, lane * 32));
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) shift_kv(
    const u8* first, const u8* second,   // the second may be null where no row comes from it
    int from,                            // of the first page
    u8* page, int to, int rows,
    int page_tokens,
    const float* cs)                     // [N_ROT / 2][2] cosine and sine of the turn
{
  const int row = blockIdx.x * WARPS + __shfl_sync(~0u, threadIdx.x >> 5, 0);
  if (row >= rows) return;
  const bool is_first = from + row < page_tokens;
  const int old_token = from + row - (is_first ? 0 : page_tokens), token = to + row;
  const int k_part = page_tokens * K_ROW, v_part = page_tokens * V_ROW;
  const long long head = blockIdx.y * (long long)(k_part + v_part);
  const u8* const source = (is_first ? first : second) + head;
  u8* const out = page + head;
  if (blockIdx.z == 1) {
    if constexpr (FRAGMENTS) move_fragment_value(source, old_token, out, token);
    else move_row(source + k_part + old_token * V_ROW, out + k_part + token * V_ROW);
    return;
  }
  float v[NK], cosine[NK], sine[NK];
  load_angles(cs, cosine, sine);
  if constexpr (FRAGMENTS) load_fragment_key(source, old_token, v);
  else load_row<K_TYPE, DK>(source + old_token * K_ROW, v);
  rotate<K_ROTATION>(v);
  rotate_pairs(v, cosine, sine);
  rotate<K_ROTATION>(v);
  if constexpr (FRAGMENTS) store_fragment_key(out, token, v);
  else store_row<K_TYPE, DK>(out + token * K_ROW, v);
}
