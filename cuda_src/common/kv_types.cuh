// The types of K and V (KvType in kvs_core/paging/geometry.py), for -DK_TYPE=KV_Q8_0 and the like.
#pragma once

enum { KV_F32, KV_F16, KV_BF16, KV_Q8_0, KV_Q4_0, KV_Q4_1, KV_Q5_0, KV_Q5_1, KV_IQ4_NL };

// Bytes of a block of 32 values; of the types without blocks, bytes of 32 values.
__device__ constexpr int kv_block_bytes(int type) {
  constexpr int BYTES[9] = {128, 64, 64, 34, 18, 20, 22, 24, 18};
  return BYTES[type];
}
// Bytes of a row of ``dim`` values, a multiple of 8.
__device__ constexpr int kv_row_bytes(int type, int dim) { return dim / 8 * kv_block_bytes(type) / 4; }
