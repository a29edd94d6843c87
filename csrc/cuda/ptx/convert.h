// Element conversions on packed registers; the lower half holds the first of two elements.
#pragma once

#include <cstdint>

namespace fastinfer::cuda::ptx {

// Four e4m3 numbers as two pairs of fp16, exactly.
__device__ inline void e4m3x4_to_f16x4(uint32_t bytes, uint32_t& first, uint32_t& second) {
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n"
      "}\n"
      : "=r"(first), "=r"(second)
      : "r"(bytes));
}

template <bool kBf16>
__device__ inline uint32_t pack(float first, float second) {
  uint32_t pair;
  if constexpr (kBf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(second), "f"(first));
  }
  return pair;
}

// bits & kMask | rest, in the one instruction that the compiler does not find when both are
// constants.
template <uint32_t kMask>
__device__ inline uint32_t and_or(uint32_t bits, uint32_t rest) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;\n" : "=r"(result) : "r"(bits), "n"(kMask), "r"(rest));
  return result;
}

__device__ inline uint32_t add_bf16x2(uint32_t a, uint32_t b) {
  uint32_t sum;
  asm("add.rn.bf16x2 %0, %1, %2;\n" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}

__device__ inline uint32_t sub_bf16x2(uint32_t a, uint32_t b) {
  uint32_t difference;
  asm("sub.rn.bf16x2 %0, %1, %2;\n" : "=r"(difference) : "r"(a), "r"(b));
  return difference;
}

__device__ inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.bf16x2 %0, %1, %2;\n" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// a * b + c, rounded once.
__device__ inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

__device__ inline uint32_t sub_f16x2(uint32_t a, uint32_t b) {
  uint32_t difference;
  asm("sub.f16x2 %0, %1, %2;\n" : "=r"(difference) : "r"(a), "r"(b));
  return difference;
}

__device__ inline uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sum;
  asm("fma.rn.f16x2 %0, %1, %2, %3;\n" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

// 1 / x within 1 ulp; of subnormal numbers infinity.
__device__ inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// 2^x within 2 ulp; 2^-inf is 0.
__device__ inline float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace fastinfer::cuda::ptx
