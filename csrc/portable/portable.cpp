// The ops on GPUs without hand-written kernels: the door in C++, then the portable implementation.
#include "portable.h"

#include "../checks/activation.h"
#include "../checks/kv_cache.h"
#include "../checks/low_bit_gemm.h"
#include "../checks/merge.h"
#include "../checks/norm.h"
#include "../checks/qk_norm_rope_append.h"
#include "../checks/quantize.h"
#include "../checks/rotary.h"
#include "../checks/sampling.h"
#include "../checks/scaled_mm.h"
#include "../functional.h"
#include "attention.h"
#include "kv_cache.h"
#include "low_bit_gemm.h"
#include "norm.h"
#include "scaled_mm.h"

namespace fastinfer {

std::string& portable_error() {
  static thread_local std::string text;
  return text;
}

}  // namespace fastinfer

// Called by fastinfer/_library.py.
extern "C" __attribute__((visibility("default"))) void fastinfer_portable_error(const char* text) {
  fastinfer::portable_error() = text;
}

namespace fastinfer::portable {

// ---- norms (the hand-written kernels come here as well)

void rms_norm_out(const Tensor& x, const Tensor& weight, double eps, double weight_offset,
                  const Tensor& out) {
  const auto p = check_norm("rms_norm", x, weight, std::nullopt, eps, weight_offset, out, nullptr);
  if (p.x_rows.count == 0) return;
  call_portable("fastinfer::_portable_rms_norm", x, weight, eps, weight_offset, out);
}

void fused_add_rms_norm_(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
                         double weight_offset) {
  const auto p =
      check_norm("fused_add_rms_norm_", x, weight, std::nullopt, eps, weight_offset, x, &residual);
  if (p.x_rows.count == 0) return;
  call_portable("fastinfer::_portable_fused_add_rms_norm_", x, residual, weight, eps,
                weight_offset);
}

// ---- pages (likewise)

void append_paged_kv_cache_(const Tensor& k, const Tensor& v, const Tensor& k_cache,
                            const Tensor& v_cache, const Tensor& slot_mapping,
                            const std::optional<Tensor>& k_scale,
                            const std::optional<Tensor>& v_scale) {
  const auto p = check_append(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale);
  if (p.tokens * p.heads == 0) return;
  call_portable("fastinfer::_portable_append_paged_kv_cache_", k, v, k_cache, v_cache, slot_mapping,
                k_scale, v_scale);
}

void qk_norm_rope_append_(const Tensor& qkv, const Tensor& q_out, const Tensor& k_cache,
                          const Tensor& v_cache, const Tensor& slot_mapping,
                          const std::optional<Tensor>& positions,
                          const std::optional<Tensor>& cos_sin, const std::optional<Tensor>& bias,
                          const std::optional<Tensor>& q_weight,
                          const std::optional<Tensor>& k_weight, double eps, double weight_offset,
                          bool interleaved, const std::optional<Tensor>& k_scale,
                          const std::optional<Tensor>& v_scale) {
  const auto p = check_qk_norm_rope_append(qkv, q_out, k_cache, v_cache, slot_mapping, positions,
                                           cos_sin, bias, q_weight, k_weight, eps, weight_offset,
                                           interleaved, k_scale, v_scale);
  if (p.append.tokens * (p.heads + p.append.heads) == 0) return;
  call_portable("fastinfer::_portable_qk_norm_rope_append_", qkv, q_out, k_cache, v_cache,
                slot_mapping, positions, cos_sin, bias, q_weight, k_weight, eps, weight_offset,
                interleaved, k_scale, v_scale);
}

// ---- low-bit matrix products (likewise)

void low_bit_gemm_out(const LowBitGemmInputs& inputs, const Tensor& out) {
  const auto p = check_low_bit_gemm(inputs, out);
  if (p.m == 0) return;
  const auto& norm = inputs.norm;
  const Tensor x = p.norm_weight == nullptr
                       ? inputs.x
                       : functional::rms_norm<&rms_norm_out>(inputs.x, *norm.weight, norm.eps,
                                                             norm.weight_offset);
  call_portable("fastinfer::_portable_low_bit_gemm", int64_t{p.bits}, x, inputs.qweight,
                inputs.scales, inputs.zeros, p.group_size, inputs.perm, inputs.bias,
                inputs.outliers.offsets, inputs.outliers.columns, inputs.outliers.values,
                static_cast<int64_t>(p.epilogue.activation), p.epilogue.gated,
                inputs.epilogue.residual, inputs.epilogue.out_scale, out);
}

// ---- scaled products of 8-bit matrices (likewise)

void scaled_mm_out(const ScaledMmInputs& inputs, const Tensor& out) {
  const auto p = check_scaled_mm(inputs, out);
  if (p.m == 0) return;
  call_portable("fastinfer::_portable_scaled_mm", inputs.a, inputs.b, inputs.a_scale,
                inputs.b_scale, inputs.a_zero, inputs.bias,
                static_cast<int64_t>(p.epilogue.activation), p.epilogue.gated,
                inputs.epilogue.residual, inputs.epilogue.out_scale, out);
}

namespace {

void layer_norm_out(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                    double eps, double weight_offset, const Tensor& out) {
  const auto p = check_norm("layer_norm", x, weight, bias, eps, weight_offset, out, nullptr);
  if (p.x_rows.count == 0) return;
  call_portable("fastinfer::_portable_layer_norm", x, weight, bias, eps, weight_offset, out);
}

void fused_add_layer_norm_(const Tensor& x, const Tensor& residual, const Tensor& weight,
                           const std::optional<Tensor>& bias, double eps, double weight_offset) {
  const auto p =
      check_norm("fused_add_layer_norm_", x, weight, bias, eps, weight_offset, x, &residual);
  if (p.x_rows.count == 0) return;
  call_portable("fastinfer::_portable_fused_add_layer_norm_", x, residual, weight, bias, eps,
                weight_offset);
}

// ---- gated activations

void silu_and_mul_out(const Tensor& x, const Tensor& out) {
  const auto p = check_activation("silu_and_mul", x, out);
  if (p.x_rows.count * p.width == 0) return;
  call_portable("fastinfer::_portable_silu_and_mul", x, out);
}

void gelu_and_mul_out(const Tensor& x, bool tanh_approx, const Tensor& out) {
  const auto p = check_activation("gelu_and_mul", x, out);
  if (p.x_rows.count * p.width == 0) return;
  call_portable("fastinfer::_portable_gelu_and_mul", x, tanh_approx, out);
}

// ---- quantization

void quantize_fp8_out(const Tensor& x, const std::optional<Tensor>& scale,
                      const std::vector<int64_t>& block, const Tensor& out,
                      const Tensor& out_scale) {
  const auto p = check_quantize_fp8(x, scale, block, out, out_scale);
  if (p.grid.count() == 0) return;
  call_portable("fastinfer::_portable_quantize_fp8", x, scale, p.grid.block_rows,
                p.grid.block_columns, out, out_scale);
}

void quantize_int8_out(const Tensor& x, const std::optional<Tensor>& scale,
                       const std::vector<int64_t>& block, const Tensor& out,
                       const Tensor& out_scale) {
  const auto p = check_quantize_int8(x, scale, block, out, out_scale);
  if (p.grid.count() == 0) return;
  call_portable("fastinfer::_portable_quantize_int8", x, scale, p.grid.block_rows,
                p.grid.block_columns, out, out_scale);
}

void quantize_int8_asymmetric_out(const Tensor& x, const Tensor& out, const Tensor& out_scale,
                                  const Tensor& out_zero_point) {
  const auto p = check_quantize_int8_asymmetric(x, out, out_scale, out_zero_point);
  if (p.grid.count() == 0) return;
  call_portable("fastinfer::_portable_quantize_int8_asymmetric", x, out, out_scale, out_zero_point);
}

// ---- positions

void rotary_embedding_(const Tensor& q, const std::optional<Tensor>& k, const Tensor& positions,
                       const Tensor& cos_sin, bool interleaved) {
  const auto p = check_rotary(q, k, positions, cos_sin);
  if (p.tokens * (p.q_heads + p.k_heads) * p.rotary_dim == 0) return;
  call_portable("fastinfer::_portable_rotary_embedding_", q, k, positions, cos_sin, interleaved);
}

// ---- sampling

void sample_out(const Tensor& logits, const std::optional<Tensor>& temperature,
                const std::optional<Tensor>& top_k, const std::optional<Tensor>& top_p,
                const std::optional<Tensor>& min_p, const std::optional<Tensor>& seeds,
                const std::optional<Tensor>& positions, const Tensor& token_ids,
                const Tensor& valid) {
  const auto p =
      check_sample(logits, temperature, top_k, top_p, min_p, seeds, positions, token_ids, valid);
  if (p.rows == 0) return;
  call_portable("fastinfer::_portable_sample", logits, temperature, top_k, top_p, min_p, seeds,
                positions, token_ids, valid);
}

}  // namespace

// ---- attention

void flash_attention_out(const Tensor& q, const Tensor& k, const Tensor& v,
                         std::optional<double> scale, bool causal, int64_t window_left,
                         int64_t window_right, double softcap, const std::optional<Tensor>& sinks,
                         const std::optional<Tensor>& tree_mask,
                         const std::optional<Tensor>& q_scale, const std::optional<Tensor>& k_scale,
                         const std::optional<Tensor>& v_scale, bool batch_invariant,
                         const Tensor& out, const Tensor& lse) {
  const auto p = check_flash_attention(
      q, k, v,
      {scale, causal, window_left, window_right, softcap, sinks, tree_mask, batch_invariant},
      {q_scale, k_scale, v_scale}, out, lse);
  if (p.total_q == 0) return;
  call_portable("fastinfer::_portable_flash_attention", q, k, v, static_cast<double>(p.scale),
                p.window_left, p.window_right, softcap, sinks, tree_mask, batch_invariant, q_scale,
                k_scale, v_scale, out, lse);
}

void flash_attention_varlen_out(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q,
    const Tensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
    std::optional<double> scale, bool causal, int64_t window_left, int64_t window_right,
    double softcap, const std::optional<Tensor>& sinks, const std::optional<Tensor>& tree_mask,
    const std::optional<Tensor>& q_scale, const std::optional<Tensor>& k_scale,
    const std::optional<Tensor>& v_scale, bool batch_invariant, const Tensor& out,
    const Tensor& lse) {
  const auto p = check_flash_attention_varlen(
      q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
      {scale, causal, window_left, window_right, softcap, sinks, tree_mask, batch_invariant},
      {q_scale, k_scale, v_scale}, out, lse);
  if (p.total_q == 0) return;
  call_portable("fastinfer::_portable_flash_attention_varlen", q, k, v, cu_seqlens_q, cu_seqlens_k,
                max_seqlen_q, max_seqlen_k, static_cast<double>(p.scale), p.window_left,
                p.window_right, softcap, sinks, tree_mask, batch_invariant, q_scale, k_scale,
                v_scale, out, lse);
}

void paged_attention_out(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                         const Tensor& block_table, const Tensor& cu_seqlens_q,
                         const Tensor& seq_lens, int64_t max_seqlen_q, int64_t max_seqlen_k,
                         std::optional<double> scale, bool causal, int64_t window_left,
                         int64_t window_right, double softcap, const std::optional<Tensor>& sinks,
                         const std::optional<Tensor>& tree_mask,
                         const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                         const std::optional<Tensor>& plan, bool batch_invariant,
                         const std::optional<Tensor>& workspace, const Tensor& out,
                         const Tensor& lse) {
  const auto p = check_paged_attention(
      {q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, k_scale, v_scale}, max_seqlen_q,
      max_seqlen_k,
      {scale, causal, window_left, window_right, softcap, sinks, tree_mask, batch_invariant}, out,
      lse);
  const Arg q_arg = read_arg(p.op, "q", q);
  if (plan.has_value()) check_plan_tensor(p.op, "plan", *plan, p, q_arg);
  check_workspace(workspace, p, q_arg);
  if (p.total_q == 0) return;
  call_portable("fastinfer::_portable_paged_attention", q, k_cache, v_cache, block_table,
                cu_seqlens_q, seq_lens, max_seqlen_q, max_seqlen_k, static_cast<double>(p.scale),
                p.window_left, p.window_right, softcap, sinks, tree_mask, batch_invariant, k_scale,
                v_scale, plan, workspace, out, lse);
}

void plan_attention_out(const Tensor& cu_seqlens_q, const Tensor& seq_lens, int64_t total_q,
                        int64_t num_heads, int64_t num_kv_heads, int64_t max_seqlen_q,
                        int64_t max_seqlen_k, bool causal, int64_t window_left,
                        int64_t window_right, bool batch_invariant, const Tensor& out) {
  const auto p =
      check_plan_attention(cu_seqlens_q, seq_lens, total_q, num_heads, num_kv_heads, max_seqlen_q,
                           max_seqlen_k, causal, window_left, window_right, batch_invariant);
  check_plan_tensor(p.op, "out", out, p, read_arg(p.op, "seq_lens", seq_lens));
  call_portable("fastinfer::_portable_plan_attention", cu_seqlens_q, seq_lens, total_q, num_heads,
                num_kv_heads, max_seqlen_q, max_seqlen_k, p.window_left,
                causal ? 0 : p.window_right, batch_invariant, out);
}

void merge_attention_states_out(const Tensor& outs, const Tensor& lses,
                                const std::optional<Tensor>& sinks, const Tensor& out,
                                const Tensor& lse) {
  const auto p = check_merge(outs, lses, sinks, out, lse);
  if (p.sequences * p.tokens * p.heads == 0) return;
  call_portable("fastinfer::_portable_merge_attention_states", outs, lses, sinks, out, lse);
}

namespace {

// Ops of csrc/cuda register themselves for CUDA and come here for what they do not take.
#ifdef FI_CUDA_ARCHS
constexpr bool kHaveCuda = true;
#else
constexpr bool kHaveCuda = false;
#endif

void register_all(torch::stable::detail::StableLibrary& m, bool with_hand_written) {
  if (with_hand_written) {
    m.impl("rms_norm", TORCH_BOX(&functional::rms_norm<&rms_norm_out>));
    m.impl("rms_norm.out", TORCH_BOX(&rms_norm_out));
    m.impl("fused_add_rms_norm_", TORCH_BOX(&fused_add_rms_norm_));
    m.impl("append_paged_kv_cache_", TORCH_BOX(&append_paged_kv_cache_));
    m.impl("qk_norm_rope_append_", TORCH_BOX(&qk_norm_rope_append_));
    m.impl("flash_attention", TORCH_BOX(&functional::flash_attention<&flash_attention_out>));
    m.impl("flash_attention.out", TORCH_BOX(&flash_attention_out));
    m.impl("flash_attention_varlen",
           TORCH_BOX(&functional::flash_attention_varlen<&flash_attention_varlen_out>));
    m.impl("flash_attention_varlen.out", TORCH_BOX(&flash_attention_varlen_out));
    m.impl("paged_attention", TORCH_BOX(&functional::paged_attention<&paged_attention_out>));
    m.impl("paged_attention.out", TORCH_BOX(&paged_attention_out));
    m.impl("plan_attention", TORCH_BOX(&functional::plan_attention<&plan_attention_out>));
    m.impl("plan_attention.out", TORCH_BOX(&plan_attention_out));
    m.impl("merge_attention_states",
           TORCH_BOX(&functional::merge_attention_states<&merge_attention_states_out>));
    m.impl("merge_attention_states.out", TORCH_BOX(&merge_attention_states_out));
    functional::register_low_bit_gemm<&low_bit_gemm_out>(m);
    functional::register_scaled_mm<&scaled_mm_out>(m);
  }
  m.impl("layer_norm", TORCH_BOX(&functional::layer_norm<&layer_norm_out>));
  m.impl("layer_norm.out", TORCH_BOX(&layer_norm_out));
  m.impl("fused_add_layer_norm_", TORCH_BOX(&fused_add_layer_norm_));
  m.impl("silu_and_mul", TORCH_BOX(&functional::silu_and_mul<&silu_and_mul_out>));
  m.impl("silu_and_mul.out", TORCH_BOX(&silu_and_mul_out));
  m.impl("gelu_and_mul", TORCH_BOX(&functional::gelu_and_mul<&gelu_and_mul_out>));
  m.impl("gelu_and_mul.out", TORCH_BOX(&gelu_and_mul_out));
  m.impl("quantize_fp8", TORCH_BOX(&functional::quantize_fp8<&quantize_fp8_out>));
  m.impl("quantize_fp8.out", TORCH_BOX(&quantize_fp8_out));
  m.impl("quantize_int8", TORCH_BOX(&functional::quantize_int8<&quantize_int8_out>));
  m.impl("quantize_int8.out", TORCH_BOX(&quantize_int8_out));
  m.impl("quantize_int8_asymmetric",
         TORCH_BOX(&functional::quantize_int8_asymmetric<&quantize_int8_asymmetric_out>));
  m.impl("quantize_int8_asymmetric.out", TORCH_BOX(&quantize_int8_asymmetric_out));
  m.impl("rotary_embedding_", TORCH_BOX(&rotary_embedding_));
  m.impl("sample", TORCH_BOX(&functional::sample<&sample_out>));
  m.impl("sample.out", TORCH_BOX(&sample_out));
}

}  // namespace
}  // namespace fastinfer::portable

STABLE_TORCH_LIBRARY_IMPL(fastinfer, CUDA, m) {
  fastinfer::portable::register_all(
      m, fastinfer::portable_forced() || !fastinfer::portable::kHaveCuda);
}

STABLE_TORCH_LIBRARY_IMPL(fastinfer, CPU, m) {
  if (fastinfer::portable_forced_on_cpu()) fastinfer::portable::register_all(m, true);
}
