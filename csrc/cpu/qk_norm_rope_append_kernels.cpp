// The bias of a projection; compiled once per instruction set.
#include "qk_norm_rope_append_kernels.h"

#include "vec.h"

namespace fastinfer::cpu::FI_ISA {
namespace {

template <class T>
void add_bias(const void* x_data, const void* bias_data, void* out_data, int64_t n) {
  const T* x = static_cast<const T*>(x_data);
  const T* bias = static_cast<const T*>(bias_data);
  T* out = static_cast<T*>(out_data);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(x + i) + load(bias + i));
  for (; i < n; ++i) from_float(to_float(x[i]) + to_float(bias[i]), out + i);
}

}  // namespace

extern const AddBiasKernels add_bias_kernels = {{add_bias<float>, add_bias<bf16>, add_bias<fp16>}};

}  // namespace fastinfer::cpu::FI_ISA
