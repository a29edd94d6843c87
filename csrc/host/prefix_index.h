// Finds the block that holds a given run of tokens behind a given prefix.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fastinfer {

// Each indexed block gets a serial number, unique for all time. A block's key is the serial of the
// block before it (kRoot for the first) and its own tokens, so a key names the whole prefix. Since
// serials are never reused, a block whose parent was evicted can no longer be reached, whatever
// its parent's memory holds by then; it ages out of the cache.
//
// A hash only leads to the candidates: parent and tokens are compared exactly before a hit.
// The table is an array of buckets whose chains run through the blocks' entries: no allocation
// after construction.
class PrefixIndex {
 public:
  static constexpr int32_t kNone = -1;
  static constexpr uint64_t kRoot = 0;

  // Only the lowest `hash_bits` bits of the hash are kept (tests force collisions with few).
  PrefixIndex(int32_t num_blocks, int32_t block_size, int hash_bits);

  // The block holding `tokens` (block_size of them) behind `parent`, or kNone.
  int32_t find(uint64_t parent, const int64_t* tokens) const;

  // Indexes a block that is not indexed yet, under a key that is not present; returns its serial.
  uint64_t insert(int32_t block, uint64_t parent, const int64_t* tokens);

  void erase(int32_t block);

  bool contains(int32_t block) const { return entries_[block].serial != kRoot; }
  uint64_t serial(int32_t block) const { return entries_[block].serial; }

  // Describes the first inconsistency, or returns an empty string.
  std::string fault() const;

 private:
  friend struct IntegrityTest;

  struct Entry {
    uint64_t serial = kRoot;  // kRoot: not indexed
    uint64_t parent = kRoot;
    uint64_t hash = 0;
    int32_t next = kNone;  // in the bucket's chain
  };

  uint64_t hash_of(uint64_t parent, const int64_t* tokens) const;
  bool holds(int32_t block, uint64_t parent, const int64_t* tokens) const;
  int32_t& bucket(uint64_t hash) { return buckets_[hash & (buckets_.size() - 1)]; }
  const int64_t* tokens_of(int32_t block) const {
    return tokens_.data() + static_cast<int64_t>(block) * block_size_;
  }

  int32_t block_size_;
  uint64_t hash_mask_;
  uint64_t last_serial_ = kRoot;
  std::vector<Entry> entries_;    // [num_blocks]
  std::vector<int64_t> tokens_;   // [num_blocks, block_size]
  std::vector<int32_t> buckets_;  // a power of two of them; first block of each chain
};

}  // namespace fastinfer
