// The activations of lanes; for kernel files, which are compiled once per instruction set.
#pragma once

#include "vec.h"

namespace fastinfer::cpu::FI_ISA {
namespace {

inline vf magnitude(vf x) {
  return bit_cast<vf>(bit_cast<vi>(x) & 0x7fffffff);
}

// x * sigmoid(s) with e = exp(-|s|), which never overflows: 1 / (1 + e), or e / (1 + e) for s < 0.
// This keeps relative accuracy in both tails.
inline vf times_sigmoid(vf x, vf s) {
  const vf e = exp(-magnitude(s));
  return x * select(s < splat(0.0f), e, splat(1.0f)) / (splat(1.0f) + e);
}

struct Silu {
  static vf apply(vf a) { return times_sigmoid(a, a); }
};

// 0.5 (1 + tanh u) = sigmoid(2u), u = sqrt(2 / pi) (a + 0.044715 a^3).
struct GeluTanh {
  static vf apply(vf a) {
    const vf u2 = splat(1.5957691216057308f) * a * (splat(1.0f) + splat(0.044715f) * a * a);
    return times_sigmoid(a, u2);
  }
};

// a Phi(a), where for a < 0 the tail Phi(a) = erfc(|a| / sqrt 2) / 2 is computed as such, since
// 1 + erf would lose its digits.
struct GeluErf {
  // erfc(z / sqrt 2) / 2 for z >= 0, within about 1e-6 relative until it underflows. With
  // t = (z - 4) / (z + 4) the smooth factor erfc(z / sqrt 2) exp(z^2 / 2) / 2 is a polynomial in t
  // (least squares of the relative error, reweighted towards minimax on z in [0, 16]: 2.3e-8).
  static vf tail(vf z) {
    const vf t = (z - splat(4.0f)) / (z + splat(4.0f));
    vf p = splat(-6.23611704e-05f);
    p = p * t + splat(-0.000163055345f);
    p = p * t + splat(0.000657310244f);
    p = p * t + splat(0.00049920578f);
    p = p * t + splat(-0.00849832594f);
    p = p * t + splat(0.0308662802f);
    p = p * t + splat(-0.0717066526f);
    p = p * t + splat(0.124379136f);
    p = p * t + splat(-0.170397744f);
    p = p * t + splat(0.094410643f);
    // The rounding of z^2, up to 128 here, would be the largest error: `high` is the half of z's
    // bits whose square is exact, so `rest` is what the rounding lost.
    const vf square = z * z;
    const vf high = bit_cast<vf>(bit_cast<vi>(z) & ~0xfff);
    const vf rest = (high * high - square) + (z - high) * (z + high);
    return p * exp(splat(-0.5f) * square) * (splat(1.0f) - splat(0.5f) * rest);
  }

  static vf apply(vf a) {
    const vf phi = tail(vmin(magnitude(a), splat(16.0f)));
    return a * select(a < splat(0.0f), phi, splat(1.0f) - phi);
  }
};

}  // namespace
}  // namespace fastinfer::cpu::FI_ISA
