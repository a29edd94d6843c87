// CPU: merge_attention_states.
#include "../checks/merge.h"

#include <torch/csrc/stable/library.h>

#include "../functional.h"
#include "../portable/portable.h"
#include "elements.h"
#include "merge_kernels.h"
#include "parallel.h"

namespace fastinfer::cpu {
namespace {

void merge_attention_states_out(const Tensor& outs, const Tensor& lses,
                                const std::optional<Tensor>& sinks, const Tensor& out,
                                const Tensor& lse) {
  const MergeProblem p = check_merge(outs, lses, sinks, out, lse);
  MergeArgs args{};
  args.outs = p.outs;
  args.lses = p.lses;
  args.out = p.out;
  args.lse = p.lse;
  args.sinks = p.sinks;
  args.splits = p.splits;
  args.tokens = p.tokens;
  args.heads = p.heads;
  args.value_dim = p.value_dim;
  args.outs_split = p.outs_split;
  args.outs_sequence = p.outs_strides.outer;
  args.outs_token = p.outs_strides.token;
  args.outs_head = p.outs_strides.head;
  args.lses_split = p.lses_split;
  args.lses_sequence = p.lses_strides.outer;
  args.lses_token = p.lses_strides.token;
  args.lses_head = p.lses_strides.head;
  args.out_sequence = p.out_strides.outer;
  args.out_token = p.out_strides.token;
  args.out_head = p.out_strides.head;
  args.lse_sequence = p.lse_strides.outer;
  args.lse_token = p.lse_strides.token;
  args.lse_head = p.lse_strides.head;
  const MergeFunction merge = merge_kernels().from_same[element_index(p.dtype)];
  parallel_for(p.sequences * p.tokens * p.heads, p.splits * p.value_dim,
               [&](int64_t begin, int64_t end) { merge(args, begin, end); });
}

}  // namespace
}  // namespace fastinfer::cpu

STABLE_TORCH_LIBRARY_IMPL(fastinfer, CPU, m) {
  if (fastinfer::portable_forced_on_cpu()) return;
  using namespace fastinfer::cpu;
  m.impl("merge_attention_states",
         TORCH_BOX(&fastinfer::functional::merge_attention_states<&merge_attention_states_out>));
  m.impl("merge_attention_states.out", TORCH_BOX(&merge_attention_states_out));
}
