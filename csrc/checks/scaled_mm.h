// The door of fp8_scaled_mm and int8_scaled_mm, the same for every backend: tensors in, a problem
// of raw pointers out.
#pragma once

#include "../torch_utils.h"
#include "epilogue.h"

namespace fastinfer {

constexpr int64_t kScaleBlock = 128;  // inputs, and features of b, that share a block's scale

enum class MmFormat { kFp8, kInt8 };

constexpr const char* scaled_mm_name(MmFormat format) {
  return format == MmFormat::kFp8 ? "fp8_scaled_mm" : "int8_scaled_mm";
}

// Arguments as the ops receive them.
struct ScaledMmInputs {
  MmFormat format;
  const Tensor& a;
  const Tensor& b;
  const Tensor& a_scale;
  const Tensor& b_scale;
  const std::optional<Tensor>& a_zero;
  const std::optional<Tensor>& bias;
  EpilogueInputs epilogue;
};

// Scales of rows, or of blocks of rows, and maybe of blocks along K: [rows, 1 or ceil(K / 128)].
struct MmScales {
  const float* data;
  int64_t row_stride;    // 0: one scale for all rows
  int64_t block_stride;  // 0: one for all of K
  int64_t block_rows;    // that share one: 1 or 128

  // Where the scale of a row and an input is.
  int64_t index(int64_t row, int64_t k) const {
    return row / block_rows * row_stride + k / kScaleBlock * block_stride;
  }
};

struct ScaledMmProblem {
  const char* op;
  MmFormat format;
  ScalarType dtype;  // of out
  ScalarType bias_dtype;
  int64_t m, n, k;
  const uint8_t* a;  // [M, K]
  int64_t a_row_stride;
  const uint8_t* b;  // [N, K]
  int64_t b_row_stride;
  MmScales a_scale;
  MmScales b_scale;
  bool block_scales;      // some scale varies along K
  const int32_t* a_zero;  // [M] or null
  int64_t a_zero_stride;
  const void* bias;  // [N] or null
  Epilogue epilogue;
  void* out;  // [M, epilogue.width]
  int64_t out_row_stride;
};

// Of the shape [1, 1] or [rows, 1], or, where block_rows is not 0, [ceil(rows / block_rows),
// ceil(K / 128)].
inline MmScales check_mm_scales(const Arg& scale, const Arg& like, int64_t rows, int64_t k,
                                int64_t block_rows) {
  expect_dtype(scale, {ScalarType::Float});
  expect_same_device(scale, like);
  const auto has_shape = [&](int64_t first, int64_t second) {
    return scale.rank == 2 && scale.size(0) == first && scale.size(1) == second;
  };
  const float* data = static_cast<const float*>(scale.data);
  if (has_shape(1, 1)) return {data, 0, 0, 1};
  if (has_shape(rows, 1)) return {data, scale.stride(0), 0, 1};
  if (block_rows == 0) {
    fail(scale.op, scale.name, ": expected shape [", rows, ", 1] or [1, 1], got ",
         shape_text(scale));
  }
  const int64_t row_blocks = (rows + block_rows - 1) / block_rows;
  const int64_t k_blocks = (k - 1) / kScaleBlock + 1;
  FI_CHECK(has_shape(row_blocks, k_blocks), scale.op, scale.name, ": expected shape [", rows,
           ", 1], [1, 1] or [", row_blocks, ", ", k_blocks, "], got ", shape_text(scale));
  return {data, scale.stride(0), k_blocks == 1 ? 0 : scale.stride(1), block_rows};
}

inline ScaledMmProblem check_scaled_mm(const ScaledMmInputs& inputs, const Tensor& out_tensor) {
  const MmFormat format = inputs.format;
  const char* op = scaled_mm_name(format);
  const bool fp8 = format == MmFormat::kFp8;
  const Arg a = read_arg(op, "a", inputs.a);
  expect_rank(a, 2, "[M, K]");
  expect_dtype(a, {fp8 ? ScalarType::Float8_e4m3fn : ScalarType::Char});
  expect_dense_last(a);
  const int64_t m = a.size(0), k = a.size(1);
  FI_CHECK(k >= 1, op, "a: expected at least 1 column, got shape ", shape_text(a));

  const Arg b = read_arg(op, "b", inputs.b);
  expect_rank(b, 2, "[N, K]");
  expect_same_dtype(b, a);
  const int64_t n = b.size(0);
  FI_CHECK(n >= 1, op, "b: expected at least 1 row, got shape ", shape_text(b));
  expect_shape(b, {n, k});
  expect_dense_last(b);
  expect_same_device(b, a);

  const Arg a_scale = read_arg(op, "a_scale", inputs.a_scale);
  const Arg b_scale = read_arg(op, "b_scale", inputs.b_scale);

  const Arg out = read_arg(op, "out", out_tensor);
  const Epilogue epilogue =
      check_epilogue(inputs.epilogue, m, n, "rows of b", a, out,
                     {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half});
  for (const Arg& other : {a, b, a_scale, b_scale}) expect_no_overlap(out, other);

  ScaledMmProblem p{};
  p.op = op;
  p.format = format;
  p.dtype = out.dtype;
  p.m = m;
  p.n = n;
  p.k = k;
  p.a = static_cast<const uint8_t*>(a.data);
  p.a_row_stride = a.stride(0);
  p.b = static_cast<const uint8_t*>(b.data);
  p.b_row_stride = b.stride(0);
  p.a_scale = check_mm_scales(a_scale, a, m, k, fp8 ? 1 : 0);
  p.b_scale = check_mm_scales(b_scale, a, n, k, fp8 ? kScaleBlock : 0);
  p.block_scales = p.a_scale.block_stride != 0 || p.b_scale.block_stride != 0;
  p.epilogue = epilogue;
  p.out = out.data;
  p.out_row_stride = out.stride(0);
  if (inputs.a_zero.has_value()) {
    const Arg a_zero = read_arg(op, "a_zero", *inputs.a_zero);
    expect_dtype(a_zero, {ScalarType::Int});
    expect_shape(a_zero, {m, 1});
    expect_same_device(a_zero, a);
    expect_no_overlap(out, a_zero);
    p.a_zero = static_cast<const int32_t*>(a_zero.data);
    p.a_zero_stride = a_zero.stride(0);
  }
  if (inputs.bias.has_value()) {
    const Arg bias = read_arg(op, "bias", *inputs.bias);
    expect_shape(bias, {n});
    if (is_quantized(out.dtype)) {
      expect_float(bias);
    } else {
      FI_CHECK(bias.dtype == out.dtype || bias.dtype == ScalarType::Float, op,
               "bias: expected dtype ", dtype_name(out.dtype), " as out or float32, got ",
               dtype_name(bias.dtype));
    }
    expect_contiguous(bias);
    expect_same_device(bias, a);
    expect_no_overlap(out, bias);
    p.bias = bias.data;
    p.bias_dtype = bias.dtype;
  }
  return p;
}

}  // namespace fastinfer
