// What a block of a kernel that runs ahead finds: up to its pdl_wait the past, behind it the present. See past.py.
#pragma once

#include <string.h>

#include "threads.h"

namespace cpu {

// When a block lets the next kernel start, if that may overlap; NEVER: when it is done.
enum Trigger : u32 { BEFORE_WAIT, BEHIND_WAIT, NEVER };

// Bytes that kernels in front have changed. present: room for as many.
struct Span {
  unsigned char *at, *past, *present;
  u64 bytes;
};

struct Past {
  Span* spans = nullptr;
  u32 n = 0;           // none: the launch does not run ahead
  bool seen = false;   // now

  void show() {
    for (u32 i = 0; i < n; i++) {
      const Span& span = spans[i];
      memcpy(span.present, span.at, span.bytes);
      memcpy(span.at, span.past, span.bytes);
    }
    seen = n > 0;
  }
  // What the block has written meanwhile stays.
  void end() {
    for (u32 i = 0; seen && i < n; i++) {
      const Span& span = spans[i];
      for (u64 b = 0; b < span.bytes; b++)
        if (span.at[b] == span.past[b]) span.at[b] = span.present[b];
    }
    seen = false;
  }
};

}  // namespace cpu
