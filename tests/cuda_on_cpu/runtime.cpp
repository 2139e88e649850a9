// Runs the blocks of a launch one after the other, the threads of a block as fibers: a thread runs until it has to wait
// for others, then the next one that can go on does. Errors end the launch with a message instead of the process.
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <link.h>

#include "context.h"
#include "past.h"
#include "threads.h"

namespace cpu {
namespace {

constexpr u32 most_threads = 1024, barriers = 16, shared_base = 1024;
constexpr size_t stack_bytes = 256 << 10, guard_bytes = 4096;

struct Copy {
  u32 dst;
  const void* src;
  u32 bytes, bar, group;
  bool there;
};
struct Copies {
  Copy* list = nullptr;
  u32 n = 0, room = 0;
  void add(const Copy& copy) {
    if (n == room) list = (Copy*)realloc(list, (room = room ? 2 * room : 16) * sizeof(Copy));
    list[n++] = copy;
  }
};

enum State { READY, MEETING, AT_BARRIER, ON_COPIES, ON_PREDECESSOR, RETURNED };
struct Fiber : Here {
  Context context;
  State state;
  u32 warp, barrier, mask;
  Compute* compute;
  void* brought;
  Copies copies;   // cp.async, in order
  u32 groups;      // committed
};
struct Barrier {
  Fiber* waiting[most_threads];
  u32 n, wanted;
};

Fiber fibers[most_threads];
Barrier barrier_of[barriers];
Fiber* ready[most_threads];   // a ring: each fiber is in it at most once
u32 ready_first, n_ready, n_threads, n_live;
Copies bulk;
char* stacks;
Context scheduler;
bool failed, waited_for_predecessor, triggered;
Trigger trigger_of_launch;   // of the last block to let it
Past past;
char message[512];
char *shared_begin, *shared_end, *dynamic_begin;
void (*kernel)(void**);
void** kernel_args;

void push(Fiber* fiber) {
  fiber->state = READY;
  ready[(ready_first + n_ready++) % most_threads] = fiber;
}
void enter(Context& from, Fiber* to) {
  here = to;
  change(from, to->context);
}
Fiber* pop() {
  Fiber* next = ready[ready_first];
  ready_first = (ready_first + 1) % most_threads;
  n_ready--;
  return next;
}
void wait() {
  Fiber* me = (Fiber*)here;
  if (!n_ready) change(me->context, scheduler);
  else enter(me->context, pop());
}

void release(Barrier& at) {
  for (u32 i = 0; i < at.n; i++) push(at.waiting[i]);
  at.n = 0;
  stirred = true;
}
// If all living lanes of the mask have come: works out what they came for and lets all but ``here`` go on.
bool complete(u32 warp, u32 mask, Compute* compute) {
  Fiber* const lanes = fibers + 32 * warp;
  void* brought[32] = {};
  for (u32 l = 32; l--;) {   // downwards: lanes come upwards as a rule, so that one that is missing is met at once
    const Fiber& lane = lanes[l];
    if (!(mask >> l & 1) || 32 * warp + l >= n_threads || lane.state == RETURNED) continue;
    if (lane.state != MEETING || lane.mask != mask || lane.compute != compute) return false;
    brought[l] = lane.brought;
  }
  compute(brought);
  stirred = true;
  for (u32 l = 0; l < 32; l++) {
    if (!brought[l]) continue;
    if (&lanes[l] == here) lanes[l].state = READY;
    else push(&lanes[l]);
  }
  return true;
}

void run_thread() {
  kernel(kernel_args);
  Fiber* me = (Fiber*)here;
  me->state = RETURNED;
  n_live--;
  stirred = true;
  for (u32 l = 0; l < 32; l++) {   // others may have waited for this lane alone
    Fiber& lane = fibers[32 * me->warp + l];
    if (32 * me->warp + l < n_threads && lane.state == MEETING) complete(me->warp, lane.mask, lane.compute);
  }
  for (Barrier& at : barrier_of)
    if (at.n && !at.wanted && at.n == n_live) release(at);
  wait();
}

void describe_deadlock() {
  u32 counts[RETURNED + 1] = {};
  for (u32 i = 0; i < n_threads; i++) counts[fibers[i].state]++;
  snprintf(message, sizeof message,
           "no thread can go on: %u wait for lanes of their warp, %u at a barrier, %u for bulk copies that nobody "
           "issued, %u have returned", counts[MEETING], counts[AT_BARRIER], counts[ON_COPIES], counts[RETURNED]);
}

void finish_copy(const Copy& copy) {
  if (!copy.there) memcpy(shared_pointer(copy.dst), copy.src, copy.bytes);
}
// All that can be done before the predecessor is done: copies that are on their way have read by now, and so it is.
bool end_past() {
  const auto arrive = [](Copies& copies) {
    for (u32 i = 0; i < copies.n; i++) finish_copy(copies.list[i]), copies.list[i].there = true;
  };
  if (!past.seen) return false;
  arrive(bulk);
  for (u32 i = 0; i < n_threads; i++) arrive(fibers[i].copies);
  past.end();
  for (u32 i = 0; i < n_threads; i++)
    if (fibers[i].state == ON_PREDECESSOR) push(&fibers[i]);
  return true;
}

bool run_block(bool backwards, u32 shared_bytes) {
  memset(shared_begin, 0xff, (size_t)(dynamic_begin - shared_begin) + shared_bytes);   // poison
  const char* dynamic_end = dynamic_begin + 227 * 1024;
  memset((char*)dynamic_end, 0xff, (size_t)(shared_end - dynamic_end));
  n_live = n_threads, n_ready = ready_first = bulk.n = 0;
  waited_for_predecessor = failed = triggered = false;
  past.show();
  for (Barrier& at : barrier_of) at.n = 0;
  for (u32 i = 0; i < n_threads; i++) {
    Fiber& fiber = fibers[i];
    prepare(fiber.context, stacks + i * stack_bytes + guard_bytes, stack_bytes - guard_bytes, run_thread);
    fiber.thread = {i, 0, 0}, fiber.lane = i % 32, fiber.warp = i / 32;
    fiber.copies.n = fiber.groups = 0;
  }
  const u32 warps = (n_threads + 31) / 32;
  for (u32 w = 0; w < warps; w++)
    for (u32 i = 32 * (backwards ? warps - 1 - w : w), l = 0; l < 32 && i + l < n_threads; l++) push(&fibers[i + l]);
  do {
    stirred = false;
    while (n_ready && !failed) enter(scheduler, pop());
    if (failed || !n_live) break;
    for (u32 i = 0; stirred && i < n_threads; i++)
      if (fibers[i].state == ON_COPIES) push(&fibers[i]);
  } while (n_ready || end_past());
  past.end();
  trigger_of_launch = triggered ? trigger_of_launch : NEVER;
  if (failed) return false;
  here = nullptr;
  if (n_live) return describe_deadlock(), false;
  if (bulk.n) return snprintf(message, sizeof message, "%u bulk copies that nobody waited for", bulk.n), false;
  // What lies beyond: compared with itself a byte further on, many times faster than byte by byte after every block.
  const char* p = dynamic_begin + shared_bytes;
  if (p < dynamic_end && (*p != '\xa5' || memcmp(p, p + 1, dynamic_end - p - 1))) {
    while (*p == '\xa5') p++;
    snprintf(message, sizeof message, "wrote byte %u of dynamic shared memory, which has %u",
             (u32)(p - dynamic_begin), shared_bytes);
    return false;
  }
  return true;
}

// ---- signals: an address that is not there, or no end ----

sigjmp_buf escape;
constexpr int caught[] = {SIGSEGV, SIGBUS, SIGFPE, SIGVTALRM};

void on_signal(int number, siginfo_t* info, void*) {
  const char* const touched = (const char*)info->si_addr;
  if (number == SIGVTALRM) {
    snprintf(message, sizeof message, "does not end");
  } else if (number == SIGFPE) {
    snprintf(message, sizeof message, "divided an integer by zero");
  } else if (touched >= stacks && touched < stacks + most_threads * stack_bytes) {
    snprintf(message, sizeof message, "a thread has more local variables than the stand-in's %zu KiB of stack",
             stack_bytes >> 10);
  } else {
    snprintf(message, sizeof message, "touched address 0x%llx, where there is nothing", (u64)touched);
  }
  siglongjmp(escape, 1);
}

struct Signals {
  struct sigaction before[sizeof caught / sizeof *caught];
  stack_t stack_before;
  char stack[64 << 10];
  timer_t timer;

  explicit Signals(u32 seconds) {
    stack_t mine{};
    mine.ss_sp = stack, mine.ss_size = sizeof stack;
    sigaltstack(&mine, &stack_before);
    struct sigaction action{};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    u32 i = 0;
    for (int number : caught) sigaction(number, &action, &before[i++]);
    struct sigevent event{};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = SIGVTALRM;
    event._sigev_un._tid = (pid_t)syscall(SYS_gettid);
    timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer);
    struct itimerspec limit{};
    limit.it_value.tv_sec = seconds;
    timer_settime(timer, 0, &limit, nullptr);
  }
  ~Signals() {
    timer_delete(timer);
    u32 i = 0;
    for (int number : caught) sigaction(number, &before[i++], nullptr);
    sigaltstack(&stack_before, nullptr);
  }
};

int find_shared(dl_phdr_info* info, size_t, void*) {
  char* const begin = (char*)info->dlpi_tls_data;
  for (int i = 0; begin && i < info->dlpi_phnum; i++) {
    char* const end = begin + info->dlpi_phdr[i].p_memsz;
    if (info->dlpi_phdr[i].p_type == PT_TLS && dynamic_begin >= begin && dynamic_begin < end) {
      shared_begin = begin, shared_end = end;
      return 1;
    }
  }
  return 0;
}

bool run_blocks(u32 shared_bytes, u32 seed, bool overlap) {
  const u64 blocks = (u64)grid_dim.x * grid_dim.y * grid_dim.z;
  u64 step = seed ? blocks / 2 + seed : 1;   // with a step prime to their number, all blocks come, in another order
  const auto divisor = [](u64 a, u64 b) { while (b) { const u64 r = a % b; a = b, b = r; } return a; };
  while (divisor(step, blocks) != 1) step++;
  for (u64 n = 0; n < blocks; n++) {
    const u64 at = (n * (step % blocks) + seed) % blocks;
    block = {(u32)(at % grid_dim.x), (u32)(at / grid_dim.x % grid_dim.y), (u32)(at / grid_dim.x / grid_dim.y)};
    if (!run_block((n + seed) % 2, shared_bytes)) return false;
    if (overlap && !waited_for_predecessor) {
      snprintf(message, sizeof message, "was launched with overlap, and no thread called pdl_wait");
      return false;
    }
  }
  return true;
}

}  // namespace

Here* here;
uint3 block, block_dim, grid_dim;
bool stirred;

void fail(const char* format, ...) {
  va_list list;
  va_start(list, format);
  vsnprintf(message, sizeof message, format, list);
  va_end(list);
  failed = true;
  change(((Fiber*)here)->context, scheduler);
  abort();
}

void meet(u32 mask, Compute* compute, void* brought) {
  Fiber* me = (Fiber*)here;
  if (!(mask >> me->lane & 1)) fail("lane %u calls a function of the lanes %#x", me->lane, mask);
  me->state = MEETING, me->mask = mask, me->compute = compute, me->brought = brought;
  if (!complete(me->warp, mask, compute)) wait();
}

void barrier(u32 id, u32 threads) {
  Fiber* me = (Fiber*)here;
  Barrier& at = barrier_of[id];
  if (at.n && at.wanted != threads) fail("threads disagree on how many meet at barrier %u", id);
  at.wanted = threads;
  if (at.n + 1 == (threads ? threads : n_live)) return release(at);
  at.waiting[at.n++] = me;
  me->state = AT_BARRIER;
  wait();
}

u32 shared_offset(const void* p) {
  if (p < shared_begin || p > shared_end) fail("takes the shared address of something that is not in shared memory");
  return shared_base + (u32)((const char*)p - shared_begin);
}
void* shared_pointer(u32 a) {
  if (a < shared_base || a > shared_base + (u32)(shared_end - shared_begin))
    fail("uses %u as a shared address, which it is not", a);
  return shared_begin + (a - shared_base);
}

// Copies arrive as late as they may: when somebody waits. Until then what they bring is poison.
static void begin_copy(Copies& copies, const Copy& copy) {
  if (copy.dst % 16 || (u64)copy.src % 16 || copy.bytes % 16)
    fail("copies %u bytes from %#llx to shared address %u: all must be multiples of 16", copy.bytes, (u64)copy.src,
         copy.dst);
  shared_pointer(copy.dst + copy.bytes);
  memset(shared_pointer(copy.dst), 0xff, copy.bytes);
  copies.add(copy);
}
static void (*count)(u32 bar, u32 arrivals, u32 bytes);

void bulk_copy(u32 dst, const void* src, u32 bytes, u32 bar, void (*mbar_count)(u32, u32, u32)) {
  begin_copy(bulk, {dst, src, bytes, bar, 0, false});
  count = mbar_count;
  stirred = true;
}
void wait_for_copies(u32 bar) {
  u32 left = 0, arrived = bulk.n;
  for (u32 i = 0; i < bulk.n; i++) {
    const Copy copy = bulk.list[i];
    if (copy.bar != bar) {
      bulk.list[left++] = copy;
      continue;
    }
    finish_copy(copy);
    count(bar, 0, 0u - copy.bytes);
  }
  bulk.n = left;
  if (arrived != left) {
    stirred = true;
  } else {
    ((Fiber*)here)->state = ON_COPIES;
    wait();
  }
}

void cp_async(u32 dst, const void* src, u32 bytes) {
  Fiber* me = (Fiber*)here;
  begin_copy(me->copies, {dst, src, bytes, 0, me->groups, false});
}
void cp_async_commit() { ((Fiber*)here)->groups++; }
void cp_async_wait(u32 groups_left) {
  Fiber* me = (Fiber*)here;
  u32 left = 0;
  for (u32 i = 0; i < me->copies.n; i++) {
    const Copy copy = me->copies.list[i];
    if (copy.group + groups_left < me->groups) finish_copy(copy);
    else me->copies.list[left++] = copy;
  }
  me->copies.n = left;
}

void pdl_wait() {
  waited_for_predecessor = true;
  if (!past.seen) return;
  ((Fiber*)here)->state = ON_PREDECESSOR;
  wait();
}
void pdl_trigger() {
  if (!triggered && waited_for_predecessor && trigger_of_launch == BEFORE_WAIT) trigger_of_launch = BEHIND_WAIT;
  triggered = true;
}
bool elect() {
  meet(~0u, [](void* const (&)[32]) {}, here);   // of a converged warp
  return here->lane == 0;
}

}  // namespace cpu

using namespace cpu;

// Runs ``call`` with ``args`` for every thread. False: ``error`` says what went wrong, and where.
//   dynamic   the library's kvs_dynamic_shared
//   seed      0: blocks in order; else in another order, a different one per seed
//   overlap   the launch demands a pdl_wait
//   spans     what kernels that may still run have changed
//   trigger   is set to when the last block lets the next kernel start
//   seconds   of processor time, after which it counts as endless
extern "C" bool kvs_launch(void (*call)(void**), void** args, const u32* grid, u32 threads, u32 shared_bytes,
                           void* dynamic, u32 seed, bool overlap, Span* spans, u32 n_spans, u32* trigger, u32 seconds,
                           char* error, u32 error_bytes) {
  if (!stacks) {
    stacks = (char*)mmap(nullptr, most_threads * stack_bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    for (u32 i = 0; i < most_threads; i++) mprotect(stacks + i * stack_bytes, guard_bytes, PROT_NONE);
  }
  past = {spans, n_spans, false}, trigger_of_launch = BEFORE_WAIT;
  kernel = call, kernel_args = args, n_threads = threads;
  grid_dim = {grid[0], grid[1], grid[2]}, block_dim = {threads, 1, 1};
  dynamic_begin = (char*)dynamic;
  dl_iterate_phdr(find_shared, nullptr);
  memset(dynamic_begin, 0xa5, 227 * 1024);
  bool done = false;
  {
    Signals signals(seconds);
    if (sigsetjmp(escape, 1) == 0) done = run_blocks(shared_bytes, seed, overlap);
  }
  past.end();
  *trigger = trigger_of_launch;
  if (done) return true;
  const int n = snprintf(error, error_bytes, "block (%u, %u, %u)", block.x, block.y, block.z);
  if (here) snprintf(error + n, error_bytes - (u32)n, ", thread %u: %s", here->thread.x, message);
  else snprintf(error + n, error_bytes - (u32)n, ": %s", message);
  here = nullptr;
  return false;
}
