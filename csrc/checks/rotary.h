// The door of rotary_embedding_, the same for every backend: tensors in, a problem of raw pointers
// out.
#pragma once

#include "../torch_utils.h"

namespace fastinfer {

struct RotaryProblem {
  ScalarType dtype;
  int64_t tokens;
  void* q;  // [T, q_heads, D], dense in D
  int64_t q_heads;
  int64_t q_token_stride;
  int64_t q_head_stride;
  void* k;  // [T, k_heads, D] or null
  int64_t k_heads;
  int64_t k_token_stride;
  int64_t k_head_stride;
  const int64_t* positions;  // [T]
  const float* cos_sin;      // [num_positions, rotary_dim], dense in rotary_dim
  int64_t cos_sin_stride;
  int64_t num_positions;
  int64_t rotary_dim;  // even, <= D
};

inline RotaryProblem check_rotary(const Tensor& q_tensor, const std::optional<Tensor>& k_tensor,
                                  const Tensor& positions_tensor, const Tensor& cos_sin_tensor) {
  constexpr const char* op = "rotary_embedding_";
  const Arg q = read_arg(op, "q", q_tensor);
  expect_rank(q, 3, "[T, H, D]");
  expect_float(q);
  expect_dense_last(q);
  expect_writable(q);

  const Arg positions = read_arg(op, "positions", positions_tensor);
  expect_dtype(positions, {ScalarType::Long});
  expect_shape(positions, {q.size(0)});
  expect_contiguous(positions);
  expect_same_device(positions, q);

  const Arg cos_sin = read_arg(op, "cos_sin", cos_sin_tensor);
  expect_rank(cos_sin, 2, "[P, R]");
  expect_dtype(cos_sin, {ScalarType::Float});
  expect_dense_last(cos_sin);
  expect_same_device(cos_sin, q);
  FI_CHECK(cos_sin.size(1) % 2 == 0 && cos_sin.size(1) <= q.size(2), op,
           "cos_sin: expected an even number of columns up to the head size ", q.size(2),
           ", got shape ", shape_text(cos_sin));

  RotaryProblem p{};
  p.dtype = q.dtype;
  p.tokens = q.size(0);
  p.q = q.data;
  p.q_heads = q.size(1);
  p.q_token_stride = q.stride(0);
  p.q_head_stride = q.stride(1);
  if (k_tensor.has_value()) {
    const Arg k = read_arg(op, "k", *k_tensor);
    expect_rank(k, 3, "[T, Hk, D]");
    expect_same_dtype(k, q);
    expect_shape(k, {q.size(0), k.size(1), q.size(2)});
    expect_dense_last(k);
    expect_writable(k);
    expect_same_device(k, q);
    expect_no_overlap(k, q);
    p.k = k.data;
    p.k_heads = k.size(1);
    p.k_token_stride = k.stride(0);
    p.k_head_stride = k.stride(1);
  }
  p.positions = static_cast<const int64_t*>(positions.data);
  p.cos_sin = static_cast<const float*>(cos_sin.data);
  p.cos_sin_stride = cos_sin.stride(0);
  p.num_positions = cos_sin.size(0);
  p.rotary_dim = cos_sin.size(1);
  return p;
}

}  // namespace fastinfer
