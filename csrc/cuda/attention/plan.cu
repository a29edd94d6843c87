// Launch of the plan kernel.
#include "../runtime.h"
#include "plan.cuh"
#include "plan.h"

namespace fastinfer::cuda {

bool plan_supports(const AttentionProblem& p) {
  return p.num_sequences <= kPlanMaxSequences;
}

void run_plan(const AttentionProblem& p, int32_t* plan, int64_t rows, int32_t device_index,
              cudaStream_t stream) {
  constexpr int64_t kMaxWindow = std::numeric_limits<int32_t>::max() / 4;
  const int64_t group = p.num_heads / p.num_kv_heads;
  const AttentionTiles tiles = choose_attention_tiles(p.max_seqlen_q, group, p.batch_invariant);
  PlanParams params{};
  params.cu_seqlens_q = p.cu_seqlens_q;
  params.seq_lens = p.seq_lens;
  params.plan = plan;
  params.plan_rows = rows;
  params.max_partial_rows = plan_partial_rows(p.total_q, p.max_seqlen_k);
  params.num_sequences = static_cast<int>(p.num_sequences);
  params.total_q = static_cast<int>(p.total_q);
  params.num_heads = static_cast<int>(p.num_heads);
  params.num_kv_heads = static_cast<int>(p.num_kv_heads);
  params.max_seqlen_q = static_cast<int>(p.max_seqlen_q);
  params.max_seqlen_k = static_cast<int>(p.max_seqlen_k);
  params.window_left = static_cast<int>(std::min(p.window_left, kMaxWindow));
  params.window_right = p.causal ? 0 : static_cast<int>(std::min(p.window_right, kMaxWindow));
  params.group = static_cast<int>(group);
  params.narrow_limit = static_cast<int>(tiles.narrow_rows);
  params.narrow_tokens = static_cast<int>(tiles.narrow);
  params.wide_tokens = static_cast<int>(tiles.wide > 0 ? tiles.wide : tiles.narrow);
  params.num_sms = num_sms(p.op, device_index);
  params.batch_invariant = p.batch_invariant;

  // A few rows a thread: each block reads all lengths.
  constexpr int64_t kBlockRows = 2 * kPlanThreads;
  const int64_t blocks = std::min<int64_t>((rows + kBlockRows - 1) / kBlockRows, params.num_sms);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kPlanThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  FI_CUDA_CHECK(cudaLaunchKernelEx(&config, plan_kernel, params), p.op);
}

}  // namespace fastinfer::cuda
