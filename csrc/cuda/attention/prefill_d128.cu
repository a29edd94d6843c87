// The prefill kernel for head sizes up to 128.
#include "prefill_launch.cuh"

namespace fastinfer::cuda {

void launch_prefill_d128(const AttentionProblem& a, const PrefillLaunch& launch) {
  if (a.softcap == 0.f && large_key_blocks(a)) {
    return launch_prefill_for<128, 128, 128, 176, 1, false>(a, launch);
  }
  launch_prefill_for<128, 128, 128, 128, 2, true>(a, launch);
}

}  // namespace fastinfer::cuda
