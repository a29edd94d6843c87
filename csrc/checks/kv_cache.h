// The door of append_paged_kv_cache_, the same for every backend: tensors in, a problem of raw
// pointers out.
#pragma once

#include "../torch_utils.h"

namespace fastinfer {

// The source rows, the pages and the scales of K, or of V. Strides are in elements.
struct AppendSide {
  const void* x;  // [T, Hk, dim], dense in dim
  int64_t x_token_stride;
  int64_t x_head_stride;
  int64_t dim;
  void* cache;  // [num_blocks, Hk, block_size, dim], dense in dim
  ScalarType cache_dtype;
  int64_t cache_block_stride;
  int64_t cache_head_stride;
  int64_t cache_slot_stride;
  float* scale;           // null for a float cache
  bool scale_is_dynamic;  // [num_blocks, Hk, block_size], written; otherwise [Hk], read
  int64_t scale_block_stride;
  int64_t scale_head_stride;
  int64_t scale_slot_stride;
};

struct AppendProblem {
  ScalarType dtype;  // of k and v
  int64_t tokens;
  int64_t heads;
  int64_t num_blocks;
  int64_t block_size;
  const int64_t* slot_mapping;  // [T]
  AppendSide k;
  AppendSide v;
};

inline AppendSide check_append_side(const Arg& x, const Arg& cache, const char* scale_name,
                                    const std::optional<Tensor>& scale_tensor) {
  const char* op = x.op;
  expect_dense_last(x);
  FI_CHECK(x.size(2) >= 1 && x.size(2) <= 512, op, x.name,
           ": expected a head size in 1..512, got shape ", shape_text(x));
  expect_rank(cache, 4, "[num_blocks, Hk, block_size, head size]");
  expect_shape(cache, {cache.size(0), x.size(1), cache.size(2), x.size(2)});
  FI_CHECK(cache.size(2) % 8 == 0 && cache.size(2) >= 8 && cache.size(2) <= 512, op, cache.name,
           ": expected a block size that is a multiple of 8 in 8..512, got shape ",
           shape_text(cache));
  expect_dtype(cache, {x.dtype, ScalarType::Char, ScalarType::Float8_e4m3fn});
  expect_dense_last(cache);
  expect_writable(cache);
  expect_same_device(cache, x);

  AppendSide side{};
  side.x = x.data;
  side.x_token_stride = x.stride(0);
  side.x_head_stride = x.stride(1);
  side.dim = x.size(2);
  side.cache = cache.data;
  side.cache_dtype = cache.dtype;
  side.cache_block_stride = cache.stride(0);
  side.cache_head_stride = cache.stride(1);
  side.cache_slot_stride = cache.stride(2);

  const bool quantized = cache.dtype != x.dtype;
  FI_CHECK(quantized || !scale_tensor.has_value(), op, scale_name, ": expected none since ",
           cache.name, " is ", dtype_name(cache.dtype), ", got a tensor");
  FI_CHECK(!quantized || scale_tensor.has_value(), op, scale_name, ": expected a tensor since ",
           cache.name, " is ", dtype_name(cache.dtype), ", got none");
  if (!quantized) return side;

  const Arg scale = read_arg(op, scale_name, *scale_tensor);
  expect_dtype(scale, {ScalarType::Float});
  expect_same_device(scale, x);
  side.scale = static_cast<float*>(scale.data);
  if (scale.rank == 1) {
    expect_shape(scale, {x.size(1)});
    side.scale_head_stride = scale.stride(0);
    return side;
  }
  FI_CHECK(scale.rank == 3, op, scale_name,
           ": expected shape [Hk] or [num_blocks, Hk, block_size], got shape ", shape_text(scale));
  expect_shape(scale, {cache.size(0), cache.size(1), cache.size(2)});
  expect_writable(scale);
  side.scale_is_dynamic = true;
  side.scale_block_stride = scale.stride(0);
  side.scale_head_stride = scale.stride(1);
  side.scale_slot_stride = scale.stride(2);
  return side;
}

inline AppendProblem check_append(const Tensor& k_tensor, const Tensor& v_tensor,
                                  const Tensor& k_cache_tensor, const Tensor& v_cache_tensor,
                                  const Tensor& slot_mapping_tensor,
                                  const std::optional<Tensor>& k_scale,
                                  const std::optional<Tensor>& v_scale) {
  constexpr const char* op = "append_paged_kv_cache_";
  const Arg k = read_arg(op, "k", k_tensor);
  const Arg v = read_arg(op, "v", v_tensor);
  const Arg k_cache = read_arg(op, "k_cache", k_cache_tensor);
  const Arg v_cache = read_arg(op, "v_cache", v_cache_tensor);
  const Arg slots = read_arg(op, "slot_mapping", slot_mapping_tensor);
  expect_rank(k, 3, "[T, Hk, D]");
  expect_float(k);
  expect_rank(v, 3, "[T, Hk, Dv]");
  expect_same_dtype(v, k);
  expect_shape(v, {k.size(0), k.size(1), v.size(2)});
  expect_same_device(v, k);
  expect_dtype(slots, {ScalarType::Long});
  expect_shape(slots, {k.size(0)});
  expect_contiguous(slots);
  expect_same_device(slots, k);

  AppendProblem p{};
  p.dtype = k.dtype;
  p.tokens = k.size(0);
  p.heads = k.size(1);
  p.k = check_append_side(k, k_cache, "k_scale", k_scale);
  p.v = check_append_side(v, v_cache, "v_scale", v_scale);
  p.num_blocks = k_cache.size(0);
  p.block_size = k_cache.size(2);
  FI_CHECK(v_cache.size(0) == p.num_blocks && v_cache.size(2) == p.block_size, op,
           "v_cache: expected ", p.num_blocks, " blocks of ", p.block_size,
           " tokens as k_cache, got shape ", shape_text(v_cache));
  expect_no_overlap(v_cache, k_cache);
  p.slot_mapping = static_cast<const int64_t*>(slots.data);
  return p;
}

}  // namespace fastinfer
