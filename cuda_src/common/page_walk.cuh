// The pages that one block of a decode attention kernel adds, in order.
//
// A unit of work is (part of the call, column pass, kv head): unit u is part u / (passes * kv heads), and a block takes
// units blockIdx.x, blockIdx.x + gridDim.x, ... The grid is a multiple of passes * kv heads, so a block keeps its head
// and its columns. How many units there are stands in the plan table, not in the grid.
//
// WINDOWED: no row sees anything of the pages before ``least``. They would add nothing: a part begins behind them, but
// for its last page, so that every part has one.
#pragma once
#include "common/ptx.cuh"
#include "common/tables.cuh"

// The first page of a part that is added.
template <bool WINDOWED> DEVICE int part_begin(const PlanPart& part, int least) {
  if constexpr (WINDOWED) return max(part.first_page, min(least, part.first_page + part.pages - 1));
  return part.first_page;
}

// Walks ahead of the arithmetic; the part after the current one is loaded before it is needed.
template <int UNITS_PER_PART, bool WINDOWED> struct PageWalk {
  const PlanPart* parts;
  const int* slots;
  int least, unit, units, page, end, next_page, next_end;

  DEVICE PageWalk(const PlanPart* parts_, const int* slots_, int units_, int least_)
      : parts(parts_), slots(slots_), least(least_), unit((int)blockIdx.x - (int)gridDim.x), units(units_) {
    look_ahead();
    advance();
  }
  DEVICE bool done() const { return page >= end; }
  // Slot of the page, or -1 past the last one.
  DEVICE int slot() const { return done() ? -1 : slots[page]; }
  DEVICE void step() {
    if (++page == end) advance();
  }
  // The same, then a step.
  DEVICE int next() {
    const int here = slot();
    if (!done()) step();
    return here;
  }

 private:
  DEVICE void advance() {
    unit += gridDim.x, page = next_page, end = next_end;
    look_ahead();
  }
  DEVICE void look_ahead() {
    const int following = unit + gridDim.x;
    next_page = next_end = 0;
    if (following < units) {
      const PlanPart part = parts[following / UNITS_PER_PART];
      next_page = part_begin<WINDOWED>(part, least), next_end = part.first_page + part.pages;
    }
  }
};
