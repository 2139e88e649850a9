// GELU in its tanh form (Hendrycks and Gimpel, 2016): g * sigmoid(2 u), u = sqrt(2 / pi) * (g + 0.044715 g^3).
#pragma once
#include "ptx.cuh"

// The exponent is -2 u * log2(e). It overflows to an infinity, which gives 0 or g.
DEVICE float gelu(float g) { return g / (1.f + ex2(g * (-2.3022082f + -0.10294324f * (g * g)))); }
