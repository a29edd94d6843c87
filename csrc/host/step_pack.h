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
  int64_t cu_seqlens_q;    // int32 [B + 1]
  int64_t seq_lens;        // int32 [B]
  int64_t block_table;     // int32 [B, M]
  int64_t nbytes;
};

StepLayout step_layout(int64_t num_tokens, int64_t num_seqs, int64_t max_blocks,
                       int64_t num_logits);

// One sequence's part in a step: its tokens [start, start + count), with logits for the last
// num_logits of them.
struct StepPart {
  const Sequence* sequence;
  int64_t start;
  int64_t count;
  int64_t num_logits;
};

// Looks up and checks the parts of a step. The four lists run in parallel.
std::vector<StepPart> step_parts(const BlockManager& manager, std::span<const int64_t> seq_ids,
                                 std::span<const int64_t> starts, std::span<const int64_t> counts,
                                 std::span<const int64_t> num_logits);

// Throws unless the parts fit into the layout.
void check_fits(const StepLayout& layout, std::span<const StepPart> parts, int64_t block_size);

// Fills the buffer. Everything has been checked before.
void fill_step(std::byte* buffer, const StepLayout& layout, std::span<const StepPart> parts,
               int64_t block_size);

}  // namespace fastinfer
