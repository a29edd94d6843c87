#pragma once

#include "../rows.h"
#include "isa.h"

namespace fastinfer::cpu {

// Rows [begin, end) of a normalisation. With a residual: residual += x (rounded to the element
// type), then the norm of the stored residual goes to out.
struct NormArgs {
  const void* x;        // [rows, hidden]
  void* out;            // [rows, hidden], may be x
  void* residual;       // [rows, hidden] or null
  const float* weight;  // [hidden], the offset already added
  const float* bias;    // [hidden] or null
  Rows x_rows;
  Rows out_rows;
  Rows residual_rows;
  int64_t hidden;
  float eps;
};

using NormFunction = void (*)(const NormArgs& args, int64_t begin, int64_t end);

// Indexed by element type: fp32, bf16, fp16.
struct NormKernels {
  NormFunction rms_norm[3];
  NormFunction layer_norm[3];
};

FI_ISA_TABLE(NormKernels, norm_kernels)

}  // namespace fastinfer::cpu
