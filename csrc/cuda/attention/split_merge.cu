// Launch of the kernel that merges split results.
#include "../runtime.h"
#include "plan.h"
#include "split_merge.cuh"
#include "split_merge.h"

namespace fastinfer::cuda {

void run_split_merge(const AttentionProblem& p, const int32_t* plan, int64_t plan_rows,
                     const float* workspace, int32_t device_index, cudaStream_t stream) {
  const int64_t partial_rows = plan_partial_rows(p.total_q, p.max_seqlen_k);
  if (partial_rows < 2) return;  // a tile that is cut leaves two rows at least
  const AttentionTiles tiles =
      choose_attention_tiles(p.max_seqlen_q, p.num_heads / p.num_kv_heads, p.batch_invariant);
  SplitMergeParams params{};
  params.partial_out = workspace;
  params.partial_lse = workspace + partial_rows * p.num_heads * p.value_dim;
  params.plan = plan;
  params.cu_seqlens_q = p.layout == AttentionLayout::kDense ? nullptr : p.cu_seqlens_q;
  params.sinks = p.sinks;
  params.out = p.out;
  params.lse = p.lse;
  params.plan_rows = plan_rows;
  params.out_sequence = p.out_strides.outer;
  params.out_token = p.out_strides.token;
  params.out_head = p.out_strides.head;
  params.lse_sequence = p.lse_strides.outer;
  params.lse_head = p.lse_strides.head;
  params.num_heads = static_cast<int>(p.num_heads);
  params.value_dim = static_cast<int>(p.value_dim);
  params.max_tokens = static_cast<int>(
      std::min(std::max(tiles.narrow, tiles.wide), std::max<int64_t>(p.max_seqlen_q, 1)));

  constexpr int64_t kBlocksPerSm = 8;
  const int64_t most = partial_rows / 2 * params.max_tokens * p.num_heads;
  const int64_t blocks = std::min(most, kBlocksPerSm * num_sms(p.op, device_index));
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kMergeThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  FI_CUDA_CHECK(p.dtype == ScalarType::BFloat16
                    ? cudaLaunchKernelEx(&config, split_merge_kernel<__nv_bfloat16>, params)
                    : cudaLaunchKernelEx(&config, split_merge_kernel<__half>, params),
                p.op);
}

}  // namespace fastinfer::cuda
