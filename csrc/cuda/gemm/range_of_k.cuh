// Which part of K a block has, and its warpgroups of that.
#pragma once

#include <cstdint>

namespace fastinfer::cuda {

// In stages.
struct RangeOfK {
  int32_t begin, end;

  // Where the part of a warpgroup, or of those that share features, begins.
  template <int kSplits>
  __device__ int32_t first_of(int split) const {
    return begin + (end - begin) * split / kSplits;
  }
  // Of the longest part.
  template <int kSplits>
  __device__ int32_t stages() const {
    return (end - begin + kSplits - 1) / kSplits;
  }
};

}  // namespace fastinfer::cuda
