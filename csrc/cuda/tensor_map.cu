// Encoding tensor maps through the driver, which is found at run time.
#include "tensor_map.h"

namespace fastinfer::cuda {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

Encode find_encode(const char* op) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  FI_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                 cudaEnableDefault, &found),
                op);
  if (found != cudaDriverEntryPointSuccess || entry == nullptr) {
    throw std::runtime_error(std::string("fastinfer::") + op +
                             ": expected a driver with cuTensorMapEncodeTiled, got one without");
  }
  return reinterpret_cast<Encode>(entry);
}

}  // namespace

CUtensorMap make_tensor_map(const char* op, ScalarType dtype, const MappedTensor& tensor) {
  static const Encode encode = find_encode(op);
  CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  if (dtype == ScalarType::BFloat16) type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  if (dtype == ScalarType::Half) type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const int64_t bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2;
  cuuint64_t sizes[4], strides[3];
  cuuint32_t box[4], steps[4] = {1, 1, 1, 1};
  for (int i = 0; i < 4; ++i) {
    sizes[i] = static_cast<cuuint64_t>(tensor.sizes[i]);
    box[i] = tensor.box[i];
    // The driver looks at the stride of a dimension of size 1 as well, which may be anything.
    if (i > 0) strides[i - 1] = sizes[i] > 1 ? bytes * tensor.strides[i] : 16;
  }
  CUtensorMap map;
  const CUresult result =
      encode(&map, type, 4, const_cast<void*>(tensor.data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error(std::string("fastinfer::") + op +
                             ": cuTensorMapEncodeTiled failed with CUDA driver error " +
                             std::to_string(static_cast<int>(result)));
  }
  return map;
}

}  // namespace fastinfer::cuda
