// Instructions that C++ does not reach, one small function each. The only file with inline PTX.
//
// Every function has up to three bodies:
//   the instruction                       where the GPU has it
//   the same result from older means      before that: sm_75 has smaller tensor-core shapes; some there is only from
//                                         sm_90 on, for kernels that have another way
//   a C++ twin, named in PTX(asm, twin)   on the CPU stand-in of the tests (-DKVS_ON_CPU, tests/cuda_on_cpu), which
//                                         defines __CUDA_ARCH__ too, so that it walks the path of the arch it plays
#pragma once

typedef unsigned char u8;
typedef signed char s8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef KVS_ON_CPU
#define PTX(code, ...) __VA_ARGS__
#else
#define PTX(code, ...) code
#endif
#define DEVICE __device__ __forceinline__

// ---- bytes and bits ----

// Byte select. A selector nibble 8 + j replicates the sign bit of byte j: __byte_perm does not promise that.
DEVICE u32 prmt(u32 a, u32 b, u32 selector) {
  u32 r;
  PTX(asm("prmt.b32 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector)), r = cpu::prmt(a, b, selector));
  return r;
}
// a * b + c on the multiply-add pipe: with b = c = -1 (opaque) a bitwise complement that spares the ALU pipe.
DEVICE u32 mad32(u32 a, u32 b, u32 c) {
  u32 r;
  PTX(asm("mad.lo.u32 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)), r = a * b + c);
  return r;
}
// Hides from the compiler where a value comes from: it stays in a register and is not recomputed at each use.
DEVICE void opaque(u32& value) { PTX(asm volatile("" : "+r"(value)), (void)value); }

// ---- 16-bit floats, as bits: f16 is u16, two of them a u32 with the first in the low half ----

DEVICE float h2f(u16 h) {
  float f;
  PTX(asm("cvt.f32.f16 %0,%1;" : "=f"(f) : "h"(h)), f = cpu::half_to_float(h));
  return f;
}
DEVICE float h2f_lo(u32 h) { return h2f((u16)(h & 0xffff)); }
DEVICE float h2f_hi(u32 h) { return h2f((u16)(h >> 16)); }
DEVICE u16 f2h(float f) {
  u16 h;
  PTX(asm("cvt.rn.f16.f32 %0,%1;" : "=h"(h) : "f"(f)), h = cpu::to_half(f));
  return h;
}
DEVICE u32 f2h2(float lo, float hi) {
#if __CUDA_ARCH__ >= 800 && !defined(KVS_ON_CPU)
  u32 r;
  asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
#else
  return (u32)f2h(lo) | (u32)f2h(hi) << 16;
#endif
}
DEVICE u32 hadd2(u32 a, u32 b) {
  u32 r;
  PTX(asm("add.rn.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b)), r = cpu::half2_fma(a, 0x3c003c00u, b));
  return r;
}
DEVICE u32 hmul2(u32 a, u32 b) {
  u32 r;
  PTX(asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b)), r = cpu::half2_fma(a, b, 0x80008000u));
  return r;
}
DEVICE u32 hfma2(u32 a, u32 b, u32 c) {
  u32 r;
  PTX(asm("fma.rn.f16x2 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)), r = cpu::half2_fma(a, b, c));
  return r;
}
DEVICE float bf2f_lo(u32 b) { return __uint_as_float(b << 16); }
DEVICE float bf2f_hi(u32 b) { return __uint_as_float(b & 0xffff0000u); }
// To nearest, ties to even.
DEVICE u16 f2bf(float f) {
#if __CUDA_ARCH__ >= 800 && !defined(KVS_ON_CPU)
  u16 b;
  asm("cvt.rn.bf16.f32 %0,%1;" : "=h"(b) : "f"(f));
  return b;
#else
  const u32 u = __float_as_uint(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (u16)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
#endif
}
DEVICE u32 f2bf2(float lo, float hi) { return (u32)f2bf(lo) | (u32)f2bf(hi) << 16; }
// 2^x, accurate to 2^-22; results below 2^-126 are zero.
DEVICE float ex2(float x) {
  float y;
  PTX(asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x)), y = x < -126.f ? 0.f : exp2f(x));
  return y;
}

// ---- tensor-core products: c += A B, sums in int32 or float32 ----
// In registers of lane l, with g = l / 4, t = l % 4 and v = values a register holds (four of 8 bits or two of 16):
//   A: a0 row g, a1 row g + 8, columns v*t .. v*t+v-1;  a2, a3 the same rows, 4*v columns further
//   B: b0 column g, rows v*t .. v*t+v-1;  b1 4*v rows further
//   C: c[0], c[1] row g, columns 2t, 2t + 1;  c[2], c[3] row g + 8

#if __CUDA_ARCH__ < 800
#define MMA_8X8(name, a_type, twin)                                                                            \
  DEVICE void name(int& c0, int& c1, u32 a, u32 b) {                                                           \
    PTX(asm("mma.sync.aligned.m8n8k16.row.col.s32." a_type ".s8.s32 {%0,%1},{%2},{%3},{%0,%1};"                \
          : "+r"(c0), "+r"(c1) : "r"(a), "r"(b)), cpu::mma_8x8<twin>(c0, c1, a, b));                           \
  }
MMA_8X8(mma_8x8_s8, "s8", s8)
MMA_8X8(mma_8x8_u8, "u8", u8)
DEVICE void mma_k8_f16(float (&c)[4], u32 a0, u32 a1, u32 b0) {
  PTX(asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b0)),
      cpu::mma<cpu::F16>(c, {a0, a1}, {b0}));
}
#endif

DEVICE void mma_s8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
  PTX(asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
    : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1)),
      cpu::mma<s8>(c, {a0, a1, a2, a3}, {b0, b1}));
#else
  mma_8x8_s8(c[0], c[1], a0, b0), mma_8x8_s8(c[0], c[1], a2, b1);
  mma_8x8_s8(c[2], c[3], a1, b0), mma_8x8_s8(c[2], c[3], a3, b1);
#endif
}
// A unsigned, B signed.
DEVICE void mma_u8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
  PTX(asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
    : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1)),
      cpu::mma<u8>(c, {a0, a1, a2, a3}, {b0, b1}));
#else
  mma_8x8_u8(c[0], c[1], a0, b0), mma_8x8_u8(c[0], c[1], a2, b1);
  mma_8x8_u8(c[2], c[3], a1, b0), mma_8x8_u8(c[2], c[3], a3, b1);
#endif
}
// Half as deep: 16 columns of A.
DEVICE void mma_s8_k16(int (&c)[4], u32 a0, u32 a1, u32 b0) {
#if __CUDA_ARCH__ >= 800
  PTX(asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
    : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(b0)), cpu::mma<s8>(c, {a0, a1}, {b0}));
#else
  mma_8x8_s8(c[0], c[1], a0, b0), mma_8x8_s8(c[2], c[3], a1, b0);
#endif
}
DEVICE void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
  PTX(asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1)),
      cpu::mma<cpu::F16>(c, {a0, a1, a2, a3}, {b0, b1}));
#else
  mma_k8_f16(c, a0, a1, b0), mma_k8_f16(c, a2, a3, b1);
#endif
}

// Barrier number ``id`` (1..15; 0 is __syncthreads) of so many threads of the block, whole warps.
DEVICE void barrier_of(u32 id, u32 threads) {
  PTX(asm volatile("bar.sync %0,%1;" :: "r"(id), "r"(threads) : "memory"), cpu::barrier(id, threads));
}

// ---- shared memory by 32-bit address ----

DEVICE u32 smem_u32(const void* p) {
  u32 a;
  PTX(a = (u32)__cvta_generic_to_shared(p), a = cpu::shared_offset(p));
  return a;
}
DEVICE void* smem_ptr(u32 a) {
  void* p;
  PTX(p = __cvta_shared_to_generic(a), p = cpu::shared_pointer(a));
  return p;
}
DEVICE u32 lds32(u32 a) {
  u32 v;
  PTX(asm volatile("ld.shared.u32 %0,[%1];" : "=r"(v) : "r"(a)), v = *(u32*)smem_ptr(a));
  return v;
}
DEVICE uint2 lds64(u32 a) {
  uint2 v;
  PTX(asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "r"(a)), v = *(uint2*)smem_ptr(a));
  return v;
}
DEVICE uint4 lds128(u32 a) {
  uint4 v;
  PTX(asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a)),
      v = *(uint4*)smem_ptr(a));
  return v;
}
// Raises the int at ``a`` to ``v`` if ``on``, without a branch and without fetching the old value.
DEVICE void smem_max(u32 a, int v, bool on) {
  PTX(asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p,%2,0;\n@p red.shared.max.s32 [%0],%1;\n}"
        :: "r"(a), "r"(v), "r"((u32)on) : "memory"),
      if (on && *(int*)smem_ptr(a) < v) *(int*)smem_ptr(a) = v);
}

// ---- data of the kernel before us: through L2, never the read-only path, whose lines may be older than the data ----

DEVICE float ldcg(const float* p) {
  float v;
  PTX(asm volatile("ld.global.cg.f32 %0,[%1];" : "=f"(v) : "l"(p)), v = *p);
  return v;
}
DEVICE u32 ldcg_u32(const void* p) {
  u32 v;
  PTX(asm volatile("ld.global.cg.u32 %0,[%1];" : "=r"(v) : "l"(p)), v = *(const u32*)p);
  return v;
}
DEVICE float2 ldcg2(const float* p) {
  float2 v;
  PTX(asm volatile("ld.global.cg.v2.f32 {%0,%1},[%2];" : "=f"(v.x), "=f"(v.y) : "l"(p)), v = *(const float2*)p);
  return v;
}
DEVICE float4 ldcg4(const float* p) {
  float4 v;
  PTX(asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3},[%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p)),
      v = *(const float4*)p);
  return v;
}
DEVICE uint4 ldcg4u(const void* p) {
  uint4 v;
  PTX(asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p)),
      v = *(const uint4*)p);
  return v;
}

// ---- programmatic dependent launch: nothing when the kernel is launched plainly ----

DEVICE void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  PTX(asm volatile("griddepcontrol.wait;" ::: "memory"), cpu::pdl_wait());
#endif
}
DEVICE void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
  PTX(asm volatile("griddepcontrol.launch_dependents;" ::: "memory"), cpu::pdl_trigger());
#endif
}
#if __CUDA_ARCH__ >= 900
// One lane of a converged warp.
DEVICE bool elect_one() {
  u32 p;
  PTX(asm volatile("{\n.reg .pred p;\nelect.sync _|p,0xffffffff;\nselp.u32 %0,1,0,p;\n}" : "=r"(p)),
      p = cpu::elect());
  return p != 0;
}
#endif

// ---- copies by single threads, global -> shared: 16 bytes, from sm_80 on in the background ----

DEVICE void cp_async16(u32 dst, const void* src) {
#if __CUDA_ARCH__ >= 800
  PTX(asm volatile("cp.async.cg.shared.global [%0],[%1],16;" :: "r"(dst), "l"(src) : "memory"),
      cpu::cp_async(dst, src, 16));
#else
  *(uint4*)smem_ptr(dst) = *(const uint4*)src;
#endif
}
DEVICE void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
  PTX(asm volatile("cp.async.commit_group;" ::: "memory"), cpu::cp_async_commit());
#endif
}
// Until all but the N newest groups of this thread have arrived; visible to others after a barrier.
template <int N> DEVICE void cp_async_wait() {
#if __CUDA_ARCH__ >= 800
  PTX(asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"), cpu::cp_async_wait(N));
#endif
}

// ---- bulk copies, global -> shared, completing on an mbarrier (u64 in shared memory): sm_90 has them ----
// One thread: mbar_expect(bar, bytes of all copies of a phase), then the copies. Anybody: mbar_wait(bar, parity), where
// parity is 0 for the first phase and alternates. The C++ twin counts in the word itself:
// [63] parity of the phase | [61:47] arrivals of a phase | [46:32] arrivals missing | [31:0] bytes missing.

#if __CUDA_ARCH__ >= 900
#ifdef KVS_ON_CPU
DEVICE void mbar_count(u32 bar, u32 arrivals, u32 bytes) {
  u64* const word = (u64*)smem_ptr(bar);
  const u32 high = (u32)(*word >> 32), left = (high & 0x7fff) - arrivals, due = (u32)*word + bytes;
  const bool full = left == 0 && due == 0;
  const u32 fresh = ((high ^ 0x80000000u) & ~0x7fffu) | (high >> 15 & 0x7fff);
  *word = (u64)(full ? fresh : (high & ~0x7fffu) | left) << 32 | due;
}
#endif

DEVICE void mbar_init(u32 bar, u32 arrivals) {
  PTX(asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" :: "r"(bar), "r"(arrivals)),
      *(u64*)smem_ptr(bar) = (u64)(arrivals << 15 | arrivals) << 32);
}
// After mbar_init, before the barrier that shows the mbarriers to other threads.
DEVICE void mbar_fence_init() {
  PTX(asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"), (void)0);
}
// One arrival that announces ``bytes``.
DEVICE void mbar_expect(u32 bar, u32 bytes) {
  PTX(asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" :: "r"(bar), "r"(bytes) : "memory"),
      mbar_count(bar, 1, bytes));
}
DEVICE void mbar_wait(u32 bar, u32 parity) {
  PTX(asm volatile("{\n.reg .pred p;\nKVS_WAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p,[%0],%1;\n"
                   "@p bra KVS_DONE;\nbra KVS_WAIT;\nKVS_DONE:\n}" :: "r"(bar), "r"(parity) : "memory"),
      while ((u32)(*(volatile u64*)smem_ptr(bar) >> 63) == parity) cpu::wait_for_copies(bar));
}
// dst, src and bytes are multiples of 16.
DEVICE void bulk_g2s(u32 dst, const void* src, u32 bytes, u32 bar) {
  PTX(asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];"
        :: "r"(dst), "l"(src), "r"(bytes), "r"(bar) : "memory"),
      cpu::bulk_copy(dst, src, bytes, bar, mbar_count));
}
DEVICE void bulk_g2s_hint(u32 dst, const void* src, u32 bytes, u32 bar, u64 policy) {
  PTX(asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                   "[%0],[%1],%2,[%3],%4;" :: "r"(dst), "l"(src), "r"(bytes), "r"(bar), "l"(policy) : "memory"),
      bulk_g2s(dst, src, bytes, bar));
}
#endif
// L2 policy for data that a step reads once.
DEVICE u64 policy_evict_first() {
#if __CUDA_ARCH__ >= 900
  u64 p;
  PTX(asm volatile("createpolicy.fractional.L2::evict_first.b64 %0,1.0;" : "=l"(p)), p = 0);
  return p;
#else
  return 0;
#endif
}

// ---- a ring of stages in shared memory that a warp fills for itself, global -> shared, by calls of the whole warp ----
// Each stage has an mbarrier: one lane calls ring_init for each of them and then ring_fence_init. Stage after stage, in a
// circle, ring_copy fills it, if there is something to copy, and ring_close ends it in any case; ring_wait comes before
// the oldest of ``stages`` is read, and a __syncwarp before it is filled anew.
// sm_90 has bulk copies; sm_80 cp.async of all lanes, in a group per stage; sm_75 copies at once.

DEVICE void ring_init(u32 bar) {
#if __CUDA_ARCH__ >= 900
  mbar_init(bar, 1);
#endif
}
DEVICE void ring_fence_init() {
#if __CUDA_ARCH__ >= 900
  mbar_fence_init();
#endif
}
// dst, src and BYTES are multiples of 16; policy: see policy_evict_first.
template <u32 BYTES> DEVICE void ring_copy(u32 dst, const void* src, u32 bar, u64 policy) {
#if __CUDA_ARCH__ >= 900
  if (elect_one()) {
    mbar_expect(bar, BYTES);
    bulk_g2s_hint(dst, src, BYTES, bar, policy);
  }
#else
#pragma unroll
  for (u32 at = (threadIdx.x & 31) * 16; at < BYTES; at += 512) cp_async16(dst + at, (const u8*)src + at);
#endif
}
DEVICE void ring_close() {
#if __CUDA_ARCH__ < 900
  cp_async_commit();
#endif
}
// phase: 0 in the first turn of the ring, then alternating; stages: 1..4.
DEVICE void ring_wait(u32 bar, u32 phase, int stages) {
#if __CUDA_ARCH__ >= 900
  mbar_wait(bar, phase);
#else
  if (stages == 4) cp_async_wait<3>();
  else if (stages == 3) cp_async_wait<2>();
  else if (stages == 2) cp_async_wait<1>();
  else cp_async_wait<0>();
  __syncwarp();
#endif
}
