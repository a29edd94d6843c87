// From the door's description of pages to the kernels', and what of it the kernels take.
#pragma once

#include "../../checks/kv_cache.h"
#include "page_rows.cuh"

namespace fastinfer::cuda {

inline PageFormat page_format(const AppendSide& side, ScalarType dtype) {
  if (side.cache_dtype == dtype) return PageFormat::kElements;
  return side.cache_dtype == ScalarType::Char ? PageFormat::kInt8 : PageFormat::kFp8;
}

inline PageSide page_side(const AppendSide& side, ScalarType dtype) {
  return {side.cache,
          side.cache_block_stride,
          side.cache_head_stride,
          side.cache_slot_stride,
          side.scale,
          side.scale_block_stride,
          side.scale_head_stride,
          side.scale_slot_stride,
          page_format(side, dtype),
          side.scale_is_dynamic};
}

// Whether a pointer and strides, in elements of `size` bytes, are multiples of `bytes`.
inline bool aligned_to(int64_t bytes, const void* pointer, int64_t size,
                       std::initializer_list<int64_t> strides) {
  bool ok = reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
  for (int64_t stride : strides) ok = ok && stride * size % bytes == 0;
  return ok;
}

// Whether every row of the pages takes stores of `elements` elements.
inline bool pages_aligned(const AppendSide& side, int64_t elements) {
  const int64_t size = element_size(side.cache_dtype);
  return side.dim % elements == 0 &&
         aligned_to(elements * size, side.cache, size,
                    {side.cache_block_stride, side.cache_head_stride, side.cache_slot_stride});
}

// Of rows and of slots: what the kernels count in 32 bits.
constexpr int64_t kMostIndices = 0x7fffffff;

// The smallest k for which 2^k is at least n.
inline int ceil_log2(int64_t n) {
  int k = 0;
  while ((int64_t{1} << k) < n) ++k;
  return k;
}

}  // namespace fastinfer::cuda
