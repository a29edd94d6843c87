// CUDA: the attention ops on Hopper. What the kernels here do not take is portable.
#include <torch/csrc/stable/library.h>

#include "../../checks/attention.h"
#include "../../functional.h"
#include "../../portable/attention.h"
#include "../../portable/portable.h"
#include "../runtime.h"
#include "decode.h"
#include "plan.h"
#include "prefill.h"
#include "split_merge.h"

namespace fastinfer::cuda {
namespace {

bool on_hopper(const char* op, const Tensor& tensor) {
  return capability(op, tensor.get_device_index()) == 90;
}

void launch_prefill(const AttentionProblem& p, const Tensor& q, int32_t device,
                    int64_t narrow_rows = 0) {
  const DeviceGuard guard(p.op, device);
  const Tensor scratch = torch::stable::new_empty(q, {prefill_scratch_words(p)}, ScalarType::Int);
  const Tensor values =
      torch::stable::new_empty(q, {prefill_value_elements(p)}, ScalarType::BFloat16);
  run_prefill(p,
              {device, num_sms(p.op, device), static_cast<uint32_t*>(scratch.data_ptr()),
               values.data_ptr(), current_stream(p.op, device), static_cast<int32_t>(narrow_rows)});
}

void flash_attention_out(const Tensor& q, const Tensor& k, const Tensor& v,
                         std::optional<double> scale, bool causal, int64_t window_left,
                         int64_t window_right, double softcap, const std::optional<Tensor>& sinks,
                         const std::optional<Tensor>& tree_mask,
                         const std::optional<Tensor>& q_scale, const std::optional<Tensor>& k_scale,
                         const std::optional<Tensor>& v_scale, bool batch_invariant,
                         const Tensor& out, const Tensor& lse) {
  constexpr const char* op = "flash_attention";
  const int32_t device = q.get_device_index();
  if (on_hopper(op, q)) {
    const auto p = check_flash_attention(
        q, k, v,
        {scale, causal, window_left, window_right, softcap, sinks, tree_mask, batch_invariant},
        {q_scale, k_scale, v_scale}, out, lse);
    if (p.total_q == 0) return;
    if (prefill_supports(p, num_sms(op, device))) {
      return launch_prefill(p, q, device);
    }
  }
  portable::flash_attention_out(q, k, v, scale, causal, window_left, window_right, softcap, sinks,
                                tree_mask, q_scale, k_scale, v_scale, batch_invariant, out, lse);
}

void flash_attention_varlen_out(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q,
    const Tensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
    std::optional<double> scale, bool causal, int64_t window_left, int64_t window_right,
    double softcap, const std::optional<Tensor>& sinks, const std::optional<Tensor>& tree_mask,
    const std::optional<Tensor>& q_scale, const std::optional<Tensor>& k_scale,
    const std::optional<Tensor>& v_scale, bool batch_invariant, const Tensor& out,
    const Tensor& lse) {
  constexpr const char* op = "flash_attention_varlen";
  const int32_t device = q.get_device_index();
  if (on_hopper(op, q)) {
    const auto p = check_flash_attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        {scale, causal, window_left, window_right, softcap, sinks, tree_mask, batch_invariant},
        {q_scale, k_scale, v_scale}, out, lse);
    if (p.total_q == 0) return;
    if (prefill_supports(p, num_sms(op, device))) {
      return launch_prefill(p, q, device);
    }
  }
  portable::flash_attention_varlen_out(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                                       max_seqlen_k, scale, causal, window_left, window_right,
                                       softcap, sinks, tree_mask, q_scale, k_scale, v_scale,
                                       batch_invariant, out, lse);
}

void plan_attention_out(const Tensor& cu_seqlens_q, const Tensor& seq_lens, int64_t total_q,
                        int64_t num_heads, int64_t num_kv_heads, int64_t max_seqlen_q,
                        int64_t max_seqlen_k, bool causal, int64_t window_left,
                        int64_t window_right, bool batch_invariant, const Tensor& out) {
  constexpr const char* op = "plan_attention";
  const int32_t device = seq_lens.get_device_index();
  if (on_hopper(op, seq_lens)) {
    const auto p =
        check_plan_attention(cu_seqlens_q, seq_lens, total_q, num_heads, num_kv_heads, max_seqlen_q,
                             max_seqlen_k, causal, window_left, window_right, batch_invariant);
    if (plan_supports(p)) {
      check_plan_tensor(p.op, "out", out, p, read_arg(p.op, "seq_lens", seq_lens));
      const DeviceGuard guard(op, device);
      return run_plan(p, static_cast<int32_t*>(out.data_ptr()), out.size(0), device,
                      current_stream(op, device));
    }
  }
  portable::plan_attention_out(cu_seqlens_q, seq_lens, total_q, num_heads, num_kv_heads,
                               max_seqlen_q, max_seqlen_k, causal, window_left, window_right,
                               batch_invariant, out);
}

// The items of a plan: decode and verification, which are the narrow sequences of a step, and if
// asked for the wide ones.
void run_items(const AttentionProblem& p, const Tensor& q, const std::optional<Tensor>& plan,
               const std::optional<Tensor>& workspace, bool wide, int32_t device) {
  const cudaStream_t stream = current_stream(p.op, device);
  // A given plan is not read here: it may have been made for other options, and cut sequences.
  const bool never_cut = p.batch_invariant && !plan.has_value();
  const int64_t partial_rows = never_cut ? 0 : plan_partial_rows(p.total_q, p.max_seqlen_k);
  const int64_t rows =
      plan_rows(p.num_sequences, p.total_q, p.num_heads, p.num_kv_heads, p.max_seqlen_k);
  const Tensor plan_tensor =
      plan.has_value() ? *plan : torch::stable::new_empty(q, {rows, kPlanColumns}, ScalarType::Int);
  auto* items = static_cast<int32_t*>(plan_tensor.data_ptr());
  if (!plan.has_value()) run_plan(p, items, rows, device, stream);
  float* scratch = nullptr;
  std::optional<Tensor> allocated;
  if (partial_rows > 0) {
    if (!workspace.has_value()) {
      allocated = torch::stable::new_empty(
          q, {plan_workspace_floats(partial_rows, p.num_heads, p.value_dim)}, ScalarType::Float);
    }
    scratch = static_cast<float*>((workspace.has_value() ? *workspace : *allocated).data_ptr());
  }
  run_decode(p, items, plan_tensor.size(0), scratch, false, device, stream);
  if (wide) run_decode(p, items, plan_tensor.size(0), scratch, true, device, stream);
  if (partial_rows > 0) run_split_merge(p, items, plan_tensor.size(0), scratch, device, stream);
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
  constexpr const char* op = "paged_attention";
  const int32_t device = q.get_device_index();
  if (on_hopper(op, q)) {
    const auto p = check_paged_attention(
        {q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, k_scale, v_scale}, max_seqlen_q,
        max_seqlen_k,
        {scale, causal, window_left, window_right, softcap, sinks, tree_mask, batch_invariant}, out,
        lse);
    const Arg q_arg = read_arg(op, "q", q);
    if (plan.has_value()) check_plan_tensor(op, "plan", *plan, p, q_arg);
    check_workspace(workspace, p, q_arg);
    if (p.total_q == 0) return;
    // With batch_invariant a step of narrow sequences goes where it would beside wide ones.
    const AttentionTiles tiles =
        choose_attention_tiles(p.max_seqlen_q, p.num_heads / p.num_kv_heads, p.batch_invariant);
    const bool has_wide = tiles.wide > 0, wide_matters = has_wide || p.batch_invariant;
    const bool by_prefill = wide_matters && prefill_supports(p, num_sms(op, device));
    if (decode_supports(p) && (plan.has_value() || plan_supports(p)) &&
        (!wide_matters || by_prefill || decode_supports_wide(p))) {
      const DeviceGuard guard(op, device);
      run_items(p, q, plan, workspace, has_wide && !by_prefill, device);
      // A plan may cut wide items as well. What merging them has made is overwritten here.
      if (has_wide && by_prefill) launch_prefill(p, q, device, tiles.narrow_rows);
      return;
    }
  }
  portable::paged_attention_out(q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens,
                                max_seqlen_q, max_seqlen_k, scale, causal, window_left,
                                window_right, softcap, sinks, tree_mask, k_scale, v_scale, plan,
                                batch_invariant, workspace, out, lse);
}

}  // namespace
}  // namespace fastinfer::cuda

STABLE_TORCH_LIBRARY_IMPL(fastinfer, CUDA, m) {
  if (fastinfer::portable_forced()) return;
  using namespace fastinfer::cuda;
  namespace functional = fastinfer::functional;
  m.impl("flash_attention", TORCH_BOX(&functional::flash_attention<&flash_attention_out>));
  m.impl("flash_attention.out", TORCH_BOX(&flash_attention_out));
  m.impl("flash_attention_varlen",
         TORCH_BOX(&functional::flash_attention_varlen<&flash_attention_varlen_out>));
  m.impl("flash_attention_varlen.out", TORCH_BOX(&flash_attention_varlen_out));
  m.impl("paged_attention", TORCH_BOX(&functional::paged_attention<&paged_attention_out>));
  m.impl("paged_attention.out", TORCH_BOX(&paged_attention_out));
  m.impl("plan_attention", TORCH_BOX(&functional::plan_attention<&plan_attention_out>));
  m.impl("plan_attention.out", TORCH_BOX(&plan_attention_out));
}
