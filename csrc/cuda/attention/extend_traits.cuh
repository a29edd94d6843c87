// The extend kernel's shapes, and what lies where in shared memory.
#pragma once

#include "../ptx/mbarrier.h"
#include "../ring.cuh"
#include "decode_unit.cuh"

namespace fastinfer::cuda {

template <class T>
struct ExtendSmem;

// Names that DecodeTraits has too mean the same: what works on units asks for them.
template <KvFormat kKFormat_, KvFormat kVFormat_, int kRows_, int kHeadDim_, int kValueDim_>
struct ExtendTraits {
  using Smem = ExtendSmem<ExtendTraits>;
  static constexpr bool kByWarpgroup = true;
  static constexpr KvFormat kKFormat = kKFormat_, kVFormat = kVFormat_;
  static constexpr int kRows = kRows_, kHeadDim = kHeadDim_, kValueDim = kValueDim_;
  static constexpr bool kByteK = is_byte(kKFormat), kByteV = is_byte(kVFormat);

  static constexpr int kKeys = 64;  // of a tile
  static constexpr int kKPitch = row_pitch(kHeadDim, kKFormat);
  static constexpr int kVPitch = row_pitch(kValueDim, kVFormat);
  static constexpr int kTileBytes = kKeys * (kKPitch + kVPitch);
  // Warpgroups with keys of their own, each with its own ring of tiles.
  static constexpr int kKeyGroups = 2;
  static constexpr int kGroupWarps = 4;
  static constexpr int kRowParts = kGroupWarps;
  static constexpr int kWarps = kKeyGroups * kGroupWarps;
  static constexpr int kThreads = kWarps * 32;  // that compute
  // A warpgroup more copies, two of its warps for each group.
  static constexpr int kBlockThreads = kThreads + 128;
  static constexpr int kComputingRegisters = 232, kCopyingRegisters = 40;

  // Columns of the result that are merged at once.
  static constexpr int kSlice = 32;
  static constexpr int kSlicePitch = kSlice + 8;
  static constexpr int kScaleBytes = 2 * kKeys * sizeof(float);
  static constexpr int kQueryBytes = kRows * kHeadDim * 2;
  static constexpr int kPartBytes = kKeyGroups * kRows * kSlicePitch * sizeof(float);
  static constexpr int kProbabilityBytes = kRows * kKeys * 2;
  static constexpr int kFixedBytes =
      (kQueryBytes > kPartBytes ? kQueryBytes : kPartBytes) + kKeyGroups * 2 * kProbabilityBytes +
      kKeyGroups * kRows * (kRowParts * (sizeof(float2) + sizeof(float)) + sizeof(float)) +
      kRows * (sizeof(DecodeRow) + 2 * sizeof(float)) + 2 * sizeof(DecodeUnit) + 2048;
  static constexpr int kFitting =
      (kMaxSharedBytes - kFixedBytes) / (kKeyGroups * (kTileBytes + kScaleBytes));
  static constexpr int kStages = kFitting < 6 ? kFitting : 6;

  static_assert(kByteK && kByteV && kHeadDim % 64 == 0 && kValueDim % 64 == 0);
  static_assert(kStages >= 2, "loading and computing must overlap");
  static_assert(2 * kKeyGroups == 4, "the warps that copy");
  // Or the warpgroups that compute would wait for registers for ever.
  static_assert(kKeyGroups * kComputingRegisters + kCopyingRegisters <=
                65536 / kBlockThreads / 8 * 8 * (kKeyGroups + 1));
};

template <class T>
struct ExtendSmem {
  alignas(1024) unsigned char tiles[T::kKeyGroups][T::kStages][T::kTileBytes];  // keys, then values
  // P of one product and of the next, as an operand: 128 bytes a row.
  alignas(1024) unsigned char probabilities[T::kKeyGroups][2][T::kProbabilityBytes];
  union {
    alignas(1024) unsigned char q[T::kQueryBytes];
    float parts[T::kKeyGroups][T::kRows][T::kSlicePitch];  // when all warps are done with q
  };
  float scales[T::kKeyGroups][T::kStages][2][T::kKeys];  // of keys, of values
  float peaks[T::kKeyGroups][T::kGroupWarps][T::kRows];  // the highest scores of a warp's keys
  // Of each row: base (of exponents of 2) and sum, and what the groups' results are multiplied by.
  float2 stats[T::kKeyGroups][T::kRowParts][T::kRows];
  float weights[T::kKeyGroups][T::kRows];
  DecodeRow rows[T::kRows];
  alignas(8) float factors[T::kRows], starts[T::kRows];  // as in DecodeSmem
  DecodeUnit units[2];                                   // the present one and the next
  ptx::Mbarrier full[T::kKeyGroups][T::kStages], empty[T::kKeyGroups][T::kStages];
};

}  // namespace fastinfer::cuda
