// Breaks a BlockManager in one way after the other and prints what check_integrity says of each.
// Built and run by test_integrity.py, which knows what it should say.

#include <algorithm>
#include <cstdio>
#include <exception>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "block_manager.h"

namespace fastinfer {

struct IntegrityTest {
  // Sequence 1 holds blocks 0, 1 (indexed) and 2; blocks 3 and 4 are cached; 5, 6, 7 are free.
  static BlockManager healthy(int hash_bits) {
    BlockManager kv(8, 8, /*enable_prefix_caching=*/true, hash_bits);
    for (int64_t seq_id : {1, 2}) {
      std::vector<int64_t> tokens(20);
      for (int64_t i = 0; i < 20; ++i) tokens[i] = 100 * seq_id + i;
      kv.add(seq_id, std::move(tokens));
      kv.reserve(seq_id, seq_id == 1 ? 20 : 16);
      kv.commit(seq_id, seq_id == 1 ? 20 : 16);
    }
    kv.release(2);
    return kv;
  }

  static std::vector<std::pair<const char*, std::function<void(BlockManager&)>>> faults() {
    return {
        {"nothing", [](auto&) {}},
        {"ref_count", [](auto& kv) { kv.ref_counts_[1] = 2; }},
        {"table", [](auto& kv) { kv.sequences_.at(1).blocks.pop_back(); }},
        {"table_range", [](auto& kv) { kv.sequences_.at(1).blocks[0] = 8; }},
        {"table_twice", [](auto& kv) { kv.sequences_.at(1).blocks[1] = 0; }},
        {"lost_block", [](auto& kv) { kv.unused_.remove(6); }},
        {"held_and_listed", [](auto& kv) { kv.unused_.push_back(2); }},
        {"num_free", [](auto& kv) { ++kv.num_free_; }},
        {"num_cached", [](auto& kv) { --kv.num_cached_; }},
        {"link", [](auto& kv) { kv.unused_.links_[6].prev = 3; }},
        {"ring", [](auto& kv) { kv.unused_.links_[6] = {6, 6}; }},
        {"order",
         [](auto& kv) {
           kv.unused_.remove(6);
           kv.unused_.push_back(6);
         }},
        {"computed", [](auto& kv) { kv.sequences_.at(1).num_computed = 21; }},
        {"indexed", [](auto& kv) { kv.sequences_.at(1).num_indexed = 1; }},
        {"index_token", [](auto& kv) { kv.index_.tokens_[9] = 7; }},
        {"index_parent", [](auto& kv) { kv.index_.entries_[1].parent = 77; }},
        {"index_bucket",
         [](auto& kv) {
           auto& buckets = kv.index_.buckets_;
           std::rotate(buckets.begin(), buckets.begin() + 1, buckets.end());
         }},
        {"index_serial", [](auto& kv) { kv.index_.entries_[1].serial = PrefixIndex::kRoot; }},
        {"index_lost", [](auto& kv) { kv.index_.buckets_.assign(8, PrefixIndex::kNone); }},
        {"index_ring", [](auto& kv) { kv.index_.entries_[0].next = 0; }},
        {"index_twin",
         [](auto& kv) {
           kv.index_.insert(2, PrefixIndex::kRoot, kv.sequences_.at(1).tokens.data());
         }},
    };
  }
};

}  // namespace fastinfer

int main() {
  using fastinfer::IntegrityTest;
  for (int hash_bits : {64, 0}) {
    for (const auto& [name, corrupt] : IntegrityTest::faults()) {
      fastinfer::BlockManager kv = IntegrityTest::healthy(hash_bits);
      corrupt(kv);
      const char* verdict = "sound";
      std::string what;
      try {
        kv.check_integrity();
      } catch (const std::exception& error) {
        what = error.what();
        verdict = what.c_str();
      }
      std::printf("%d %s %s\n", hash_bits, name, verdict);
    }
  }
}
