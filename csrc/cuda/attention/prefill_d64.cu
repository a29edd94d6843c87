// The prefill kernel for head sizes up to 64.
#include "prefill_launch.cuh"

namespace fastinfer::cuda {

void launch_prefill_d64(const AttentionProblem& a, const PrefillLaunch& launch) {
  if (small_key_blocks(a)) return launch_prefill_for<64, 64, 192, 96, 2, false>(a, launch);
  launch_prefill_for<64, 64, 192, 128, 2, false>(a, launch);
}

}  // namespace fastinfer::cuda
