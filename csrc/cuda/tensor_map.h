// Tensor maps: how TMA finds a tile of a tensor.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "runtime.h"

namespace fastinfer::cuda {

// A matrix of elements of 8 or 16 bits in up to four dimensions, the innermost dense.
struct MappedTensor {
  const void* data;    // aligned to 16 bytes
  int64_t sizes[4];    // innermost first
  int64_t strides[4];  // in elements; those of dimensions of size 1 are not used
  uint32_t box[4];     // elements of a tile; box[0] are at most the swizzle's 128 bytes
};

// Fails with what the driver says if it refuses the map.
CUtensorMap make_tensor_map(const char* op, ScalarType dtype, const MappedTensor& tensor);

// Whether strides (of elements of so many bytes) and the address suit TMA and accesses of 16 bytes.
// A dimension of stride 0 is none that TMA knows.
inline bool suits_tma(const void* data, int64_t element_bytes,
                      std::initializer_list<std::pair<int64_t, int64_t>> sizes_and_strides) {
  bool ok = reinterpret_cast<uintptr_t>(data) % 16 == 0;
  for (const auto& [size, stride] : sizes_and_strides) {
    ok = ok && (size <= 1 || (stride > 0 && stride * element_bytes % 16 == 0));
  }
  return ok;
}

}  // namespace fastinfer::cuda
