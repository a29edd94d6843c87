// From a fused QKV projection to queries and pages in one pass. Raw pointers only; checks and
// launch live in qk_norm_rope_append.cu.
//
// A block takes a token, and its warps units of it: as many rows of one kind (of q, of k or of v)
// as a warp has threads for. A thread holds four vectors of 16 bytes of a row, so that what a row
// costs beside its elements is shared by many. A warp's next unit is on its way into shared memory
// while the present one is computed and stored.
#pragma once

#include "qkv_steps.cuh"

namespace fastinfer::cuda {

// What a warp keeps in shared memory.
template <class T, int kLanes>
struct QkvWarp {
  Pack<T> rows[2][kQkvVectors][32];           // of this unit and of the next; [..][..][thread]
  float cos_sin[kQkvRowElements<T, kLanes>];  // of the token's position
};

// kLanes: threads of a row, if every row has exactly their vectors and, if it is turned, its halves
// are the members of its pairs; or 0. kQuantized: the pages of k, of v or of both are.
template <class T, int kLanes, bool kQuantized>
__global__ void __launch_bounds__(kQkvMostWarps * 32, kQkvResidentWarps<kLanes> / kQkvMostWarps)
    qk_norm_rope_append_kernel(const __grid_constant__ QkNormRopeAppendParams p) {
  constexpr int kSize = Pack<T>::kSize;
  const int lanes = kLanes > 0 ? kLanes : 1 << p.lanes_log2;
  const int thread = threadIdx.x % 32;
  const int lane = thread & (lanes - 1);
  const int vector_step = lanes * kSize;
  const auto part_of = [&](const QkvKind& k, bool has_row) {
    return QkvPart<kLanes>{lane, lanes, k.vectors, has_row};
  };

  extern __shared__ uint4 memory[];
  auto& mine = reinterpret_cast<QkvWarp<T, kLanes>*>(memory)[threadIdx.x / 32];
  __shared__ __align__(16) float weights[2][kQkvRowElements<T, kLanes>];

  const int64_t token = blockIdx.x;
  const int64_t position = p.positions != nullptr ? p.positions[token] : 0;
  const int64_t any_slot = p.slot_mapping[token];
  const T* const columns = static_cast<const T*>(p.qkv) + token * p.qkv_token_stride;
  T* const q_out = static_cast<T*>(p.q_out) + token * p.q_token_stride + lane * kSize;

  // The unit that is on its way.
  int unit = threadIdx.x / 32;
  int kind = 0, head = 0, steps = 0, stage = 0;
  const auto column_of = [&](const QkvKind& k, int row) {
    return (k.first_vector + row * k.vectors + lane) * kSize;
  };
  const auto load_rows = [&] {
    if (unit >= p.units) return;
    kind = (unit >= p.kinds[kKeys].first_unit) + (unit >= p.kinds[kValues].first_unit);
    const QkvKind& k = p.kinds[kind];
    head = (unit - k.first_unit) * (32 / lanes) + thread / lanes;
    const auto part = part_of(k, head < k.heads);
    steps = k.steps | (part.has_row ? kHasRow : 0);
    const T* const from = columns + column_of(k, head);
#pragma unroll
    for (int i = 0; i < kQkvVectors; ++i) {
      ptx::cp_async_16(ptx::shared_address(&mine.rows[stage][i][thread]), from + i * vector_step,
                       !part.holds(i));
    }
  };
  load_rows();
  ptx::cp_async_commit();
  load_weights<T>(p, weights);
  if (p.positions != nullptr) load_cos_sin(p, position, mine.cos_sin);
  ptx::cp_async_commit();
  __syncthreads();
  const int32_t slot = is_below(any_slot, p.capacity) ? static_cast<int32_t>(any_slot) : -1;

  while (unit < p.units) {
    ptx::cp_async_wait<1>();  // the rows; the group after them is the cosines' or empty
    auto& rows = mine.rows[stage];
    QkvVectors<T> x;
#pragma unroll
    for (int i = 0; i < kQkvVectors; ++i) x[i] = rows[i][thread];
    const int this_kind = kind, this_head = head, this_steps = steps;
    unit += p.warps;
    stage ^= 1;
    load_rows();
    ptx::cp_async_commit();
    ptx::cp_async_commit();

    const QkvKind& k = p.kinds[this_kind];
    const auto part = part_of(k, this_steps & kHasRow);
    if (this_steps & kAddBias) {
      const T* const bias = static_cast<const T*>(p.bias) + column_of(k, this_head);
#pragma unroll
      for (int i = 0; i < kQkvVectors; ++i) {
        if (part.holds(i)) add_bias(bias + i * vector_step, &x[i]);
      }
    }
    if (this_steps & kNormalise) {
      const int elements = kLanes > 0 ? kQkvRowElements<T, kLanes> : k.vectors * kSize;
      normalise<T>(weights[this_kind], elements, p.eps, lane, lanes, x);
    }
    if (this_steps & kTurn) {
      ptx::cp_async_wait<2>();
      __syncwarp();
      if constexpr (kLanes > 0) {
        turn_halves<T>(mine.cos_sin, lane, lanes, x);
      } else {
        turn_any<T>(p, mine.cos_sin, rows, lane, lanes, x);
      }
    }
    if (this_kind == kQueries) {
#pragma unroll
      for (int i = 0; i < kQkvVectors; ++i) {
        if (part.holds(i)) store_pack(q_out + this_head * p.q_head_stride + i * vector_step, x[i]);
      }
    } else if (slot >= 0) {
      write_row<kQuantized, T>(p, p.pages[this_kind - kKeys], slot, this_head, part, x);
    }
  }
  ptx::cp_async_wait<0>();  // nothing may arrive when the block is gone
}

}  // namespace fastinfer::cuda
