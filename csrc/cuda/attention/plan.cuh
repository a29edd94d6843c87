// Makes an attention plan: a thread for each row. Every block computes the bounds of all sequences'
// items, then writes its share of the rows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../checks/attention_plan.h"
#include "../ptx/grid_dependency.h"

namespace fastinfer::cuda {

constexpr int kPlanThreads = 512;
constexpr int kPlanMaxSequences = 2048;
// How finely work is cut: enough pieces for an even load, few enough to merge.
constexpr int kPlanUnitsPerSm = 4;
constexpr int kPlanUncut = 1 << 30;

struct PlanParams {
  const int32_t* cu_seqlens_q;  // [B + 1]
  const int32_t* seq_lens;      // [B]
  int32_t* plan;                // [plan_rows, 8]
  int64_t plan_rows;
  int64_t max_partial_rows;
  int num_sequences, total_q, num_heads, num_kv_heads, max_seqlen_q, max_seqlen_k;
  int window_left, window_right;
  int group, narrow_limit, narrow_tokens, wide_tokens;
  int num_sms;
  bool batch_invariant;
};

// Counts of some sequences, or where a sequence's rows begin.
struct PlanCounts {
  int wide, narrow, rows, merged;
  __device__ PlanCounts operator+(const PlanCounts& other) const {
    return {wide + other.wide, narrow + other.narrow, rows + other.rows, merged + other.merged};
  }
};

struct PlanSmem {
  long long sums[kPlanThreads / 32][3];
  PlanCounts warps[kPlanThreads / 32];
  PlanCounts starts[kPlanMaxSequences + 1];  // the last one used: the totals
};

struct PlanSequence {
  int queries, keys, low, span, tile_tokens, tiles;
  bool narrow;
};

__device__ inline PlanSequence read_sequence(const PlanParams& p, int b) {
  PlanSequence s;
  s.queries = p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b];
  s.keys = p.seq_lens[b];
  s.narrow = static_cast<int64_t>(s.queries) * p.group <= p.narrow_limit;
  s.tile_tokens = s.narrow ? p.narrow_tokens : p.wide_tokens;
  s.tiles = (s.queries + s.tile_tokens - 1) / s.tile_tokens;
  // The keys that the tokens see lie in [low, keys). There may be a tree mask, whose tokens may
  // stand one position before the step.
  s.low = 0;
  s.span = s.keys;
  if (p.window_left >= 0) {
    s.low = max(s.keys - s.queries - 1 - p.window_left, 0);
    s.span = min(s.keys, p.window_left + s.tile_tokens + 1);
  }
  return s;
}

// How many pieces a sequence's keys have when cut at multiples of `piece`; at least 1.
__device__ inline int count_pieces(const PlanSequence& s, int piece) {
  return max((s.keys + piece - 1) / piece - s.low / piece, 1);
}

// Sums of two numbers and the maximum of a third over the block.
__device__ inline void reduce_block(PlanSmem& smem, long long& a, long long& b, long long& most) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    a += __shfl_xor_sync(0xffffffffu, a, mask);
    b += __shfl_xor_sync(0xffffffffu, b, mask);
    most = max(most, __shfl_xor_sync(0xffffffffu, most, mask));
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    smem.sums[threadIdx.x / 32][0] = a;
    smem.sums[threadIdx.x / 32][1] = b;
    smem.sums[threadIdx.x / 32][2] = most;
  }
  __syncthreads();
  a = b = most = 0;
  for (int w = 0; w < kPlanThreads / 32; ++w) {
    a += smem.sums[w][0];
    b += smem.sums[w][1];
    most = max(most, smem.sums[w][2]);
  }
}

// The sum over all threads before this one.
__device__ inline PlanCounts scan_block(PlanSmem& smem, const PlanCounts& mine) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  PlanCounts sum = mine;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const PlanCounts other = {
        __shfl_up_sync(0xffffffffu, sum.wide, by), __shfl_up_sync(0xffffffffu, sum.narrow, by),
        __shfl_up_sync(0xffffffffu, sum.rows, by), __shfl_up_sync(0xffffffffu, sum.merged, by)};
    if (lane >= by) sum = sum + other;
  }
  if (lane == 31) smem.warps[warp] = sum;
  __syncthreads();
  PlanCounts before = {sum.wide - mine.wide, sum.narrow - mine.narrow, sum.rows - mine.rows,
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

  long long work = 0, tiles = 0, longest = 0;
  for (int b = begin; b < end; ++b) {
    const PlanSequence s = read_sequence(p, b);
    // Under a causal mask the average tile of a long prompt sees half of the step's own keys.
    work += static_cast<long long>(s.tiles) * (s.span - min(s.queries, s.span) / 2);
    tiles += s.tiles;
    if (s.tiles > 0) longest = max(longest, static_cast<long long>(s.span));
  }
  reduce_block(smem, work, tiles, longest);
  int piece = kPlanUncut;
  if (!p.batch_invariant) {
    const long long per_sm = (work * p.num_kv_heads + p.num_sms - 1) / p.num_sms;
    const long long rounds = (tiles * p.num_kv_heads + p.num_sms - 1) / p.num_sms;
    // Whole sequences may be an even load as they are.
    if (rounds * longest * 10 > per_sm * 11) {
      const long long units = static_cast<long long>(p.num_sms) * kPlanUnitsPerSm;
      const long long wanted = (work * p.num_kv_heads + units - 1) / units;
      const long long rounded = (wanted + kPlanMinSplit - 1) / kPlanMinSplit * kPlanMinSplit;
      piece = static_cast<int>(
          min(max(rounded, static_cast<long long>(kPlanMinSplit)), 1ll * kPlanUncut));
    }
    for (;; piece *= 2) {
      long long rows = 0, unused = 0, most = 0;
      for (int b = begin; b < end; ++b) {
        const PlanSequence s = read_sequence(p, b);
        const int splits = count_pieces(s, piece);
        if (splits > 1) rows += static_cast<long long>(s.queries) * splits;
      }
      reduce_block(smem, rows, unused, most);
      if (rows <= p.max_partial_rows || piece == kPlanUncut) break;
    }
  }

  const auto counts_of = [&](int b) {
    const PlanSequence s = read_sequence(p, b);
    const int splits = count_pieces(s, piece), items = s.tiles * splits;
    return PlanCounts{s.narrow ? 0 : items, s.narrow ? items : 0,
                      splits > 1 ? s.queries * splits : 0, splits > 1 ? s.tiles : 0};
  };
  PlanCounts mine = {0, 0, 0, 0};
  for (int b = begin; b < end; ++b) mine = mine + counts_of(b);
  PlanCounts start = scan_block(smem, mine);
  for (int b = begin; b < end; ++b) {
    smem.starts[b] = start;
    start = start + counts_of(b);
  }
  if (threadIdx.x == kPlanThreads - 1) smem.starts[count] = start;
  __syncthreads();

  const PlanCounts total = smem.starts[count];
  const int num_items = total.wide + total.narrow;
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
    int b, tile, split;
    if (item < num_items) {
      const bool wide = item < total.wide;
      const int at = static_cast<int>(item) - (wide ? 0 : total.wide);
      b = wide ? find_sequence<&PlanCounts::wide>(smem, count, at)
               : find_sequence<&PlanCounts::narrow>(smem, count, at);
      const PlanSequence s = read_sequence(p, b);
      const int i = at - (wide ? smem.starts[b].wide : smem.starts[b].narrow);
      const int splits = count_pieces(s, piece);
      tile = s.tiles - 1 - i / splits;  // the last tile sees most keys, and goes first
      split = i % splits;
    } else if (from_end < total.merged) {
      b = find_sequence<&PlanCounts::merged>(smem, count, static_cast<int>(from_end));
      tile = static_cast<int>(from_end) - smem.starts[b].merged;
      split = 0;
    } else {
      // The rest is zero, so that equal lengths give equal plans.
      write_row(to, {0, 0, 0, 0, 0, 0, 0, 0});
      continue;
    }
    const PlanSequence s = read_sequence(p, b);
    const int splits = count_pieces(s, piece), first_piece = s.low / piece;
    const int q_begin = tile * s.tile_tokens;
    const int q_count = min(s.tile_tokens, s.queries - q_begin);
    const int64_t next_cut = static_cast<int64_t>(first_piece + split + 1) * piece;
    const int k_end = static_cast<int>(min(next_cut, static_cast<int64_t>(s.keys)));
    const int k_begin = static_cast<int>(
        min(max(next_cut - piece, static_cast<int64_t>(s.low)), static_cast<int64_t>(k_end)));
    const int partial = splits > 1 ? smem.starts[b].rows + q_begin * splits + split * q_count : -1;
    write_row(to, {b, q_begin, q_count, k_begin, k_end, partial, split, splits});
  }
}

}  // namespace fastinfer::cuda
