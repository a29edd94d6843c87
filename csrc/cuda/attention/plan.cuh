// Makes an attention plan: a thread for each row. Every block computes the bounds of all sequences'
// items, then writes its share of the rows.
//
// Wide items stand sequence by sequence. Narrow items have the order that plan_cut.cuh counts on:
// all pieces of a sequence but its last, sequence by sequence, then the last pieces (the only ones
// of sequences that are not cut) by descending length, in bins.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../checks/attention_plan.h"
#include "../ptx/grid_dependency.h"
#include "plan_cut.cuh"

namespace fastinfer::cuda {

// Counts of some sequences, or where a sequence's rows begin.
struct PlanCounts {
  int wide, full, rows, merged;  // full: pieces of narrow sequences that are not the last
  __device__ PlanCounts operator+(const PlanCounts& other) const {
    return {wide + other.wide, full + other.full, rows + other.rows, merged + other.merged};
  }
};

// Sequences are ordered by counting: in each bin of lengths those of each warp and round.
constexpr int kPlanOrderBins = 64;
constexpr int kPlanRounds = kPlanMaxSequences / kPlanThreads;
constexpr int kPlanParts = kPlanRounds * kPlanWarps;
static_assert(kPlanOrderBins * kPlanParts == 8 * kPlanThreads, "a thread sums 8 counts");

struct PlanSmem {
  PlanCounts warps[kPlanWarps];
  uint16_t order[kPlanMaxSequences];  // narrow sequences, by descending length of the last piece
  union {
    struct {
      union {
        PlanCutSmem cut;
        alignas(16) uint16_t counts[kPlanOrderBins * kPlanParts];
      };
      int sums[kPlanWarps];
      int lengths[kPlanMaxSequences];  // of last pieces; -1 where not in the order
    } early;
    PlanCounts starts[kPlanMaxSequences + 1];  // the last one used: the totals
  };
};
static_assert(sizeof(PlanSmem) <= 48 * 1024);

// The sum over all threads before this one.
__device__ inline PlanCounts scan_block(PlanSmem& smem, const PlanCounts& mine) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  PlanCounts sum = mine;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const PlanCounts other = {
        __shfl_up_sync(0xffffffffu, sum.wide, by), __shfl_up_sync(0xffffffffu, sum.full, by),
        __shfl_up_sync(0xffffffffu, sum.rows, by), __shfl_up_sync(0xffffffffu, sum.merged, by)};
    if (lane >= by) sum = sum + other;
  }
  if (lane == 31) smem.warps[warp] = sum;
  __syncthreads();
  PlanCounts before = {sum.wide - mine.wide, sum.full - mine.full, sum.rows - mine.rows,
                       sum.merged - mine.merged};
  for (int w = 0; w < warp; ++w) before = before + smem.warps[w];
  return before;
}

// The last sequence whose rows begin at or before `at`: the one that has row `at`.
template <int PlanCounts::* kCount>
__device__ inline int find_sequence(const PlanSmem& smem, int num_sequences, int at) {
  int low = 0, high = num_sequences;  // starts[low] <= at < starts[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (smem.starts[middle].*kCount <= at) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Fills `order` from `lengths`, of which `longest` is a bound that few exceed. Lengths of a bin
// stay in the order of sequences, so that equal lengths give equal plans.
__device__ inline void order_sequences(PlanSmem& smem, int num_sequences, float longest) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  auto& eight = reinterpret_cast<uint4*>(smem.early.counts)[threadIdx.x];
  eight = make_uint4(0, 0, 0, 0);
  __syncthreads();
  const float per_key = kPlanOrderBins / longest;
  int slots[kPlanRounds], ranks[kPlanRounds];
#pragma unroll
  for (int round = 0; round < kPlanRounds; ++round) {
    const int b = round * kPlanThreads + threadIdx.x;
    const int length = b < num_sequences ? smem.early.lengths[b] : -1;
    const float place = static_cast<float>(length) * per_key;
    const int bin = kPlanOrderBins - 1 - min(static_cast<int>(place), kPlanOrderBins - 1);
    const unsigned peers = __match_any_sync(0xffffffffu, length < 0 ? -1 : bin);
    ranks[round] = __popc(peers & ((1u << lane) - 1));
    slots[round] = length < 0 ? -1 : bin * kPlanParts + round * kPlanWarps + warp;
    if (length >= 0 && ranks[round] == 0) smem.early.counts[slots[round]] = __popc(peers);
  }
  __syncthreads();
  // Counts become the sums of all before them.
  uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
  int sum = 0;
#pragma unroll
  for (uint32_t& word : words) {
    const int low = word & 0xffff, high = word >> 16;
    word = sum | (sum + low) << 16;
    sum += low + high;
  }
  int until = sum;  // of this warp
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, until, by);
    if (lane >= by) until += other;
  }
  if (lane == 31) smem.early.sums[warp] = until;
  __syncthreads();
  uint32_t before = until - sum;
  for (int w = 0; w < warp; ++w) before += smem.early.sums[w];
#pragma unroll
  for (uint32_t& word : words) word += before * 0x10001u;
  eight = make_uint4(words[0], words[1], words[2], words[3]);
  __syncthreads();
#pragma unroll
  for (int round = 0; round < kPlanRounds; ++round) {
    if (slots[round] < 0) continue;
    smem.order[smem.early.counts[slots[round]] + ranks[round]] =
        static_cast<uint16_t>(round * kPlanThreads + threadIdx.x);
  }
}

__device__ inline void write_row(int32_t* row, const int (&words)[kPlanColumns]) {
#pragma unroll
  for (int i = 0; i < kPlanColumns; ++i) row[i] = words[i];
}

__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const __grid_constant__ PlanParams p) {
  __shared__ PlanSmem smem;
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const int count = p.num_sequences;
  const int share = (count + kPlanThreads - 1) / kPlanThreads;
  const int begin = min(static_cast<int>(threadIdx.x) * share, count);
  const int end = min(begin + share, count);

  const PlanTotals totals = sum_sequences(p, smem.early.cut, begin, end);
  const PlanCut cut = choose_cut(p, smem.early.cut, totals);

  const auto counts_of = [&](const PlanSequence& s, int splits) {
    return PlanCounts{s.narrow ? 0 : s.tiles * splits, s.narrow ? s.tiles * (splits - 1) : 0,
                      splits > 1 ? s.queries * splits : 0, splits > 1 ? s.tiles : 0};
  };
  PlanCounts mine = {0, 0, 0, 0};
#pragma unroll 1
  for (int b = begin; b < end; ++b) {
    const PlanSequence s = read_sequence(p, b);
    const PlanPieces pieces = cut_sequence(s, cut);
    mine = mine + counts_of(s, pieces.count());
    smem.early.lengths[b] = s.narrow && s.tiles > 0 ? s.keys - pieces.last_begin : -1;
  }
  PlanCounts start = scan_block(smem, mine);
  order_sequences(smem, count, cut.longest_piece(totals.longest));
  __syncthreads();  // the starts take the place of the lengths
#pragma unroll 1
  for (int b = begin; b < end; ++b) {
    smem.starts[b] = start;
    const PlanSequence s = read_sequence(p, b);
    start = start + counts_of(s, cut_sequence(s, cut).count());
  }
  if (threadIdx.x == kPlanThreads - 1) smem.starts[count] = start;
  __syncthreads();

  const PlanCounts total = smem.starts[count];
  const int num_items = total.wide + total.full + totals.narrow;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kPlanThreads;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kPlanThreads + threadIdx.x;
       row < p.plan_rows; row += stride) {
    int32_t* to = p.plan + row * kPlanColumns;
    if (row == 0) {
      write_row(to, {kPlanMagic, num_items, total.rows, count, p.total_q, p.num_heads,
                     p.num_kv_heads, p.batch_invariant});
      continue;
    }
    if (row == 1) {
      write_row(to, {p.max_seqlen_q, p.max_seqlen_k, p.window_left, p.window_right, 0, 0,
                     total.wide, total.merged});
      continue;
    }
    const int64_t item = row - kPlanHeaderRows, from_end = p.plan_rows - 1 - row;
    int b, tile = 0, split = 0;
    if (item < total.wide) {
      const int at = static_cast<int>(item);
      b = find_sequence<&PlanCounts::wide>(smem, count, at);
      const PlanSequence s = read_sequence(p, b);
      const int i = at - smem.starts[b].wide, splits = cut_sequence(s, cut).count();
      tile = s.tiles - 1 - i / splits;  // the last tile sees most keys, and goes first
      split = i % splits;
    } else if (item < total.wide + total.full) {
      const int at = static_cast<int>(item) - total.wide;
      b = find_sequence<&PlanCounts::full>(smem, count, at);
      split = at - smem.starts[b].full;
    } else if (item < num_items) {
      b = smem.order[item - total.wide - total.full];
      split = cut_sequence(read_sequence(p, b), cut).count() - 1;
    } else if (from_end < total.merged) {
      b = find_sequence<&PlanCounts::merged>(smem, count, static_cast<int>(from_end));
      tile = static_cast<int>(from_end) - smem.starts[b].merged;
    } else {
      // The rest is zero, so that equal lengths give equal plans.
      write_row(to, {0, 0, 0, 0, 0, 0, 0, 0});
      continue;
    }
    const PlanSequence s = read_sequence(p, b);
    const PlanPieces pieces = cut_sequence(s, cut);
    const int splits = pieces.count(), piece = pieces.first + split;
    const int q_begin = tile * s.tile_tokens;
    const int q_count = min(s.tile_tokens, s.queries - q_begin);
    const int k_begin = max(cut.begin_of(piece), s.low);
    const int k_end = piece < pieces.last ? cut.begin_of(piece + 1) : s.keys;
    const int partial = splits > 1 ? smem.starts[b].rows + q_begin * splits + split * q_count : -1;
    write_row(to, {b, q_begin, q_count, k_begin, k_end, partial, split, splits});
  }
}

}  // namespace fastinfer::cuda
