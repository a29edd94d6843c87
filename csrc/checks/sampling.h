// The door of sample, the same for every backend: tensors in, a problem of raw pointers out. What
// depends on the values of the parameters is for the backends that can read them.
#pragma once

#include "../torch_utils.h"

namespace fastinfer {

struct SampleProblem {
  ScalarType dtype;
  int64_t rows;        // B
  int64_t vocab;       // V >= 1
  const void* logits;  // [B, V], dense in V
  int64_t logits_stride;
  const float* temperature;  // [B] or null
  const int32_t* top_k;      // [B] or null
  const float* top_p;        // [B] or null
  const float* min_p;        // [B] or null
  const int64_t* seeds;      // [B] or null
  const int64_t* positions;  // [B] or null
  int64_t* token_ids;        // [B]
  bool* valid;               // [B]
};

template <class T>
const T* check_sample_parameter(const char* name, const std::optional<Tensor>& tensor,
                                ScalarType dtype, const Arg& logits) {
  if (!tensor.has_value()) return nullptr;
  const Arg arg = read_arg(logits.op, name, *tensor);
  expect_dtype(arg, {dtype});
  expect_shape(arg, {logits.size(0)});
  expect_contiguous(arg);
  expect_same_device(arg, logits);
  return static_cast<const T*>(arg.data);
}

inline SampleProblem check_sample(const Tensor& logits_tensor,
                                  const std::optional<Tensor>& temperature,
                                  const std::optional<Tensor>& top_k,
                                  const std::optional<Tensor>& top_p,
                                  const std::optional<Tensor>& min_p,
                                  const std::optional<Tensor>& seeds,
                                  const std::optional<Tensor>& positions,
                                  const Tensor& token_ids_tensor, const Tensor& valid_tensor) {
  constexpr const char* op = "sample";
  const Arg logits = read_arg(op, "logits", logits_tensor);
  expect_rank(logits, 2, "[B, V]");
  expect_float(logits);
  expect_dense_last(logits);
  // A token is four to a counter word, and the counter has 32 bits for it.
  FI_CHECK(logits.size(1) >= 1 && logits.size(1) <= INT32_MAX, op,
           "logits: expected a vocabulary in 1..2^31-1, got shape ", shape_text(logits));

  SampleProblem p{};
  p.dtype = logits.dtype;
  p.rows = logits.size(0);
  p.vocab = logits.size(1);
  p.logits = logits.data;
  p.logits_stride = logits.stride(0);
  using enum ScalarType;
  p.temperature = check_sample_parameter<float>("temperature", temperature, Float, logits);
  p.top_k = check_sample_parameter<int32_t>("top_k", top_k, Int, logits);
  p.top_p = check_sample_parameter<float>("top_p", top_p, Float, logits);
  p.min_p = check_sample_parameter<float>("min_p", min_p, Float, logits);
  p.seeds = check_sample_parameter<int64_t>("seeds", seeds, Long, logits);
  p.positions = check_sample_parameter<int64_t>("positions", positions, Long, logits);

  const Arg token_ids = read_arg(op, "token_ids", token_ids_tensor);
  expect_dtype(token_ids, {Long});
  expect_shape(token_ids, {p.rows});
  expect_contiguous(token_ids);
  expect_same_device(token_ids, logits);
  p.token_ids = static_cast<int64_t*>(token_ids.data);

  const Arg valid = read_arg(op, "valid", valid_tensor);
  expect_dtype(valid, {Bool});
  expect_shape(valid, {p.rows});
  expect_contiguous(valid);
  expect_same_device(valid, logits);
  p.valid = static_cast<bool*>(valid.data);
  return p;
}

}  // namespace fastinfer
