// zero_page: clears a page.   page 16-byte aligned; any grid and block
extern "C" __global__ void zero_page(uint4* page, long long vectors) {
  const long long stride = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < vectors; i += stride)
    page[i] = make_uint4(0, 0, 0, 0);
}
