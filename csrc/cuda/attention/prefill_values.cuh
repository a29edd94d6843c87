// Values of e4m3 as the prefill kernel multiplies them: images of shared memory.
//
// wgmma contracts e4m3 operands along their rows only, so the values of a block of keys are
// transposed. An image is one KV head's kN keys times kValueDim columns: for every 16 keys, for
// every column, 16 bytes, which wgmma reads as bricks without a swizzle. Of 16 keys, byte 4 t + 2 h + e
// is key 8 h + 2 t + e, the order in which the accumulator's registers hold the scores. Keys
// beyond a sequence and columns beyond value_dim are zeros.
#pragma once

#include <cstdint>

#include "prefill_params.h"

namespace fastinfer::cuda {

struct ValueImageParams {
  const uint8_t* v;         // [B, Sk, Hk, Dv] or [total_k, Hk, Dv]
  PrefillStrides strides;   // in bytes
  const int32_t* cu_seqlens_k;  // [B + 1], or null: dense
  uint8_t* images;          // [blocks, Hk, kN * kValueDim]
  int32_t num_sequences, num_kv_heads, seqlen_k, value_dim;
  int32_t sequence_blocks;  // of a dense sequence
};

// Byte `which` of each of four words, in their order.
__device__ inline uint32_t gather_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d, int which) {
  const uint32_t pair = which | (which + 4) << 4;
  return __byte_perm(__byte_perm(a, b, pair), __byte_perm(c, d, pair), 0x5410);
}

// Grid: (block of keys, KV head). A thread has 16 keys times 4 columns.
template <int kN, int kValueDim>
__global__ __launch_bounds__(kN* kValueDim / 64) void value_images_kernel(
    const __grid_constant__ ValueImageParams p) {
  constexpr int kQuads = kValueDim / 4;
  const int kv_head = blockIdx.y;
  int sequence, block, first_key = 0, length = p.seqlen_k;
  if (p.cu_seqlens_k == nullptr) {
    sequence = blockIdx.x / p.sequence_blocks;
    block = blockIdx.x - sequence * p.sequence_blocks;
  } else {
    // The last sequence that begins at this block or before it.
    int low = 0, high = p.num_sequences - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      const bool begun = p.cu_seqlens_k[middle] / kN + middle <= static_cast<int>(blockIdx.x);
      (begun ? low : high) = begun ? middle : middle - 1;
    }
    sequence = low;
    first_key = p.cu_seqlens_k[sequence];
    length = p.cu_seqlens_k[sequence + 1] - first_key;
    block = blockIdx.x - (first_key / kN + sequence);
    if (block * kN >= length) return;
  }
  const int column = threadIdx.x % kQuads * 4, chunk = threadIdx.x / kQuads;
  const int key = block * kN + chunk * 16;
  const int64_t outer = p.cu_seqlens_k == nullptr ? sequence * p.strides.outer : 0;
  const uint8_t* from = p.v + outer + (int64_t{first_key} + key) * p.strides.token +
                        kv_head * p.strides.head + column;
  uint32_t words[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    words[i] = 0;
    if (key + i < length && column < p.value_dim) {
      words[i] = *reinterpret_cast<const uint32_t*>(from + i * p.strides.token);
    }
  }
  const int64_t image = int64_t{blockIdx.x} * p.num_kv_heads + kv_head;
  auto* to = reinterpret_cast<uint4*>(p.images + image * (kN * kValueDim)) + chunk * kValueDim +
             column;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    uint32_t bytes[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      bytes[t] = gather_bytes(words[2 * t], words[2 * t + 1], words[8 + 2 * t], words[9 + 2 * t], c);
    }
    to[c] = make_uint4(bytes[0], bytes[1], bytes[2], bytes[3]);
  }
}

}  // namespace fastinfer::cuda
