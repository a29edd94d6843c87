// What the prefill and the decode kernel share of the way from a score to its exponential.
#pragma once

#include "../ptx/convert.h"

namespace fastinfer::cuda {

// Up to here, in base 2, the rounding of what is subtracted from scores hardly changes a
// probability; beyond, scores must be rounded alike, before the difference is taken.
constexpr float kExactBase = 0x1p18f;

// The hyperbolic tangent, for a soft cap. exp2 of a large argument is inf, and 1 - 2 / inf is 1.
// For small ones that would leave few digits: there it is a polynomial, tanh(x) / x as a function
// of x^2 fitted up to 0.4.
__device__ inline float tanh_accurate(float x) {
  const float square = x * x;
  const float tail =
      0.13332735f + square * (-0.053845163f + square * (0.020968756f + square * -0.006054318f));
  const float near = x + x * square * (-0.33333328f + square * tail);
  const float grown = ptx::exp2(x * 2.8853900817779268f);
  const float far = 1.f - __fdividef(2.f, 1.f + grown);
  return square < 0.4f ? near : far;
}

}  // namespace fastinfer::cuda
