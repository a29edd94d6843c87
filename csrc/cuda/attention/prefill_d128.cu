// The prefill kernel for head sizes up to 128.
#include "prefill_launch.cuh"

namespace fastinfer::cuda {

void launch_prefill_d128(const AttentionProblem& a, const PrefillLaunch& launch) {
  // Over many keys larger blocks win; over few their last one wastes more.
  constexpr int64_t kMany = 2048;
  if (a.layout != AttentionLayout::kPaged && a.softcap == 0.f && a.max_seqlen_k > kMany) {
    return launch_prefill_for<128, 128, 128, 176, 1, false>(a, launch);
  }
  launch_prefill_for<128, 128, 128, 128, 2, true>(a, launch);
}

}  // namespace fastinfer::cuda
