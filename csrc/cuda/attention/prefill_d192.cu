// The prefill kernel for head sizes up to 192.
#include "prefill_launch.cuh"

namespace fastinfer::cuda {

void launch_prefill_d192(const AttentionProblem& a, const PrefillLaunch& launch) {
  launch_prefill_for<192, 128, 128, 128, 1, false>(a, launch);
}

}  // namespace fastinfer::cuda
