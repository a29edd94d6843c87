// What low_bit_gemm.cu asks of the kernels, which are compiled in a file for each width of codes.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "../indexing.h"
#include "low_bit_config.h"
#include "result.h"

namespace fastinfer::cuda {

struct LowBitParams {
  const void* x;         // [M, K]
  int64_t x_row_stride;  // in elements
  const int32_t* perm;   // [K] or null
  const uint4* qweight;  // [n_tiles, k_tiles, bits, 32]; fewer than 2^31
  const void* scales;    // [groups, N]
  const void* zeros;     // [groups, N] or null: 2^(bits - 1)
  ResultParams result;
  int32_t m, n, k;
  int32_t n_tiles, k_tiles;  // of 64
  Divider group_size;        // a multiple of 16
  bool x_in_vectors;         // no perm, K a multiple of 8 and rows aligned to 16 bytes
  FloatFormat scale_format;  // of scales and zeros
  bool scales_aligned;       // rows of both to four of their elements
  bool scales_by_bulk;       // rows of both to 16 bytes, in length as well
  const void* norm_weight;   // [K] in x's type, or null: rows of x are normalised first (few rows)
  float norm_eps, norm_weight_offset;
  // Sums of parts of K that are added up later, or one part and null.
  int32_t parts;
  float* partial;  // [parts, M, 64 n_tiles]
};

// For 1 to kFewRows rows. many_scales: the groups' size is no multiple of 64.
template <int kBits>
cudaError_t low_bit_few_rows(const LowBitParams& params, bool bf16, bool many_scales,
                             const FewRowsConfig& config, int device, cudaStream_t stream);

// For any number of rows, which x_map shows in boxes of 64 columns and many_rows_box rows; `groups`
// share 128 columns: one, or two of 64.
template <int kBits>
cudaError_t low_bit_many_rows(const LowBitParams& params, bool bf16, const CUtensorMap& x_map,
                              int groups, const ManyRowsConfig& config, int sms, int device,
                              cudaStream_t stream);

// The result, of params.partial, when the kernel that writes it is done.
cudaError_t low_bit_add_parts(const LowBitParams& params, int sms, cudaStream_t stream);

inline uint32_t many_rows_box(const ManyRowsShape& shape) {
  return static_cast<uint32_t>(shape.shared ? shape.tokens / 2 : shape.tokens);
}

}  // namespace fastinfer::cuda
