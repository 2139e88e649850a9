// The tables that kernels of a step read from device memory; the layouts of kvs_core/device/cuda/tables.py.
#pragma once

// Step table: int [16].
constexpr int STEP_POSITION = 0;   // position of row 0
constexpr int STEP_ROWS = 1;       // rows of the step
constexpr int STEP_PENDING = 2;    // rows that recurrent layers have not applied yet
constexpr int STEP_STORE = 3;      // 1 if recurrent layers store their state, 0 in a draft
constexpr int STEP_KEPT = 4;       // rows of the last step that were kept
constexpr int STEP_TOKENS = 8;     // tokens of a decode step

// Plan table of one layer: header | slots | calls | parts | folds. Launchers pass where slots, calls, parts and folds
// begin as pointers: their places depend on capacity.
constexpr int PLAN_PAGES = 0;
constexpr int PLAN_SEGMENTS = 1;
constexpr int PLAN_FIRST_LAST_FOLD = 2;
constexpr int PLAN_LAST_FOLDS = 3;

struct PlanCall { int first_part, parts, first_fold, folds; };
struct PlanPart { int scratch_row, fresh, first_page, pages; };
struct PlanFold { int scratch_row, segment, fresh, zero; };
