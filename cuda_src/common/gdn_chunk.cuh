// Gated DeltaNet, prefill: what gdn_chunks.cu leaves in scratch for gdn_scan.cu, and the products that both use.
//
// Rows go in chunks of 32. Per chunk and value head, with row i's unit key k_i, query q_i of length 1 / sqrt(DIM),
// value v_i, step b_i, decay g_i, products M[i][j] = g_{j+1} .. g_i for j <= i, G_i = g_0 .. g_i and R_j = M[last][j]:
//
//     gdn_chunks    T = (I + strictly_lower(b K K^T M))^-1;   U = T b V;   W = T b G K;   P = lower(Q K^T M)
//     gdn_scan      D = U - W S;   O = G Q S + P D;   S = G_last S + (R K)^T D
//
// The first needs no S: all chunks in parallel. All products run on f16 tensor cores with every number in two f16 parts
// (22 bits) and f32 sums; values beyond 65504 do not fit.
//
//   operands  [chunk][head][OPERAND_BYTES]   -W | G Q | R K | P as B fragments: tiles of 16 (k) x 8 (n), each lane's 16
//             bytes being b0, b1 of the high parts, then of the low ones (see the products in ptx.cuh)
//             -W, G Q  [key dims / 16][rows / 8]    k: key dim, n: row
//             R K      [rows / 16][key dims / 8]    k: row, n: key dim
//             P        [rows / 16][rows / 8]        k: row whose d is read, n: row that reads; tiles above the diagonal
//                                                   are neither written nor used
//   updates   [chunk][head][columns / 16][rows / 8][lane][4] f32   U as C fragments: column x row
//   keeps     [chunk][head] f32                   G_last
//
// A long call takes several passes, with two scratches in turn, so that the chunks of pass i + 1 work under the scan of
// pass i:
//     scan i     waits for chunks i, then lets chunks i + 1 begin
//     chunks i   begins so; of a pass before, it touches only the scratch that scan i - 2 read, which ended before
//                chunks i - 1 did, because chunks i - 1 waits at its end for scan i - 2
#pragma once
#include "ptx.cuh"

constexpr int CHUNK = 32;
constexpr int ROW_TILES = CHUNK / 8, ROW_STEPS = CHUNK / 16;
constexpr int KEY_TILES = DIM / 8, KEY_STEPS = DIM / 16;
constexpr int TILE_BYTES = 512;
constexpr int W_AT = 0;
constexpr int Q_AT = W_AT + KEY_STEPS * ROW_TILES * TILE_BYTES;
constexpr int K_AT = Q_AT + KEY_STEPS * ROW_TILES * TILE_BYTES;
constexpr int P_AT = K_AT + ROW_STEPS * KEY_TILES * TILE_BYTES;
constexpr int OPERAND_BYTES = P_AT + ROW_STEPS * ROW_TILES * TILE_BYTES;

// Two numbers as two f16 each.
struct Split {
  u32 high, low;
  DEVICE Split() {}
  DEVICE Split(float x, float y) : high(f2h2(x, y)), low(f2h2(x - h2f_lo(high), y - h2f_hi(high))) {}
};
struct FragmentA { Split r[4]; };
struct FragmentB { Split r[2]; };

// The three products that make one; b: a lane's 16 bytes of a tile. The two low parts' product is too small to count.
DEVICE void mma_high_low(float (&c)[4], const FragmentA& a, const uint4& b) {
  mma_f16(c, a.r[0].high, a.r[1].high, a.r[2].high, a.r[3].high, b.z, b.w);
}
DEVICE void mma_low_high(float (&c)[4], const FragmentA& a, const uint4& b) {
  mma_f16(c, a.r[0].low, a.r[1].low, a.r[2].low, a.r[3].low, b.x, b.y);
}
DEVICE void mma_high_high(float (&c)[4], const FragmentA& a, const uint4& b) {
  mma_f16(c, a.r[0].high, a.r[1].high, a.r[2].high, a.r[3].high, b.x, b.y);
}
