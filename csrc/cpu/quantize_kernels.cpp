// Pieces of rows: their largest magnitudes, and their codes. Compiled once per instruction set.
#include "quantize_kernels.h"

#include "quantize_row.h"

namespace fastinfer::cpu::FI_ISA {
namespace {

template <class Format>
struct Symmetric {
  template <class T>
  static Magnitudes magnitudes(const void* x, int64_t n) {
    return {largest_magnitude(static_cast<const T*>(x), n), 0};
  }

  static Coding coding(Magnitudes block) { return {dynamic_scale<Format>(block.high), 0}; }

  template <class T>
  static void encode(const void* x, int64_t n, Coding coding, uint8_t* out) {
    quantize_row<Format>(static_cast<const T*>(x), n, coding.scale, out);
  }
};

struct Asymmetric {
  template <class T>
  static Magnitudes magnitudes(const void* data, int64_t n) {
    const T* x = static_cast<const T*>(data);
    vi high = {}, low = {};
    // As integers, what has the other sign is negative.
    const auto include = [&](vi bits) {
      high = larger(high, bits);
      low = larger(low, bits ^ INT32_MIN);
    };
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) include(bit_cast<vi>(load(x + i)));
    if (i < n) include(bit_cast<vi>(load_partial(x + i, n - i)));
    return {largest(high), largest(low)};
  }

  static Coding coding(Magnitudes block) {
    // Divided before they are added, which could overflow.
    const float low = bit_cast<float>(block.low);
    const float scale = usable_scale(bit_cast<float>(block.high) / 255.0f + low / 255.0f);
    const int32_t zero_point = round_to_int(splat(low) / splat(scale))[0] - 128;
    return {scale, zero_point < 127 ? zero_point : 127};
  }

  template <class T>
  static void encode(const void* x, int64_t n, Coding coding, uint8_t* out) {
    encode_row(static_cast<const T*>(x), n, out, [&](vf v) {
      const vi code = round_to_int(v / splat(coding.scale)) + coding.zero_point;
      const vi lowest = vi{} - 128, highest = vi{} + 127;
      return larger(lowest, code < highest ? code : highest);
    });
  }
};

template <class Kind>
constexpr QuantizeFormat format_of() {
  return {
      {Kind::template magnitudes<float>, Kind::template magnitudes<bf16>,
       Kind::template magnitudes<fp16>},
      Kind::coding,
      {Kind::template encode<float>, Kind::template encode<bf16>, Kind::template encode<fp16>},
  };
}

}  // namespace

extern const QuantizeKernels quantize_kernels = {
    format_of<Symmetric<Int8>>(), format_of<Symmetric<Fp8>>(), format_of<Asymmetric>()};

}  // namespace fastinfer::cpu::FI_ISA
