// The door of quantize_fp8, quantize_int8 and quantize_int8_asymmetric, the same for every backend:
// tensors in, a problem of raw pointers out.
#pragma once

#include <algorithm>
#include <vector>

#include "../torch_utils.h"
#include "rows.h"

namespace fastinfer {

// The blocks of a matrix: [rows, columns] of them, each with a scale of its own. Those at the ends
// may be partial.
struct BlockGrid {
  int64_t rows;
  int64_t columns;
  int64_t block_rows;  // at least 1
  int64_t block_columns;

  int64_t count() const { return rows * columns; }
};

inline const std::vector<int64_t> kPerToken = {1, -1};

// A number per block, or null; read and written through both strides.
template <class T>
struct BlockValues {
  T* data;  // [grid.rows, grid.columns]
  int64_t row_stride;
  int64_t column_stride;

  T& at(int64_t row, int64_t column) const {
    return data[row * row_stride + column * column_stride];
  }
};

struct QuantizeProblem {
  ScalarType dtype;
  const void* x;  // [rows, columns], dense in columns
  uint8_t* out;   // [rows, columns], likewise: int8, or the codes of float8_e4m3fn
  Rows x_rows;
  Rows out_rows;
  int64_t columns;
  BlockGrid grid;
  BlockValues<const float> given;  // null: scales are taken from the blocks
  BlockValues<float> scale;
  BlockValues<int32_t> zero_point;  // null if symmetric
};

// All rows, or all columns, are one block even where there are none: a tensor's scale has one shape
// whatever the number of tokens.
inline BlockGrid block_grid(const Arg& x, const std::vector<int64_t>& block) {
  FI_CHECK(x.rank >= 1, x.op, "x: expected at least 1 dimension, got a scalar");
  FI_CHECK(block.size() == 2, x.op, "block: expected [rows, columns], got ", block.size(),
           " numbers");
  int64_t sizes[2] = {1, x.size(-1)};
  for (int64_t i = 0; i + 1 < x.rank; ++i) sizes[0] *= x.sizes[i];
  int64_t counts[2], extents[2];
  for (int i = 0; i < 2; ++i) {
    FI_CHECK(block[i] >= 1 || block[i] == -1, x.op,
             "block: expected [rows, columns] of at least 1, or -1 for all, got ",
             shape_text(block.data(), 2));
    const int64_t all = std::max<int64_t>(1, sizes[i]);
    extents[i] = block[i] == -1 ? all : std::min(block[i], all);
    counts[i] = block[i] == -1 ? 1 : (sizes[i] + extents[i] - 1) / extents[i];
  }
  return {counts[0], counts[1], extents[0], extents[1]};
}

template <class T>
BlockValues<T> check_block_values(const Arg& arg, const Arg& x, const BlockGrid& grid,
                                  ScalarType dtype) {
  expect_dtype(arg, {dtype});
  expect_same_device(arg, x);
  expect_shape(arg, {grid.rows, grid.columns});
  return {static_cast<T*>(arg.data), arg.stride(0), arg.stride(1)};
}

// A scale that is given; that of a single block may as well be a vector or a scalar.
inline BlockValues<const float> check_given_scale(const std::optional<Tensor>& tensor, const Arg& x,
                                                  const BlockGrid& grid) {
  if (!tensor.has_value()) return {};
  const Arg scale = read_arg(x.op, "scale", *tensor);
  if (grid.count() != 1 || scale.rank > 1 || scale.numel() != 1) {
    return check_block_values<const float>(scale, x, grid, ScalarType::Float);
  }
  expect_dtype(scale, {ScalarType::Float});
  expect_same_device(scale, x);
  return {static_cast<const float*>(scale.data), 0, 0};
}

inline QuantizeProblem check_quantize(const char* op, const Tensor& x_tensor,
                                      const std::vector<int64_t>& block, ScalarType out_dtype,
                                      const Tensor& out_tensor, const Tensor& out_scale_tensor) {
  const Arg x = read_arg(op, "x", x_tensor);
  expect_float(x);
  expect_dense_last(x);
  const Arg out = read_arg(op, "out", out_tensor);
  expect_dtype(out, {out_dtype});
  expect_same_device(out, x);
  expect_same_shape(out, x);
  expect_dense_last(out);
  expect_writable(out);
  expect_no_overlap(out, x);

  QuantizeProblem p{};
  p.dtype = x.dtype;
  p.x = x.data;
  p.out = static_cast<uint8_t*>(out.data);
  p.grid = block_grid(x, block);
  p.x_rows = rows_of(x);
  p.out_rows = rows_of(out);
  p.columns = x.size(-1);
  const Arg out_scale = read_arg(op, "out_scale", out_scale_tensor);
  p.scale = check_block_values<float>(out_scale, x, p.grid, ScalarType::Float);
  expect_writable(out_scale);
  expect_no_overlap(out_scale, x);
  expect_no_overlap(out_scale, out);
  return p;
}

inline QuantizeProblem check_quantize_symmetric(const char* op, const Tensor& x,
                                                const std::optional<Tensor>& scale,
                                                const std::vector<int64_t>& block,
                                                ScalarType out_dtype, const Tensor& out,
                                                const Tensor& out_scale) {
  QuantizeProblem p = check_quantize(op, x, block, out_dtype, out, out_scale);
  p.given = check_given_scale(scale, read_arg(op, "x", x), p.grid);
  if (scale.has_value()) {
    const Arg given = read_arg(op, "scale", *scale);
    expect_same_or_no_overlap(read_arg(op, "out_scale", out_scale), given);
    expect_no_overlap(read_arg(op, "out", out), given);
  }
  return p;
}

inline QuantizeProblem check_quantize_fp8(const Tensor& x, const std::optional<Tensor>& scale,
                                          const std::vector<int64_t>& block, const Tensor& out,
                                          const Tensor& out_scale) {
  return check_quantize_symmetric("quantize_fp8", x, scale, block, ScalarType::Float8_e4m3fn, out,
                                  out_scale);
}

inline QuantizeProblem check_quantize_int8(const Tensor& x, const std::optional<Tensor>& scale,
                                           const std::vector<int64_t>& block, const Tensor& out,
                                           const Tensor& out_scale) {
  return check_quantize_symmetric("quantize_int8", x, scale, block, ScalarType::Char, out,
                                  out_scale);
}

inline QuantizeProblem check_quantize_int8_asymmetric(const Tensor& x_tensor, const Tensor& out,
                                                      const Tensor& out_scale,
                                                      const Tensor& zero_point_tensor) {
  constexpr const char* op = "quantize_int8_asymmetric";
  QuantizeProblem p = check_quantize(op, x_tensor, kPerToken, ScalarType::Char, out, out_scale);
  const Arg zero_point = read_arg(op, "out_zero_point", zero_point_tensor);
  p.zero_point =
      check_block_values<int32_t>(zero_point, read_arg(op, "x", x_tensor), p.grid, ScalarType::Int);
  expect_writable(zero_point);
  expect_no_overlap(zero_point, read_arg(op, "out_scale", out_scale));
  expect_no_overlap(zero_point, read_arg(op, "out", out));
  expect_no_overlap(zero_point, read_arg(op, "x", x_tensor));
  return p;
}

}  // namespace fastinfer
