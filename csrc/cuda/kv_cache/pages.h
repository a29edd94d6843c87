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

// Whether every row of the pages takes stores of `elements` elements.
inline bool pages_aligned(const AppendSide& side, int64_t elements) {
  const int64_t size = element_size(side.cache_dtype);
  return side.dim % elements == 0 &&
         aligned_to(elements * size, side.cache, size,
                    {side.cache_block_stride, side.cache_head_stride, side.cache_slot_stride});
}

}  // namespace fastinfer::cuda
