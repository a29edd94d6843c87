// The decode kernel's shapes: how a block's warps share a tile, and what lies where in shared
// memory.
#pragma once

#include "decode_unit.cuh"

namespace fastinfer::cuda {

template <class T>
struct DecodeSmem;

template <KvFormat kKFormat_, KvFormat kVFormat_, int kRows_, int kHeadDim_, int kValueDim_>
struct DecodeTraits {
  using Smem = DecodeSmem<DecodeTraits>;
  static constexpr KvFormat kKFormat = kKFormat_, kVFormat = kVFormat_;
  static constexpr int kRows = kRows_, kHeadDim = kHeadDim_, kValueDim = kValueDim_;
  static constexpr bool kByteK = is_byte(kKFormat), kByteV = is_byte(kVFormat);

  // A warp's accumulators take kWarpRows * kValueDim / 32 registers, half of what there is.
  static constexpr int kWarpRows = kValueDim > 128 ? 16 : (kRows < 32 ? kRows : 32);
  // Warps that have the same keys and different rows.
  static constexpr int kGroupWarps = kRows / kWarpRows;
  static constexpr int kKeys = kByteK || kByteV || kHeadDim <= 64 ? 32 : 16;  // of a tile
  static constexpr int kKPitch = row_pitch(kHeadDim, kKFormat);
  static constexpr int kVPitch = row_pitch(kValueDim, kVFormat);
  static constexpr int kTileBytes = kKeys * (kKPitch + kVPitch);
  // Groups of warps with keys of their own, each with its own ring of tiles.
  static constexpr int kWantedGroups = kTileBytes > 8192 ? 4 : 8;
  static constexpr int kKeyGroups =
      kWantedGroups * kGroupWarps <= 8 ? kWantedGroups : 8 / kGroupWarps;
  static constexpr int kWarps = kKeyGroups * kGroupWarps;
  static constexpr int kThreads = kWarps * 32;
  static constexpr bool kByWarpgroup = false;
  static constexpr int kRowParts = 1;  // of a row's sum in a group, each in a warp

  static constexpr int kRowTiles = kWarpRows / 16;
  static constexpr int kKeyTiles = kKeys / 8;
  static constexpr int kValueTiles = kValueDim / 8;

  // q stays in registers where there is room.
  static constexpr bool kKeepQuery = kWarpRows == 16 && kHeadDim <= 128;

  // Columns of the result that are merged at once.
  static constexpr int kSlice = kRows * kKeyGroups <= 128 ? 32 : 16;
  static constexpr int kSlicePitch = kSlice + 8;
  static constexpr int kScaleBytes = 2 * kKeys * sizeof(float);

  static constexpr int kQueryBytes = kRows * kHeadDim * 2;
  static constexpr int kPartBytes = kKeyGroups * kRows * kSlicePitch * sizeof(float);
  static constexpr int kFixedBytes = (kQueryBytes > kPartBytes ? kQueryBytes : kPartBytes) +
                                     kKeyGroups * kRows * (sizeof(float2) + sizeof(float)) +
                                     kRows * (sizeof(DecodeRow) + 2 * sizeof(float)) +
                                     4 * sizeof(DecodeUnit) + 256;
  static constexpr int kFitting =
      (kMaxSharedBytes - kFixedBytes) / (kKeyGroups * (kTileBytes + kScaleBytes));
  static constexpr int kStages = kFitting < 6 ? kFitting : 6;

  static_assert(kHeadDim % 16 == 0 && kValueDim % kSlice == 0);
  static_assert(kRows % 16 == 0 && kRows % kWarpRows == 0 && kKeyGroups >= 1);
  static_assert(kStages >= 2, "loading and computing must overlap");
};

template <class T>
struct DecodeSmem {
  alignas(128) unsigned char tiles[T::kKeyGroups][T::kStages][T::kTileBytes];  // keys, then values
  union {
    alignas(128) unsigned char q[T::kQueryBytes];
    float parts[T::kKeyGroups][T::kRows][T::kSlicePitch];  // when all warps are done with q
  };
  float scales[T::kKeyGroups][T::kStages][2][T::kKeys];  // of keys, of values
  // Of each row: base (of exponents of 2) and sum, and what the groups' results are multiplied by.
  float2 stats[T::kKeyGroups][T::kRowParts][T::kRows];
  float weights[T::kKeyGroups][T::kRows];
  DecodeRow rows[T::kRows];
  // Scores, before a softcap's tanh, are factor * (start + q k): the softmax scale and what makes
  // up for the powers of 2 in q and k.
  float factors[T::kRows], starts[T::kRows];
  BlockUnits block;
  DecodeUnit units[4];  // ring: the present one, two that follow, and one that is being read
};

}  // namespace fastinfer::cuda
