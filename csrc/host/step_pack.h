// One buffer for everything that a step needs: the layout, and the loops that fill it.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "block_manager.h"

namespace fastinfer {

// Byte offsets of the arrays of a step (T tokens, B sequences, M blocks a sequence, R logits rows),
// all multiples of kAlignment. What each array holds is written in fastinfer/_host.pyi.
struct StepLayout {
  static constexpr int64_t kAlignment = 64;  // a cache line, and more than any kernel's vector load

  int64_t num_tokens, num_seqs, max_blocks, num_logits;
  int64_t input_ids;       // int64 [T]
  int64_t positions;       // int64 [T]
  int64_t slot_mapping;    // int64 [T]
  int64_t logits_indices;  // int64 [R]
  int64_t seeds;           // int64 [R]
  int64_t draw_positions;  // int64 [R]
  int64_t temperature;     // float [R]
  int64_t top_p;           // float [R]
  int64_t min_p;           // float [R]
  int64_t top_k;           // int32 [R]
  int64_t cu_seqlens_q;    // int32 [B + 1]
  int64_t seq_lens;        // int32 [B]
  int64_t block_table;     // int32 [B, M]
  int64_t nbytes;
};

StepLayout step_layout(int64_t num_tokens, int64_t num_seqs, int64_t max_blocks,
                       int64_t num_logits);

// One sequence's part in a step: its tokens [start, start + count), with logits for the last
// num_logits of them, and then `padding` tokens that mean nothing.
struct StepPart {
  const Sequence* sequence;
  int64_t start;
  int64_t count;
  int64_t num_logits;
  int64_t padding;

  int64_t end() const { return start + count + padding; }
};

// Which of the sampling parameters make a difference in a step: a set of these bits.
enum SamplingUse : int { kTemperature = 1, kTopK = 2, kTopP = 4, kMinP = 8 };

// Looks up and checks the parts of a step. The lists run in parallel; `padding` may be empty.
std::vector<StepPart> step_parts(const BlockManager& manager, std::span<const int64_t> seq_ids,
                                 std::span<const int64_t> starts, std::span<const int64_t> counts,
                                 std::span<const int64_t> num_logits,
                                 std::span<const int64_t> padding);

// Throws unless the parts fit into the layout.
void check_fits(const StepLayout& layout, std::span<const StepPart> parts, int64_t block_size);

// Fills the buffer; returns a set of SamplingUse. Everything has been checked before.
int fill_step(std::byte* buffer, const StepLayout& layout, std::span<const StepPart> parts,
              int64_t block_size);

}  // namespace fastinfer
