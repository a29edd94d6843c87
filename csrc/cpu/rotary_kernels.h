#pragma once

#include <cstdint>

#include "isa.h"

namespace fastinfer::cpu {

// Turns the pairs of `heads` rows of one token in place, by one row of the table.
struct RotaryArgs {
  void* x;              // [heads, >= 2 * pairs]
  int64_t head_stride;  // elements
  int64_t heads;
  const float* cos;  // [pairs]
  const float* sin;  // [pairs]
  int64_t pairs;
};

using RotaryFunction = void (*)(const RotaryArgs& args);

// Indexed by pairing (neox, interleaved), then by element type (fp32, bf16, fp16).
struct RotaryKernels {
  RotaryFunction rotate[2][3];
};

FI_ISA_TABLE(RotaryKernels, rotary_kernels)

}  // namespace fastinfer::cpu
