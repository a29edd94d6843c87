#pragma once

#include <cstdint>

#include "isa.h"

namespace fastinfer::cpu {

// out = x + bias, rounded to the element type; out may be x.
using AddBiasFunction = void (*)(const void* x, const void* bias, void* out, int64_t n);

// Indexed by element type: fp32, bf16, fp16.
struct AddBiasKernels {
  AddBiasFunction add[3];
};

FI_ISA_TABLE(AddBiasKernels, add_bias_kernels)

}  // namespace fastinfer::cpu
