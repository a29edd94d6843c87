// ldmatrix: four 8x8 matrices of 16-bit elements from shared memory. Lane 8 i + r gives the address
// of row r of matrix i; lane 4 r + c receives elements 2 c and 2 c + 1 of row r (transposed: of
// column r) of each.
#pragma once

#include <cstdint>

namespace fastinfer::cuda::ptx {

__device__ inline void ldmatrix_x4(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address));
}

__device__ inline void ldmatrix_x4_trans(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address));
}

}  // namespace fastinfer::cuda::ptx
