// The door of the gated activations, the same for every backend: tensors in, a problem of raw
// pointers out.
#pragma once

#include "../torch_utils.h"
#include "rows.h"

namespace fastinfer {

struct ActivationProblem {
  ScalarType dtype;
  const void* x;  // [rows, 2 * width]: the gate, then what it multiplies; dense
  void* out;      // [rows, width], dense; may be the gate's half of x
  Rows x_rows;
  Rows out_rows;
  int64_t width;
};

inline ActivationProblem check_activation(const char* op, const Tensor& x_tensor,
                                          const Tensor& out_tensor) {
  const Arg x = read_arg(op, "x", x_tensor);
  expect_float(x);
  expect_dense_last(x);
  FI_CHECK(x.size(-1) % 2 == 0, op, "x: expected an even last dimension, got shape ",
           shape_text(x));

  const Arg out = read_arg(op, "out", out_tensor);
  expect_same_dtype(out, x);
  expect_same_device(out, x);
  bool fits = out.rank == x.rank && out.size(-1) == x.size(-1) / 2;
  for (int64_t i = 0; fits && i + 1 < x.rank; ++i) fits = out.sizes[i] == x.sizes[i];
  FI_CHECK(fits, op, "out: expected half the last dimension of x ", shape_text(x), ", got shape ",
           shape_text(out));
  expect_dense_last(out);
  expect_writable(out);

  ActivationProblem p{};
  p.dtype = x.dtype;
  p.x = x.data;
  p.out = out.data;
  p.x_rows = rows_of(x);
  p.out_rows = rows_of(out);
  p.width = out.size(-1);
  return p;
}

}  // namespace fastinfer
