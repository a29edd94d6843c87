// Eight floats at a time, in terms of the compiler's vector extensions, and the conversions and
// functions the CPU kernels share.
//
// Every *_kernels.cpp is compiled once per instruction set with FI_ISA naming it (generic, avx2),
// and everything here lives in that namespace: an inline function compiled with AVX2 must never be
// the one the linker keeps for the generic build. For the same reason kernel files use no templates
// of the standard library that could be emitted out of line.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif

#ifndef FI_ISA
#error "FI_ISA must name the instruction set this file is compiled for"
#endif

namespace fastinfer::cpu::FI_ISA {

constexpr int kLanes = 8;
typedef float vf __attribute__((vector_size(32)));
typedef int32_t vi __attribute__((vector_size(32)));
typedef uint32_t vu __attribute__((vector_size(32)));
typedef uint16_t vh __attribute__((vector_size(16)));

// Storage types of 16-bit elements; arithmetic is always in fp32.
struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

template <class To, class From>
inline __attribute__((always_inline)) To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

inline vf splat(float x) {
  return vf{x, x, x, x, x, x, x, x};
}
// Lane by lane; `mask` is the result of a comparison.
inline vf select(vi mask, vf a, vf b) {
#ifdef __AVX2__
  return bit_cast<vf>(
      _mm256_blendv_ps(bit_cast<__m256>(b), bit_cast<__m256>(a), bit_cast<__m256>(mask)));
#else
  return bit_cast<vf>((mask & bit_cast<vi>(a)) | (~mask & bit_cast<vi>(b)));
#endif
}

// a > b ? a : b and a < b ? a : b, so b where one of them is NaN.
inline vf vmax(vf a, vf b) {
#ifdef __AVX2__
  return bit_cast<vf>(_mm256_max_ps(bit_cast<__m256>(a), bit_cast<__m256>(b)));
#else
  return select(a > b, a, b);
#endif
}
inline vf vmin(vf a, vf b) {
#ifdef __AVX2__
  return bit_cast<vf>(_mm256_min_ps(bit_cast<__m256>(a), bit_cast<__m256>(b)));
#else
  return select(a < b, a, b);
#endif
}

// ---- scalar conversions (round to nearest even, NaN stays NaN)

inline float to_float(float x) {
  return x;
}
inline float to_float(bf16 x) {
  return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}
inline float to_float(fp16 x) {
#ifdef __F16C__
  return _cvtsh_ss(x.bits);
#else
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ff) << 13);
  // Shifting the exponent field and multiplying by 2^112 also normalises subnormals.
  return bit_cast<float>(sign | bit_cast<uint32_t>(bit_cast<float>(magnitude << 13) * 0x1p112f));
#endif
}

inline void from_float(float x, float* out) {
  *out = x;
}
inline void from_float(float x, bf16* out) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    out->bits = static_cast<uint16_t>(bits >> 16 | 0x40);
  } else {
    out->bits = static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
  }
}
inline void from_float(float x, fp16* out) {
#ifdef __F16C__
  out->bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    out->bits = sign | 0x7e00;
  } else if (magnitude >= 0x477ff000u) {  // rounds to 2^16 or more
    out->bits = sign | 0x7c00;
  } else if (magnitude <
             0x38800000u) {  // subnormal in fp16: adding 0.5 lets the fp32 adder round at 2^-24
    const uint32_t rounded =
        bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - bit_cast<uint32_t>(0.5f);
    out->bits = static_cast<uint16_t>(sign | rounded);
  } else {
    const uint32_t odd = magnitude >> 13 & 1;
    out->bits = static_cast<uint16_t>(sign | (magnitude - 0x38000000u + 0xfffu + odd) >> 13);
  }
#endif
}

// ---- vector loads and stores

inline vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
inline vf load(const bf16* p) {
#ifdef __AVX2__
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return bit_cast<vf>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
#else
  vh h;
  std::memcpy(&h, p, sizeof(h));
  return bit_cast<vf>(__builtin_convertvector(h, vu) << 16);
#endif
}
inline vf load(const fp16* p) {
#ifdef __F16C__
  return bit_cast<vf>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  vf v;
  for (int i = 0; i < kLanes; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}

inline void store(float* p, vf v) {
  std::memcpy(p, &v, sizeof(v));
}
inline void store(bf16* p, vf v) {
  const vu bits = bit_cast<vu>(v);
  const vf rounded = bit_cast<vf>(bits + 0x7fffu + (bits >> 16 & 1));
  const vu result = bit_cast<vu>(select(v != v, bit_cast<vf>(bits | 0x400000u), rounded)) >> 16;
#ifdef __AVX2__
  const __m256i words = bit_cast<__m256i>(result);
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(p),
      _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#else
  const vh h = __builtin_convertvector(result, vh);
  std::memcpy(p, &h, sizeof(h));
#endif
}
inline void store(fp16* p, vf v) {
#ifdef __F16C__
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(bit_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes; ++i) from_float(v[i], p + i);
#endif
}

// The first `n` < kLanes elements; lanes beyond are `fill` and are never read from memory.
template <class T>
inline vf load_partial(const T* p, int64_t n, float fill = 0.0f) {
  vf v = splat(fill);
  for (int64_t i = 0; i < n; ++i) v[i] = to_float(p[i]);
  return v;
}
template <class T>
inline void store_partial(T* p, vf v, int64_t n) {
  for (int64_t i = 0; i < n; ++i) from_float(v[i], p + i);
}

// ---- reductions, in a fixed order

inline float sum(vf v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}
inline float max(vf v) {
  float m = v[0];
  for (int i = 1; i < kLanes; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

// ---- functions

// e^x within about 1 ulp: x = n ln2 + r, a polynomial on |r| <= ln2 / 2, and 2^n in two factors so
// that the result may be subnormal.
inline vf exp(vf x) {
  x = vmin(splat(89.0f), x);
  x = vmax(splat(-104.0f), x);
  const vf magic =
      splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer held in the low bits
  const vf shifted = x * splat(1.44269504088896341f) + magic;
  const vf n = shifted - magic;
  vf r = x - n * splat(0.693145751953125f);
  r = r - n * splat(1.42860682030941723e-6f);
  vf p = splat(1.0f / 5040);
  p = p * r + splat(1.0f / 720);
  p = p * r + splat(1.0f / 120);
  p = p * r + splat(1.0f / 24);
  p = p * r + splat(1.0f / 6);
  p = p * r + splat(0.5f);
  p = p * r + splat(1.0f);
  p = p * r + splat(1.0f);
  const vi k = bit_cast<vi>(shifted) - bit_cast<vi>(magic);
  const vi half = k >> 1;
  const vf scale_a = bit_cast<vf>((half + 127) << 23);
  const vf scale_b = bit_cast<vf>((k - half + 127) << 23);
  return p * scale_a * scale_b;
}

// tanh x: an odd Taylor-like polynomial below 0.35 where 1 - 2 / (e^2x + 1) would cancel.
inline vf tanh(vf x) {
  const vf z = x * x;
  vf p = splat(-1382.0f / 155925);
  p = p * z + splat(62.0f / 2835);
  p = p * z + splat(-17.0f / 315);
  p = p * z + splat(2.0f / 15);
  p = p * z + splat(-1.0f / 3);
  const vf small = x + x * z * p;
  const vf large = splat(1.0f) - splat(2.0f) / (exp(x + x) + splat(1.0f));
  return select(z < splat(0.35f * 0.35f), small, large);
}

// ---- integers and 8-bit floats

// The nearest integer, halves to even, for |x| < 2^22; NaN gives 0.
inline vi round_to_int(vf x) {
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23
  const vi rounded = bit_cast<vi>(x + magic) - bit_cast<vi>(magic);
  return rounded & (x == x);
}

// The low bytes of the lanes.
inline void store_bytes(uint8_t* p, vi v) {
#ifdef __AVX2__
  const __m256i low = bit_cast<__m256i>(v & 0xff);
  const __m128i words =
      _mm_packs_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
#else
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<uint8_t>(v[i]);
#endif
}

// float8_e4m3fn codes (0..255) of |x| <= 448, to nearest even; every NaN is 0x7f.
inline vi encode_e4m3(vf x) {
  const vi bits = bit_cast<vi>(x);
  const vi magnitude = bits & 0x7fffffff;
  // Normal: drop 20 bits of mantissa with rounding, and move the exponent's bias from 127 to 7.
  const vi normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
  // Below 2^-6 codes are multiples of 2^-9, which is where the adder rounds a sum with 2^14.
  const vi subnormal =
      bit_cast<vi>(bit_cast<vf>(magnitude) + splat(16384.0f)) - bit_cast<vi>(splat(16384.0f));
  const vi code = magnitude < bit_cast<vi>(splat(0.015625f)) ? subnormal : normal;
  return x == x ? code | (bits >> 24 & 0x80) : vi{} + 0x7f;
}

// Values of float8_e4m3fn codes (0..255).
inline vf decode_e4m3(vi code) {
  const vi magnitude = code & 0x7f;
  // Shifting the exponent field and multiplying by 2^120 also normalises subnormals.
  const vf value = bit_cast<vf>(magnitude << 20) * splat(0x1p120f);
  const vf number = magnitude == 0x7f ? splat(__builtin_nanf("")) : value;
  return bit_cast<vf>(bit_cast<vi>(number) | (code & 0x80) << 24);
}

// Whether any lane of a comparison's result is set.
inline bool any(vi mask) {
#ifdef __AVX2__
  return _mm256_movemask_epi8(bit_cast<__m256i>(mask)) != 0;
#else
  int32_t set = 0;
  for (int i = 0; i < kLanes; ++i) set |= mask[i];
  return set != 0;
#endif
}

}  // namespace fastinfer::cpu::FI_ISA
