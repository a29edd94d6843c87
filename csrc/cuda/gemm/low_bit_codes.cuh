// Codes of the packed layout (fastinfer/ops/packed_weights.py): one by one, and as operands of
// mma.m16n8k16.
//
// A block of codes, 16, 32 or 64 features by 64 columns of K, is what whole loads of 16 bytes a
// lane hold: for each 16 features and each step of 16 columns a lane's registers of operand A. A
// code becomes a 16-bit number by masks alone, relative to an offset and in a unit that the group's
// scale takes back:
//
//     number = kOffset + code * unit(whether of features 8 to 15 of the 16)
//
// bf16: 0x4300 | code is 128 + code, for up to 7 bits. fp16: code itself is the subnormal
// code * 2^-24, which tensor cores multiply exactly. Where two fields fit into those bits, the
// second one's number is a power of two too large, and a shift is saved.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../ptx/convert.h"

namespace fastinfer::cuda {

// One code of tiles [n_tiles, k_tiles, bits * 128].
template <int kBits>
__device__ inline int low_bit_code(const uint32_t* tiles, int32_t k_tiles, int32_t n, int32_t k) {
  const uint32_t* tile = tiles + (int64_t{n / 64} * k_tiles + k / 64) * (kBits * 128);
  const int row16 = n % 64 / 16, step = k % 64 / 16, r = n % 16 / 8 + 2 * (k % 16 / 8), h = k % 2;
  const auto field = [&](int word, int bit) {
    return tile[word / 4 * 128 + (n % 8 * 4 + k % 8 / 2) * 4 + word % 4] >> (bit + 16 * h);
  };
  if constexpr (kBits == 4) {
    return field(4 * row16 + step, 4 * r) & 15;
  } else if constexpr (kBits == 2) {
    return field(2 * row16 + step / 2, 2 * (r + 4 * (step % 2))) & 3;
  } else if constexpr (kBits == 8) {
    return field(2 * (4 * row16 + step) + r / 2, 8 * (r % 2)) & 255;
  } else {
    if (step < 3) return field(3 * row16 + step, 3 * r) & 7;
    if (r < 3) return field(3 * row16 + r, 12) & 7;
    return field(3 * row16, 15) & 1 | (field(3 * row16 + 1, 15) & 1) << 1 |
           (field(3 * row16 + 2, 15) & 1) << 2;
  }
}

// kNormal: in fp16 as well as an offset, 1024 + code, for those who subtract it.
template <class T, int kBits, bool kNormal = false>
struct LowBitCodes {
  static constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  static constexpr int kRows = kBits == 3 ? 4 : kBits == 2 ? 2 : 1;  // of 16 features, of a block
  static constexpr int kLoads = kBits * kRows / 4;
  static constexpr int kBlocks = 4 / kRows;  // of a tile of 64 features
  static constexpr int kWords = 4 * kLoads;  // of a lane, of a block
  static constexpr bool kOffsets = kBf16 ? kBits < 8 : kNormal;
  static constexpr float kOffset = !kOffsets ? 0.0f : kBf16 ? 128.0f : 1024.0f;
  static constexpr float kUnit = kBf16 || kNormal ? 1.0f : 0x1p-24f;
  static constexpr uint32_t kOffsetPair = !kOffsets ? 0 : kBf16 ? 0x43004300u : 0x64006400u;
  static constexpr uint32_t kOnePair = kBf16 ? 0x3f803f80u : 0x3c003c00u;

  __device__ static constexpr float unit(bool second) {
    return second && kBits < 4 ? kUnit * (1 << kBits) : kUnit;
  }

  // Operand A for features 16 row .. of a block and the columns of a step.
  __device__ static void operand(const uint32_t (&words)[kWords], int row, int step,
                                 uint32_t (&a)[4]) {
#pragma unroll
    for (int r = 0; r < 4; ++r) a[r] = pair(words, row, step, r);
  }

 private:
  __device__ static uint32_t pair(const uint32_t (&words)[kWords], int row, int step, int r) {
    if constexpr (kBits == 4) {
      return ptx::and_or<0x000f000f>(words[step] >> 4 * r, kOffsetPair);
    } else if constexpr (kBits == 2) {
      const uint32_t two = words[2 * row + step / 2] >> 4 * (r / 2 + 2 * (step % 2));
      return r % 2 == 0 ? ptx::and_or<0x00030003>(two, kOffsetPair)
                        : ptx::and_or<0x000c000c>(two, kOffsetPair);
    } else if constexpr (kBits == 3) {
      const uint32_t* three = words + 3 * row;
      if (step < 3) {
        const uint32_t two = three[step] >> 6 * (r / 2);
        return r % 2 == 0 ? ptx::and_or<0x00070007>(two, kOffsetPair)
                          : ptx::and_or<0x00380038>(two, kOffsetPair);
      }
      if (r % 2 == 0) return ptx::and_or<0x00070007>(three[r] >> 12, kOffsetPair);
      if (r == 1) return ptx::and_or<0x00380038>(three[1] >> 9, kOffsetPair);
      const uint32_t low = ptx::and_or<0x00080008>(three[0] >> 12, kOffsetPair);
      return ptx::and_or<0x00200020>(three[2] >> 10, ptx::and_or<0x00100010>(three[1] >> 11, low));
    } else {
      const uint32_t bytes = words[2 * step + r / 2] >> 8 * (r % 2);
      if constexpr (!kBf16) return ptx::and_or<0x00ff00ff>(bytes, kOffsetPair);
      // 128 + the low 7 bits, and 128 or 256 by the eighth: both are exact, and so is their sum
      // less 256.
      const uint32_t low = ptx::and_or<0x007f007f>(bytes, 0x43004300u);
      const uint32_t high = ptx::and_or<0x00800080>(bytes, 0x43004300u);
      return ptx::add_bf16x2(low, ptx::add_bf16x2(high, 0xc380c380u));
    }
  }
};

}  // namespace fastinfer::cuda
