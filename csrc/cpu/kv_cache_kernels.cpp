// Rows written into pages: copied, or quantized to int8 or float8_e4m3fn. Compiled once per
// instruction set.
#include "kv_cache_kernels.h"

#include "quantize_row.h"

namespace fastinfer::cpu::FI_ISA {
namespace {

template <class Format, class T>
void quantize(const AppendRow& row) {
  const T* x = static_cast<const T*>(row.x);
  if (row.scale_is_dynamic) *row.scale = dynamic_scale<Format>(largest_magnitude(x, row.dim));
  quantize_row<Format>(x, row.dim, *row.scale, static_cast<uint8_t*>(row.cache));
}

template <class T>
void copy(const AppendRow& row) {
  std::memcpy(row.cache, row.x, static_cast<size_t>(row.dim) * sizeof(T));
}

}  // namespace

extern const KvCacheKernels kv_cache_kernels = {{
    {copy<float>, copy<bf16>, copy<fp16>},
    {quantize<Int8, float>, quantize<Int8, bf16>, quantize<Int8, fp16>},
    {quantize<Fp8, float>, quantize<Fp8, bf16>, quantize<Fp8, fp16>},
}};

}  // namespace fastinfer::cpu::FI_ISA
