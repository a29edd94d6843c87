// The prefill kernel for head sizes up to 96: shared memory as for 128, fewer products.
#include "prefill_launch.cuh"

namespace fastinfer::cuda {

void launch_prefill_d96(const AttentionProblem& a, const PrefillLaunch& launch) {
  if (large_key_blocks(a)) {
    return launch_prefill_for<96, 96, 128, 176, 1, false>(a, launch);
  }
  launch_prefill_for<96, 96, 128, 128, 2, false>(a, launch);
}

}  // namespace fastinfer::cuda
