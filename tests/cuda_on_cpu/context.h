// A context: a stack, and the registers that a call preserves.
#pragma once

#include <stddef.h>
#include <ucontext.h>

#if defined(__x86_64__) && !defined(KVS_UCONTEXT)
struct Context { void* sp; };
extern "C" void kvs_switch(void** save, void* load);
asm(".text\n.globl kvs_switch\nkvs_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");
static void prepare(Context& context, char* stack, size_t bytes, void (*run)()) {
  void** top = (void**)(stack + bytes);
  *--top = nullptr;           // where run would return to; it does not
  *--top = (void*)run;
  context.sp = top - 6;       // six registers, any values
}
static void change(Context& from, Context& to) { kvs_switch(&from.sp, to.sp); }
#else
typedef ucontext_t Context;
static void prepare(Context& context, char* stack, size_t bytes, void (*run)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = bytes;
  context.uc_link = nullptr;
  makecontext(&context, run, 0);
}
static void change(Context& from, Context& to) { swapcontext(&from, &to); }
#endif
