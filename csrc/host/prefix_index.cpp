#include "prefix_index.h"

#include <algorithm>
#include <bit>

namespace fastinfer {

PrefixIndex::PrefixIndex(int32_t num_blocks, int32_t block_size, int hash_bits)
    : block_size_(block_size),
      hash_mask_(hash_bits >= 64 ? ~uint64_t{0} : (uint64_t{1} << hash_bits) - 1),
      entries_(num_blocks),
      tokens_(static_cast<size_t>(num_blocks) * block_size),
      buckets_(std::bit_ceil(static_cast<size_t>(num_blocks)), kNone) {}

uint64_t PrefixIndex::hash_of(uint64_t parent, const int64_t* tokens) const {
  // Multiply and fold. Both constants are odd with well mixed bits (the golden ratio's fraction
  // and a large prime); quality only decides the length of the chains.
  uint64_t hash = parent * 0x9E3779B97F4A7C15u + 0xD6E8FEB86659FD93u;
  for (int32_t i = 0; i < block_size_; ++i) {
    hash = (hash ^ static_cast<uint64_t>(tokens[i])) * 0xD6E8FEB86659FD93u;
    hash ^= hash >> 32;
  }
  return hash & hash_mask_;
}

bool PrefixIndex::holds(int32_t block, uint64_t parent, const int64_t* tokens) const {
  return entries_[block].parent == parent &&
         std::equal(tokens, tokens + block_size_, tokens_of(block));
}

int32_t PrefixIndex::find(uint64_t parent, const int64_t* tokens) const {
  const uint64_t hash = hash_of(parent, tokens);
  int32_t block = buckets_[hash & (buckets_.size() - 1)];
  while (block != kNone && !(entries_[block].hash == hash && holds(block, parent, tokens))) {
    block = entries_[block].next;
  }
  return block;
}

uint64_t PrefixIndex::insert(int32_t block, uint64_t parent, const int64_t* tokens) {
  const uint64_t hash = hash_of(parent, tokens);
  std::copy_n(tokens, block_size_, tokens_.data() + static_cast<int64_t>(block) * block_size_);
  entries_[block] = {++last_serial_, parent, hash, bucket(hash)};
  bucket(hash) = block;
  return last_serial_;
}

void PrefixIndex::erase(int32_t block) {
  int32_t* link = &bucket(entries_[block].hash);
  while (*link != block) link = &entries_[*link].next;
  *link = entries_[block].next;
  entries_[block] = Entry{};
}

std::string PrefixIndex::fault() const {
  const auto num_blocks = static_cast<int64_t>(entries_.size());
  int64_t chained = 0;
  for (size_t i = 0; i < buckets_.size(); ++i) {
    for (int32_t block = buckets_[i]; block != kNone; block = entries_[block].next) {
      const std::string name = "block " + std::to_string(block);
      if (++chained > num_blocks) return "the chain of bucket " + std::to_string(i) + " is a ring";
      if (!contains(block)) return name + " is chained but not indexed";
      const uint64_t hash = hash_of(entries_[block].parent, tokens_of(block));
      if (hash != entries_[block].hash) return name + " does not match its hash";
      if ((hash & (buckets_.size() - 1)) != i) return name + " is in the wrong bucket";
      if (find(entries_[block].parent, tokens_of(block)) != block) {
        return name + " has the same parent and tokens as another indexed block";
      }
    }
  }
  const auto indexed = std::count_if(entries_.begin(), entries_.end(),
                                     [](const Entry& e) { return e.serial != kRoot; });
  if (indexed != chained) {
    return std::to_string(indexed) + " blocks are indexed, but " + std::to_string(chained) +
           " can be found";
  }
  return "";
}

}  // namespace fastinfer
