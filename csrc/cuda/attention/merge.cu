// CUDA: merge_attention_states on Hopper.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "../../checks/merge.h"
#include "../../functional.h"
#include "../../portable/attention.h"
#include "../../portable/portable.h"
#include "../indexing.h"
#include "../runtime.h"
#include "merge.cuh"

namespace fastinfer::cuda {
namespace {

constexpr const char* kOp = "merge_attention_states";

int64_t tiles_of(int64_t count, int tile_log2) {
  return (count + (int64_t{1} << tile_log2) - 1) >> tile_log2;
}

// How a block's rows are spread: enough tokens that whole 32-byte sectors of lse are used, heads
// beyond that.
struct MergeTile {
  int lanes_log2, heads_log2, tokens_log2;

  explicit MergeTile(const MergeProblem& p) {
    const int64_t size = 16 / element_size(p.dtype);
    lanes_log2 = std::min(5, ceil_log2((p.value_dim + size - 1) / size));
    const int rows_log2 = ceil_log2(kMergeStatesThreads * kMergeStatesRows) - lanes_log2;
    tokens_log2 = std::min({3, ceil_log2(p.tokens), rows_log2});
    heads_log2 = std::min(rows_log2 - tokens_log2, ceil_log2(p.heads));
    tokens_log2 = rows_log2 - heads_log2;
  }
  int64_t head_tiles(const MergeProblem& p) const { return tiles_of(p.heads, heads_log2); }
  int64_t token_tiles(const MergeProblem& p) const { return tiles_of(p.tokens, tokens_log2); }
};

// The kernels are compiled for sm_90a, which runs on compute capability 9.0 alone, and count rows,
// states and what lies between neighbouring tokens and heads in 32 bits.
bool supports(const MergeProblem& p, int32_t device_index) {
  bool near = true;
  for (const AttentionStrides* strides :
       {&p.outs_strides, &p.lses_strides, &p.out_strides, &p.lse_strides}) {
    near = near && strides->token <= kMostIndices && strides->head <= kMostIndices;
  }
  return near && capability(kOp, device_index) == 90 && p.splits <= kMostIndices / 2 &&
         p.tokens <= kMostIndices / 2 && p.heads <= kMostIndices / 2 &&
         p.sequences * p.tokens * p.heads <= kMostIndices;
}

template <class T>
void launch(const MergeProblem& p, cudaStream_t stream) {
  const MergeTile tile(p);
  const MergeStatesParams params{p.outs,
                                 p.lses,
                                 p.sinks,
                                 p.out,
                                 p.lse,
                                 p.outs_split,
                                 p.outs_strides.outer,
                                 p.lses_split,
                                 p.lses_strides.outer,
                                 p.out_strides.outer,
                                 p.lse_strides.outer,
                                 static_cast<int32_t>(p.outs_strides.token),
                                 static_cast<int32_t>(p.outs_strides.head),
                                 static_cast<int32_t>(p.lses_strides.head),
                                 static_cast<int32_t>(p.out_strides.token),
                                 static_cast<int32_t>(p.out_strides.head),
                                 static_cast<int32_t>(p.lse_strides.head),
                                 static_cast<int32_t>(p.splits),
                                 static_cast<int32_t>(p.tokens),
                                 static_cast<int32_t>(p.heads),
                                 static_cast<int32_t>(p.value_dim),
                                 tile.lanes_log2,
                                 tile.heads_log2,
                                 tile.tokens_log2,
                                 Divider(static_cast<int32_t>(tile.head_tiles(p))),
                                 Divider(static_cast<int32_t>(tile.token_tiles(p)))};
  const bool vectorised =
      p.value_dim % Pack<T>::kSize == 0 &&
      aligned_to(16, p.outs, sizeof(T),
                 {p.outs_split, p.outs_strides.outer, p.outs_strides.token, p.outs_strides.head}) &&
      aligned_to(16, p.out, sizeof(T),
                 {p.out_strides.outer, p.out_strides.token, p.out_strides.head});
  const dim3 grid(static_cast<unsigned>(p.sequences * tile.token_tiles(p) * tile.head_tiles(p)));
  if (vectorised) {
    merge_states_kernel<T, true><<<grid, kMergeStatesThreads, 0, stream>>>(params);
  } else {
    merge_states_kernel<T, false><<<grid, kMergeStatesThreads, 0, stream>>>(params);
  }
  FI_CUDA_CHECK(cudaGetLastError(), kOp);
}

void merge_attention_states_out(const Tensor& outs, const Tensor& lses,
                                const std::optional<Tensor>& sinks, const Tensor& out,
                                const Tensor& lse) {
  const MergeProblem p = check_merge(outs, lses, sinks, out, lse);
  const int32_t device_index = outs.get_device_index();
  if (!supports(p, device_index)) {
    return portable::merge_attention_states_out(outs, lses, sinks, out, lse);
  }
  if (p.sequences * p.tokens * p.heads == 0) return;
  const DeviceGuard guard(kOp, device_index);
  const cudaStream_t stream = current_stream(kOp, device_index);
  switch (p.dtype) {
    case ScalarType::Float: return launch<float>(p, stream);
    case ScalarType::BFloat16: return launch<__nv_bfloat16>(p, stream);
    default: return launch<__half>(p, stream);
  }
}

}  // namespace
}  // namespace fastinfer::cuda

STABLE_TORCH_LIBRARY_IMPL(fastinfer, CUDA, m) {
  if (fastinfer::portable_forced()) return;
  using namespace fastinfer::cuda;
  m.impl("merge_attention_states",
         TORCH_BOX(&fastinfer::functional::merge_attention_states<&merge_attention_states_out>));
  m.impl("merge_attention_states.out", TORCH_BOX(&merge_attention_states_out));
}
