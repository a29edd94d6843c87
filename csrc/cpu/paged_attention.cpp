// CPU: paged_attention and plan_attention.
#include <torch/csrc/stable/library.h>

#include "../functional.h"
#include "../portable/portable.h"
#include "attention.h"

namespace fastinfer::cpu {
namespace {

void paged_attention_out(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                         const Tensor& block_table, const Tensor& cu_seqlens_q,
                         const Tensor& seq_lens, int64_t max_seqlen_q, int64_t max_seqlen_k,
                         std::optional<double> scale, bool causal, int64_t window_left,
                         int64_t window_right, double softcap, const std::optional<Tensor>& sinks,
                         const std::optional<Tensor>& tree_mask,
                         const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                         const std::optional<Tensor>& plan_tensor, bool batch_invariant,
                         const std::optional<Tensor>& workspace, const Tensor& out,
                         const Tensor& lse) {
  constexpr const char* op = "paged_attention";
  const AttentionOptions options{scale,   causal, window_left, window_right,
                                 softcap, sinks,  tree_mask,   batch_invariant};
  const AttentionProblem p = check_paged_attention(
      {q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, k_scale, v_scale}, max_seqlen_q,
      max_seqlen_k, options, out, lse);
  const Arg q_arg = read_arg(op, "q", q);
  float* const space = check_workspace(workspace, p, q_arg);

  const AttentionLengths lengths = read_lengths(p);
  check_block_table(p, lengths);
  AttentionPlan plan;
  const PlanHeader header = plan_header(p, lengths);
  if (plan_tensor.has_value()) {
    const Arg arg = check_plan_tensor(op, "plan", *plan_tensor, p, q_arg);
    plan = read_plan(op, header, lengths, static_cast<const int32_t*>(arg.data), arg.size(0));
  } else {
    plan = make_plan(header, lengths, torch::stable::get_num_threads());
  }
  if (p.total_q == 0) return;
  const int64_t floats =
      plan_workspace_floats(plan.header.num_partial_rows, p.num_heads, p.value_dim);
  if (space != nullptr || floats == 0) return run_attention(p, lengths, plan, space);
  const Tensor allocated = torch::stable::new_empty(q, {floats}, ScalarType::Float);
  run_attention(p, lengths, plan, static_cast<float*>(allocated.data_ptr()));
}

void plan_attention_out(const Tensor& cu_seqlens_q, const Tensor& seq_lens, int64_t total_q,
                        int64_t num_heads, int64_t num_kv_heads, int64_t max_seqlen_q,
                        int64_t max_seqlen_k, bool causal, int64_t window_left,
                        int64_t window_right, bool batch_invariant, const Tensor& out) {
  const AttentionProblem p =
      check_plan_attention(cu_seqlens_q, seq_lens, total_q, num_heads, num_kv_heads, max_seqlen_q,
                           max_seqlen_k, causal, window_left, window_right, batch_invariant);
  const Arg rows = check_plan_tensor(p.op, "out", out, p, read_arg(p.op, "seq_lens", seq_lens));
  const AttentionLengths lengths = read_lengths(p);
  const AttentionPlan plan =
      make_plan(plan_header(p, lengths), lengths, torch::stable::get_num_threads());
  write_plan(plan, static_cast<int32_t*>(rows.data), rows.size(0));
}

}  // namespace
}  // namespace fastinfer::cpu

STABLE_TORCH_LIBRARY_IMPL(fastinfer, CPU, m) {
  if (fastinfer::portable_forced_on_cpu()) return;
  using namespace fastinfer::cpu;
  m.impl("paged_attention",
         TORCH_BOX(&fastinfer::functional::paged_attention<&paged_attention_out>));
  m.impl("paged_attention.out", TORCH_BOX(&paged_attention_out));
  m.impl("plan_attention", TORCH_BOX(&fastinfer::functional::plan_attention<&plan_attention_out>));
  m.impl("plan_attention.out", TORCH_BOX(&plan_attention_out));
}
