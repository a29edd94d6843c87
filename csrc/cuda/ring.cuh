// Rings of buffers whose stages are handed on by mbarriers.
#pragma once

#include <cstdint>

namespace fastinfer::cuda {

// A place in a ring, and the parity of its barriers' phase.
template <int kCount>
struct Ring {
  int index = 0;
  uint32_t phase = 0;

  __device__ void next() {
    if (++index == kCount) {
      index = 0;
      phase ^= 1;
    }
  }
};

}  // namespace fastinfer::cuda
