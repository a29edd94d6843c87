// The door of merge_attention_states, the same for every backend.
#pragma once

#include "attention.h"

namespace fastinfer {

// Strides of the dense form; a ragged problem is one sequence.
struct MergeProblem {
  ScalarType dtype;   // of outs and out
  const void* outs;   // [splits, sequences, tokens, heads, value_dim]
  const float* lses;  // [splits, sequences, heads, tokens]
  void* out;
  float* lse;
  const float* sinks;  // [heads] or null
  int64_t splits, sequences, tokens, heads, value_dim;
  int64_t outs_split, lses_split;
  AttentionStrides outs_strides, lses_strides, out_strides, lse_strides;
};

inline MergeProblem check_merge(const Tensor& outs_tensor, const Tensor& lses_tensor,
                                const std::optional<Tensor>& sinks_tensor, const Tensor& out_tensor,
                                const Tensor& lse_tensor) {
  constexpr const char* op = "merge_attention_states";
  const Arg outs = read_arg(op, "outs", outs_tensor);
  FI_CHECK(outs.rank == 4 || outs.rank == 5, op,
           "outs: expected [splits, tokens, heads, value_dim] or [splits, batch, seqlen_q, heads, "
           "value_dim], got shape ",
           shape_text(outs));
  expect_float(outs);
  expect_dense_last(outs);
  check_head_dim(outs);
  const bool dense = outs.rank == 5;
  MergeProblem p{};
  p.dtype = outs.dtype;
  p.splits = outs.size(0);
  p.sequences = dense ? outs.size(1) : 1;
  p.tokens = outs.size(-3);
  p.heads = outs.size(-2);
  p.value_dim = outs.size(-1);
  FI_CHECK(p.splits >= 1, op, "outs: expected at least 1 result to merge, got shape ",
           shape_text(outs));

  const Arg lses = read_arg(op, "lses", lses_tensor);
  expect_dtype(lses, {ScalarType::Float});
  const Arg out = read_arg(op, "out", out_tensor);
  expect_same_dtype(out, outs);
  const Arg lse = read_arg(op, "lse", lse_tensor);
  expect_dtype(lse, {ScalarType::Float});
  if (dense) {
    expect_shape(lses, {p.splits, p.sequences, p.heads, p.tokens});
    expect_shape(out, {p.sequences, p.tokens, p.heads, p.value_dim});
    expect_shape(lse, {p.sequences, p.heads, p.tokens});
  } else {
    expect_shape(lses, {p.splits, p.heads, p.tokens});
    expect_shape(out, {p.tokens, p.heads, p.value_dim});
    expect_shape(lse, {p.heads, p.tokens});
  }
  for (const Arg* arg : {&lses, &out, &lse}) {
    expect_dense_last(*arg);
    expect_same_device(*arg, outs);
  }
  expect_writable(out);
  expect_writable(lse);
  if (sinks_tensor.has_value()) {
    p.sinks = static_cast<const float*>(
        read_vector(op, "sinks", *sinks_tensor, ScalarType::Float, p.heads, outs).data);
  }
  p.outs = outs.data;
  p.lses = static_cast<const float*>(lses.data);
  p.out = out.data;
  p.lse = static_cast<float*>(lse.data);
  p.outs_split = outs.stride(0);
  p.lses_split = lses.stride(0);
  p.outs_strides = {dense ? outs.stride(1) : 0, outs.stride(-3), outs.stride(-2)};
  p.lses_strides = {dense ? lses.stride(1) : 0, 1, lses.stride(-2)};
  p.out_strides = {dense ? out.stride(0) : 0, out.stride(-3), out.stride(-2)};
  p.lse_strides = {dense ? lse.stride(0) : 0, 1, lse.stride(-2)};
  return p;
}

}  // namespace fastinfer
