// act(gate) * up over pieces of rows; compiled once per instruction set.
#include "activation_kernels.h"

#include "activation_functions.h"

namespace fastinfer::cpu::FI_ISA {
namespace {

template <class Act, class T>
void gate_mul(const void* gate_data, const void* up_data, void* out_data, int64_t n) {
  const T* gate = static_cast<const T*>(gate_data);
  const T* up = static_cast<const T*>(up_data);
  T* out = static_cast<T*>(out_data);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, Act::apply(load(gate + i)) * load(up + i));
  const int64_t rest = n - i;
  if (rest == 0) return;
  store_partial(out + i, Act::apply(load_partial(gate + i, rest)) * load_partial(up + i, rest),
                rest);
}

}  // namespace

extern const ActivationKernels activation_kernels = {
    {gate_mul<Silu, float>, gate_mul<Silu, bf16>, gate_mul<Silu, fp16>},
    {gate_mul<GeluErf, float>, gate_mul<GeluErf, bf16>, gate_mul<GeluErf, fp16>},
    {gate_mul<GeluTanh, float>, gate_mul<GeluTanh, bf16>, gate_mul<GeluTanh, fp16>},
};

}  // namespace fastinfer::cpu::FI_ISA
