// New keys and values written into pages, copied or quantized: a few threads a row, each with 32 of
// its elements. Raw pointers only; checks and launch live in append_paged_kv_cache.cu.
#pragma once

#include "page_rows.cuh"

namespace fastinfer::cuda {

struct AppendRows {
  const void* x;  // [T, heads, dim]
  int64_t x_token_stride;
  int64_t x_head_stride;
  int vectors;     // 16-byte vectors of a row
  int lanes_log2;  // threads of a row: a power of two, up to a warp
  PageSide pages;
};

struct AppendParams {
  AppendRows sides[2];          // K, V: blockIdx.y
  const int64_t* slot_mapping;  // [T]
  int32_t rows;                 // T * heads
  int32_t capacity;             // slots
  Divider heads;
  Divider block_size;
};

constexpr int kAppendThreads = 256;
// Rows of a thread, whose loads are in flight together.
constexpr int kAppendRows = 1;

// Elements of a row that one thread holds, so that what a row costs beside them is shared by many.
constexpr int kAppendElements = 32;
constexpr int kCodesOfStore = 16;

template <class T>
__global__ void __launch_bounds__(kAppendThreads)
    append_kernel(const __grid_constant__ AppendParams p) {
  using Vec = Pack<T>;
  constexpr int kVectors = kAppendElements / Vec::kSize;
  const AppendRows& side = p.sides[blockIdx.y];
  const PageSide& pages = side.pages;
  const int lanes = 1 << side.lanes_log2;
  const int lane = threadIdx.x & (lanes - 1);
  const int step = kAppendThreads >> side.lanes_log2;
  const bool copied = pages.format == PageFormat::kElements;
  // Copied rows are read and written by neighbouring threads at neighbouring vectors; in quantized
  // ones a thread's vectors are neighbours, so that their codes are one store.
  const int first_vector = copied ? lane : lane * kVectors;
  const int vector_step = copied ? lanes : 1;

  Vec x[kAppendRows][kVectors];
  int64_t slot[kAppendRows];
  int32_t head[kAppendRows];
  const int64_t first_row =
      static_cast<int64_t>(blockIdx.x) * step * kAppendRows + (threadIdx.x >> side.lanes_log2);
#pragma unroll
  for (int r = 0; r < kAppendRows; ++r) {
    const bool inside = first_row + r * step < p.rows;
    const int32_t row = inside ? static_cast<int32_t>(first_row) + r * step : 0;
    const int32_t token = p.heads.quotient(row);
    head[r] = row - token * p.heads.divisor;
    slot[r] = inside ? p.slot_mapping[token] : -1;
    const T* from = static_cast<const T*>(side.x) + token * side.x_token_stride +
                    head[r] * side.x_head_stride + first_vector * Vec::kSize;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const bool held = inside && first_vector + i * vector_step < side.vectors;
      x[r][i] = held ? load_pack(from + i * vector_step * Vec::kSize) : Vec{};
    }
  }

#pragma unroll
  for (int r = 0; r < kAppendRows; ++r) {
    // Every thread of the warp comes here: rows without a slot take part in the exchange.
    const bool kept = slot[r] >= 0 && slot[r] < p.capacity;
    const int32_t kept_slot = kept ? static_cast<int32_t>(slot[r]) : 0;
    const int32_t block = p.block_size.quotient(kept_slot);
    const int32_t offset = kept_slot - block * p.block_size.divisor;
    const int64_t element = element_at(pages, block, offset, head[r]);
    if (copied) {
      T* to = static_cast<T*>(pages.cache) + element + first_vector * Vec::kSize;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (kept && first_vector + i * vector_step < side.vectors) {
          store_pack(to + i * vector_step * Vec::kSize, x[r][i]);
        }
      }
      continue;
    }
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) largest = max(largest, largest_magnitude(x[r][i]));
    float scale;
    if (pages.scale_is_dynamic) {
      largest = largest_of_lanes(largest, lanes);
      scale = dynamic_scale(largest, pages.format);
      if (kept && lane == 0) *scale_at(pages, block, offset, head[r]) = scale;
    } else {
      scale = *scale_at(pages, block, offset, head[r]);
    }
    if (kept && first_vector < side.vectors) {
      uint32_t words[kAppendElements / 4];
      if (pages.format == PageFormat::kInt8) {
        quantize<PageFormat::kInt8, kVectors>(x[r], scale, largest, words);
      } else {
        quantize<PageFormat::kFp8, kVectors>(x[r], scale, largest, words);
      }
      uint8_t* to = static_cast<uint8_t*>(pages.cache) + element + lane * kAppendElements;
#pragma unroll
      for (int i = 0; i < kAppendElements / kCodesOfStore; ++i) {
        if (first_vector + i * kCodesOfStore / Vec::kSize < side.vectors) {
          *reinterpret_cast<uint4*>(to + i * kCodesOfStore) =
              make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
        }
      }
    }
  }
}

}  // namespace fastinfer::cuda
