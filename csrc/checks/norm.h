// The door of the normalisation ops, the same for every backend: tensors in, a problem of raw
// pointers out.
#pragma once

#include "../torch_utils.h"
#include "rows.h"

namespace fastinfer {

struct NormProblem {
  ScalarType dtype;
  ScalarType weight_dtype;
  ScalarType bias_dtype;
  const void* x;
  void* out;           // may be x
  void* residual;      // null unless fused with an add; then read and written
  const void* weight;  // [hidden]
  const void* bias;    // [hidden] or null
  Rows x_rows;
  Rows out_rows;
  Rows residual_rows;
  int64_t hidden;
  float eps;
  float weight_offset;
};

inline void check_norm_vector(const Arg& vector, const Arg& x) {
  expect_shape(vector, {x.size(-1)});
  FI_CHECK(vector.dtype == x.dtype || vector.dtype == ScalarType::Float, vector.op, vector.name,
           ": expected dtype ", dtype_name(x.dtype), " as x or float32, got ",
           dtype_name(vector.dtype));
  expect_contiguous(vector);
  expect_same_device(vector, x);
}

inline NormProblem check_norm(const char* op, const Tensor& x_tensor, const Tensor& weight_tensor,
                              const std::optional<Tensor>& bias_tensor, double eps,
                              double weight_offset, const Tensor& out_tensor,
                              const Tensor* residual_tensor) {
  const Arg x = read_arg(op, "x", x_tensor);
  expect_float(x);
  expect_dense_last(x);
  FI_CHECK(x.size(-1) >= 1, op, "x: expected a last dimension of at least 1, got shape ",
           shape_text(x));
  FI_CHECK(eps >= 0.0, op, "eps: expected a number >= 0, got ", eps);

  const Arg weight = read_arg(op, "weight", weight_tensor);
  check_norm_vector(weight, x);

  const Arg out = read_arg(op, residual_tensor ? "x" : "out", out_tensor);
  expect_same_dtype(out, x);
  expect_same_shape(out, x);
  expect_dense_last(out);
  expect_writable(out);
  expect_same_device(out, x);

  if (residual_tensor == nullptr) expect_same_or_no_overlap(out, x);

  NormProblem p{};
  p.dtype = x.dtype;
  p.x = x.data;
  p.out = out.data;
  p.weight = weight.data;
  p.weight_dtype = weight.dtype;
  if (bias_tensor.has_value()) {
    const Arg bias = read_arg(op, "bias", *bias_tensor);
    check_norm_vector(bias, x);
    p.bias = bias.data;
    p.bias_dtype = bias.dtype;
  }
  if (residual_tensor != nullptr) {
    const Arg residual = read_arg(op, "residual", *residual_tensor);
    expect_same_dtype(residual, x);
    expect_same_shape(residual, x);
    expect_dense_last(residual);
    expect_writable(residual);
    expect_same_device(residual, x);
    expect_no_overlap(residual, x);
    p.residual = residual.data;
    p.residual_rows = rows_of(residual);
  }
  p.x_rows = rows_of(x);
  p.out_rows = rows_of(out);
  p.hidden = x.size(-1);
  p.eps = static_cast<float>(eps);
  p.weight_offset = static_cast<float>(weight_offset);
  return p;
}

}  // namespace fastinfer
