// Rows written into pages: copied, or quantized to int8 or float8_e4m3fn. Compiled once per
// instruction set.
#include "kv_cache_kernels.h"

#include "vec.h"

namespace fastinfer::cpu::FI_ISA {
namespace {

struct Int8 {
  static constexpr float kLimit = 127.0f;
  static vi encode(vf clamped) { return round_to_int(clamped); }
};

struct Fp8 {
  static constexpr float kLimit = 448.0f;
  static vi encode(vf clamped) { return encode_e4m3(clamped); }
};

inline vi larger(vi a, vi b) {
  return a > b ? a : b;
}

// Largest magnitude of a row. Magnitudes are compared as integers, where NaN is above infinity, so
// a NaN anywhere in the row is the result.
template <class T>
inline float largest_magnitude(const T* x, int64_t n) {
  vi m = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) m = larger(m, bit_cast<vi>(load(x + i)) & 0x7fffffff);
  if (i < n) m = larger(m, bit_cast<vi>(load_partial(x + i, n - i)) & 0x7fffffff);
  int32_t largest = 0;
  for (int j = 0; j < kLanes; ++j) largest = m[j] > largest ? m[j] : largest;
  return bit_cast<float>(largest);
}

template <class Format>
inline vi quantize_lanes(vf v, float scale) {
  // A true division, not a product with the reciprocal: the stored bits are part of the contract.
  v = v / splat(scale);
  v = vmin(splat(Format::kLimit), v);  // keeps a NaN
  v = vmax(splat(-Format::kLimit), v);
  return Format::encode(v);
}

template <class Format, class T>
void quantize(const AppendRow& row) {
  const T* x = static_cast<const T*>(row.x);
  uint8_t* out = static_cast<uint8_t*>(row.cache);
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
    store_bytes(out + i, quantize_lanes<Format>(load(x + i), scale));
  }
  const int64_t rest = row.dim - i;
  if (rest == 0) return;
  const vi codes = quantize_lanes<Format>(load_partial(x + i, rest), scale);
  for (int64_t j = 0; j < rest; ++j) out[i + j] = static_cast<uint8_t>(codes[j]);
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
