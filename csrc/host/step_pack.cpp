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
  return (part.end() + block_size - 1) / block_size;
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
  place(layout.seeds, num_logits * kInt64);
  place(layout.draw_positions, num_logits * kInt64);
  for (int64_t* field : {&layout.temperature, &layout.top_p, &layout.min_p, &layout.top_k}) {
    place(*field, num_logits * kInt32);
  }
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
                                 std::span<const int64_t> num_logits,
                                 std::span<const int64_t> padding) {
  check_length("starts", starts.size(), seq_ids.size());
  check_length("counts", counts.size(), seq_ids.size());
  check_length("num_logits", num_logits.size(), seq_ids.size());
  if (!padding.empty()) check_length("padding", padding.size(), seq_ids.size());

  std::vector<StepPart> parts(seq_ids.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    const Sequence& seq = manager.sequence(seq_ids[i], kPack);
    auto argument = [i](std::string name) {
      return name.append("[").append(std::to_string(i)).append("]");
    };
    const int64_t slots = static_cast<int64_t>(seq.blocks.size()) * manager.block_size();
    const int64_t known = std::min(static_cast<int64_t>(seq.tokens.size()), slots);
    const int64_t pads = padding.empty() ? 0 : padding[i];
    if (known == 0) {
      refuse(kPack, argument("seq_ids"), "a sequence with reserved blocks", seq_ids[i]);
    }
    if (pads < 0) refuse(kPack, argument("padding"), ">= 0", pads);
    const bool only_padding = pads > 0 && counts[i] == 0;  // it may begin behind the known tokens
    const int64_t starts_end = only_padding ? slots : known;
    if (starts[i] < 0 || starts[i] >= starts_end) {
      refuse(kPack, argument("starts"),
             (only_padding ? "a token that has a slot, 0.."
                           : "a token that is known and has a slot, 0..") +
                 std::to_string(starts_end - 1),
             starts[i]);
    }
    if (!only_padding && (counts[i] < 1 || counts[i] > known - starts[i])) {
      refuse(kPack, argument("counts"),
             "1.." + std::to_string(known - starts[i]) + " (tokens that are known and have a slot)",
             counts[i]);
    }
    if (num_logits[i] < 0 || num_logits[i] > counts[i]) {
      refuse(kPack, argument("num_logits"), "0.." + std::to_string(counts[i]), num_logits[i]);
    }
    if (pads > slots - starts[i] - counts[i]) {
      refuse(kPack, argument("padding"),
             "tokens that have a slot, 0.." + std::to_string(slots - starts[i] - counts[i]), pads);
    }
    parts[i] = {&seq, starts[i], counts[i], num_logits[i], pads};
  }

  check_distinct(kPack, seq_ids);
  return parts;
}

void check_fits(const StepLayout& layout, std::span<const StepPart> parts, int64_t block_size) {
  int64_t tokens = 0, logits = 0, blocks = 0;
  for (const StepPart& part : parts) {
    tokens += part.count + part.padding;
    logits += part.num_logits;
    blocks = std::max(blocks, num_blocks(part, block_size));
  }
  check_capacity("num_tokens", layout.num_tokens, tokens);
  // Tokens that fill up the step belong to a sequence too.
  const int64_t filler = layout.num_tokens > tokens ? 1 : 0;
  check_capacity("num_seqs", layout.num_seqs, static_cast<int64_t>(parts.size()) + filler);
  check_capacity("num_logits", layout.num_logits, logits);
  check_capacity("max_blocks", layout.max_blocks, blocks);
}

int fill_step(std::byte* buffer, const StepLayout& layout, std::span<const StepPart> parts,
              int64_t block_size) {
  auto* input_ids = reinterpret_cast<int64_t*>(buffer + layout.input_ids);
  auto* positions = reinterpret_cast<int64_t*>(buffer + layout.positions);
  auto* slot_mapping = reinterpret_cast<int64_t*>(buffer + layout.slot_mapping);
  auto* logits_indices = reinterpret_cast<int64_t*>(buffer + layout.logits_indices);
  auto* cu_seqlens_q = reinterpret_cast<int32_t*>(buffer + layout.cu_seqlens_q);
  auto* seq_lens = reinterpret_cast<int32_t*>(buffer + layout.seq_lens);
  auto* block_table = reinterpret_cast<int32_t*>(buffer + layout.block_table);

  auto* seeds = reinterpret_cast<int64_t*>(buffer + layout.seeds);
  auto* draw_positions = reinterpret_cast<int64_t*>(buffer + layout.draw_positions);
  auto* temperature = reinterpret_cast<float*>(buffer + layout.temperature);
  auto* top_p = reinterpret_cast<float*>(buffer + layout.top_p);
  auto* min_p = reinterpret_cast<float*>(buffer + layout.min_p);
  auto* top_k = reinterpret_cast<int32_t*>(buffer + layout.top_k);

  int64_t row = 0, logit = 0;
  int use = 0;
  auto put_sampling = [&](const Sampling& sampling, int64_t position) {
    seeds[logit] = sampling.seed;
    draw_positions[logit] = position;
    temperature[logit] = sampling.temperature;
    top_p[logit] = sampling.top_p;
    min_p[logit] = sampling.min_p;
    top_k[logit] = sampling.top_k;
    if (sampling.temperature > 0) {
      use |= kTemperature | (sampling.top_k > 0 ? kTopK : 0) | (sampling.top_p < 1 ? kTopP : 0) |
             (sampling.min_p > 0 ? kMinP : 0);
    }
  };
  for (const StepPart& part : parts) {
    const int64_t* tokens = part.sequence->tokens.data();
    const int32_t* blocks = part.sequence->blocks.data();
    const int64_t known_end = part.start + part.count, end = part.end();

    *cu_seqlens_q++ = static_cast<int32_t>(row);
    *seq_lens++ = static_cast<int32_t>(end);
    std::copy_n(blocks, num_blocks(part, block_size), block_table);
    block_table += layout.max_blocks;

    std::copy_n(tokens + part.start, part.count, input_ids + row);
    std::fill_n(input_ids + row + part.count, part.padding, 0);
    std::iota(positions + row, positions + row + part.count + part.padding, part.start);
    // Block by block, so that the division is outside the loop over tokens.
    for (int64_t at = part.start; at < end;) {
      const int64_t block = at / block_size;
      const int64_t stop = std::min(end, (block + 1) * block_size);
      const int64_t first_slot = blocks[block] * block_size + at % block_size;
      std::iota(slot_mapping + row, slot_mapping + row + (stop - at), first_slot);
      row += stop - at;
      at = stop;
    }
    // The token that a row of logits gives stands right behind the row's own.
    for (int64_t left = part.num_logits; left > 0; --left, ++logit) {
      logits_indices[logit] = row - part.padding - left;
      put_sampling(part.sequence->sampling, known_end - left + 1);
    }
  }

  // Filler tokens have no slot and no keys: sequences of length 0 take one each, the last one the
  // rest. So a step of single tokens stays one when it is filled up.
  const int64_t padding_seqs = layout.num_seqs - static_cast<int64_t>(parts.size());
  for (int64_t i = 0; i < padding_seqs; ++i) {
    *cu_seqlens_q++ = static_cast<int32_t>(std::min(row + i, layout.num_tokens));
  }
  *cu_seqlens_q = static_cast<int32_t>(layout.num_tokens);
  std::fill_n(seq_lens, padding_seqs, 0);
  std::fill_n(input_ids + row, layout.num_tokens - row, 0);
  std::fill_n(positions + row, layout.num_tokens - row, 0);
  std::fill_n(slot_mapping + row, layout.num_tokens - row, -1);
  std::fill_n(logits_indices + logit, layout.num_logits - logit, 0);
  for (; logit < layout.num_logits; ++logit) put_sampling(Sampling{}, 0);
  return use;
}

}  // namespace fastinfer
