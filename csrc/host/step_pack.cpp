#include "step_pack.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>

#include "errors.h"

namespace fastinfer {
namespace {

constexpr const char* kPack = "BlockManager.pack";

void check_size(const std::string& argument, int64_t size) {
  // cu_seqlens_q and seq_lens are int32, and four such factors never overflow the byte offsets.
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  if (size < 0 || size > kMax) {
    refuse("step_layout", argument, "0.." + std::to_string(kMax), size);
  }
}

void check_length(const std::string& argument, size_t size, size_t expected) {
  if (size != expected) {
    refuse(kPack, argument, "one entry for each of the " + std::to_string(expected) + " seq_ids",
           static_cast<long long>(size));
  }
}

void check_capacity(const std::string& what, int64_t capacity, int64_t needed) {
  if (needed > capacity) {
    refuse(kPack, "layout." + what, "at least " + std::to_string(needed), capacity);
  }
}

int64_t num_blocks(const StepPart& part, int64_t block_size) {
  return (part.start + part.count + block_size - 1) / block_size;
}

}  // namespace

StepLayout step_layout(int64_t num_tokens, int64_t num_seqs, int64_t max_blocks,
                       int64_t num_logits) {
  check_size("num_tokens", num_tokens);
  check_size("num_seqs", num_seqs);
  check_size("max_blocks", max_blocks);
  check_size("num_logits", num_logits);

  StepLayout layout{};
  layout.num_tokens = num_tokens;
  layout.num_seqs = num_seqs;
  layout.max_blocks = max_blocks;
  layout.num_logits = num_logits;
  int64_t end = 0;
  auto place = [&end](int64_t& offset, int64_t bytes) {
    offset = end;
    constexpr int64_t kMask = StepLayout::kAlignment - 1;
    if (bytes > std::numeric_limits<int64_t>::max() - kMask - end) {
      refuse("step_layout", "max_blocks", "a table of fewer than 2^63 bytes", "more");
    }
    end = (end + bytes + kMask) & ~kMask;
  };
  constexpr int64_t kInt64 = sizeof(int64_t), kInt32 = sizeof(int32_t);
  place(layout.input_ids, num_tokens * kInt64);
  place(layout.positions, num_tokens * kInt64);
  place(layout.slot_mapping, num_tokens * kInt64);
  place(layout.logits_indices, num_logits * kInt64);
  place(layout.cu_seqlens_q, (num_seqs + 1) * kInt32);
  place(layout.seq_lens, num_seqs * kInt32);
  if (max_blocks > 0 && num_seqs > std::numeric_limits<int64_t>::max() / kInt32 / max_blocks) {
    refuse("step_layout", "max_blocks", "a table of fewer than 2^63 bytes", max_blocks);
  }
  place(layout.block_table, num_seqs * max_blocks * kInt32);
  layout.nbytes = end;
  return layout;
}

std::vector<StepPart> step_parts(const BlockManager& manager, std::span<const int64_t> seq_ids,
                                 std::span<const int64_t> starts, std::span<const int64_t> counts,
                                 std::span<const int64_t> num_logits) {
  check_length("starts", starts.size(), seq_ids.size());
  check_length("counts", counts.size(), seq_ids.size());
  check_length("num_logits", num_logits.size(), seq_ids.size());

  std::vector<StepPart> parts(seq_ids.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    const Sequence& seq = manager.sequence(seq_ids[i], kPack);
    auto argument = [i](std::string name) {
      return name.append("[").append(std::to_string(i)).append("]");
    };
    const int64_t known = std::min(static_cast<int64_t>(seq.tokens.size()),
                                   static_cast<int64_t>(seq.blocks.size()) * manager.block_size());
    if (known == 0) {
      refuse(kPack, argument("seq_ids"), "a sequence with reserved blocks", seq_ids[i]);
    }
    if (starts[i] < 0 || starts[i] >= known) {
      refuse(kPack, argument("starts"),
             "a token that is known and has a slot, 0.." + std::to_string(known - 1), starts[i]);
    }
    if (counts[i] < 1 || counts[i] > known - starts[i]) {
      refuse(kPack, argument("counts"),
             "1.." + std::to_string(known - starts[i]) + " (tokens that are known and have a slot)",
             counts[i]);
    }
    if (num_logits[i] < 0 || num_logits[i] > counts[i]) {
      refuse(kPack, argument("num_logits"), "0.." + std::to_string(counts[i]), num_logits[i]);
    }
    parts[i] = {&seq, starts[i], counts[i], num_logits[i]};
  }

  std::vector<int64_t> sorted(seq_ids.begin(), seq_ids.end());
  std::sort(sorted.begin(), sorted.end());
  if (auto twice = std::adjacent_find(sorted.begin(), sorted.end()); twice != sorted.end()) {
    refuse(kPack, "seq_ids", "each sequence once", std::to_string(*twice) + " twice");
  }
  return parts;
}

void check_fits(const StepLayout& layout, std::span<const StepPart> parts, int64_t block_size) {
  int64_t tokens = 0, logits = 0, blocks = 0;
  for (const StepPart& part : parts) {
    tokens += part.count;
    logits += part.num_logits;
    blocks = std::max(blocks, num_blocks(part, block_size));
  }
  check_capacity("num_seqs", layout.num_seqs, static_cast<int64_t>(parts.size()));
  check_capacity("num_tokens", layout.num_tokens, tokens);
  check_capacity("num_logits", layout.num_logits, logits);
  check_capacity("max_blocks", layout.max_blocks, blocks);
}

void fill_step(std::byte* buffer, const StepLayout& layout, std::span<const StepPart> parts,
               int64_t block_size) {
  auto* input_ids = reinterpret_cast<int64_t*>(buffer + layout.input_ids);
  auto* positions = reinterpret_cast<int64_t*>(buffer + layout.positions);
  auto* slot_mapping = reinterpret_cast<int64_t*>(buffer + layout.slot_mapping);
  auto* logits_indices = reinterpret_cast<int64_t*>(buffer + layout.logits_indices);
  auto* cu_seqlens_q = reinterpret_cast<int32_t*>(buffer + layout.cu_seqlens_q);
  auto* seq_lens = reinterpret_cast<int32_t*>(buffer + layout.seq_lens);
  auto* block_table = reinterpret_cast<int32_t*>(buffer + layout.block_table);

  int64_t row = 0, logit = 0;
  for (const StepPart& part : parts) {
    const int64_t* tokens = part.sequence->tokens.data();
    const int32_t* blocks = part.sequence->blocks.data();
    const int64_t end = part.start + part.count;

    *cu_seqlens_q++ = static_cast<int32_t>(row);
    *seq_lens++ = static_cast<int32_t>(end);
    std::copy_n(blocks, num_blocks(part, block_size), block_table);
    block_table += layout.max_blocks;

    std::copy(tokens + part.start, tokens + end, input_ids + row);
    std::iota(positions + row, positions + row + part.count, part.start);
    // Block by block, so that the division is outside the loop over tokens.
    for (int64_t at = part.start; at < end;) {
      const int64_t block = at / block_size;
      const int64_t stop = std::min(end, (block + 1) * block_size);
      const int64_t first_slot = blocks[block] * block_size + at % block_size;
      std::iota(slot_mapping + row, slot_mapping + row + (stop - at), first_slot);
      row += stop - at;
      at = stop;
    }
    std::iota(logits_indices + logit, logits_indices + logit + part.num_logits,
              row - part.num_logits);
    logit += part.num_logits;
  }

  const int64_t padding_seqs = layout.num_seqs - static_cast<int64_t>(parts.size());
  std::fill_n(cu_seqlens_q, padding_seqs + 1, static_cast<int32_t>(row));
  std::fill_n(seq_lens, padding_seqs, 0);
  std::fill_n(input_ids + row, layout.num_tokens - row, 0);
  std::fill_n(positions + row, layout.num_tokens - row, 0);
  std::fill_n(slot_mapping + row, layout.num_tokens - row, -1);
  std::fill_n(logits_indices + logit, layout.num_logits - logit, 0);
}

}  // namespace fastinfer
