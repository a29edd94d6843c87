// The functional overloads, the same for every backend: allocate the outputs, then do what the
// backend's `.out` implementation `kOut` does.
#pragma once

#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "checks/attention.h"
#include "checks/low_bit_gemm.h"
#include "checks/quantize.h"
#include "checks/scaled_mm.h"
#include "torch_utils.h"

namespace fastinfer::functional {

template <auto kOut>
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, double weight_offset) {
  Tensor out = torch::stable::new_empty(x, x.sizes());
  kOut(x, weight, eps, weight_offset, out);
  return out;
}

template <auto kOut>
Tensor layer_norm(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                  double eps, double weight_offset) {
  Tensor out = torch::stable::new_empty(x, x.sizes());
  kOut(x, weight, bias, eps, weight_offset, out);
  return out;
}

inline Tensor new_halved(const char* op, const Tensor& x) {
  FI_CHECK(x.dim() >= 1, op, "x: expected at least 1 dimension, got a scalar");
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() /= 2;
  return torch::stable::new_empty(x, sizes);
}

template <auto kOut>
Tensor silu_and_mul(const Tensor& x) {
  Tensor out = new_halved("silu_and_mul", x);
  kOut(x, out);
  return out;
}

template <auto kOut>
Tensor gelu_and_mul(const Tensor& x, bool tanh_approx) {
  Tensor out = new_halved("gelu_and_mul", x);
  kOut(x, tanh_approx, out);
  return out;
}

// A backend's low-bit matrix product is one function for all bits, kOut(inputs, out).
template <int kBits, auto kOut>
void low_bit_gemm_out(const Tensor& x, const Tensor& qweight, const Tensor& scales,
                      const std::optional<Tensor>& zeros, int64_t group_size,
                      const std::optional<Tensor>& perm, const std::optional<Tensor>& bias,
                      const std::string& activation, bool gated,
                      const std::optional<Tensor>& residual, const std::optional<Tensor>& out_scale,
                      std::optional<ScalarType> out_dtype, const std::optional<Tensor>& norm_weight,
                      double norm_eps, double norm_weight_offset,
                      const std::optional<Tensor>& outlier_offsets,
                      const std::optional<Tensor>& outlier_columns,
                      const std::optional<Tensor>& outlier_values, const Tensor& out) {
  kOut({kBits,
        x,
        qweight,
        scales,
        zeros,
        group_size,
        perm,
        bias,
        {activation, gated, residual, out_scale, out_dtype},
        {norm_weight, norm_eps, norm_weight_offset},
        {outlier_offsets, outlier_columns, outlier_values}},
       out);
}

template <int kBits, auto kOut>
Tensor low_bit_gemm(const Tensor& x, const Tensor& qweight, const Tensor& scales,
                    const std::optional<Tensor>& zeros, int64_t group_size,
                    const std::optional<Tensor>& perm, const std::optional<Tensor>& bias,
                    const std::string& activation, bool gated,
                    const std::optional<Tensor>& residual, const std::optional<Tensor>& out_scale,
                    std::optional<ScalarType> out_dtype, const std::optional<Tensor>& norm_weight,
                    double norm_eps, double norm_weight_offset,
                    const std::optional<Tensor>& outlier_offsets,
                    const std::optional<Tensor>& outlier_columns,
                    const std::optional<Tensor>& outlier_values) {
  constexpr const char* op = low_bit_gemm_name(kBits);
  FI_CHECK(x.dim() == 2, op, "x: expected 2 dimensions [M, K], got ", x.dim());
  FI_CHECK(scales.dim() == 2, op, "scales: expected 2 dimensions [ceil(K / group_size), N], got ",
           scales.dim());
  Tensor out = torch::stable::new_empty(x, {x.size(0), result_columns(scales.size(1), gated)},
                                        out_dtype.value_or(x.scalar_type()));
  low_bit_gemm_out<kBits, kOut>(x, qweight, scales, zeros, group_size, perm, bias, activation,
                                gated, residual, out_scale, out_dtype, norm_weight, norm_eps,
                                norm_weight_offset, outlier_offsets, outlier_columns,
                                outlier_values, out);
  return out;
}

// The four ops of a backend. (A second pair of parentheses keeps the macro's argument whole.)
template <auto kOut>
void register_low_bit_gemm(torch::stable::detail::StableLibrary& m) {
  m.impl("int2_gemm", TORCH_BOX((&low_bit_gemm<2, kOut>)));
  m.impl("int2_gemm.out", TORCH_BOX((&low_bit_gemm_out<2, kOut>)));
  m.impl("int3_gemm", TORCH_BOX((&low_bit_gemm<3, kOut>)));
  m.impl("int3_gemm.out", TORCH_BOX((&low_bit_gemm_out<3, kOut>)));
  m.impl("int4_gemm", TORCH_BOX((&low_bit_gemm<4, kOut>)));
  m.impl("int4_gemm.out", TORCH_BOX((&low_bit_gemm_out<4, kOut>)));
  m.impl("int8_gemm", TORCH_BOX((&low_bit_gemm<8, kOut>)));
  m.impl("int8_gemm.out", TORCH_BOX((&low_bit_gemm_out<8, kOut>)));
}

// A backend's scaled product is one function for both formats, kOut(inputs, out).
template <auto kOut>
void fp8_scaled_mm_out(const Tensor& a, const Tensor& b, const Tensor& a_scale,
                       const Tensor& b_scale, const std::optional<Tensor>& bias,
                       std::optional<ScalarType> out_dtype, const std::string& activation,
                       bool gated, const std::optional<Tensor>& residual,
                       const std::optional<Tensor>& out_scale, const Tensor& out) {
  kOut({MmFormat::kFp8,
        a,
        b,
        a_scale,
        b_scale,
        std::nullopt,
        bias,
        {activation, gated, residual, out_scale, out_dtype}},
       out);
}

template <auto kOut>
void int8_scaled_mm_out(const Tensor& a, const Tensor& b, const Tensor& a_scale,
                        const Tensor& b_scale, const std::optional<Tensor>& a_zero,
                        const std::optional<Tensor>& bias, std::optional<ScalarType> out_dtype,
                        const std::string& activation, bool gated,
                        const std::optional<Tensor>& residual,
                        const std::optional<Tensor>& out_scale, const Tensor& out) {
  kOut({MmFormat::kInt8,
        a,
        b,
        a_scale,
        b_scale,
        a_zero,
        bias,
        {activation, gated, residual, out_scale, out_dtype}},
       out);
}

inline Tensor new_product(MmFormat format, const Tensor& a, const Tensor& b, bool gated,
                          std::optional<ScalarType> out_dtype) {
  const char* op = scaled_mm_name(format);
  FI_CHECK(a.dim() == 2, op, "a: expected 2 dimensions [M, K], got ", a.dim());
  FI_CHECK(b.dim() == 2, op, "b: expected 2 dimensions [N, K], got ", b.dim());
  return torch::stable::new_empty(a, {a.size(0), result_columns(b.size(0), gated)},
                                  out_dtype.value_or(ScalarType::BFloat16));
}

template <auto kOut>
Tensor fp8_scaled_mm(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                     const std::optional<Tensor>& bias, std::optional<ScalarType> out_dtype,
                     const std::string& activation, bool gated,
                     const std::optional<Tensor>& residual,
                     const std::optional<Tensor>& out_scale) {
  Tensor out = new_product(MmFormat::kFp8, a, b, gated, out_dtype);
  fp8_scaled_mm_out<kOut>(a, b, a_scale, b_scale, bias, out_dtype, activation, gated, residual,
                          out_scale, out);
  return out;
}

template <auto kOut>
Tensor int8_scaled_mm(const Tensor& a, const Tensor& b, const Tensor& a_scale,
                      const Tensor& b_scale, const std::optional<Tensor>& a_zero,
                      const std::optional<Tensor>& bias, std::optional<ScalarType> out_dtype,
                      const std::string& activation, bool gated,
                      const std::optional<Tensor>& residual,
                      const std::optional<Tensor>& out_scale) {
  Tensor out = new_product(MmFormat::kInt8, a, b, gated, out_dtype);
  int8_scaled_mm_out<kOut>(a, b, a_scale, b_scale, a_zero, bias, out_dtype, activation, gated,
                           residual, out_scale, out);
  return out;
}

template <auto kOut>
void register_scaled_mm(torch::stable::detail::StableLibrary& m) {
  m.impl("fp8_scaled_mm", TORCH_BOX(&fp8_scaled_mm<kOut>));
  m.impl("fp8_scaled_mm.out", TORCH_BOX(&fp8_scaled_mm_out<kOut>));
  m.impl("int8_scaled_mm", TORCH_BOX(&int8_scaled_mm<kOut>));
  m.impl("int8_scaled_mm.out", TORCH_BOX(&int8_scaled_mm_out<kOut>));
}

template <auto kOut>
std::tuple<Tensor, Tensor> quantize_fp8(const Tensor& x, const std::optional<Tensor>& scale,
                                        const std::vector<int64_t>& block) {
  const BlockGrid grid = block_grid(read_arg("quantize_fp8", "x", x), block);
  Tensor out = torch::stable::new_empty(x, x.sizes(), ScalarType::Float8_e4m3fn);
  Tensor out_scale = torch::stable::new_empty(x, {grid.rows, grid.columns}, ScalarType::Float);
  kOut(x, scale, block, out, out_scale);
  return {out, out_scale};
}

template <auto kOut>
std::tuple<Tensor, Tensor> quantize_int8(const Tensor& x, const std::optional<Tensor>& scale,
                                         const std::vector<int64_t>& block) {
  const BlockGrid grid = block_grid(read_arg("quantize_int8", "x", x), block);
  Tensor out = torch::stable::new_empty(x, x.sizes(), ScalarType::Char);
  Tensor out_scale = torch::stable::new_empty(x, {grid.rows, grid.columns}, ScalarType::Float);
  kOut(x, scale, block, out, out_scale);
  return {out, out_scale};
}

template <auto kOut>
std::tuple<Tensor, Tensor, Tensor> quantize_int8_asymmetric(const Tensor& x) {
  const BlockGrid grid = block_grid(read_arg("quantize_int8_asymmetric", "x", x), kPerToken);
  Tensor out = torch::stable::new_empty(x, x.sizes(), ScalarType::Char);
  Tensor out_scale = torch::stable::new_empty(x, {grid.rows, grid.columns}, ScalarType::Float);
  Tensor out_zero_point = torch::stable::new_empty(x, {grid.rows, grid.columns}, ScalarType::Int);
  kOut(x, out, out_scale, out_zero_point);
  return {out, out_scale, out_zero_point};
}

template <auto kOut>
std::tuple<Tensor, Tensor> sample(const Tensor& logits, const std::optional<Tensor>& temperature,
                                  const std::optional<Tensor>& top_k,
                                  const std::optional<Tensor>& top_p,
                                  const std::optional<Tensor>& min_p,
                                  const std::optional<Tensor>& seeds,
                                  const std::optional<Tensor>& positions) {
  FI_CHECK(logits.dim() == 2, "sample", "logits: expected 2 dimensions [B, V], got ", logits.dim());
  Tensor token_ids = torch::stable::new_empty(logits, {logits.size(0)}, ScalarType::Long);
  Tensor valid = torch::stable::new_empty(logits, {logits.size(0)}, ScalarType::Bool);
  kOut(logits, temperature, top_k, top_p, min_p, seeds, positions, token_ids, valid);
  return {token_ids, valid};
}

template <auto kOut>
std::tuple<Tensor, Tensor> merge_attention_states(const Tensor& outs, const Tensor& lses,
                                                  const std::optional<Tensor>& sinks) {
  constexpr const char* op = "merge_attention_states";
  FI_CHECK(outs.dim() >= 1, op, "outs: expected at least 1 dimension, got a scalar");
  FI_CHECK(lses.dim() >= 1, op, "lses: expected at least 1 dimension, got a scalar");
  Tensor out = torch::stable::new_empty(outs, outs.sizes().slice(1));
  Tensor lse = torch::stable::new_empty(lses, lses.sizes().slice(1));
  kOut(outs, lses, sinks, out, lse);
  return {out, lse};
}

template <auto kOut>
std::tuple<Tensor, Tensor> flash_attention(
    const Tensor& q, const Tensor& k, const Tensor& v, std::optional<double> scale, bool causal,
    int64_t window_left, int64_t window_right, double softcap, const std::optional<Tensor>& sinks,
    const std::optional<Tensor>& tree_mask, const std::optional<Tensor>& q_scale,
    const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
    bool batch_invariant) {
  auto [out, lse] = new_attention_outputs("flash_attention", q, "v", v, true);
  kOut(q, k, v, scale, causal, window_left, window_right, softcap, sinks, tree_mask, q_scale,
       k_scale, v_scale, batch_invariant, out, lse);
  return {out, lse};
}

template <auto kOut>
std::tuple<Tensor, Tensor> flash_attention_varlen(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q,
    const Tensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
    std::optional<double> scale, bool causal, int64_t window_left, int64_t window_right,
    double softcap, const std::optional<Tensor>& sinks, const std::optional<Tensor>& tree_mask,
    const std::optional<Tensor>& q_scale, const std::optional<Tensor>& k_scale,
    const std::optional<Tensor>& v_scale, bool batch_invariant) {
  auto [out, lse] = new_attention_outputs("flash_attention_varlen", q, "v", v, false);
  kOut(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal, window_left,
       window_right, softcap, sinks, tree_mask, q_scale, k_scale, v_scale, batch_invariant, out,
       lse);
  return {out, lse};
}

template <auto kOut>
std::tuple<Tensor, Tensor> paged_attention(
    const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_table,
    const Tensor& cu_seqlens_q, const Tensor& seq_lens, int64_t max_seqlen_q, int64_t max_seqlen_k,
    std::optional<double> scale, bool causal, int64_t window_left, int64_t window_right,
    double softcap, const std::optional<Tensor>& sinks, const std::optional<Tensor>& tree_mask,
    const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
    const std::optional<Tensor>& plan, bool batch_invariant) {
  auto [out, lse] = new_attention_outputs("paged_attention", q, "v_cache", v_cache, false);
  kOut(q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, max_seqlen_q, max_seqlen_k, scale,
       causal, window_left, window_right, softcap, sinks, tree_mask, k_scale, v_scale, plan,
       batch_invariant, std::nullopt, out, lse);
  return {out, lse};
}

template <auto kOut>
Tensor plan_attention(const Tensor& cu_seqlens_q, const Tensor& seq_lens, int64_t total_q,
                      int64_t num_heads, int64_t num_kv_heads, int64_t max_seqlen_q,
                      int64_t max_seqlen_k, bool causal, int64_t window_left, int64_t window_right,
                      bool batch_invariant) {
  const AttentionProblem p =
      check_plan_attention(cu_seqlens_q, seq_lens, total_q, num_heads, num_kv_heads, max_seqlen_q,
                           max_seqlen_k, causal, window_left, window_right, batch_invariant);
  const Tensor out =
      torch::stable::new_empty(seq_lens, {plan_rows(p), kPlanColumns}, ScalarType::Int);
  kOut(cu_seqlens_q, seq_lens, total_q, num_heads, num_kv_heads, max_seqlen_q, max_seqlen_k, causal,
       window_left, window_right, batch_invariant, out);
  return out;
}

}  // namespace fastinfer::functional
