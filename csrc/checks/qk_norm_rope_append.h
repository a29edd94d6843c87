// The door of qk_norm_rope_append_, the same for every backend: tensors in, a problem of raw
// pointers out.
#pragma once

#include "kv_cache.h"

namespace fastinfer {

struct QkNormRopeAppendProblem {
  const void* qkv;  // [T, heads * dim + kv_heads * (dim + value_dim)], dense in its columns
  int64_t qkv_token_stride;
  void* q_out;  // [T, heads, dim], dense in dim; may be the first columns of qkv
  int64_t q_token_stride;
  int64_t q_head_stride;
  int64_t heads;
  int64_t dim;
  const int64_t* positions;  // [T], or null: nothing is turned
  const float* cos_sin;      // [num_positions, rotary_dim], dense in rotary_dim
  int64_t cos_sin_stride;
  int64_t num_positions;
  int64_t rotary_dim;  // even, <= dim; 0 without positions
  bool interleaved;
  const void* bias;      // [columns of qkv], of its element type, or null
  const void* q_weight;  // [dim], or null: not normalised
  const void* k_weight;  // likewise
  ScalarType q_weight_dtype;
  ScalarType k_weight_dtype;
  float eps;
  float weight_offset;
  AppendProblem append;  // k and v as columns of qkv
};

namespace detail {

inline void check_head_weight(const Arg& weight, const Arg& qkv, int64_t dim) {
  expect_shape(weight, {dim});
  FI_CHECK(weight.dtype == qkv.dtype || weight.dtype == ScalarType::Float, weight.op, weight.name,
           ": expected dtype ", dtype_name(qkv.dtype), " as qkv or float32, got ",
           dtype_name(weight.dtype));
  expect_contiguous(weight);
  expect_same_device(weight, qkv);
}

inline void check_rotation(const Arg& qkv, const Tensor& positions_tensor,
                           const Tensor& cos_sin_tensor, QkNormRopeAppendProblem* p) {
  const Arg positions = read_arg(qkv.op, "positions", positions_tensor);
  expect_dtype(positions, {ScalarType::Long});
  expect_shape(positions, {qkv.size(0)});
  expect_contiguous(positions);
  expect_same_device(positions, qkv);
  const Arg cos_sin = read_arg(qkv.op, "cos_sin", cos_sin_tensor);
  expect_rank(cos_sin, 2, "[P, R]");
  expect_dtype(cos_sin, {ScalarType::Float});
  expect_dense_last(cos_sin);
  expect_same_device(cos_sin, qkv);
  FI_CHECK(cos_sin.size(1) % 2 == 0 && cos_sin.size(1) <= p->dim, qkv.op,
           "cos_sin: expected an even number of columns up to the head size ", p->dim,
           ", got shape ", shape_text(cos_sin));
  if (cos_sin.size(1) == 0) return;
  p->positions = static_cast<const int64_t*>(positions.data);
  p->cos_sin = static_cast<const float*>(cos_sin.data);
  p->cos_sin_stride = cos_sin.stride(0);
  p->num_positions = cos_sin.size(0);
  p->rotary_dim = cos_sin.size(1);
}

// Queries may be written over the columns that they come from, and over no others of qkv.
inline void check_q_overlap(const Arg& q_out, const Arg& qkv) {
  const bool same = q_out.data == qkv.data &&
                    (q_out.stride(0) == qkv.stride(0) || qkv.size(0) <= 1) &&
                    (q_out.stride(1) == q_out.size(2) || q_out.size(1) <= 1);
  if (!same) expect_no_overlap(q_out, qkv);
}

}  // namespace detail

inline QkNormRopeAppendProblem check_qk_norm_rope_append(
    const Tensor& qkv_tensor, const Tensor& q_out_tensor, const Tensor& k_cache_tensor,
    const Tensor& v_cache_tensor, const Tensor& slot_mapping_tensor,
    const std::optional<Tensor>& positions, const std::optional<Tensor>& cos_sin,
    const std::optional<Tensor>& bias_tensor, const std::optional<Tensor>& q_weight_tensor,
    const std::optional<Tensor>& k_weight_tensor, double eps, double weight_offset,
    bool interleaved, const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale) {
  constexpr const char* op = "qk_norm_rope_append_";
  const Arg qkv = read_arg(op, "qkv", qkv_tensor);
  const Arg q_out = read_arg(op, "q_out", q_out_tensor);
  const Arg k_cache = read_arg(op, "k_cache", k_cache_tensor);
  const Arg v_cache = read_arg(op, "v_cache", v_cache_tensor);
  const Arg slots = read_arg(op, "slot_mapping", slot_mapping_tensor);
  expect_rank(qkv, 2, "[T, H * D + Hk * (D + Dv)]");
  expect_float(qkv);
  expect_dense_last(qkv);
  expect_rank(q_out, 3, "[T, H, D]");
  expect_same_dtype(q_out, qkv);
  expect_dense_last(q_out);
  expect_writable(q_out);
  expect_same_device(q_out, qkv);
  expect_rank(k_cache, 4, "[num_blocks, Hk, block_size, D]");
  expect_rank(v_cache, 4, "[num_blocks, Hk, block_size, Dv]");
  const int64_t tokens = qkv.size(0), heads = q_out.size(1), dim = k_cache.size(3);
  const int64_t kv_heads = k_cache.size(1), value_dim = v_cache.size(3);
  expect_shape(q_out, {tokens, heads, dim});
  expect_shape(v_cache, {k_cache.size(0), kv_heads, k_cache.size(2), value_dim});
  FI_CHECK(qkv.size(1) == heads * dim + kv_heads * (dim + value_dim), op, "qkv: expected ",
           heads * dim + kv_heads * (dim + value_dim), " columns for ", heads, " heads of q_out, ",
           kv_heads, " of k_cache of size ", dim, " and of v_cache of size ", value_dim,
           ", got shape ", shape_text(qkv));
  detail::check_q_overlap(q_out, qkv);
  expect_dtype(slots, {ScalarType::Long});
  expect_shape(slots, {tokens});
  expect_contiguous(slots);
  expect_same_device(slots, qkv);
  FI_CHECK(eps >= 0.0, op, "eps: expected a number >= 0, got ", eps);

  QkNormRopeAppendProblem p{};
  p.qkv = qkv.data;
  p.qkv_token_stride = qkv.stride(0);
  p.q_out = q_out.data;
  p.q_token_stride = q_out.stride(0);
  p.q_head_stride = q_out.stride(1);
  p.heads = heads;
  p.dim = dim;
  p.interleaved = interleaved;
  p.eps = static_cast<float>(eps);
  p.weight_offset = static_cast<float>(weight_offset);
  FI_CHECK(positions.has_value() == cos_sin.has_value(), op,
           "positions, cos_sin: expected both or none, got ",
           positions.has_value() ? "positions" : "cos_sin", " alone");
  if (positions.has_value()) detail::check_rotation(qkv, *positions, *cos_sin, &p);
  if (bias_tensor.has_value()) {
    const Arg bias = read_arg(op, "bias", *bias_tensor);
    expect_same_dtype(bias, qkv);
    expect_shape(bias, {qkv.size(1)});
    expect_contiguous(bias);
    expect_same_device(bias, qkv);
    p.bias = bias.data;
  }
  if (q_weight_tensor.has_value()) {
    const Arg weight = read_arg(op, "q_weight", *q_weight_tensor);
    detail::check_head_weight(weight, qkv, dim);
    p.q_weight = weight.data;
    p.q_weight_dtype = weight.dtype;
  }
  if (k_weight_tensor.has_value()) {
    const Arg weight = read_arg(op, "k_weight", *k_weight_tensor);
    detail::check_head_weight(weight, qkv, dim);
    p.k_weight = weight.data;
    p.k_weight_dtype = weight.dtype;
  }

  // k and v as tensors of their own: columns of qkv.
  char* k_data = static_cast<char*>(qkv.data) + heads * dim * element_size(qkv.dtype);
  char* v_data = k_data + kv_heads * dim * element_size(qkv.dtype);
  const int64_t k_sizes[] = {tokens, kv_heads, dim}, k_strides[] = {qkv.stride(0), dim, 1};
  const int64_t v_sizes[] = {tokens, kv_heads, value_dim};
  const int64_t v_strides[] = {qkv.stride(0), value_dim, 1};
  Arg k = qkv, v = qkv;
  k.rank = v.rank = 3;
  k.data = k_data, k.sizes = k_sizes, k.strides = k_strides;
  v.data = v_data, v.sizes = v_sizes, v.strides = v_strides;
  p.append.dtype = qkv.dtype;
  p.append.tokens = tokens;
  p.append.heads = kv_heads;
  p.append.num_blocks = k_cache.size(0);
  p.append.block_size = k_cache.size(2);
  p.append.slot_mapping = static_cast<const int64_t*>(slots.data);
  p.append.k = check_append_side(k, k_cache, "k_scale", k_scale);
  p.append.v = check_append_side(v, v_cache, "v_scale", v_scale);
  for (const Arg& other : {qkv, q_out}) {
    expect_no_overlap(k_cache, other);
    expect_no_overlap(v_cache, other);
  }
  expect_no_overlap(v_cache, k_cache);
  return p;
}

}  // namespace fastinfer
