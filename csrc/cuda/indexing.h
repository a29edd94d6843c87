// What launches need to check about addresses, and kernels to find their place: alignment, powers
// of two and division by a number known at the launch.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace fastinfer::cuda {

// Whether a pointer and strides, in elements of `size` bytes, are multiples of `bytes`.
inline bool aligned_to(int64_t bytes, const void* pointer, int64_t size,
                       std::initializer_list<int64_t> strides) {
  bool ok = reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
  for (int64_t stride : strides) ok = ok && stride * size % bytes == 0;
  return ok;
}

// Of rows and of slots: what the kernels count in 32 bits.
constexpr int64_t kMostIndices = 0x7fffffff;

// The smallest k for which 2^k is at least n.
inline int ceil_log2(int64_t n) {
  int k = 0;
  while ((int64_t{1} << k) < n) ++k;
  return k;
}

// n / divisor by a multiplication, for n and divisor below 2^31.
//
// With 2^(l - 1) < d <= 2^l and m = ceil(2^(31 + l) / d), which is below 2^32, m d exceeds 2^(31 +
// l) by e < 2^l; so n m / 2^(31 + l) exceeds n / d by n e / (d 2^(31 + l)) < 1 / d: the floor is
// right.
struct Divider {
  uint32_t magic;
  int shift;
  int32_t divisor;

  explicit Divider(int32_t d) : shift(31), divisor(d) {
    while ((int64_t{1} << (shift - 31)) < d) ++shift;
    magic = static_cast<uint32_t>(((uint64_t{1} << shift) + d - 1) / d);
  }

#ifdef __CUDACC__
  __device__ int32_t quotient(int32_t n) const {
    return static_cast<int32_t>(uint64_t{static_cast<uint32_t>(n)} * magic >> shift);
  }
#endif
};

}  // namespace fastinfer::cuda
