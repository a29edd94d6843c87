// Elements as vectors of 16 bytes, as kernels load and store them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace fastinfer::cuda {

constexpr unsigned kFullWarp = 0xffffffffu;

// Kept in words: an array of 16-bit elements would be taken apart as soon as it is loaded, and
// every load would wait for the one before.
template <class T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(T);
  uint32_t words[4];
};

// In one instruction; `from` and `to` are aligned to 16 bytes.
template <class T>
__device__ inline Pack<T> load_pack(const T* from) {
  const uint4 words = *reinterpret_cast<const uint4*>(from);
  return {words.x, words.y, words.z, words.w};
}

template <class T>
__device__ inline void store_pack(T* to, const Pack<T>& pack) {
  const uint32_t (&words)[4] = pack.words;
  *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

// Two neighbouring elements in a word.
template <class T>
struct PairOf;
template <>
struct PairOf<__nv_bfloat16> {
  using type = __nv_bfloat162;
  __device__ static float2 to_floats(uint32_t word) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
  }
  __device__ static type from_floats(float a, float b) { return __floats2bfloat162_rn(a, b); }
};
template <>
struct PairOf<__half> {
  using type = __half2;
  __device__ static float2 to_floats(uint32_t word) {
    return __half22float2(*reinterpret_cast<const __half2*>(&word));
  }
  __device__ static type from_floats(float a, float b) { return __floats2half2_rn(a, b); }
};

template <class T>
__device__ inline typename PairOf<T>::type pair_of(uint32_t word) {
  return *reinterpret_cast<const typename PairOf<T>::type*>(&word);
}

template <class T>
__device__ inline void unpack(const Pack<T>& pack, float (&values)[Pack<T>::kSize]) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if constexpr (std::is_same_v<T, float>) {
      values[w] = __uint_as_float(pack.words[w]);
    } else {
      const float2 two = PairOf<T>::to_floats(pack.words[w]);
      values[2 * w] = two.x, values[2 * w + 1] = two.y;
    }
  }
}

// Rounded to nearest even.
template <class T>
__device__ inline Pack<T> rounded(const float (&values)[Pack<T>::kSize]) {
  Pack<T> pack;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if constexpr (std::is_same_v<T, float>) {
      pack.words[w] = __float_as_uint(values[w]);
    } else {
      const auto pair = PairOf<T>::from_floats(values[2 * w], values[2 * w + 1]);
      pack.words[w] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  }
  return pack;
}

// The largest magnitude as the bits of a float, where NaN is above infinity: as unsigned integers
// such bits keep their order, so maxima of them can be taken further.
template <class T>
__device__ inline uint32_t largest_magnitude(const Pack<T>& pack) {
  if constexpr (std::is_same_v<T, float>) {
    uint32_t largest = 0;
#pragma unroll
    for (uint32_t word : pack.words) largest = max(largest, word & 0x7fffffffu);
    return largest;
  } else {
    auto largest = __habs2(pair_of<T>(pack.words[0]));
#pragma unroll
    for (int w = 1; w < 4; ++w) {
      largest = __hmax2_nan(largest, __habs2(pair_of<T>(pack.words[w])));
    }
    const float2 two = PairOf<T>::to_floats(*reinterpret_cast<const uint32_t*>(&largest));
    return max(__float_as_uint(two.x), __float_as_uint(two.y));
  }
}

// Over the `lanes` (a power of two) neighbouring threads that hold one row.
__device__ inline uint32_t largest_of_lanes(uint32_t value, int lanes) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    if (mask < lanes) value = max(value, __shfl_xor_sync(kFullWarp, value, mask));
  }
  return value;
}

}  // namespace fastinfer::cuda
