// Threading through torch's own pool, so that torch.set_num_threads is respected.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>

namespace fastinfer::cpu {

// f(begin, end) over [0, count); `cost` is the work of one item in elements touched. Small jobs
// stay on the calling thread.
template <class F>
void parallel_for(int64_t count, int64_t cost, const F& f) {
  constexpr int64_t kElementsPerTask = 16384;
  const int64_t grain = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, cost));
  if (count <= grain) {
    if (count > 0) f(int64_t{0}, count);
    return;
  }
  torch::stable::parallel_for(0, count, grain, f);
}

}  // namespace fastinfer::cpu
