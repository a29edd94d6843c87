// Rows written into pages: copied, or quantized to int8 or float8_e4m3fn. Compiled once per
// instruction set.
#include "kv_cache_kernels.h"

#include "vec.h"

namespace fastinfer::cpu::FI_ISA {
namespace {

struct Int8 {
  using Storage = int8_t;
  static constexpr float kLimit = 127.0f;
  static vi encode(vf clamped) { return round_to_int(clamped); }
};

struct Fp8 {
  using Storage = uint8_t;
  static constexpr float kLimit = 448.0f;
  static vi encode(vf clamped) { return encode_e4m3(clamped); }
};

// Largest magnitude of a row. Magnitudes are compared as integers, where NaN is above infinity, so
// a NaN anywhere in the row is the result.
template <class T>
inline float largest_magnitude(const T* x, int64_t n) {
  vi m = {};
  int64_t i = 0;
  for (; i < n; i += kLanes) {
    const vf v = n - i >= kLanes ? load(x + i) : load_partial(x + i, n - i);
    const vi magnitude = bit_cast<vi>(v) & 0x7fffffff;
    m = magnitude > m ? magnitude : m;
  }
  int32_t largest = m[0];
  for (int j = 1; j < kLanes; ++j) largest = m[j] > largest ? m[j] : largest;
  return bit_cast<float>(largest);
}

template <class Format, class T>
void quantize(const AppendRow& row) {
  using Storage = typename Format::Storage;
  const T* x = static_cast<const T*>(row.x);
  Storage* out = static_cast<Storage*>(row.cache);
  float scale = 0.0f;
  if (row.scale_is_dynamic) {
    scale = largest_magnitude(x, row.dim) / Format::kLimit;
    if (scale == 0.0f) scale = 1.0f;
    *row.scale = scale;
  } else {
    scale = *row.scale;
  }
  for (int64_t i = 0; i < row.dim; i += kLanes) {
    const int64_t n = row.dim - i;
    // A true division, not a product with the reciprocal: the stored bits are part of the contract.
    vf v = (n >= kLanes ? load(x + i) : load_partial(x + i, n)) / splat(scale);
    v = vmin(splat(Format::kLimit), v);  // keeps a NaN
    v = vmax(splat(-Format::kLimit), v);
    typedef Storage Stored __attribute__((vector_size(kLanes * sizeof(Storage))));
    const Stored stored = __builtin_convertvector(Format::encode(v), Stored);
    std::memcpy(out + i, &stored, n >= kLanes ? kLanes : static_cast<size_t>(n));
  }
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
