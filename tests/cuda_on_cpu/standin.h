// The CUDA of the CPU: what a kernel source may use, for g++. Included before a source that the builder (build.py) has
// prepared; no system header comes along, so that a kernel that needs one fails here as it does with NVRTC.
//
//   static shared memory   thread_local of the kernel's library: one known range of bytes, poisoned before each block
//   dynamic                kvs_dynamic_shared, in the same range, so that 32-bit shared addresses are offsets into it
//   threads                fibers of one OS thread (runtime.cpp); nothing here needs a lock
#pragma once

using size_t = decltype(sizeof(0));
static_assert(sizeof(long) == 8 && sizeof(long long) == 8, "64-bit Linux");

#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __constant__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __CUDACC_RTC__ 1

#include "threads.h"

constexpr int kvs_dynamic_bytes = 227 * 1024;
static thread_local __align__(1024) unsigned char kvs_dynamic_shared[kvs_dynamic_bytes];

#define threadIdx (cpu::here->thread)
#define blockIdx cpu::block
#define blockDim cpu::block_dim
#define gridDim cpu::grid_dim
#define warpSize 32

inline void __syncthreads() { cpu::barrier(0, 0); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) {}

#include "intrinsics.h"
#include "warp.h"

// ---- how the launcher reaches a kernel: kvs_call_<name>(addresses of its arguments), kvs_signature_<name> ----

namespace cpu {
template <class T> constexpr char code = 'S';
template <class T> constexpr char code<T*> = 'P';
template <> constexpr char code<int> = 'i';
template <> constexpr char code<u32> = 'u';
template <> constexpr char code<float> = 'f';
template <> constexpr char code<long> = 'l';
template <> constexpr char code<long long> = 'l';
template <> constexpr char code<unsigned long> = 'L';
template <> constexpr char code<u64> = 'L';
template <int... I> struct Ints {};
template <class... A, int... I> void call(void (*kernel)(A...), void** args, Ints<I...>) { kernel(*(A*)args[I]...); }
template <class... A> void call(void (*kernel)(A...), void** args) {
  call(kernel, args, Ints<__integer_pack(sizeof...(A))...>());
}
template <class F> struct Signature;
template <class... A> struct Signature<void (*)(A...)> { static constexpr char text[] = {code<A>..., 0}; };
}  // namespace cpu

extern "C" void* kvs_shared_memory() { return kvs_dynamic_shared; }
