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

constexpr int kAppendThreads = 128;
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
  const bool copied = pages.format == PageFormat::kElements;
  // Copied rows are read and written by neighbouring threads at neighbouring vectors; in quantized
  // ones a thread's vectors are neighbours, so that their codes are few stores.
  const int first_vector = copied ? lane : lane * kVectors;
  const int vector_step = copied ? lanes : 1;
  const auto held = [&](int i) { return first_vector + i * vector_step < side.vectors; };

  const int64_t index = static_cast<int64_t>(blockIdx.x) * (kAppendThreads >> side.lanes_log2) +
                        (threadIdx.x >> side.lanes_log2);
  const bool inside = index < p.rows;
  const int32_t row = inside ? static_cast<int32_t>(index) : 0;
  const int32_t token = p.heads.quotient(row);
  const int32_t head = row - token * p.heads.divisor;
  const int64_t slot = inside ? p.slot_mapping[token] : -1;
  const T* from = static_cast<const T*>(side.x) + token * side.x_token_stride +
                  head * side.x_head_stride + first_vector * Vec::kSize;
  Vec x[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    x[i] = inside && held(i) ? load_pack(from + i * vector_step * Vec::kSize) : Vec{};
  }

  // Every thread of the warp goes on: rows without a slot take part in the exchange.
  const bool kept = slot >= 0 && slot < p.capacity;
  const int32_t kept_slot = kept ? static_cast<int32_t>(slot) : 0;
  const int32_t block = p.block_size.quotient(kept_slot);
  const int32_t offset = kept_slot - block * p.block_size.divisor;
  const int64_t element = element_at(pages, block, offset, head);
  if (copied) {
    T* to = static_cast<T*>(pages.cache) + element + first_vector * Vec::kSize;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (kept && held(i)) store_pack(to + i * vector_step * Vec::kSize, x[i]);
    }
    return;
  }
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) largest = max(largest, largest_magnitude(x[i]));
  float scale;
  if (pages.scale_is_dynamic) {
    largest = largest_of_lanes(largest, lanes);
    scale = dynamic_scale(largest, pages.format);
    if (kept && lane == 0) *scale_at(pages, block, offset, head) = scale;
  } else {
    scale = *scale_at(pages, block, offset, head);
  }
  if (!kept || !held(0)) return;
  uint32_t words[kAppendElements / 4];
  if (pages.format == PageFormat::kInt8) {
    quantize<PageFormat::kInt8, kVectors>(x, scale, largest, words);
  } else {
    quantize<PageFormat::kFp8, kVectors>(x, scale, largest, words);
  }
  uint8_t* to = static_cast<uint8_t*>(pages.cache) + element + lane * kAppendElements;
#pragma unroll
  for (int i = 0; i < kAppendElements / kCodesOfStore; ++i) {
    if (held(i * kCodesOfStore / Vec::kSize)) {
      *reinterpret_cast<uint4*>(to + i * kCodesOfStore) =
          make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    }
  }
}

}  // namespace fastinfer::cuda
