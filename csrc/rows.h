// Rows of a tensor: its leading dimensions walked as one index, whatever their strides.
#pragma once

#include <cstdint>

namespace fastinfer {

constexpr int kMaxRowDims = 7;

// offset(row) for tensors of any rank: adjacent dimensions that can be walked with one stride are
// merged, so that the usual case is a single multiplication.
struct Rows {
  int64_t count = 1;
  int dims = 0;
  int64_t sizes[kMaxRowDims];
  int64_t strides[kMaxRowDims];

#ifdef __CUDACC__
  __host__ __device__
#endif
      int64_t offset(int64_t row) const {
    int64_t result = 0;
    for (int i = dims - 1; i > 0; --i) {
      result += (row % sizes[i]) * strides[i];
      row /= sizes[i];
    }
    return dims == 0 ? 0 : result + row * strides[0];
  }
};

// The first `rank` dimensions as rows. Returns false when more than kMaxRowDims remain after
// merging.
inline bool make_rows(const int64_t* sizes, const int64_t* strides, int64_t rank, Rows* rows) {
  *rows = Rows{};
  for (int64_t i = 0; i < rank; ++i) {
    rows->count *= sizes[i];
    if (sizes[i] == 1) continue;
    const int last = rows->dims - 1;
    if (last >= 0 && rows->strides[last] == sizes[i] * strides[i]) {
      rows->sizes[last] *= sizes[i];
      rows->strides[last] = strides[i];
      continue;
    }
    if (rows->dims == kMaxRowDims) return false;
    rows->sizes[rows->dims] = sizes[i];
    rows->strides[rows->dims] = strides[i];
    ++rows->dims;
  }
  return true;
}

}  // namespace fastinfer
