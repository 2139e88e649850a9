// Bytes of a tensor whose blocks are drawn from a pool (kvs_core/formats/synthetic_blocks.py), once, at load.
//   -DBLOCK_WORDS   16-bit words of a block
//   -DPOOL_BLOCKS   blocks of the pool, a power of two
// out[i] = word skip + i of the blocks first_block, first_block + 1, ... of a tensor, for i in [0, n_words).
// A thread makes every (gridDim.x * blockDim.x)-th word; any grid and block. The pool stays in the L2 cache.
#include "common/ptx.cuh"

DEVICE u32 drawn_block(u32 index, u32 seed) {
  u32 x = index * 0x9e3779b1u + seed;
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return (x ^ x >> 16) & (POOL_BLOCKS - 1);
}

extern "C" __global__ void __launch_bounds__(256)
draw_blocks(const u16* __restrict__ pool, u32 seed, u32 first_block, u32 skip, u32 n_words, u16* __restrict__ out) {
  const u32 stride = gridDim.x * blockDim.x;
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < n_words; i += stride) {
    const u32 word = skip + i, block = word / BLOCK_WORDS;
    out[i] = pool[drawn_block(first_block + block, seed) * BLOCK_WORDS + (word - block * BLOCK_WORDS)];
  }
}
