// A warp's products with one tile of keys and values. Bytes are decoded to fp16 in registers:
//
// - Keys: ldmatrix gives a lane four neighbouring bytes of a key, so the head dimensions of a group
//   of 16 are taken in the order in which lane c of a quad holds 4 c, 4 c + 1 | 4 c + 2, 4 c + 3
//   instead of 2 c, 2 c + 1 | 2 c + 8, 2 c + 9; q lies in shared memory in that order. An int8 key
//   b is taken as (b + 128) 2^-24, the fp16 number that has the bits of b + 128: what its scores
//   have too much is known before (kKeyOffset).
// - Values: ldmatrix transposes pairs of bytes, so a register holds two neighbouring columns of two
//   keys; the even columns of 16 make one tile of a product and the odd ones the next.
#pragma once

#include "../ptx/convert.h"
#include "../ptx/ldmatrix.h"
#include "../ptx/mma.h"
#include "decode_stream.cuh"

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

// Column of element i (0 or 1) of a lane's pair in tile `tile` of the result.
template <class T>
__device__ inline int value_column(int tile, int i) {
  const int c = threadIdx.x % 4;
  return T::kByteV ? tile / 2 * 16 + 4 * c + 2 * i + tile % 2 : tile * 8 + 2 * c + i;
}

// Where head dimension d of a row of q lies.
template <class T>
__host__ __device__ inline int query_offset(int row, int d) {
  const int in16 = d % 16;
  const int place = T::kByteK ? in16 / 4 * 2 + in16 % 2 + in16 / 2 % 2 * 8 : in16;
  const int element = d - in16 + place;
  return swizzled<T::kHeadDim * 2>(row, element / 8) + element % 8 * 2;
}

// Where a lane begins to load rows of q, from row `row` on.
template <class T>
__device__ inline uint32_t query_address(uint32_t q, int row) {
  const int lane = threadIdx.x % 32;
  return q + swizzled<T::kHeadDim * 2>(row + lane % 16, lane / 16);
}

// 16 rows of q by head dimensions [16 step, 16 step + 16), as the first operand of a product.
__device__ inline void load_query(uint32_t (&a)[4], uint32_t address, int step) {
  ptx::ldmatrix_x4(a, chunk_address(address, step * 2));
}

template <class T>
using Scores = float[T::kRowTiles][T::kKeyTiles][4];

// s = start + q k^T. Element [i][n][2 h + j] of a lane is row 16 i + 8 h + lane / 4, key 8 n + 2
// (lane % 4) + j. `start(i, h)` is the same for all keys, `query(a, i, step)` gives the first
// operand.
template <class T, class Start, class Query>
__device__ inline void multiply_keys(Scores<T>& s, uint32_t k, const Start& start,
                                     const Query& query) {
  constexpr bool kBf16 = T::kKFormat == KvFormat::kBf16;
  const int lane = threadIdx.x % 32;
  float starts[T::kRowTiles][4];
#pragma unroll
  for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) starts[i][e] = start(i, e / 2);
  }
  const uint32_t first = T::kByteK
                             ? k + swizzled<T::kKPitch>(lane, 0)
                             : k + swizzled<T::kKPitch>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
  for (int step = 0; step < T::kHeadDim / 16; ++step) {
    uint32_t a[T::kRowTiles][4];
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) query(a[i], i, step);
    if constexpr (T::kByteK) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, chunk_address(first, step));
#pragma unroll
      for (int n = 0; n < T::kKeyTiles; ++n) {
        uint32_t b0, b1;
        decode_keys<T::kKFormat>(b[n], b0, b1);
#pragma unroll
        for (int i = 0; i < T::kRowTiles; ++i) {
          ptx::mma_m16n8k16<kBf16>(s[i][n], a[i], b0, b1, step == 0 ? starts[i] : s[i][n]);
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < T::kKeyTiles; n += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, chunk_address(first, step * 2) + n * 8 * T::kKPitch);
#pragma unroll
        for (int i = 0; i < T::kRowTiles; ++i) {
          ptx::mma_m16n8k16<kBf16>(s[i][n], a[i], b[0], b[1], step == 0 ? starts[i] : s[i][n]);
          ptx::mma_m16n8k16<kBf16>(s[i][n + 1], a[i], b[2], b[3],
                                   step == 0 ? starts[i] : s[i][n + 1]);
        }
      }
    }
  }
}

// acc += p v. Element [i][n][2 h + j] of acc is row 16 i + 8 h + lane / 4, column value_column(n,
// j).
template <class T>
__device__ inline void multiply_values(float (&acc)[T::kRowTiles][T::kValueTiles][4],
                                       const Scores<T>& p, uint32_t v) {
  constexpr bool kBf16 = T::kVFormat == KvFormat::kBf16;
  const int lane = threadIdx.x % 32;
  uint32_t a[T::kRowTiles][T::kKeys / 16][4];
#pragma unroll
  for (int i = 0; i < T::kRowTiles; ++i) {
#pragma unroll
    for (int step = 0; step < T::kKeys / 16; ++step) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float (&pair)[4] = p[i][step * 2 + e / 2];
        a[i][step][e] = ptx::pack<kBf16>(pair[e % 2 * 2], pair[e % 2 * 2 + 1]);
      }
    }
  }
  const uint32_t first = T::kByteV ? v + swizzled<T::kVPitch>(lane, 0)
                                   : v + swizzled<T::kVPitch>(lane % 16, lane / 16);
#pragma unroll
  for (int n = 0; n < T::kValueTiles; n += 2) {
    if constexpr (T::kByteV) {
      uint32_t b[4], even[4], odd[4];
      ptx::ldmatrix_x4_trans(b, chunk_address(first, n / 2));
#pragma unroll
      for (int e = 0; e < 4; ++e) decode_values<T::kVFormat>(b[e], even[e], odd[e]);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int i = 0; i < T::kRowTiles; ++i) {
          const auto& x = a[i][step];
          ptx::mma_m16n8k16<kBf16>(acc[i][n], x, even[step * 2], even[step * 2 + 1], acc[i][n]);
          ptx::mma_m16n8k16<kBf16>(acc[i][n + 1], x, odd[step * 2], odd[step * 2 + 1],
                                   acc[i][n + 1]);
        }
      }
    } else {
#pragma unroll
      for (int step = 0; step < T::kKeys / 16; ++step) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, chunk_address(first, n) + step * 16 * T::kVPitch);
#pragma unroll
        for (int i = 0; i < T::kRowTiles; ++i) {
          ptx::mma_m16n8k16<kBf16>(acc[i][n], a[i][step], b[0], b[1], acc[i][n]);
          ptx::mma_m16n8k16<kBf16>(acc[i][n + 1], a[i][step], b[2], b[3], acc[i][n + 1]);
        }
      }
    }
  }
}

// Which keys of a tile (bit by bit) have a NaN or an infinity among their values, or as their
// scale. The same for all lanes.
template <class T>
__device__ inline uint32_t spoiled_keys(const unsigned char* v, const float* scales) {
  constexpr int kLanes = 32 / T::kKeys;  // that share a key
  const int lane = threadIdx.x % 32, key = lane % T::kKeys;
  bool bad = false;
  if constexpr (T::kByteV) bad = !isfinite(scales[key]);
  if constexpr (T::kVFormat != KvFormat::kInt8) {
    for (int chunk = lane / T::kKeys; chunk < T::kVPitch / 16; chunk += kLanes) {
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
  if constexpr (T::kKeys == 16) keys = (keys | keys >> 16) & 0xffff;
  return keys;
}

}  // namespace fastinfer::cuda
