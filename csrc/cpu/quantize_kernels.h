#pragma once

#include <cstdint>

#include "isa.h"

namespace fastinfer::cpu {

// Bits of the largest magnitudes of a part of a block. As integers they keep their order, with NaN
// above infinity, so that a NaN anywhere stays visible.
struct Magnitudes {
  int32_t high = 0;  // asymmetric: of what is positive; symmetric: of everything
  int32_t low = 0;   // asymmetric: of what is negative
};

// How a block is written: code = x / scale, rounded, + zero_point.
struct Coding {
  float scale;
  int32_t zero_point;
};

// Element types are fp32, bf16, fp16.
struct QuantizeFormat {
  Magnitudes (*magnitudes[3])(const void* x, int64_t n);
  Coding (*coding)(Magnitudes block);
  void (*encode[3])(const void* x, int64_t n, Coding coding, uint8_t* out);
};

struct QuantizeKernels {
  QuantizeFormat int8;
  QuantizeFormat fp8;
  QuantizeFormat int8_asymmetric;
};

FI_ISA_TABLE(QuantizeKernels, quantize_kernels)

}  // namespace fastinfer::cpu
