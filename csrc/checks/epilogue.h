// What follows a matrix product y = product + bias [M, N], the same for every op and backend:
//
//   h = act(y)                              [M, N]
//   h = act(y[:, :N / 2]) * y[:, N / 2:]    [M, N / 2], if gated
//   h += residual
//   out = h, or the 8-bit codes of h / out_scale
//
// all of it in fp32 and rounded once. Arguments as ops are given them, their checks, and a
// description of raw pointers.
#pragma once

#include <string>

#include "../activation.h"
#include "../torch_utils.h"

namespace fastinfer {

struct EpilogueInputs {
  const std::string& activation;
  bool gated;
  const std::optional<Tensor>& residual;
  const std::optional<Tensor>& out_scale;
  std::optional<ScalarType> out_dtype;  // none: that of out
};

struct Epilogue {
  Activation activation;
  bool gated;
  int64_t width;         // columns of out: N, or N / 2 if gated
  const void* residual;  // [M, width] or null; may be out
  ScalarType residual_dtype;
  int64_t residual_row_stride;
  const float* out_scale;  // [1, 1] if out is in 8 bits, else null

  bool nothing() const {
    return activation == Activation::kNone && !gated && residual == nullptr && out_scale == nullptr;
  }
};

inline int64_t result_columns(int64_t features, bool gated) {
  return gated ? features / 2 : features;
}

inline Activation activation_of(const char* op, const std::string& name) {
  if (name == "none") return Activation::kNone;
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  fail(op, "activation: expected none, silu, gelu or gelu_tanh, got ", name);
}

inline bool is_quantized(ScalarType dtype) {
  return dtype == ScalarType::Float8_e4m3fn || dtype == ScalarType::Char;
}

// One of `floats`, or of the 8-bit formats.
inline void expect_result_dtype(const char* op, const char* name, ScalarType dtype,
                                std::initializer_list<ScalarType> floats) {
  std::ostringstream expected;
  for (ScalarType accepted : floats) {
    if (dtype == accepted) return;
    expected << dtype_name(accepted) << " or ";
  }
  FI_CHECK(is_quantized(dtype), op, name, ": expected dtype ", expected.str(),
           "float8_e4m3fn or int8, got ", dtype_name(dtype));
}

// From the first byte of a matrix with dense rows to the last.
inline int64_t extent(const Arg& a) {
  const int64_t columns = a.size(1) + (a.size(0) - 1) * a.stride(0);
  return columns * element_size(a.dtype);
}

// Whether two matrices with dense rows share memory. Rows that lie equally far apart may lie beside
// each other, as column slices of one matrix do; others may not lie among each other.
inline bool matrices_meet(const Arg& a, const Arg& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  const int64_t distance = static_cast<const char*>(b.data) - static_cast<const char*>(a.data);
  if (distance >= extent(a) || -distance >= extent(b)) return false;
  const int64_t stride = a.stride(0) * element_size(a.dtype);
  const bool alike = stride > 0 && stride == b.stride(0) * element_size(b.dtype);
  if (a.size(0) == 1 || b.size(0) == 1 || !alike) return true;
  const int64_t first = -distance / stride;
  for (int64_t rows = first - 1; rows <= first + 1; ++rows) {  // from a row of a to one of b
    const int64_t apart = distance + rows * stride;
    const bool both_there = rows < b.size(0) && -rows < a.size(0);
    if (both_there && apart < a.size(1) * element_size(a.dtype) &&
        -apart < b.size(1) * element_size(b.dtype)) {
      return true;
    }
  }
  return false;
}

// `out` may be the residual itself: each element is read before it is written.
inline void expect_residual_or_apart(const Arg& out, const Arg& residual) {
  const bool same = out.data == residual.data && out.dtype == residual.dtype &&
                    (out.stride(0) == residual.stride(0) || out.size(0) <= 1);
  FI_CHECK(
      same || !matrices_meet(out, residual), out.op,
      "out: expected the residual itself or no memory shared with it, got overlapping tensors");
}

// For a product of [m, n], n being `features`, whose results and residuals have one of the dtypes
// `floats`.
inline Epilogue check_epilogue(const EpilogueInputs& inputs, int64_t m, int64_t n,
                               const char* features, const Arg& like, const Arg& out,
                               std::initializer_list<ScalarType> floats) {
  const char* op = out.op;
  Epilogue e{};
  e.activation = activation_of(op, inputs.activation);
  e.gated = inputs.gated;
  FI_CHECK(!e.gated || n % 2 == 0, op, "gated: expected an even number of ", features,
           ", of gates and what they multiply, got ", n);
  e.width = result_columns(n, e.gated);

  if (inputs.out_dtype.has_value()) {
    expect_result_dtype(op, "out_dtype", *inputs.out_dtype, floats);
    FI_CHECK(out.dtype == *inputs.out_dtype, op, "out: expected dtype ",
             dtype_name(*inputs.out_dtype), " as out_dtype, got ", dtype_name(out.dtype));
  }
  expect_result_dtype(op, "out", out.dtype, floats);
  expect_shape(out, {m, e.width});
  expect_dense_last(out);
  expect_writable(out);
  FI_CHECK(m <= 1 || out.stride(0) >= e.width, op, "out: expected rows at least ", e.width,
           " elements apart since they are written, got ", out.stride(0));
  expect_same_device(out, like);

  if (inputs.residual.has_value()) {
    const Arg residual = read_arg(op, "residual", *inputs.residual);
    expect_dtype(residual, floats);
    expect_shape(residual, {m, e.width});
    expect_dense_last(residual);
    expect_same_device(residual, like);
    expect_residual_or_apart(out, residual);
    e.residual = residual.data;
    e.residual_dtype = residual.dtype;
    e.residual_row_stride = residual.stride(0);
  }

  const bool quantized = is_quantized(out.dtype);
  FI_CHECK(!quantized || inputs.out_scale.has_value(), op,
           "out_scale: expected float32 [1, 1] since the result is ", dtype_name(out.dtype),
           ", got none");
  FI_CHECK(quantized || !inputs.out_scale.has_value(), op,
           "out_scale: expected none since the result is ", dtype_name(out.dtype),
           ", got a tensor");
  if (quantized) {
    const Arg scale = read_arg(op, "out_scale", *inputs.out_scale);
    expect_dtype(scale, {ScalarType::Float});
    expect_shape(scale, {1, 1});
    expect_same_device(scale, like);
    FI_CHECK(!matrices_meet(out, scale), op,
             "out: expected no memory shared with out_scale, got overlapping tensors");
    e.out_scale = static_cast<const float*>(scale.data);
  }
  return e;
}

}  // namespace fastinfer
