// Bytes of a cache as fp16, in registers.
#pragma once

#include "../ptx/convert.h"
#include "decode_params.cuh"

namespace fastinfer::cuda {

// What an int8 key's elements have too much, and what they are then multiplied by.
constexpr float kKeyOffset = 128.0f, kKeyUnit = 0x1p-24f;

// Four bytes of a key as two pairs of fp16: bytes 0, 1 and 2, 3.
template <KvFormat kFormat>
__device__ inline void decode_keys(uint32_t bytes, uint32_t& first, uint32_t& second) {
  if constexpr (kFormat == KvFormat::kInt8) {
    bytes ^= 0x80808080u;
    first = __byte_perm(bytes, 0, 0x4140);
    second = __byte_perm(bytes, 0, 0x4342);
  } else {
    ptx::e4m3x4_to_f16x4(bytes, first, second);
  }
}

// Four bytes of values as two pairs of fp16: bytes 0, 2 and 1, 3.
template <KvFormat kFormat>
__device__ inline void decode_values(uint32_t bytes, uint32_t& first, uint32_t& second) {
  if constexpr (kFormat == KvFormat::kInt8) {
    // Below 0x64, a byte b makes the fp16 number 1024 + b; b is the element plus 128.
    bytes ^= 0x80808080u;
    first = ptx::sub_f16x2(__byte_perm(bytes, 0x64646464u, 0x4240), 0x64806480u);
    second = ptx::sub_f16x2(__byte_perm(bytes, 0x64646464u, 0x4341), 0x64806480u);
  } else {
    ptx::e4m3x4_to_f16x4(__byte_perm(bytes, 0, 0x3120), first, second);
  }
}

}  // namespace fastinfer::cuda
