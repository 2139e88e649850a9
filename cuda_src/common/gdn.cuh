// What decode and prefill of a Gated DeltaNet layer share: its gates.
#pragma once
#include "ptx.cuh"

// exp(a * softplus(x)): how much of the state a row keeps. a <= 0
DEVICE float gdn_decay(float x, float a) { return expf(a * (x > 20.f ? x : log1pf(expf(x)))); }
// sigmoid; 0 and 1 at the ends
DEVICE float gdn_sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }
DEVICE float gdn_silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }
