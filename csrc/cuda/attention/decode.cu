// Which problems the decode and the extend kernel take, and their launch.
#include <bit>

#include "../runtime.h"
#include "decode.h"
#include "decode_params.cuh"
#include "plan.h"

namespace fastinfer::cuda {
namespace {

constexpr int64_t kChunkBytes = 16;  // of one copy to shared memory
constexpr int64_t kMaxDim = 256;
constexpr int64_t kMaxTokenStride = int64_t{1} << 29;  // elements; in bytes it fits 32 bits
constexpr int64_t kMaxWindow = int64_t{1} << 29;  // beyond any length; sums with it fit 32 bits
constexpr int64_t kMostRows = 64;                 // of a unit
constexpr int kWideValueRows = 32;                // likewise, if values have more than 128 columns

int64_t element_bytes(ScalarType dtype) {
  return dtype == ScalarType::BFloat16 || dtype == ScalarType::Half ? 2 : 1;
}

bool pages_supported(const AttentionKv& kv, int64_t dim) {
  const int64_t bytes = element_bytes(kv.dtype);
  bool ok = reinterpret_cast<uintptr_t>(kv.data) % kChunkBytes == 0 &&
            dim * bytes % kChunkBytes == 0 && kv.strides.token <= kMaxTokenStride &&
            kv.scale_strides.token <= kMaxTokenStride;
  for (const int64_t stride : {kv.strides.outer, kv.strides.token, kv.strides.head}) {
    ok = ok && stride * bytes % kChunkBytes == 0;
  }
  return ok;
}

DecodeKv decode_kv(const AttentionKv& kv, int64_t dim) {
  const int64_t bytes = element_bytes(kv.dtype);
  return {static_cast<const unsigned char*>(kv.data),
          kv.scale,
          kv.strides.outer * bytes,
          kv.strides.head * bytes,
          kv.scale_strides.outer,
          kv.scale_strides.head,
          static_cast<int>(kv.strides.token * bytes),
          static_cast<int>(kv.scale_strides.token),
          static_cast<int>(dim * bytes)};
}

// The smallest tile that holds the problem. An item's rows are halved where 64 of them would not
// fit into registers beside wide values.
DecodeShape choose_shape(const AttentionProblem& p, int64_t item_rows) {
  const int rows = static_cast<int>(item_rows);
  if (p.head_dim <= 64 && p.value_dim <= 64) return {rows, 64, 64};
  if (p.head_dim <= 128 && p.value_dim <= 128) return {rows, 128, 128};
  if (p.head_dim <= 192 && p.value_dim <= 128) return {rows, 192, 128};
  const bool halved =
      element_bytes(p.k.dtype) == 1 && p.num_heads / p.num_kv_heads <= kWideValueRows;
  return {halved ? std::min(rows, kWideValueRows) : rows, 256, 256};
}

DecodeLauncher choose_launcher(const AttentionProblem& p) {
  if (p.k.dtype != p.v.dtype) return nullptr;
  switch (p.k.dtype) {
    case ScalarType::BFloat16: return &launch_decode_bf16;
    case ScalarType::Half: return &launch_decode_fp16;
    case ScalarType::Char: return &launch_decode_int8;
    case ScalarType::Float8_e4m3fn: return &launch_decode_fp8;
    default: return nullptr;
  }
}

}  // namespace

bool decode_supports(const AttentionProblem& p) {
  return p.layout == AttentionLayout::kPaged &&
         (p.dtype == ScalarType::BFloat16 || p.dtype == ScalarType::Half) &&
         p.head_dim <= kMaxDim && p.value_dim <= kMaxDim && choose_launcher(p) != nullptr &&
         pages_supported(p.k, p.head_dim) && pages_supported(p.v, p.value_dim);
}

// Over 16-bit pages the prefill kernel is faster, and so is the portable one.
bool decode_supports_wide(const AttentionProblem& p) {
  return decode_supports(p) && element_bytes(p.k.dtype) == 1 &&
         p.num_heads / p.num_kv_heads <= kMostRows;
}

void run_decode(const AttentionProblem& p, const int32_t* plan, int64_t plan_rows, float* workspace,
                bool wide, int32_t device_index, cudaStream_t stream) {
  const int64_t group = p.num_heads / p.num_kv_heads;
  const AttentionTiles tiles = choose_attention_tiles(p.max_seqlen_q, group, p.batch_invariant);
  const int64_t partial_rows = plan_partial_rows(p.total_q, p.max_seqlen_k);
  DecodeParams params{};
  params.q = static_cast<const uint16_t*>(p.q);
  params.out = static_cast<uint16_t*>(p.out);
  params.lse = p.lse;
  params.partial_out = workspace;
  params.partial_lse =
      workspace == nullptr ? nullptr : workspace + partial_rows * p.num_heads * p.value_dim;
  params.plan = plan;
  params.cu_seqlens_q = p.cu_seqlens_q;
  params.seq_lens = p.seq_lens;
  params.block_table = p.block_table;
  params.sinks = p.sinks;
  params.tree_mask = p.tree_mask;
  params.k = decode_kv(p.k, p.head_dim);
  params.v = decode_kv(p.v, p.value_dim);
  params.q_token = p.q_strides.token;
  params.q_head = p.q_strides.head;
  params.out_token = p.out_strides.token;
  params.out_head = p.out_strides.head;
  params.lse_head = p.lse_strides.head;
  params.table_sequence = p.block_table_strides[0];
  params.table_block = p.block_table_strides[1];
  params.num_heads = static_cast<int>(p.num_heads);
  params.num_kv_heads = static_cast<int>(p.num_kv_heads);
  params.group = static_cast<int>(group);
  params.head_dim = static_cast<int>(p.head_dim);
  params.value_dim = static_cast<int>(p.value_dim);
  params.block_size = static_cast<int>(p.block_size);
  const auto block_size = static_cast<unsigned>(p.block_size);
  params.block_shift = std::has_single_bit(block_size) ? std::countr_zero(block_size) : -1;
  const int64_t item_tokens = wide ? tiles.wide : tiles.narrow;
  const DecodeShape shape = choose_shape(p, wide ? kMostRows : tiles.narrow_rows);
  const int64_t unit_tokens = std::max<int64_t>(1, shape.rows / group);
  const int64_t parts = (item_tokens + unit_tokens - 1) / unit_tokens;
  params.wide = wide;
  params.unit_tokens = static_cast<int>(unit_tokens);
  params.parts = static_cast<int>(parts);
  params.window_left = static_cast<int>(std::min(p.window_left, kMaxWindow));
  params.window_right = static_cast<int>(std::min(p.window_right, kMaxWindow));
  params.scale = p.scale;
  params.softcap = p.softcap;
  params.is_bf16 = p.dtype == ScalarType::BFloat16;

  // Never more blocks than there can be units.
  const int64_t most_units = (plan_rows - kPlanHeaderRows) * parts * p.num_kv_heads;
  const int64_t blocks = std::min<int64_t>(num_sms(p.op, device_index), most_units);
  if (blocks <= 0) return;
  FI_CUDA_CHECK(choose_launcher(p)(shape, params, static_cast<int>(blocks), device_index, stream),
                p.op);
}

}  // namespace fastinfer::cuda
