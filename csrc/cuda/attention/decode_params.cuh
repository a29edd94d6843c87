// What the decode and the extend kernel are given. Raw pointers only: checks are in
// checks/attention.h, choice in decode.cu.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fastinfer::cuda {

// How keys, or values, are stored.
enum class KvFormat { kBf16, kFp16, kInt8, kFp8 };

// Strides of data in bytes, of scales in elements.
struct DecodeKv {
  const unsigned char* data;  // [num_blocks, Hk, block_size, head_dim]
  const float* scale;         // [num_blocks, Hk, block_size], [Hk] (outer, token: 0), or null
  int64_t outer, head, scale_outer, scale_head;
  int token, scale_token;
  int row_bytes;  // of one token and head: a multiple of 16
};

struct DecodeParams {
  const uint16_t* q;            // [total_q, H, head_dim], bf16 or fp16
  uint16_t* out;                // [total_q, H, value_dim], as q
  float* lse;                   // [H, total_q]
  float* partial_out;           // [partial_rows, H, value_dim]
  float* partial_lse;           // [partial_rows, H]
  const int32_t* plan;          // [plan_rows, 8]
  const int32_t* cu_seqlens_q;  // [B + 1]
  const int32_t* seq_lens;      // [B]
  const int32_t* block_table;   // [B, max_blocks]
  const float* sinks;           // [H] or null
  const int64_t* tree_mask;     // [total_q] or null
  DecodeKv k, v;
  int64_t q_token, q_head, out_token, out_head, lse_head, table_sequence, table_block;
  int num_heads, num_kv_heads, group, head_dim, value_dim;
  int block_size, block_shift;    // block_size == 1 << block_shift, or block_shift < 0
  bool wide;                      // which of the plan's items: wide ones or narrow ones
  int unit_tokens, parts;         // of a unit, at most; units of an item for one KV head
  int window_left, window_right;  // -1: none
  float scale, softcap;
  bool is_bf16;  // q and out
};

// Rows of a tile and its shape: head_dim and value_dim are rounded up to one that exists.
struct DecodeShape {
  int rows;  // 16, 32 or 64
  int head_dim, value_dim;
};

using DecodeLauncher = cudaError_t (*)(const DecodeShape&, const DecodeParams&, int blocks,
                                       int device, cudaStream_t);

// One for each pair of formats, each in a file of its own.
cudaError_t launch_decode_bf16(const DecodeShape&, const DecodeParams&, int blocks, int device,
                               cudaStream_t);
cudaError_t launch_decode_fp16(const DecodeShape&, const DecodeParams&, int blocks, int device,
                               cudaStream_t);
cudaError_t launch_decode_int8(const DecodeShape&, const DecodeParams&, int blocks, int device,
                               cudaStream_t);
cudaError_t launch_decode_fp8(const DecodeShape&, const DecodeParams&, int blocks, int device,
                              cudaStream_t);

}  // namespace fastinfer::cuda
