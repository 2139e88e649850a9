// Vector types, and what kernel libraries and the runtime (runtime.cpp) know of each other.
#pragma once

// ---- vectors ----

#define KVS_VECTOR(name, type, bytes)                                                                             \
  struct __attribute__((aligned(2 * bytes))) name##2 { type x, y; };                                              \
  struct name##3 { type x, y, z; };                                                                               \
  struct __attribute__((aligned(4 * bytes > 16 ? 16 : 4 * bytes))) name##4 { type x, y, z, w; };                  \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }                                                \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }                                     \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
KVS_VECTOR(char, signed char, 1)
KVS_VECTOR(uchar, unsigned char, 1)
KVS_VECTOR(short, short, 2)
KVS_VECTOR(ushort, unsigned short, 2)
KVS_VECTOR(int, int, 4)
KVS_VECTOR(uint, unsigned, 4)
KVS_VECTOR(float, float, 4)
KVS_VECTOR(longlong, long long, 8)
KVS_VECTOR(ulonglong, unsigned long long, 8)
KVS_VECTOR(double, double, 8)

// ---- the runtime ----

namespace cpu {
using u32 = unsigned;
using u64 = unsigned long long;

struct Here {   // the thread that runs
  uint3 thread;
  u32 lane;
};
extern Here* here;
extern uint3 block, block_dim, grid_dim;

// Ends the launch with an error that names kernel, block and thread.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
// Something happened that another thread may wait for in a loop.
extern bool stirred;

// The lanes of ``mask`` meet; the last to come runs ``compute`` on what all of them brought (null for others).
typedef void Compute(void* const (&lanes)[32]);
void meet(u32 mask, Compute* compute, void* brought);
// A barrier of the block: all threads that have not returned, or ``threads`` of them.
void barrier(u32 id, u32 threads);

u32 shared_offset(const void* p);
void* shared_pointer(u32 a);
void bulk_copy(u32 dst, const void* src, u32 bytes, u32 bar, void (*count)(u32 bar, u32 arrivals, u32 bytes));
void wait_for_copies(u32 bar);
void cp_async(u32 dst, const void* src, u32 bytes);
void cp_async_commit();
void cp_async_wait(u32 groups_left);
void pdl_wait();
void pdl_trigger();
bool elect();
}  // namespace cpu
