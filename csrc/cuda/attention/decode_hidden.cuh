// What rows must not see: hidden keys, and NaN in the values of such keys.
#pragma once

#include "decode_unit.cuh"

namespace fastinfer::cuda {

// Whether a row sees key `key` of its sequence.
__device__ inline bool is_visible(const DecodeParams& p, const DecodeUnit& unit,
                                  const DecodeRow& row, int key) {
  if (key < unit.low || key >= unit.high) return false;
  int position = key;
  if (p.tree_mask != nullptr) {
    const int own = key - unit.step_begin;  // which token of the step it is
    if (own >= 0) {
      if ((row.tree >> min(own, 63) & 1) == 0) return false;
      if (p.window_left >= 0 || p.window_right >= 0) {
        const int64_t mask = p.tree_mask[static_cast<int64_t>(unit.first_token) + own];
        position = unit.step_begin + __popcll(static_cast<unsigned long long>(mask)) - 1;
      }
    }
  }
  return position >= row.low && position <= row.high;
}

// Which of up to 32 keys of a tile (bit by bit) have a NaN or an infinity among their values, or as
// their scale. The same for all lanes.
template <class T>
__device__ inline uint32_t spoiled_keys(const unsigned char* v, const float* scales) {
  constexpr int kKeys = T::kKeys < 32 ? T::kKeys : 32, kLanes = 32 / kKeys;  // that share a key
  const int lane = threadIdx.x % 32, key = lane % kKeys;
  bool bad = false;
  if constexpr (T::kByteV) bad = !isfinite(scales[key]);
  if constexpr (T::kVFormat != KvFormat::kInt8) {
    for (int chunk = lane / kKeys; chunk < T::kVPitch / 16; chunk += kLanes) {
      const uint4 words = *reinterpret_cast<const uint4*>(v + swizzled<T::kVPitch>(key, chunk));
#pragma unroll
      for (const uint32_t word : {words.x, words.y, words.z, words.w}) {
        if constexpr (T::kVFormat == KvFormat::kFp8) {
#pragma unroll
          for (int byte = 0; byte < 32; byte += 8) bad |= (word >> byte & 0x7f) == 0x7f;
        } else {
          constexpr uint32_t kExponent = T::kVFormat == KvFormat::kBf16 ? 0x7f80 : 0x7c00;
          bad |= (word & kExponent) == kExponent || (word >> 16 & kExponent) == kExponent;
        }
      }
    }
  }
  uint32_t keys = __ballot_sync(0xffffffffu, bad);
  if constexpr (kKeys == 16) keys = (keys | keys >> 16) & 0xffff;
  return keys;
}

// Whether keys of the tile that begins at `begin` are seen by some rows only.
template <class T>
__device__ inline bool rows_differ(const DecodeUnit& unit, int begin) {
  return max(begin, unit.low) < unit.all_low || min(begin + T::kKeys, unit.high) > unit.all_high;
}

// 0 * NaN: a value that some rows see must not reach the others. spoil(key) makes NaN of the rows
// that see a key of the tile with a NaN or an infinity, and the key's values become zeros. Where
// all rows see the same, what is hidden was loaded as zero.
template <class T, class Spoil>
__device__ inline void clear_spoiled_keys(unsigned char* values, float* v_scales, int group,
                                          int member, const Spoil& spoil) {
  constexpr int kParts = T::kKeys <= 32 ? 1 : T::kKeys / 32;
  const int lane = threadIdx.x % 32;
  uint32_t spoiled[kParts];
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    spoiled[part] = spoiled_keys<T>(values + part * 32 * T::kVPitch, v_scales + part * 32);
  }
  group_barrier<T>(group);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll 1
    for (uint32_t left = spoiled[part]; left != 0; left &= left - 1) {
      const int key = part * 32 + __ffs(left) - 1;
      spoil(key);
      if (member != 0) continue;
      for (int b = lane * 4; b < T::kVPitch; b += 128) {
        *reinterpret_cast<uint32_t*>(values + key * T::kVPitch + b) = 0;
      }
      if (T::kByteV && lane == 0) v_scales[key] = 0.0f;
    }
  }
  group_barrier<T>(group);
}

}  // namespace fastinfer::cuda
