// What follows a matrix product, as the kernels of both families take it.
#pragma once

#include "../checks/epilogue.h"
#include "elements.h"
#include "epilogue_args.h"

namespace fastinfer::cpu {

inline EpilogueArgs epilogue_args(const Epilogue& e, ScalarType out_dtype, void* out,
                                  int64_t out_row_stride) {
  const int out_type = out_dtype == ScalarType::Char            ? kInt8Result
                       : out_dtype == ScalarType::Float8_e4m3fn ? kFp8Result
                                                                : element_index(out_dtype);
  return {e.activation,          e.gated,     e.width, e.residual, element_index(e.residual_dtype),
          e.residual_row_stride, e.out_scale, out,     out_type,   out_row_stride};
}

}  // namespace fastinfer::cpu
