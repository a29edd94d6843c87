// The portable attention ops, for hand-written ones to fall back on.
#pragma once

#include "../torch_utils.h"

namespace fastinfer::portable {

void flash_attention_out(const Tensor& q, const Tensor& k, const Tensor& v,
                         std::optional<double> scale, bool causal, int64_t window_left,
                         int64_t window_right, double softcap, const std::optional<Tensor>& sinks,
                         const std::optional<Tensor>& tree_mask,
                         const std::optional<Tensor>& q_scale, const std::optional<Tensor>& k_scale,
                         const std::optional<Tensor>& v_scale, bool batch_invariant,
                         const Tensor& out, const Tensor& lse);
void flash_attention_varlen_out(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q,
    const Tensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
    std::optional<double> scale, bool causal, int64_t window_left, int64_t window_right,
    double softcap, const std::optional<Tensor>& sinks, const std::optional<Tensor>& tree_mask,
    const std::optional<Tensor>& q_scale, const std::optional<Tensor>& k_scale,
    const std::optional<Tensor>& v_scale, bool batch_invariant, const Tensor& out,
    const Tensor& lse);
void paged_attention_out(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                         const Tensor& block_table, const Tensor& cu_seqlens_q,
                         const Tensor& seq_lens, int64_t max_seqlen_q, int64_t max_seqlen_k,
                         std::optional<double> scale, bool causal, int64_t window_left,
                         int64_t window_right, double softcap, const std::optional<Tensor>& sinks,
                         const std::optional<Tensor>& tree_mask,
                         const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                         const std::optional<Tensor>& plan, bool batch_invariant,
                         const std::optional<Tensor>& workspace, const Tensor& out,
                         const Tensor& lse);
void plan_attention_out(const Tensor& cu_seqlens_q, const Tensor& seq_lens, int64_t total_q,
                        int64_t num_heads, int64_t num_kv_heads, int64_t max_seqlen_q,
                        int64_t max_seqlen_k, bool causal, int64_t window_left,
                        int64_t window_right, bool batch_invariant, const Tensor& out);
void merge_attention_states_out(const Tensor& outs, const Tensor& lses,
                                const std::optional<Tensor>& sinks, const Tensor& out,
                                const Tensor& lse);

}  // namespace fastinfer::portable
