// Rows quantized to int8 or float8_e4m3fn. The bits are part of the contract: every step is an IEEE
// operation in fp32.
#pragma once

#include "vec.h"

namespace fastinfer::cpu::FI_ISA {

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

inline int32_t largest(vi m) {
  int32_t result = m[0];
  for (int j = 1; j < kLanes; ++j) result = m[j] > result ? m[j] : result;
  return result;
}

// Largest magnitude of a row. Magnitudes are compared as integers, where NaN is above infinity, so
// a NaN anywhere in the row is the result.
template <class T>
inline int32_t largest_magnitude(const T* x, int64_t n) {
  vi m = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) m = larger(m, bit_cast<vi>(load(x + i)) & 0x7fffffff);
  if (i < n) m = larger(m, bit_cast<vi>(load_partial(x + i, n - i)) & 0x7fffffff);
  return largest(m);
}

// A scale that was computed: blocks of zeros get 1, and there is only one NaN.
inline float usable_scale(float scale) {
  if (scale != scale) return __builtin_nanf("");
  return scale == 0.0f ? 1.0f : scale;
}

// The scale for values up to a magnitude, given by its bits.
template <class Format>
inline float dynamic_scale(int32_t largest_magnitude) {
  return usable_scale(bit_cast<float>(largest_magnitude) / Format::kLimit);
}

template <class Format>
inline vi quantize_lanes(vf v, float scale) {
  // A true division, not a product with the reciprocal.
  v = v / splat(scale);
  v = vmin(splat(Format::kLimit), v);  // keeps a NaN
  v = vmax(splat(-Format::kLimit), v);
  return Format::encode(v);
}

// Codes of x[0, n), lane by lane as `encode` gives them.
template <class T, class Encode>
inline void encode_row(const T* x, int64_t n, uint8_t* out, const Encode& encode) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store_bytes(out + i, encode(load(x + i)));
  const int64_t rest = n - i;
  if (rest == 0) return;
  const vi codes = encode(load_partial(x + i, rest));
  for (int64_t j = 0; j < rest; ++j) out[i + j] = static_cast<uint8_t>(codes[j]);
}

template <class Format, class T>
inline void quantize_row(const T* x, int64_t n, float scale, uint8_t* out) {
  encode_row(x, n, out, [&](vf v) { return quantize_lanes<Format>(v, scale); });
}

}  // namespace fastinfer::cpu::FI_ISA
