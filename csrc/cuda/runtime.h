// What a CUDA op needs from torch and the driver: the current stream, a device guard, a device's
// properties looked up once.
#pragma once

#include <cuda_runtime.h>

#include "../torch_utils.h"
#include "kept_of_device.h"

// Absent from CPU-only torch, where the library must load all the same.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace fastinfer::cuda {

#define FI_CUDA_CHECK(call, op)                                                             \
  do {                                                                                      \
    const cudaError_t error = (call);                                                       \
    if (error != cudaSuccess) {                                                             \
      throw std::runtime_error(std::string("fastinfer::") + (op) + ": CUDA error " +        \
                               cudaGetErrorName(error) + ": " + cudaGetErrorString(error)); \
    }                                                                                       \
  } while (0)

inline cudaStream_t current_stream(const char* op, int32_t device_index) {
  FI_CHECK(aoti_torch_get_current_cuda_stream != nullptr, op,
           "expected a torch built with CUDA, got one without");
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return static_cast<cudaStream_t>(stream);
}

// Makes the tensor's device current for one launch.
class DeviceGuard {
 public:
  DeviceGuard(const char* op, int32_t device_index) {
    FI_CUDA_CHECK(cudaGetDevice(&previous_), op);
    if (previous_ != device_index) FI_CUDA_CHECK(cudaSetDevice(device_index), op);
    current_ = device_index;
  }
  ~DeviceGuard() {
    if (previous_ != current_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  int current_ = 0;
};

template <cudaDeviceAttr kAttribute>
int device_attribute(const char* op, int32_t device_index) {
  int value = 0;
  FI_CUDA_CHECK(cudaDeviceGetAttribute(&value, kAttribute, device_index), op);
  return value;
}

inline int look_up_capability(const char* op, int32_t device_index) {
  return 10 * device_attribute<cudaDevAttrComputeCapabilityMajor>(op, device_index) +
         device_attribute<cudaDevAttrComputeCapabilityMinor>(op, device_index);
}

// Compute capability as 10 * major + minor.
inline int capability(const char* op, int32_t device_index) {
  return kept_of_device<look_up_capability>(op, device_index);
}

inline int num_sms(const char* op, int32_t device_index) {
  return kept_of_device<device_attribute<cudaDevAttrMultiProcessorCount>>(op, device_index);
}

}  // namespace fastinfer::cuda
