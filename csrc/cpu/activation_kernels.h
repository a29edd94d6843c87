#pragma once

#include <cstdint>

#include "isa.h"

namespace fastinfer::cpu {

// out[i] = act(gate[i]) * up[i] for i in [0, n); out may be gate.
using ActivationFunction = void (*)(const void* gate, const void* up, void* out, int64_t n);

// Each indexed by element type: fp32, bf16, fp16.
struct ActivationKernels {
  ActivationFunction silu[3];
  ActivationFunction gelu_erf[3];
  ActivationFunction gelu_tanh[3];
};

FI_ISA_TABLE(ActivationKernels, activation_kernels)

}  // namespace fastinfer::cpu
