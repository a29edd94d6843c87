// The prefill kernel for head sizes up to 256.
#include "prefill_launch.cuh"

namespace fastinfer::cuda {

void launch_prefill_d256(const AttentionProblem& a, const PrefillLaunch& launch) {
  // Pages must fit a block of keys.
  if (a.layout == AttentionLayout::kPaged)
    return launch_prefill_for<256, 256, 128, 64, 1, true>(a, launch);
  launch_prefill_for<256, 256, 128, 80, 1, true>(a, launch);
}

}  // namespace fastinfer::cuda
