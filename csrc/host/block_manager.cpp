#include "block_manager.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

#include "errors.h"

namespace fastinfer {
namespace {

// Checked before any member is built from them.
int64_t checked_num_blocks(int64_t num_blocks) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max() - 1;  // ids are int32, plus the head
  if (num_blocks < 1 || num_blocks > kMax) {
    refuse("BlockManager", "num_blocks", "1.." + std::to_string(kMax), num_blocks);
  }
  return num_blocks;
}

int64_t checked_block_size(int64_t block_size) {
  if (block_size < 8 || block_size > 512 || block_size % 8 != 0) {
    refuse("BlockManager", "block_size", "a multiple of 8 in 8..512", block_size);
  }
  return block_size;
}

int checked_hash_bits(int hash_bits) {
  if (hash_bits < 0 || hash_bits > 64) refuse("BlockManager", "hash_bits", "0..64", hash_bits);
  return hash_bits;
}

int64_t ceil_div(int64_t a, int64_t b) {
  return a / b + (a % b != 0);
}

void check_length(const char* op, const char* argument, size_t size, size_t expected) {
  if (size != expected) {
    refuse(op, argument, "one entry for each of the " + std::to_string(expected) + " seq_ids",
           static_cast<long long>(size));
  }
}

[[noreturn]] void broken(const std::string& what) {
  throw std::runtime_error("BlockManager.check_integrity: " + what);
}

}  // namespace

void check_distinct(const char* op, std::span<const int64_t> seq_ids) {
  std::vector<int64_t> sorted(seq_ids.begin(), seq_ids.end());
  std::sort(sorted.begin(), sorted.end());
  if (auto twice = std::adjacent_find(sorted.begin(), sorted.end()); twice != sorted.end()) {
    refuse(op, "seq_ids", "each sequence once", std::to_string(*twice) + " twice");
  }
}

BlockManager::BlockManager(int64_t num_blocks, int64_t block_size, bool enable_prefix_caching,
                           int hash_bits)
    : num_blocks_(checked_num_blocks(num_blocks)),
      block_size_(checked_block_size(block_size)),
      enable_prefix_caching_(enable_prefix_caching),
      num_free_(num_blocks),
      ref_counts_(num_blocks, 0),
      unused_(static_cast<int32_t>(num_blocks)),
      // Without prefix caching nothing is ever indexed, and the index takes no memory to speak of.
      index_(static_cast<int32_t>(enable_prefix_caching ? num_blocks : 0),
             static_cast<int32_t>(block_size), checked_hash_bits(hash_bits)) {
  for (int32_t block = 0; block < num_blocks; ++block) unused_.push_back(block);
}

const Sequence& BlockManager::sequence(int64_t seq_id, const char* op) const {
  auto found = sequences_.find(seq_id);
  if (found == sequences_.end()) refuse(op, "seq_id", "a sequence that was added", seq_id);
  return found->second;
}

Sequence& BlockManager::sequence(int64_t seq_id, const char* op) {
  return const_cast<Sequence&>(std::as_const(*this).sequence(seq_id, op));
}

int64_t BlockManager::ref_count(int64_t block) const {
  if (block < 0 || block >= num_blocks_) {
    refuse("BlockManager.ref_count", "block", "0.." + std::to_string(num_blocks_ - 1), block);
  }
  return ref_counts_[block];
}

void BlockManager::add(int64_t seq_id, std::vector<int64_t> tokens) {
  const char* const op = "BlockManager.add";
  if (contains(seq_id)) refuse(op, "seq_id", "an id that is not in use", seq_id);
  if (tokens.empty()) refuse(op, "tokens", "at least one token", "none");
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0) {
      refuse(op, "tokens[" + std::to_string(i) + "]", "a token id >= 0", tokens[i]);
    }
  }
  sequences_[seq_id].tokens = std::move(tokens);
}

void BlockManager::append(int64_t seq_id, int64_t token) {
  const char* const op = "BlockManager.append";
  Sequence& seq = sequence(seq_id, op);
  if (token < 0) refuse(op, "token", "a token id >= 0", token);
  seq.tokens.push_back(token);
}

void BlockManager::set_sampling(int64_t seq_id, double temperature, int64_t top_k, double top_p,
                                double min_p, int64_t seed) {
  const char* const op = "BlockManager.set_sampling";
  Sequence& seq = sequence(seq_id, op);
  if (!(temperature >= 0.0)) {
    refuse(op, "temperature", ">= 0", std::to_string(temperature));
  }
  if (!(top_p > 0.0)) refuse(op, "top_p", "> 0", std::to_string(top_p));
  if (!(min_p >= 0.0 && min_p <= 1.0)) refuse(op, "min_p", "in [0, 1]", std::to_string(min_p));
  // What float rounds to infinity or to zero is still a temperature and a top_p.
  using Float = std::numeric_limits<float>;
  constexpr int64_t kMaxTopK = std::numeric_limits<int32_t>::max();
  seq.sampling = {.temperature = static_cast<float>(std::min<double>(temperature, Float::max())),
                  .top_p = std::max(static_cast<float>(std::min(top_p, 1.0)), Float::min()),
                  .min_p = static_cast<float>(min_p),
                  .top_k = static_cast<int32_t>(std::clamp<int64_t>(top_k, 0, kMaxTopK)),
                  .seed = seed};
}

int64_t BlockManager::match_prefix(int64_t seq_id) {
  const char* const op = "BlockManager.match_prefix";
  Sequence& seq = sequence(seq_id, op);
  if (!seq.blocks.empty()) {
    refuse(op, "seq_id", "a sequence without blocks",
           "sequence " + std::to_string(seq_id) + " with " + std::to_string(seq.blocks.size()));
  }
  if (!enable_prefix_caching_) return 0;

  // The last token is never matched: its hidden state is needed to predict the next one.
  const int64_t limit = (static_cast<int64_t>(seq.tokens.size()) - 1) / block_size_;
  seq.blocks.reserve(limit);
  while (static_cast<int64_t>(seq.blocks.size()) < limit) {
    const int64_t first_token = static_cast<int64_t>(seq.blocks.size()) * block_size_;
    const int32_t block = index_.find(seq.chain, seq.tokens.data() + first_token);
    if (block == PrefixIndex::kNone) break;
    if (ref_counts_[block]++ == 0) {
      unused_.remove(block);
      --num_cached_;
    }
    seq.blocks.push_back(block);
    seq.chain = index_.serial(block);
  }
  seq.num_indexed = static_cast<int64_t>(seq.blocks.size());
  seq.num_computed = seq.num_indexed * block_size_;
  return seq.num_computed;
}

bool BlockManager::reserve(int64_t seq_id, int64_t num_tokens) {
  const char* const op = "BlockManager.reserve";
  Sequence& seq = sequence(seq_id, op);
  if (num_tokens < 0) refuse(op, "num_tokens", ">= 0", num_tokens);
  return reserve(seq, num_tokens);
}

int64_t BlockManager::reserve_each(std::span<const int64_t> seq_ids,
                                   std::span<const int64_t> num_tokens) {
  const char* const op = "BlockManager.reserve_each";
  check_length(op, "num_tokens", num_tokens.size(), seq_ids.size());
  std::vector<Sequence*> sequences;
  sequences.reserve(seq_ids.size());
  for (size_t i = 0; i < seq_ids.size(); ++i) {
    sequences.push_back(&sequence(seq_ids[i], op));
    if (num_tokens[i] < 0) refuse(op, "num_tokens", ">= 0", num_tokens[i]);
  }
  size_t done = 0;
  while (done < sequences.size() && reserve(*sequences[done], num_tokens[done])) ++done;
  return static_cast<int64_t>(done);
}

bool BlockManager::reserve(Sequence& seq, int64_t num_tokens) {
  const int64_t wanted = ceil_div(num_tokens, block_size_);
  const int64_t missing = wanted - static_cast<int64_t>(seq.blocks.size());
  if (missing <= 0) return true;
  if (missing > num_available()) return false;

  seq.blocks.reserve(wanted);  // the only thing here that can throw: before any change
  for (int64_t i = 0; i < missing; ++i) {
    const int32_t block = unused_.front();
    unused_.remove(block);
    if (enable_prefix_caching_ && index_.contains(block)) {
      index_.erase(block);
      --num_cached_;
    } else {
      --num_free_;
    }
    ref_counts_[block] = 1;
    seq.blocks.push_back(block);
  }
  return true;
}

void BlockManager::commit(int64_t seq_id, int64_t num_computed) {
  const char* const op = "BlockManager.commit";
  Sequence& seq = sequence(seq_id, op);
  check_computed(op, seq, num_computed);
  commit(seq, num_computed);
}

void BlockManager::record(std::span<const int64_t> seq_ids, std::span<const int64_t> num_computed,
                          std::span<const int64_t> tokens) {
  const char* const op = "BlockManager.record";
  check_length(op, "num_computed", num_computed.size(), seq_ids.size());
  check_length(op, "tokens", tokens.size(), seq_ids.size());
  std::vector<Sequence*> sequences;
  sequences.reserve(seq_ids.size());
  for (size_t i = 0; i < seq_ids.size(); ++i) {
    sequences.push_back(&sequence(seq_ids[i], op));
    check_computed(op, *sequences.back(), num_computed[i]);
  }
  check_distinct(op, seq_ids);
  for (size_t i = 0; i < sequences.size(); ++i) {
    commit(*sequences[i], num_computed[i]);
    if (tokens[i] >= 0) sequences[i]->tokens.push_back(tokens[i]);
  }
}

void BlockManager::check_computed(const char* op, const Sequence& seq, int64_t num_computed) const {
  const int64_t limit = std::min(static_cast<int64_t>(seq.tokens.size()),
                                 static_cast<int64_t>(seq.blocks.size()) * block_size_);
  if (num_computed < seq.num_computed || num_computed > limit) {
    refuse(op, "num_computed",
           std::to_string(seq.num_computed) + ".." + std::to_string(limit) +
               " (computed so far .. known tokens that have a slot)",
           num_computed);
  }
}

void BlockManager::commit(Sequence& seq, int64_t num_computed) {
  seq.num_computed = num_computed;
  if (!enable_prefix_caching_) return;

  for (; (seq.num_indexed + 1) * block_size_ <= num_computed; ++seq.num_indexed) {
    const int64_t* tokens = seq.tokens.data() + seq.num_indexed * block_size_;
    const int32_t twin = index_.find(seq.chain, tokens);
    // The same content may have been computed twice, by sequences that ran side by side. The
    // first stays in the index; ours stays private, and what follows it continues the first's
    // chain.
    seq.chain = twin == PrefixIndex::kNone
                    ? index_.insert(seq.blocks[seq.num_indexed], seq.chain, tokens)
                    : index_.serial(twin);
  }
}

void BlockManager::release(int64_t seq_id) {
  release_blocks(sequence(seq_id, "BlockManager.release"));
}

void BlockManager::remove(int64_t seq_id) {
  release_blocks(sequence(seq_id, "BlockManager.remove"));
  sequences_.erase(seq_id);
}

void BlockManager::release_blocks(Sequence& seq) {
  // The tail goes first, so that it is evicted first: a prefix is useful without its continuation,
  // but not the other way round.
  for (; !seq.blocks.empty(); seq.blocks.pop_back()) {
    const int32_t block = seq.blocks.back();
    if (--ref_counts_[block] > 0) continue;
    if (enable_prefix_caching_ && index_.contains(block)) {
      unused_.push_back(block);
      ++num_cached_;
    } else {
      unused_.push_front(block);
      ++num_free_;
    }
  }
  seq.num_computed = 0;
  seq.num_indexed = 0;
  seq.chain = PrefixIndex::kRoot;
}

void BlockManager::check_integrity() const {
  std::vector<int32_t> counts(num_blocks_, 0);
  for (const auto& [seq_id, seq] : sequences_) {
    check_sequence(seq_id, seq);
    for (int32_t block : seq.blocks) ++counts[block];
  }

  int64_t free = 0, cached = 0;
  for (int32_t block = 0; block < num_blocks_; ++block) {
    const std::string name = "block " + std::to_string(block);
    if (counts[block] != ref_counts_[block]) {
      broken(name + " is in " + std::to_string(counts[block]) +
             " block tables, but its reference count is " + std::to_string(ref_counts_[block]));
    }
    if (unused_.contains(block) != (counts[block] == 0)) {
      broken(name + (counts[block] ? " is held and on the free list"
                                   : " is neither held nor on the free list"));
    }
    if (counts[block] == 0) ++(enable_prefix_caching_ && index_.contains(block) ? cached : free);
  }
  if (free != num_free_ || cached != num_cached_) {
    broken("counted " + std::to_string(free) + " free and " + std::to_string(cached) +
           " cached blocks, but the counters say " + std::to_string(num_free_) + " and " +
           std::to_string(num_cached_));
  }
  const int64_t listed = unused_.checked_size();
  if (listed != free + cached) {
    broken(listed < 0 ? "the free list's links contradict each other"
                      : "the free list holds " + std::to_string(listed) + " blocks, expected " +
                            std::to_string(free + cached));
  }
  bool seen_cached = false;
  for (int32_t block = unused_.empty() ? FreeList::kNone : unused_.front();
       block != FreeList::kNone; block = unused_.after(block)) {
    const bool is_cached = enable_prefix_caching_ && index_.contains(block);
    if (seen_cached && !is_cached) {
      broken("free block " + std::to_string(block) + " is behind a cached one on the free list");
    }
    seen_cached = is_cached;
  }
  if (const std::string fault = index_.fault(); !fault.empty()) {
    broken("prefix index: " + fault);
  }
}

void BlockManager::check_sequence(int64_t seq_id, const Sequence& seq) const {
  const std::string name = "sequence " + std::to_string(seq_id);
  for (int32_t block : seq.blocks) {
    if (block < 0 || block >= num_blocks_) {
      broken(name + " holds block " + std::to_string(block) + ", which does not exist");
    }
  }
  std::vector<int32_t> sorted = seq.blocks;
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
    broken(name + " holds a block twice");
  }
  if (seq.num_computed > static_cast<int64_t>(seq.tokens.size()) ||
      seq.num_computed > static_cast<int64_t>(seq.blocks.size()) * block_size_) {
    broken(name + " has more computed tokens than tokens or slots");
  }
  if (seq.num_indexed != (enable_prefix_caching_ ? seq.num_computed / block_size_ : 0)) {
    broken(name + " has offered " + std::to_string(seq.num_indexed) + " blocks to the index with " +
           std::to_string(seq.num_computed) + " tokens computed");
  }
}

}  // namespace fastinfer
