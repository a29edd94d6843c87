// Merges attention over pieces of a sequence's keys: a block for each token and head.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../../checks/attention_plan.h"
#include "../ptx/convert.h"
#include "../ptx/grid_dependency.h"

namespace fastinfer::cuda {

constexpr int kMergeThreads = 256;
constexpr int kMergeWarps = kMergeThreads / 32;
constexpr int kMergeColumns = 128;  // of a pass; four of a lane
constexpr int kMergeBatch = 8;      // splits that a warp loads at once

struct SplitMergeParams {
  const float* partial_out;     // [partial_rows, H, value_dim]
  const float* partial_lse;     // [partial_rows, H]
  const int32_t* plan;          // [plan_rows, 8]
  const int32_t* cu_seqlens_q;  // [B + 1]; null where sequences have a dimension of their own
  const float* sinks;           // [H] or null
  void* out;                    // [total_q, H, value_dim]
  float* lse;                   // [H, total_q]
  int64_t plan_rows;
  int64_t out_sequence, out_token, out_head, lse_sequence, lse_head;
  int num_heads, value_dim, max_tokens;  // of a tile
};

template <class T>
__global__ void __launch_bounds__(kMergeThreads)
    split_merge_kernel(const __grid_constant__ SplitMergeParams p) {
  constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
  constexpr float kInfinity = __builtin_huge_valf();
  __shared__ float parts[kMergeWarps][kMergeColumns];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  // The plan lists its split tiles from its last row backwards.
  const int64_t units = static_cast<int64_t>(p.plan[15]) * p.max_tokens * p.num_heads;
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int head = static_cast<int>(unit % p.num_heads);
    const int64_t tile = unit / p.num_heads;
    const int token = static_cast<int>(tile % p.max_tokens);
    const int32_t* item = p.plan + (p.plan_rows - 1 - tile / p.max_tokens) * kPlanColumns;
    const int count = item[2], splits = item[7];
    if (token >= count) continue;
    const int64_t first = (static_cast<int64_t>(item[5]) + token) * p.num_heads + head;
    const int64_t step = static_cast<int64_t>(count) * p.num_heads;  // from one split to the next
    const int64_t sequence = item[0];
    const int64_t at = item[1] + token + (p.cu_seqlens_q == nullptr ? 0 : p.cu_seqlens_q[sequence]);

    float highest = -kInfinity;
    for (int s = lane; s < splits; s += 32)
      highest = fmaxf(highest, p.partial_lse[first + s * step]);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, mask));
    }
    const float base = highest == -kInfinity ? 0.0f : highest;
    float total = 0.0f;
    for (int s = lane; s < splits; s += 32) {
      total += ptx::exp2((p.partial_lse[first + s * step] - base) * kLog2e);
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
      total += __shfl_xor_sync(0xffffffffu, total, mask);
    }
    const bool empty = total == 0.0f;
    if (threadIdx.x == 0) {
      p.lse[sequence * p.lse_sequence + head * p.lse_head + at] =
          empty ? -kInfinity : base + kLn2 * log2f(total);
    }
    if (p.sinks != nullptr) total += ptx::exp2((p.sinks[head] - base) * kLog2e);
    const float norm = empty ? 0.0f : 1.0f / total;

    T* out =
        static_cast<T*>(p.out) + sequence * p.out_sequence + at * p.out_token + head * p.out_head;
    for (int column = 0; column < p.value_dim; column += kMergeColumns) {
      float sums[4] = {};
      for (int batch = warp; batch < splits; batch += kMergeWarps * kMergeBatch) {
        float lse[kMergeBatch], values[kMergeBatch][4];
#pragma unroll
        for (int i = 0; i < kMergeBatch; ++i) {
          const int s = batch + i * kMergeWarps;
          const int64_t row = first + s * step;
          lse[i] = s < splits ? p.partial_lse[row] : -kInfinity;
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const int d = column + c * 32 + lane;
            values[i][c] =
                s < splits && d < p.value_dim ? p.partial_out[row * p.value_dim + d] : 0.0f;
          }
        }
#pragma unroll
        for (int i = 0; i < kMergeBatch; ++i) {
          if (lse[i] == -kInfinity) continue;  // an empty result may hold anything
          const float weight = ptx::exp2((lse[i] - base) * kLog2e);
#pragma unroll
          for (int c = 0; c < 4; ++c) sums[c] += weight * values[i][c];
        }
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) parts[warp][c * 32 + lane] = sums[c];
      __syncthreads();
      const int d = column + threadIdx.x;
      if (threadIdx.x < kMergeColumns && d < p.value_dim) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kMergeWarps; ++w) sum += parts[w][threadIdx.x];
        out[d] = T(sum * norm);
      }
      __syncthreads();
    }
  }
}

}  // namespace fastinfer::cuda
