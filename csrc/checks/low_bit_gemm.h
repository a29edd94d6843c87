// The door of the low-bit matrix products, the same for every backend: tensors in, a problem of raw
// pointers out. The entries of perm and of the outliers' offsets and columns are contents and are
// checked where they can be read (cpu/low_bit_gemm.cpp).
#pragma once

#include "../torch_utils.h"
#include "epilogue.h"
#include "norm.h"

namespace fastinfer {

constexpr int64_t kLowBitTile = 64;  // features and inputs of a packed tile
constexpr int64_t kQuantGroupUnit = 16;

// RMSNorm of x's rows before all else.
struct NormPrologueInputs {
  const std::optional<Tensor>& weight;  // none: no norm
  double eps;
  double weight_offset;
};

// Weights beside the codes: all three tensors or none.
struct OutlierInputs {
  const std::optional<Tensor>& offsets;
  const std::optional<Tensor>& columns;
  const std::optional<Tensor>& values;
};

// Arguments as the ops receive them.
struct LowBitGemmInputs {
  int bits;
  const Tensor& x;
  const Tensor& qweight;
  const Tensor& scales;
  const std::optional<Tensor>& zeros;
  int64_t group_size;
  const std::optional<Tensor>& perm;
  const std::optional<Tensor>& bias;
  EpilogueInputs epilogue;
  NormPrologueInputs norm;
  OutlierInputs outliers;
};

// A sparse matrix [N, K] that is added to W: feature n has the entries [offsets[n], offsets[n +
// 1]).
struct Outliers {
  const int32_t* offsets;  // [N + 1], or null: there are none
  const int32_t* columns;  // [count]: of W, so that perm is applied to them
  const void* values;      // [count]
  ScalarType dtype;        // of values
  int64_t count;
};

// W[n, k] = scales[g, n] * (q[n, k] - zeros[g, n]), g = k / group_size; zeros that are null stand
// for 2^(bits - 1).
struct LowBitGemmProblem {
  const char* op;
  int bits;
  ScalarType dtype;        // of x
  ScalarType scale_dtype;  // of scales and zeros
  ScalarType bias_dtype;
  // group_size is a multiple of 16 always: where one group holds the whole of K, K rounded up to
  // the tile.
  int64_t m, n, k, group_size, groups;
  const void* x;  // [M, K]
  int64_t x_row_stride;
  const int32_t* qweight;   // [ceil(N / 64), ceil(K / 64), bits * 128]
  const void* scales;       // [groups, N]
  const void* zeros;        // [groups, N] or null
  const int32_t* perm;      // [K] or null
  const void* bias;         // [N] or null
  const void* norm_weight;  // [K] or null: x is not normalised
  ScalarType norm_weight_dtype;
  float norm_eps;
  float norm_weight_offset;
  Outliers outliers;
  Epilogue epilogue;
  ScalarType out_dtype;
  void* out;  // [M, epilogue.width]
  int64_t out_row_stride;
};

// The name of an op with codes of so many bits, as messages carry it.
constexpr const char* low_bit_gemm_name(int bits) {
  return bits == 2 ? "int2_gemm" : bits == 3 ? "int3_gemm" : bits == 4 ? "int4_gemm" : "int8_gemm";
}

inline Outliers check_outliers(const OutlierInputs& inputs, int64_t n, const Arg& x,
                               const Arg& out) {
  const int given =
      inputs.offsets.has_value() + inputs.columns.has_value() + inputs.values.has_value();
  FI_CHECK(given == 0 || given == 3, x.op,
           "outlier_offsets, outlier_columns, outlier_values: expected all three or none, got ",
           given, " of them");
  if (given == 0) return {};
  const Arg offsets = read_arg(x.op, "outlier_offsets", *inputs.offsets);
  expect_dtype(offsets, {ScalarType::Int});
  expect_shape(offsets, {n + 1});
  const Arg columns = read_arg(x.op, "outlier_columns", *inputs.columns);
  expect_dtype(columns, {ScalarType::Int});
  expect_rank(columns, 1, "[outliers]");
  const Arg values = read_arg(x.op, "outlier_values", *inputs.values);
  expect_float(values);
  expect_shape(values, {columns.size(0)});
  FI_CHECK(columns.size(0) <= INT32_MAX, x.op, "outlier_columns: expected at most ", INT32_MAX,
           " entries, as outlier_offsets count them, got ", columns.size(0));
  for (const Arg& arg : {offsets, columns, values}) {
    expect_contiguous(arg);
    expect_same_device(arg, x);
    expect_no_overlap(out, arg);
  }
  return {static_cast<const int32_t*>(offsets.data), static_cast<const int32_t*>(columns.data),
          values.data, values.dtype, columns.size(0)};
}

inline LowBitGemmProblem check_low_bit_gemm(const LowBitGemmInputs& inputs,
                                            const Tensor& out_tensor) {
  const int bits = inputs.bits;
  const int64_t group_size = inputs.group_size;
  const char* op = low_bit_gemm_name(bits);
  const Arg x = read_arg(op, "x", inputs.x);
  expect_rank(x, 2, "[M, K]");
  expect_float(x);
  expect_dense_last(x);
  const int64_t m = x.size(0), k = x.size(1);
  FI_CHECK(k >= 1, op, "x: expected at least 1 column, got shape ", shape_text(x));

  FI_CHECK(group_size >= 1 && (group_size % kQuantGroupUnit == 0 || group_size >= k), op,
           "group_size: expected a positive multiple of ", kQuantGroupUnit, ", or at least the ", k,
           " columns of x, got ", group_size);
  const int64_t groups = (k - 1) / group_size + 1;

  const Arg scales = read_arg(op, "scales", inputs.scales);
  expect_rank(scales, 2, "[ceil(K / group_size), N]");
  expect_float(scales);
  const int64_t n = scales.size(1);
  FI_CHECK(n >= 1, op, "scales: expected at least 1 column, got shape ", shape_text(scales));
  expect_shape(scales, {groups, n});
  expect_contiguous(scales);
  expect_same_device(scales, x);

  const Arg qweight = read_arg(op, "qweight", inputs.qweight);
  expect_dtype(qweight, {ScalarType::Int});
  expect_shape(qweight,
               {(n - 1) / kLowBitTile + 1, (k - 1) / kLowBitTile + 1, int64_t{bits} * 128});
  expect_contiguous(qweight);
  expect_same_device(qweight, x);

  const Arg out = read_arg(op, "out", out_tensor);
  const Epilogue epilogue =
      check_epilogue(inputs.epilogue, m, n, "columns of scales", x, out, {x.dtype});
  for (const Arg& read : {x, scales, qweight}) expect_no_overlap(out, read);

  LowBitGemmProblem p{};
  p.op = op;
  p.bits = bits;
  p.dtype = x.dtype;
  p.scale_dtype = scales.dtype;
  p.m = m;
  p.n = n;
  p.k = k;
  p.group_size = groups == 1 ? ((k - 1) / kLowBitTile + 1) * kLowBitTile : group_size;
  p.groups = groups;
  p.x = x.data;
  p.x_row_stride = x.stride(0);
  p.qweight = static_cast<const int32_t*>(qweight.data);
  p.scales = scales.data;
  p.epilogue = epilogue;
  p.out_dtype = out.dtype;
  p.out = out.data;
  p.out_row_stride = out.stride(0);
  if (inputs.zeros.has_value()) {
    const Arg zeros = read_arg(op, "zeros", *inputs.zeros);
    expect_same_dtype(zeros, scales);
    expect_same_shape(zeros, scales);
    expect_contiguous(zeros);
    expect_same_device(zeros, x);
    expect_no_overlap(out, zeros);
    p.zeros = zeros.data;
  }
  if (inputs.perm.has_value()) {
    const Arg perm = read_arg(op, "perm", *inputs.perm);
    expect_dtype(perm, {ScalarType::Int});
    expect_shape(perm, {k});
    expect_contiguous(perm);
    expect_same_device(perm, x);
    expect_no_overlap(out, perm);
    p.perm = static_cast<const int32_t*>(perm.data);
  }
  FI_CHECK(inputs.norm.eps >= 0.0, op, "norm_eps: expected a number >= 0, got ", inputs.norm.eps);
  if (inputs.norm.weight.has_value()) {
    const Arg weight = read_arg(op, "norm_weight", *inputs.norm.weight);
    check_norm_vector(weight, x);
    expect_no_overlap(out, weight);
    p.norm_weight = weight.data;
    p.norm_weight_dtype = weight.dtype;
    p.norm_eps = static_cast<float>(inputs.norm.eps);
    p.norm_weight_offset = static_cast<float>(inputs.norm.weight_offset);
  }
  p.outliers = check_outliers(inputs.outliers, n, x, out);
  if (inputs.bias.has_value()) {
    const Arg bias = read_arg(op, "bias", *inputs.bias);
    expect_shape(bias, {n});
    FI_CHECK(bias.dtype == x.dtype || bias.dtype == ScalarType::Float, op, "bias: expected dtype ",
             dtype_name(x.dtype), " as x or float32, got ", dtype_name(bias.dtype));
    expect_contiguous(bias);
    expect_same_device(bias, x);
    expect_no_overlap(out, bias);
    p.bias = bias.data;
    p.bias_dtype = bias.dtype;
  }
  return p;
}

}  // namespace fastinfer
