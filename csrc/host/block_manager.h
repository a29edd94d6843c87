// The blocks of a paged KV pool: who holds which, and which still hold a known prefix.
//
// Every block is in one of three states:
//   used    one or more sequences have it in their block table (reference count > 0);
//   cached  nobody holds it, but the prefix index still knows what it contains;
//   free    nobody holds it and nobody knows its content.
// The unused blocks form one list, reused from its front: the free ones come first, then the
// cached ones, least recently used first. So the free list is the prefix cache.
//
// A sequence's blocks never change once they are full and committed: a prefix hit shares full
// blocks only and leaves at least one token to compute, so nobody writes into a shared block.

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "free_list.h"
#include "prefix_index.h"

namespace fastinfer {

// How a sequence's tokens are drawn. Nothing here depends on it; pack() writes it beside the step.
struct Sampling {
  float temperature = 0.0f;
  float top_p = 1.0f;
  float min_p = 0.0f;
  int32_t top_k = 0;
  int64_t seed = 0;
};

struct Sequence {
  std::vector<int64_t> tokens;
  std::vector<int32_t> blocks;  // the block table
  int64_t num_computed = 0;     // tokens whose keys and values are in their slots
  // The blocks [0, num_indexed) have been offered to the prefix index; `chain` is the serial that
  // the index gives to their content, and thus the parent of the next one.
  int64_t num_indexed = 0;
  uint64_t chain = PrefixIndex::kRoot;
  Sampling sampling;
};

// Throws, naming the operation `op`, when an id occurs twice.
void check_distinct(const char* op, std::span<const int64_t> seq_ids);

class BlockManager {
 public:
  BlockManager(int64_t num_blocks, int64_t block_size, bool enable_prefix_caching, int hash_bits);

  int64_t num_blocks() const { return num_blocks_; }
  int64_t block_size() const { return block_size_; }
  bool enable_prefix_caching() const { return enable_prefix_caching_; }
  int64_t num_free() const { return num_free_; }
  int64_t num_cached() const { return num_cached_; }
  int64_t num_available() const { return num_free_ + num_cached_; }
  int64_t num_used() const { return num_blocks_ - num_available(); }
  int64_t num_sequences() const { return static_cast<int64_t>(sequences_.size()); }

  void add(int64_t seq_id, std::vector<int64_t> tokens);
  void append(int64_t seq_id, int64_t token);
  void set_sampling(int64_t seq_id, double temperature, int64_t top_k, double top_p, double min_p,
                    int64_t seed);
  int64_t match_prefix(int64_t seq_id);
  bool reserve(int64_t seq_id, int64_t num_tokens);
  void commit(int64_t seq_id, int64_t num_computed);
  // The same for many sequences in one call; a step of hundreds would spend its time on calls.
  int64_t reserve_each(std::span<const int64_t> seq_ids, std::span<const int64_t> num_tokens);
  void record(std::span<const int64_t> seq_ids, std::span<const int64_t> num_computed,
              std::span<const int64_t> tokens);
  void release(int64_t seq_id);
  void remove(int64_t seq_id);

  bool contains(int64_t seq_id) const { return sequences_.contains(seq_id); }
  // Throws, naming the operation `op`, when there is no such sequence.
  const Sequence& sequence(int64_t seq_id, const char* op) const;
  int64_t ref_count(int64_t block) const;

  // Throws std::runtime_error saying what is wrong.
  void check_integrity() const;

 private:
  friend struct IntegrityTest;  // breaks things, to see that check_integrity notices

  Sequence& sequence(int64_t seq_id, const char* op);
  bool reserve(Sequence& sequence, int64_t num_tokens);
  void check_computed(const char* op, const Sequence& sequence, int64_t num_computed) const;
  void commit(Sequence& sequence, int64_t num_computed);
  void release_blocks(Sequence& sequence);
  void check_sequence(int64_t seq_id, const Sequence& sequence) const;

  int64_t num_blocks_;
  int64_t block_size_;
  bool enable_prefix_caching_;
  int64_t num_free_;
  int64_t num_cached_ = 0;
  std::vector<int32_t> ref_counts_;  // [num_blocks]
  FreeList unused_;
  PrefixIndex index_;
  std::unordered_map<int64_t, Sequence> sequences_;
};

}  // namespace fastinfer
