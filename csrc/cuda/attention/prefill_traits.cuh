// The prefill kernel's shapes, and what lies in its shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "../ptx/mbarrier.h"
#include "prefill_isolated.cuh"

namespace fastinfer::cuda {

using namespace ptx;

// Element: of queries and keys. Value: of values and probabilities, 16 bits.
template <class Element_, class Value_, class Out_, int kHeadDim_, int kValueDim_, int kM_, int kN_,
          int kQueryStages_, bool kSoftcap_>
struct PrefillTraits {
  using Element = Element_;
  using Value = Value_;
  using Out = Out_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kValueDim = kValueDim_;
  static constexpr int kM = kM_;
  static constexpr int kN = kN_;
  static constexpr bool kSoftcap = kSoftcap_;
  // e4m3 queries and keys have scales, and their values have been converted to bf16.
  static constexpr bool kFp8 = std::is_same_v<Element, __nv_fp8_e4m3>;
  // Whether sums may be brought back by powers of 2 (prefill_rows.cuh): in fp16 what is small
  // would lose digits.
  static constexpr bool kRecenters = std::is_same_v<Value, __nv_bfloat16>;
  static constexpr int kStages = 2;
  static constexpr int kQueryStages = kQueryStages_;  // 2: the next tile's Q is there in time
  static constexpr int kConsumers = kM / 64;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // 64 K registers of an SM, as setmaxnreg shares them out.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;

  // Matrices are stored as slabs of rows of 128 bytes, one after the other. The last may hold more
  // columns than are multiplied.
  static constexpr int kKeySlab = 128 / sizeof(Element);
  static constexpr int kValueSlab = 128 / sizeof(Value);
  static constexpr int kKeySlabs = (kHeadDim + kKeySlab - 1) / kKeySlab;
  static constexpr int kValueSlabs = (kValueDim + kValueSlab - 1) / kValueSlab;

  static_assert(kM % 64 == 0 && (kConsumers == 2 || kConsumers == 3));
  static_assert(kN % 16 == 0, "P's registers are A operands of 16 keys");
  static_assert(kHeadDim % (32 / int{sizeof(Element)}) == 0 && kValueDim % 32 == 0);
  static_assert(kHeadDim <= 256 && kValueDim <= 256, "wgmma's largest N");
};

template <class Traits>
struct PrefillShared {
  using Element = typename Traits::Element;
  using Value = typename Traits::Value;
  static constexpr int kKeyColumns = Traits::kKeySlabs * Traits::kKeySlab;
  static constexpr int kValueColumns = Traits::kValueSlabs * Traits::kValueSlab;
  alignas(1024) Element q[Traits::kQueryStages][Traits::kM * kKeyColumns];
  alignas(1024) Element k[Traits::kStages][Traits::kN * kKeyColumns];
  alignas(1024) Value v[Traits::kStages][Traits::kN * kValueColumns];
  // What each Q belongs to, and what the one before them belonged to: rows are finished after Q.
  PrefillTile tiles[Traits::kQueryStages + 1];
  int32_t failed[Traits::kQueryStages + 1];  // whether some of its rows are to be computed again
  Mbarrier q_full[Traits::kQueryStages], q_empty[Traits::kQueryStages];
  Mbarrier k_full[Traits::kStages], k_empty[Traits::kStages];
  Mbarrier v_full[Traits::kStages], v_empty[Traits::kStages];
};

}  // namespace fastinfer::cuda
