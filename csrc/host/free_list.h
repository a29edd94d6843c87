// The blocks that nobody holds, in the order in which they will be reused.

#pragma once

#include <cstdint>
#include <vector>

namespace fastinfer {

// A doubly linked list threaded through an array of links, one per block, so that any block
// leaves in O(1) when a prefix hit revives it. The extra link at the end is the list's head and
// tail in one; a block outside the list has both of its links at kNone.
class FreeList {
 public:
  static constexpr int32_t kNone = -1;

  explicit FreeList(int32_t num_blocks)
      : head_(num_blocks), links_(static_cast<size_t>(num_blocks) + 1) {
    links_[head_] = {head_, head_};
  }

  bool empty() const { return links_[head_].next == head_; }
  bool contains(int32_t block) const { return links_[block].next != kNone; }

  int32_t front() const { return links_[head_].next; }
  // The block after `block`, or kNone at the end.
  int32_t after(int32_t block) const {
    return links_[block].next == head_ ? kNone : links_[block].next;
  }

  void push_front(int32_t block) { insert_between(head_, block, links_[head_].next); }
  void push_back(int32_t block) { insert_between(links_[head_].prev, block, head_); }

  void remove(int32_t block) {
    Link& link = links_[block];
    links_[link.prev].next = link.next;
    links_[link.next].prev = link.prev;
    link = {kNone, kNone};
  }

  // How many blocks the list holds, or -1 if its links contradict each other.
  int64_t checked_size() const {
    int64_t size = 0;
    for (int32_t at = head_;; ++size) {
      int32_t next = links_[at].next;
      if (next < 0 || next > head_ || links_[next].prev != at || size > head_) return -1;
      if (next == head_) return size;
      at = next;
    }
  }

 private:
  friend struct IntegrityTest;

  struct Link {
    int32_t prev = kNone;
    int32_t next = kNone;
  };

  void insert_between(int32_t prev, int32_t block, int32_t next) {
    links_[block] = {prev, next};
    links_[prev].next = block;
    links_[next].prev = block;
  }

  int32_t head_;
  std::vector<Link> links_;
};

}  // namespace fastinfer
