// The end of a unit: what its groups have becomes one result.
#pragma once

#include "decode_rows.cuh"

namespace fastinfer::cuda {

// A row's sum over all groups: writes its lse and the groups' weights.
template <class T>
__device__ inline void merge_row(const DecodeParams& p, typename T::Smem& smem, bool final,
                                 int row) {
  float highest = -kInfinity, total = 0.0f;
#pragma unroll
  for (int g = 0; g < T::kKeyGroups; ++g) highest = fmaxf(highest, smem.stats[g][0][row].x);
  const float base = softmax_base(highest);
#pragma unroll
  for (int g = 0; g < T::kKeyGroups; ++g) {
#pragma unroll
    for (int part = 0; part < T::kRowParts; ++part) {
      const float2 stats = smem.stats[g][part][row];
      total += stats.y * ptx::exp2(stats.x - base);
    }
  }
  const int head = smem.rows[row].head;
  const bool empty = total == 0.0f;
  if (head >= 0) {
    float* lse = final ? p.lse : p.partial_lse;
    lse[smem.rows[row].lse_at] = empty ? -kInfinity : highest * kLn2 + logf(total);
    if (final && p.sinks != nullptr) total += ptx::exp2(p.sinks[head] * kLog2e - base);
  }
#pragma unroll
  for (int g = 0; g < T::kKeyGroups; ++g) {
    smem.weights[g][row] = empty ? 0.0f : ptx::exp2(smem.stats[g][0][row].x - base) / total;
  }
}

// Merges what the groups have of a unit and writes it.
template <class T, class State>
__device__ inline void finish_unit(const DecodeParams& p, typename T::Smem& smem,
                                   const DecodeUnit& unit, State& state) {
  const bool final = unit.partial_row < 0;
  state.write_stats(smem);
  block_barrier<T>();
  if (threadIdx.x < T::kRows) merge_row<T>(p, smem, final, threadIdx.x);
  block_barrier<T>();
  state.weigh(smem);
  for (int first = 0; first < p.value_dim; first += T::kSlice) {
    state.write_slice(smem, first);
    block_barrier<T>();
    for (int at = threadIdx.x; at < T::kRows * T::kSlice; at += T::kThreads) {
      const int row = at / T::kSlice, column = at % T::kSlice;
      const DecodeRow& info = smem.rows[row];
      if (info.head < 0 || first + column >= p.value_dim) continue;
      float sum = 0.0f;
#pragma unroll
      for (int g = 0; g < T::kKeyGroups; ++g) sum += smem.parts[g][row][column];
      if (final) {
        p.out[info.out_at + first + column] = write_16bit(sum, p.is_bf16);
      } else {
        p.partial_out[info.out_at + first + column] = sum;
      }
    }
    block_barrier<T>();
  }
}

}  // namespace fastinfer::cuda
