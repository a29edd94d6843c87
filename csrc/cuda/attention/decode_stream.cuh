// The decode kernel's loads: which keys a group of warps takes next, and their way into its ring.
#pragma once

#include "../../checks/attention_plan.h"
#include "../ptx/cp_async.h"
#include "../ptx/named_barrier.h"
#include "decode_traits.cuh"

namespace fastinfer::cuda {

// Unit `index` of the items from `first_item` on: by item, then by part, then by KV head. The last
// parts of an item may have no tokens, and then no keys.
__device__ inline DecodeUnit read_unit(const DecodeParams& p, int first_item, int index) {
  DecodeUnit unit;
  const int part_of_item = index / p.num_kv_heads;
  unit.kv_head = index - part_of_item * p.num_kv_heads;
  unit.k = p.k.data + unit.kv_head * p.k.head;
  unit.v = p.v.data + unit.kv_head * p.v.head;
  unit.k_scale = p.k.scale + unit.kv_head * p.k.scale_head;
  unit.v_scale = p.v.scale + unit.kv_head * p.v.scale_head;
  const int64_t row = kPlanHeaderRows + first_item + part_of_item / p.parts;
  const int32_t* item = p.plan + row * kPlanColumns;
  const int sequence = item[0];
  unit.pages = p.block_table + sequence * p.table_sequence;
  const int skipped = part_of_item % p.parts * p.unit_tokens;  // of the item's tokens
  unit.token_begin = item[1] + skipped;
  unit.token_count = min(item[2] - skipped, p.unit_tokens);
  const int key_begin = item[3], key_end = item[4];
  unit.partial_row = item[5] < 0 ? -1 : item[5] + skipped;
  const int keys = p.seq_lens[sequence];
  unit.first_token = p.cu_seqlens_q[sequence];
  const int queries = p.cu_seqlens_q[sequence + 1] - unit.first_token;

  unit.step_begin = keys - queries;
  int low = key_begin, high = min(key_end, keys);
  // A tree's tokens stand anywhere between its first and its last, or one before with an empty
  // mask.
  const bool tree = p.tree_mask != nullptr;
  const int first_position = unit.step_begin + (tree ? -1 : unit.token_begin);
  const int last_position =
      unit.step_begin + (tree ? queries : unit.token_begin + unit.token_count) - 1;
  int all_low = low, all_high = tree ? min(high, unit.step_begin) : high;
  if (p.window_left >= 0) {
    low = max(low, first_position - p.window_left);
    all_low = max(low, last_position - p.window_left);
  }
  if (p.window_right >= 0) {
    high = min(high, last_position + p.window_right + 1);
    all_high = min(all_high, first_position + p.window_right + 1);
  }
  unit.low = max(low, 0);
  unit.high = high;
  // Nothing to see must be no tile either: a table has no entry beyond its sequence.
  if (unit.token_count <= 0 || unit.low >= high) unit.low = unit.high = 0;
  unit.all_low = max(all_low, unit.low);
  unit.all_high = min(all_high, unit.high);
  return unit;
}

// The first key of the first tile of a group.
template <class T>
__device__ inline int first_tile(const DecodeUnit& unit, int group) {
  return (static_cast<unsigned>(unit.low) / T::kKeys + group) * T::kKeys;
}

template <class T>
__device__ inline void group_barrier(int group) {
  if constexpr (T::kRowGroups == 1) {
    __syncwarp();
  } else {
    ptx::named_barrier_sync(1 + group, T::kRowGroups * 32);
  }
}

// The tiles of a group of warps, over all units of the block. Loads run up to kStages - 1 tiles
// ahead of computation, across the border between units, so that memory has work while a unit is
// being finished. All warps of a group hold the same state.
template <class T>
struct KeyStream {
  int unit = -1;            // the block's number of the unit of the next tile
  int begin = 0, high = 0;  // the next tile's first key and the unit's end; begin >= high: no tile
  int page, inside;         // of the first key of this lane's run in the next tile
  int ahead = 0;            // tiles that were asked for and not yet computed
  int fill = 0;             // stage of the next tile

  // To the first tile in units [unit, last].
  __device__ void seek(const DecodeParams& p, const DecodeSmem<T>& smem, int group, int last) {
    while (begin >= high && unit < last) {
      ++unit;
      const DecodeUnit& next = smem.units[unit & 3];
      begin = first_tile<T>(next, group);
      high = next.high;
    }
    if (begin < high) look_up(p, smem);
  }

  // A lane copies parts of kRun keys of a tile, one after the other and in one page.
  static constexpr int kRun = T::kKeys / 4;
  static_assert(8 % kRun == 0, "the block size is a multiple of 8");

  // Pages are looked up a tile ahead, so that no load of keys waits for its page. Entries of keys
  // that are not loaded may hold anything and are not read.
  __device__ void look_up(const DecodeParams& p, const DecodeSmem<T>& smem) {
    const DecodeUnit& now = smem.units[unit & 3];
    const int key = begin + threadIdx.x % 32 / 8 * kRun;
    const int entry = p.block_shift >= 0 ? key >> p.block_shift : key / p.block_size;
    inside = key - entry * p.block_size;
    page = 0;  // what is not loaded has an address all the same
    if (key + kRun > now.low && key < high) {
      page = now.pages[static_cast<uint32_t>(entry) * static_cast<uint64_t>(p.table_block)];
    }
  }

  __device__ void load(const DecodeParams& p, DecodeSmem<T>& smem, int group, int row_group,
                       int last) {
    const int lane = threadIdx.x % 32;
    const DecodeUnit& now = smem.units[unit & 3];
    const uint32_t keys = ptx::shared_address(smem.tiles[group][fill]);
    const uint32_t values = keys + T::kKeys * T::kKPitch;
    const int own = begin + lane % T::kKeys;
    const bool is_present = own >= now.low && own < high;
    const uint32_t present = __ballot_sync(0xffffffffu, is_present);  // bit: key of the tile
    if (present == 0xffffffffu && p.k.row_bytes == T::kKPitch && p.v.row_bytes == T::kVPitch) {
      copy_rows<T::kKPitch, true>(p.k, now.k, present, keys, row_group);
      copy_rows<T::kVPitch, true>(p.v, now.v, present, values, row_group);
    } else {
      copy_rows<T::kKPitch, false>(p.k, now.k, present, keys, row_group);
      copy_rows<T::kVPitch, false>(p.v, now.v, present, values, row_group);
    }
    if ((T::kByteK || T::kByteV) && row_group == 0) {
      static_assert(!(T::kByteK || T::kByteV) || T::kKeys == 32, "a lane copies one key's scales");
      const int token = inside + lane % kRun;
      if constexpr (T::kByteK) {
        ptx::cp_async_4(ptx::shared_address(&smem.scales[group][fill][0][lane]),
                        now.k_scale + place(p.k.scale_outer, p.k.scale_token, token), !is_present);
      }
      if constexpr (T::kByteV) {
        ptx::cp_async_4(ptx::shared_address(&smem.scales[group][fill][1][lane]),
                        now.v_scale + place(p.v.scale_outer, p.v.scale_token, token), !is_present);
      }
    }
    ptx::cp_async_commit();
    fill = fill + 1 == T::kStages ? 0 : fill + 1;
    ++ahead;
    begin += T::kKeys * T::kKeyGroups;
    seek(p, smem, group, last);
  }

  // Asks for tiles until `most` are ahead.
  __device__ void load_up_to(int most, const DecodeParams& p, DecodeSmem<T>& smem, int group,
                             int row_group, int last) {
    while (ahead < most && begin < high) load(p, smem, group, row_group, last);
  }

  // Waits for the oldest tile, then for the warps that share it.
  __device__ void wait(int group) const {
    if (ahead >= T::kStages - 1) {
      ptx::cp_async_wait<T::kStages - 2>();
    } else {
      ptx::cp_async_wait<0>();
    }
    group_barrier<T>(group);
  }

 private:
  // Of token `token` of the lane's page. No factor is below 0, so that products are short.
  __device__ int64_t place(int64_t outer, int token_stride, int token) const {
    return static_cast<uint32_t>(page) * static_cast<uint64_t>(outer) +
           static_cast<uint64_t>(static_cast<uint32_t>(token)) *
               static_cast<uint32_t>(token_stride);
  }

  // A warp copies a 128-byte segment of four rows at once, kRun rows apart. Unless the tile is
  // whole, absent keys and the padding of rows become zeros.
  template <int kPitch, bool kWhole>
  __device__ void copy_rows(const DecodeKv& kv, const unsigned char* head, uint32_t present,
                            uint32_t to, int row_group) const {
    constexpr int kShare = kRun / T::kRowGroups;
    const int lane = threadIdx.x % 32, chunk = lane % 8, in_run = row_group * kShare;
    const int first = lane / 8 * kRun + in_run;
    const unsigned char* from = head + place(kv.outer, kv.token, inside + in_run) + chunk * 16;
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const bool is_present = (present >> (first + i) & 1) != 0;
#pragma unroll
      for (int s = 0; s < kPitch / 128; ++s) {
        const bool ignored = !is_present || (s * 8 + chunk) * 16 >= kv.row_bytes;
        ptx::cp_async_16(to + swizzled<kPitch>(first + i, s * 8 + chunk), from + s * 128,
                         !kWhole && ignored);
      }
      from += static_cast<uint32_t>(kv.token);
    }
  }
};

}  // namespace fastinfer::cuda
