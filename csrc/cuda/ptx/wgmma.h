// wgmma: D[64, N] += A[64, K] * B[K, N] in fp32, or of int8 in int32, by a warpgroup,
// asynchronously; K is 32 bytes of elements.
//
// A comes from shared memory or registers, B from shared memory. Operands in shared memory are
// named by descriptors and have the 128-byte swizzle that TMA writes. Registers of D and A must not
// be touched between the instruction and the wait for it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace fastinfer::cuda::ptx {

__device__ inline void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most kPending groups are in flight.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving accesses of accumulators across this point.
template <int kCount>
__device__ inline void wgmma_pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kCount>
__device__ inline void wgmma_pin(int32_t (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// Descriptors. Rows of 128 bytes, 8 of them an atom of 1024 bytes; addresses in units of 16 bytes.
constexpr uint64_t kSwizzle128 = 1ull << 62;

__device__ constexpr uint64_t descriptor_start(uint32_t shared_address) {
  return (shared_address & 0x3ffff) >> 4;
}
// The contraction runs along the rows (K, Q): atoms follow each other along the other dimension.
__device__ constexpr uint64_t k_major_descriptor(uint32_t shared_address) {
  return kSwizzle128 | (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 16) |
         descriptor_start(shared_address);
}
// The same for what all lanes of a warp name. A reduction's result is known to be uniform, which
// makes what is added to it free.
__device__ inline uint64_t uniform_k_major_descriptor(uint32_t shared_address) {
  const uint32_t low = static_cast<uint32_t>(k_major_descriptor(shared_address));
  return k_major_descriptor(0) | __reduce_or_sync(~0u, low);
}
// The contraction runs across the rows (V): `next_columns` bytes on are the next 64 columns.
__device__ inline uint64_t mn_major_descriptor(uint32_t shared_address, uint32_t next_columns) {
  return kSwizzle128 | (uint64_t{1024 >> 4} << 32) | (uint64_t{next_columns >> 4} << 16) |
         descriptor_start(shared_address);
}

template <class T, int kN>
struct Wgmma;

// Names of D's registers, by eights.
#define FI_REGS_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FI_REGS_1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define FI_REGS_2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define FI_REGS_3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define FI_REGS_4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define FI_REGS_5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define FI_REGS_6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define FI_REGS_7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define FI_REGS_8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define FI_REGS_9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define FI_REGS_10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define FI_REGS_11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define FI_REGS_12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define FI_REGS_13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define FI_REGS_14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define FI_REGS_15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define FI_NAMES_16 FI_REGS_0
#define FI_NAMES_32 FI_REGS_0 ", " FI_REGS_1
#define FI_NAMES_64 FI_REGS_0 ", " FI_REGS_1 ", " FI_REGS_2 ", " FI_REGS_3
#define FI_NAMES_80 FI_REGS_0 ", " FI_REGS_1 ", " FI_REGS_2 ", " FI_REGS_3 ", " FI_REGS_4
#define FI_NAMES_96 FI_NAMES_80 ", " FI_REGS_5
#define FI_NAMES_128                                                                   \
  FI_REGS_0 ", " FI_REGS_1 ", " FI_REGS_2 ", " FI_REGS_3 ", " FI_REGS_4 ", " FI_REGS_5 \
            ", " FI_REGS_6 ", " FI_REGS_7
#define FI_NAMES_160 FI_NAMES_128 ", " FI_REGS_8 ", " FI_REGS_9
#define FI_NAMES_176                                                                   \
  FI_REGS_0 ", " FI_REGS_1 ", " FI_REGS_2 ", " FI_REGS_3 ", " FI_REGS_4 ", " FI_REGS_5 \
            ", " FI_REGS_6 ", " FI_REGS_7 ", " FI_REGS_8 ", " FI_REGS_9 ", " FI_REGS_10
#define FI_NAMES_192                                                                    \
  FI_REGS_0 ", " FI_REGS_1 ", " FI_REGS_2 ", " FI_REGS_3 ", " FI_REGS_4 ", " FI_REGS_5  \
            ", " FI_REGS_6 ", " FI_REGS_7 ", " FI_REGS_8 ", " FI_REGS_9 ", " FI_REGS_10 \
            ", " FI_REGS_11
#define FI_NAMES_256                                                                    \
  FI_REGS_0 ", " FI_REGS_1 ", " FI_REGS_2 ", " FI_REGS_3 ", " FI_REGS_4 ", " FI_REGS_5  \
            ", " FI_REGS_6 ", " FI_REGS_7 ", " FI_REGS_8 ", " FI_REGS_9 ", " FI_REGS_10 \
            ", " FI_REGS_11 ", " FI_REGS_12 ", " FI_REGS_13 ", " FI_REGS_14 ", " FI_REGS_15
// D's operands.
#define FI_D8(i)                                                                              \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define FI_D32(i) FI_D8(i), FI_D8(i + 8), FI_D8(i + 16), FI_D8(i + 24)
#define FI_OPERANDS_16 FI_D8(0)
#define FI_OPERANDS_32 FI_D8(0), FI_D8(8)
#define FI_OPERANDS_64 FI_D32(0)
#define FI_OPERANDS_80 FI_D32(0), FI_D8(32)
#define FI_OPERANDS_96 FI_D32(0), FI_D8(32), FI_D8(40)
#define FI_OPERANDS_128 FI_D32(0), FI_D32(32)
#define FI_OPERANDS_160 FI_D32(0), FI_D32(32), FI_D8(64), FI_D8(72)
#define FI_OPERANDS_176 FI_D32(0), FI_D32(32), FI_D8(64), FI_D8(72), FI_D8(80)
#define FI_OPERANDS_192 FI_D32(0), FI_D32(32), FI_D32(64)
#define FI_OPERANDS_256 FI_D32(0), FI_D32(32), FI_D32(64), FI_D32(96)

// I0.. are the numbers of the operands after D: N / 2 and on. Both A and B are K-major; TRANSPOSED
// says so where the instruction could be told otherwise.
#define FI_SHARED_K_MAJOR(TYPE, K, TRANSPOSED, N, I0, I1, I2)                                     \
  static __device__ void shared_k_major(float (&d)[N / 2], uint64_t a, uint64_t b,                \
                                        int accumulate) {                                         \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I2                                         \
                 ", 0;\n"                                                                         \
                 "wgmma.mma_async.sync.aligned.m64n" #N K ".f32." TYPE "." TYPE " {" FI_NAMES_##N \
                 "}, %" #I0 ", %" #I1 ", p, 1, 1" TRANSPOSED ";\n}\n"                             \
                 : FI_OPERANDS_##N                                                                \
                 : "l"(a), "l"(b), "r"(accumulate));                                              \
  }
// A from registers; FROM and TRANSPOSED say which way B runs.
#define FI_REGISTERS(FROM, TRANSPOSED, TYPE, N, I0, I1, I2, I3, I4, I5)                            \
  static __device__ void registers_##FROM(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,   \
                                          int accumulate) {                                        \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I5                                          \
                 ", 0;\n"                                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" FI_NAMES_##N \
                 "}, {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 ", p, 1, 1, " TRANSPOSED     \
                 ";\n}\n"                                                                          \
                 : FI_OPERANDS_##N                                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));           \
  }
#define FI_WGMMA(T, TYPE, N, I0, I1, I2, I3, I4, I5)             \
  template <>                                                    \
  struct Wgmma<T, N> {                                           \
    FI_SHARED_K_MAJOR(TYPE, "k16", ", 0, 0", N, I0, I1, I2)      \
    FI_REGISTERS(mn_major, "1", TYPE, N, I0, I1, I2, I3, I4, I5) \
    FI_REGISTERS(k_major, "0", TYPE, N, I0, I1, I2, I3, I4, I5)  \
  };
#define FI_WGMMA_16BIT(N, I0, I1, I2, I3, I4, I5)            \
  FI_WGMMA(__nv_bfloat16, "bf16", N, I0, I1, I2, I3, I4, I5) \
  FI_WGMMA(__half, "f16", N, I0, I1, I2, I3, I4, I5)

FI_WGMMA_16BIT(32, 16, 17, 18, 19, 20, 21)
FI_WGMMA_16BIT(64, 32, 33, 34, 35, 36, 37)
FI_WGMMA_16BIT(80, 40, 41, 42, 43, 44, 45)
FI_WGMMA_16BIT(96, 48, 49, 50, 51, 52, 53)
FI_WGMMA_16BIT(128, 64, 65, 66, 67, 68, 69)
FI_WGMMA_16BIT(176, 88, 89, 90, 91, 92, 93)
FI_WGMMA_16BIT(256, 128, 129, 130, 131, 132, 133)

#define FI_WGMMA_E4M3(N, I0, I1, I2)                    \
  template <>                                           \
  struct Wgmma<__nv_fp8_e4m3, N> {                      \
    FI_SHARED_K_MAJOR("e4m3", "k32", "", N, I0, I1, I2) \
  };

FI_WGMMA_E4M3(16, 8, 9, 10)
FI_WGMMA_E4M3(64, 32, 33, 34)
FI_WGMMA_E4M3(96, 48, 49, 50)
FI_WGMMA_E4M3(128, 64, 65, 66)
FI_WGMMA_E4M3(160, 80, 81, 82)
FI_WGMMA_E4M3(176, 88, 89, 90)
FI_WGMMA_E4M3(192, 96, 97, 98)

#define FI_I8(i)                                                                              \
  "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), \
      "+r"(d[i + 6]), "+r"(d[i + 7])
#define FI_I32(i) FI_I8(i), FI_I8(i + 8), FI_I8(i + 16), FI_I8(i + 24)
#define FI_INTS_16 FI_I8(0)
#define FI_INTS_64 FI_I32(0)
#define FI_INTS_96 FI_I32(0), FI_I8(32), FI_I8(40)
#define FI_INTS_128 FI_I32(0), FI_I32(32)
#define FI_INTS_160 FI_I32(0), FI_I32(32), FI_I8(64), FI_I8(72)
#define FI_INTS_176 FI_I32(0), FI_I32(32), FI_I8(64), FI_I8(72), FI_I8(80)
#define FI_INTS_192 FI_I32(0), FI_I32(32), FI_I32(64)
#define FI_WGMMA_S8(N, I0, I1, I2)                                                       \
  template <>                                                                            \
  struct Wgmma<int8_t, N> {                                                              \
    static __device__ void shared_k_major(int32_t (&d)[N / 2], uint64_t a, uint64_t b,   \
                                          int accumulate) {                              \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I2                              \
                   ", 0;\n"                                                              \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" FI_NAMES_##N \
                   "}, %" #I0 ", %" #I1 ", p;\n}\n"                                      \
                   : FI_INTS_##N                                                         \
                   : "l"(a), "l"(b), "r"(accumulate));                                   \
    }                                                                                    \
  };

FI_WGMMA_S8(16, 8, 9, 10)
FI_WGMMA_S8(64, 32, 33, 34)
FI_WGMMA_S8(96, 48, 49, 50)
FI_WGMMA_S8(128, 64, 65, 66)
FI_WGMMA_S8(160, 80, 81, 82)
FI_WGMMA_S8(176, 88, 89, 90)
FI_WGMMA_S8(192, 96, 97, 98)

}  // namespace fastinfer::cuda::ptx
