// The sum of a number over the threads of a block: lanes by halving distances, then the warps in order.
#pragma once
#include "ptx.cuh"

// Every thread gets it.   parts  shared, a number per warp; read behind the barrier, so each sum has its own
template <int WARPS> DEVICE float block_sum(float sum, float* parts) {
#pragma unroll
  for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
  if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = sum;
  __syncthreads();
  float total = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) total += parts[w];
  return total;
}
