// New keys and values written into pages, copied or quantized: a few threads a row. Raw pointers
// only; checks and launch live in append_paged_kv_cache.cu.
#pragma once

#include "page_rows.cuh"

namespace fastinfer::cuda {

struct AppendRows {
  const void* x;  // [T, heads, dim]
  int64_t x_token_stride;
  int64_t x_head_stride;
  int vectors;  // 16-byte vectors of a row
  PageSide pages;
};

struct AppendParams {
  AppendRows sides[2];          // K, V
  const int64_t* slot_mapping;  // [T]
  int32_t rows;                 // T * heads
  int32_t capacity;             // slots
  int lanes_log2;               // threads of a row: a power of two, up to a warp
  Divider heads;
  Divider block_size;
};

constexpr int kAppendThreads = 128;
constexpr int kCodesOfStore = 16;

// kCopied: the pages of K and of V hold elements. A copy costs what its place costs, so a thread
// has a row of K and the same of V; quantization what a row's scale costs, so it has more of one
// row.
template <bool kCopied>
constexpr int kAppendSides = kCopied ? 2 : 1;
// Elements of a row that one thread has.
template <bool kCopied>
constexpr int kAppendElements = kCopied ? 16 : 32;

// Of a thread, of a row.
template <class T, bool kCopied>
struct AppendPart {
  static constexpr int kVectors = kAppendElements<kCopied> / Pack<T>::kSize;

  const AppendRows& side;
  int lane;
  int lanes;

  __device__ bool copied() const { return kCopied || side.pages.format == PageFormat::kElements; }

  // Copied rows are read and written by neighbouring threads at neighbouring vectors; in quantized
  // ones a thread's vectors are neighbours, so that their codes are few stores.
  __device__ int first_vector() const { return copied() ? lane : lane * kVectors; }
  __device__ int vector_step() const { return copied() ? lanes : 1; }
  __device__ bool has(int i) const { return first_vector() + i * vector_step() < side.vectors; }

  __device__ void load(int32_t token, int32_t head, bool inside, Pack<T> (&x)[kVectors]) const {
    const T* from = static_cast<const T*>(side.x) + token * side.x_token_stride +
                    head * side.x_head_stride + first_vector() * Pack<T>::kSize;
    const int step = vector_step() * Pack<T>::kSize;
    // `&`, here and below: after `&&` a branch would keep the next load from its way.
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      x[i] = inside & has(i) ? load_pack(from + i * step) : Pack<T>{};
    }
  }

  // Every thread of the warp comes here: rows that are not kept take part in the exchange.
  __device__ void store(int32_t block, int32_t offset, int32_t head, bool kept,
                        const Pack<T> (&x)[kVectors]) const {
    const int64_t element = element_at(side.pages, block, offset, head);
    if (copied()) {
      T* to = static_cast<T*>(side.pages.cache) + element + first_vector() * Pack<T>::kSize;
      const int step = vector_step() * Pack<T>::kSize;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (kept & has(i)) store_pack(to + i * step, x[i]);
      }
    } else {
      store_codes(static_cast<uint8_t*>(side.pages.cache) + element,
                  scale_at(side.pages, block, offset, head), kept, x);
    }
  }

 private:
  __device__ void store_codes(uint8_t* row, float* scale_of_row, bool kept,
                              const Pack<T> (&x)[kVectors]) const {
    const PageFormat format = side.pages.format;
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) largest = max(largest, largest_magnitude(x[i]));
    float scale;
    if (side.pages.scale_is_dynamic) {
      largest = largest_of_lanes(largest, lanes);
      scale = dynamic_scale(largest, format);
      if (kept && lane == 0) *scale_of_row = scale;
    } else {
      scale = *scale_of_row;
    }
    if (!kept || !has(0)) return;
    uint32_t words[kVectors * Pack<T>::kSize / 4];
    if (format == PageFormat::kInt8) {
      quantize<PageFormat::kInt8, kVectors>(x, scale, largest, words);
    } else {
      quantize<PageFormat::kFp8, kVectors>(x, scale, largest, words);
    }
    constexpr int kVectorsOfStore = kCodesOfStore / Pack<T>::kSize;
#pragma unroll
    for (int i = 0; i < kVectors / kVectorsOfStore; ++i) {
      if (!has(i * kVectorsOfStore)) break;
      const uint32_t* four = words + 4 * i;
      *reinterpret_cast<uint4*>(row + first_vector() * Pack<T>::kSize + i * kCodesOfStore) =
          make_uint4(four[0], four[1], four[2], four[3]);
    }
  }
};

template <class T, bool kCopied>
__global__ void __launch_bounds__(kAppendThreads)
    append_kernel(const __grid_constant__ AppendParams p) {
  using Part = AppendPart<T, kCopied>;
  const int lanes = 1 << p.lanes_log2;
  const int lane = threadIdx.x & (lanes - 1);
  // Below 2^31 + a block's rows.
  const uint32_t index =
      blockIdx.x * (kAppendThreads >> p.lanes_log2) + (threadIdx.x >> p.lanes_log2);
  const bool inside = index < static_cast<uint32_t>(p.rows);
  const int32_t row = inside ? static_cast<int32_t>(index) : 0;
  const int32_t token = p.heads.quotient(row);
  const int32_t head = row - token * p.heads.divisor;
  const int64_t slot = inside ? p.slot_mapping[token] : -1;
  const auto part = [&](int s) { return Part{p.sides[kCopied ? s : blockIdx.y], lane, lanes}; };
  Pack<T> x[kAppendSides<kCopied>][Part::kVectors];
#pragma unroll
  for (int s = 0; s < kAppendSides<kCopied>; ++s) part(s).load(token, head, inside, x[s]);

  const bool kept = slot >= 0 && slot < p.capacity;
  const int32_t kept_slot = kept ? static_cast<int32_t>(slot) : 0;
  const int32_t block = p.block_size.quotient(kept_slot);
  const int32_t offset = kept_slot - block * p.block_size.divisor;
#pragma unroll
  for (int s = 0; s < kAppendSides<kCopied>; ++s) part(s).store(block, offset, head, kept, x[s]);
}

}  // namespace fastinfer::cuda
