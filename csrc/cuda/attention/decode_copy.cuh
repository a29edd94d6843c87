// Tiles of keys and values on their way from pages to shared memory.
#pragma once

#include "../ptx/cp_async.h"
#include "decode_unit.cuh"

namespace fastinfer::cuda {

// Of a tile, or of 32 keys of it, a lane copies parts of a run of keys, a quarter: one after the
// other and in one page.
struct KeyRun {
  int page, inside;  // of the first key
};

// A lane's run of keys [begin, begin + kKeys). Pages are looked up before they are needed, so that
// no load of keys waits for its page. Entries of keys that are not loaded may hold anything and are
// not read.
template <int kKeys>
__device__ inline KeyRun look_up_run(const DecodeParams& p, const DecodeUnit& unit, int begin) {
  constexpr int kRun = kKeys / 4;
  static_assert(8 % kRun == 0, "the block size is a multiple of 8");
  const int key = begin + threadIdx.x % 32 / 8 * kRun;
  const int entry = p.block_shift >= 0 ? key >> p.block_shift : key / p.block_size;
  KeyRun run = {0, key - entry * p.block_size};  // what is not loaded has an address all the same
  if (key + kRun > unit.low && key < unit.high) {
    run.page = unit.pages[static_cast<uint32_t>(entry) * static_cast<uint64_t>(p.table_block)];
  }
  return run;
}

// Of token `token` of a page. No factor is below 0, so that products are short.
__device__ inline int64_t place_in_pages(int page, int64_t outer, int token_stride, int token) {
  return static_cast<uint32_t>(page) * static_cast<uint64_t>(outer) +
         static_cast<uint64_t>(static_cast<uint32_t>(token)) * static_cast<uint32_t>(token_stride);
}

// A warp copies a 128-byte segment of four rows at once, a run apart. Unless all of it is present,
// absent keys and the padding of rows become zeros.
template <int kPitch, int kKeys, int kWarps, bool kWhole>
__device__ inline void copy_rows(const DecodeKv& kv, const unsigned char* head, const KeyRun& run,
                                 uint32_t present, uint32_t to, int warp) {
  constexpr int kRun = kKeys / 4, kShare = kRun / kWarps;
  const int lane = threadIdx.x % 32, chunk = lane % 8, in_run = warp * kShare;
  const int first = lane / 8 * kRun + in_run;
  const unsigned char* from =
      head + place_in_pages(run.page, kv.outer, kv.token, run.inside + in_run) + chunk * 16;
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    const bool is_present = (present >> (first + i) & 1) != 0;
    const unsigned char* row = from + static_cast<uint64_t>(i) * static_cast<uint32_t>(kv.token);
#pragma unroll
    for (int s = 0; s < kPitch / 128; ++s) {
      const bool ignored = !is_present || (s * 8 + chunk) * 16 >= kv.row_bytes;
      ptx::cp_async_16(to + swizzled<kPitch>(first + i, s * 8 + chunk), row + s * 128,
                       !kWhole && ignored);
    }
  }
}

// The share of warp `warp`, of kWarps, in copying keys [begin, begin + kKeys) and their values and
// scales (of keys, then of values).
template <class T, int kKeys, int kWarps, int kScales>
__device__ inline void copy_keys(const DecodeParams& p, const DecodeUnit& unit, const KeyRun& run,
                                 int begin, uint32_t keys, uint32_t values,
                                 float (&scales)[2][kScales], int first_scale, int warp) {
  const int lane = threadIdx.x % 32, own = begin + lane % kKeys;
  const bool is_present = own >= unit.low && own < unit.high;
  const uint32_t present = __ballot_sync(0xffffffffu, is_present);  // bit: key
  if (present == 0xffffffffu && p.k.row_bytes == T::kKPitch && p.v.row_bytes == T::kVPitch) {
    copy_rows<T::kKPitch, kKeys, kWarps, true>(p.k, unit.k, run, present, keys, warp);
    copy_rows<T::kVPitch, kKeys, kWarps, true>(p.v, unit.v, run, present, values, warp);
  } else {
    copy_rows<T::kKPitch, kKeys, kWarps, false>(p.k, unit.k, run, present, keys, warp);
    copy_rows<T::kVPitch, kKeys, kWarps, false>(p.v, unit.v, run, present, values, warp);
  }
  if ((T::kByteK || T::kByteV) && warp == 0) {
    static_assert(!(T::kByteK || T::kByteV) || kKeys == 32, "a lane copies one key's scales");
    const int token = run.inside + lane % (kKeys / 4);
    const auto copy = [&](float* to, const float* head, const DecodeKv& kv) {
      ptx::cp_async_4(ptx::shared_address(to + first_scale + lane),
                      head + place_in_pages(run.page, kv.scale_outer, kv.scale_token, token),
                      !is_present);
    };
    if constexpr (T::kByteK) copy(scales[0], unit.k_scale, p.k);
    if constexpr (T::kByteV) copy(scales[1], unit.v_scale, p.v);
  }
}

}  // namespace fastinfer::cuda
