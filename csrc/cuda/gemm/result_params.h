// From a checked problem to what its kernels are told of the result.
#pragma once

#include "../../checks/epilogue.h"
#include "../indexing.h"
#include "result.h"

namespace fastinfer::cuda {

inline FloatFormat float_format_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return FloatFormat::kFloat;
    case ScalarType::BFloat16: return FloatFormat::kBf16;
    default: return FloatFormat::kFp16;
  }
}

inline OutFormat out_format_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return OutFormat::kFloat;
    case ScalarType::BFloat16: return OutFormat::kBf16;
    case ScalarType::Half: return OutFormat::kFp16;
    case ScalarType::Char: return OutFormat::kInt8;
    default: return OutFormat::kFp8;
  }
}

inline ResultParams result_params(const Epilogue& e, const void* bias, ScalarType bias_dtype,
                                  void* out, int64_t out_row_stride, ScalarType out_dtype,
                                  int64_t rows) {
  const int64_t size = element_size(out_dtype);
  return {bias,
          float_format_of(bias_dtype),
          e.activation,
          e.gated,
          e.residual,
          float_format_of(e.residual_dtype),
          e.residual_row_stride,
          e.out_scale,
          out,
          out_row_stride,
          out_format_of(out_dtype),
          static_cast<int32_t>(e.width),
          e.nothing() && size == 2,
          e.residual == nullptr && size == 2 && e.activation != Activation::kGelu,
          e.width % 8 == 0 && aligned_to(16, out, size, {rows > 1 ? out_row_stride : 0})};
}

}  // namespace fastinfer::cuda
