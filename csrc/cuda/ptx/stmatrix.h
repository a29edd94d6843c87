// stmatrix: four 8x8 matrices of 16-bit elements to shared memory. Lane 8 i + r gives the address
// of row r of matrix i; lane 4 r + c holds elements 2 c and 2 c + 1 of row r (transposed: of column
// r) of each.
#pragma once

#include <cstdint>

namespace fastinfer::cuda::ptx {

__device__ inline void stmatrix_x4(uint32_t address, const uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address),
               "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}

__device__ inline void stmatrix_x4_trans(uint32_t address, const uint32_t (&from)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address),
      "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
      : "memory");
}

}  // namespace fastinfer::cuda::ptx
