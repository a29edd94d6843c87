// The prefill kernel's shapes, and what lies in its shared memory.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "../ptx/mbarrier.h"
#include "prefill_isolated.cuh"

namespace fastinfer::cuda {

using namespace ptx;

// On 16-bit elements, of which P's are too.
template <class T, int kHeadDim_, int kValueDim_, int kM_, int kN_, int kQueryStages_,
          bool kSoftcap_>
struct PrefillTraits {
  using Element = T;
  using Out = T;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kValueDim = kValueDim_;
  static constexpr int kM = kM_;
  static constexpr int kN = kN_;
  static constexpr bool kSoftcap = kSoftcap_;
  static constexpr int kStages = 2;
  static constexpr int kQueryStages = kQueryStages_;  // 2: the next tile's Q is there in time
  static constexpr int kConsumers = kM / 64;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // 64 K registers of an SM, as setmaxnreg shares them out.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;

  static_assert(kM % 64 == 0 && (kConsumers == 2 || kConsumers == 3));
  static_assert(kN % 16 == 0, "P's registers are A operands of 16 keys");
  static_assert(kHeadDim % 64 == 0 && kValueDim % 64 == 0, "columns of 128 bytes");
  static_assert(kHeadDim <= 256 && kValueDim <= 256, "wgmma's largest N");
};

// On e4m3 elements. Values come as the images that prefill_values.cuh makes.
template <class Out_, int kHeadDim_, int kValueDim_, int kN_>
struct Fp8PrefillTraits {
  using Element = __nv_fp8_e4m3;
  using Out = Out_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kValueDim = kValueDim_;
  static constexpr int kM = 128;
  static constexpr int kN = kN_;
  static constexpr bool kSoftcap = false;
  static constexpr int kStages = 2;
  static constexpr int kQueryStages = 2;
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = 384;
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;

  static_assert(kN % 32 == 0, "P's registers are A operands of 32 keys");
  static_assert(kHeadDim % 128 == 0 && kValueDim % 32 == 0);
};

template <class Traits>
constexpr bool kIsFp8 = sizeof(typename Traits::Element) == 1;

// Matrices are stored as slabs 128 bytes wide, one after the other.
template <class Traits>
constexpr int kSlab = 128 / sizeof(typename Traits::Element);

template <class Traits>
struct PrefillShared {
  using T = typename Traits::Element;
  alignas(1024) T q[Traits::kQueryStages][Traits::kM * Traits::kHeadDim];
  alignas(1024) T k[Traits::kStages][Traits::kN * Traits::kHeadDim];
  alignas(1024) T v[Traits::kStages][Traits::kN * Traits::kValueDim];
  // What each Q belongs to, and what the one before them belonged to: rows are finished after Q.
  PrefillTile tiles[Traits::kQueryStages + 1];
  Mbarrier q_full[Traits::kQueryStages], q_empty[Traits::kQueryStages];
  Mbarrier k_full[Traits::kStages], k_empty[Traits::kStages];
  Mbarrier v_full[Traits::kStages], v_empty[Traits::kStages];
};

// A place in a ring of buffers, and the parity of its barriers' phase.
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
