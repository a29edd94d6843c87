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
  const auto visit = [&](vf v) __attribute__((always_inline)) {
    const vi magnitude = bit_cast<vi>(v) & 0x7fffffff;
    m = magnitude > m ? magnitude : m;
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) visit(load(x + i));
  if (i < n) visit(load_partial(x + i, n - i));
  int32_t largest = m[0];
  for (int j = 1; j < kLanes; ++j) largest = m[j] > largest ? m[j] : largest;
  return bit_cast<float>(largest);
}

template <class Format>
struct Codes {
  typename Format::Storage codes[kLanes];
};

template <class Format>
inline Codes<Format> quantize_lanes(vf v, float scale) {
  // A true division, not a product with the reciprocal: the stored bits are part of the contract.
  v = v / splat(scale);
  v = vmin(splat(Format::kLimit), v);  // keeps a NaN
  v = vmax(splat(-Format::kLimit), v);
  typedef typename Format::Storage Stored __attribute__((vector_size(kLanes)));
  return bit_cast<Codes<Format>>(__builtin_convertvector(Format::encode(v), Stored));
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
  int64_t i = 0;
  for (; i + kLanes <= row.dim; i += kLanes) {
    const Codes<Format> lanes = quantize_lanes<Format>(load(x + i), scale);
    std::memcpy(out + i, lanes.codes, sizeof(lanes));
  }
  const int64_t rest = row.dim - i;
  if (rest == 0) return;
  const Codes<Format> lanes = quantize_lanes<Format>(load_partial(x + i, rest), scale);
  for (int64_t j = 0; j < rest; ++j) out[i + j] = lanes.codes[j];
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
