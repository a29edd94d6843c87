// A tile of queries: its scratch space, and which keys its rows see.
#pragma once

#include "attention_micro.h"
#include "merge_row.h"

namespace fastinfer::cpu::FI_ISA {

// Keys packed at a time, so that they are still in L1 when they are used.
constexpr int64_t kKeyChunk = 2 * kPanel;

inline int64_t min64(int64_t a, int64_t b) {
  return a < b ? a : b;
}
inline int64_t max64(int64_t a, int64_t b) {
  return a > b ? a : b;
}
inline int64_t round_down(int64_t x, int64_t multiple) {
  return x / multiple * multiple;
}
inline int64_t round_up(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

struct Span {
  int64_t first;
  int64_t last;

  bool empty() const { return first >= last; }
  Span cut(Span other) const { return {max64(first, other.first), min64(last, other.last)}; }
};

// The keys that a query token sees: `keys`, and of those from `prefix` on (the step's own) only the
// ones in `bits`.
struct TokenView {
  Span keys;
  uint64_t bits;
};

struct Tile {
  const AttentionArgs& args;
  const AttentionWork& work;
  int64_t rows;
  int64_t num_blocks;  // of block_rows rows each, but for the last one: register blocks
  int64_t block_rows;
  int64_t value_columns;  // value_dim rounded up to panels
  int64_t prefix;  // keys before the step's own; negative if there are more queries than keys
  Span keys;       // that any token sees

  // Scratch space.
  float* q;       // [rows, head_dim]
  float* scores;  // [rows, kKeyTile], then the weights
  float* acc;     // [rows, value_columns]
  float* merged;  // [rows, value_columns], with batch_invariant
  float* key_panels;
  float* value_panels;
  float* largest;      // [rows], of the scores so far
  float* total;        // [rows], of e^(score - largest) so far
  MergeState* states;  // [rows]
  TokenView* tokens;   // [q_count]
  TokenView** views;   // [rows]
  Span* seen;          // [num_blocks], the keys of the tile at hand that rows of the block see

  int64_t rows_of(int64_t block) const { return min64(block_rows, rows - block * block_rows); }
};

// ---- which keys are visible

inline Span window_of(const AttentionArgs& args, int64_t position, int64_t num_keys) {
  Span keys{0, num_keys};
  if (args.window_left >= 0) keys.first = max64(0, position - args.window_left);
  if (args.window_right >= 0) keys.last = min64(num_keys, position + args.window_right + 1);
  return keys;
}

// With a tree mask a token's position, as query and as key, is its depth in the tree.
inline void view_tree_tokens(Tile* tile) {
  const AttentionArgs& args = tile->args;
  const AttentionWork& work = tile->work;
  const int64_t prefix = tile->prefix;
  for (int64_t t = 0; t < work.q_count; ++t) {
    const uint64_t mask = static_cast<uint64_t>(work.tree_mask[work.q_begin + t]);
    const int64_t depth = __builtin_popcountll(mask) - 1;
    TokenView& view = tile->tokens[t];
    view.bits = 0;
    view.keys = {
        max64(0, min64(prefix, args.window_left >= 0 ? prefix + depth - args.window_left : 0)),
        max64(0, prefix)};
    for (int64_t j = max64(0, -prefix); j < work.num_queries; ++j) {
      if ((mask >> j & 1) == 0) continue;
      const int64_t distance =
          __builtin_popcountll(static_cast<uint64_t>(work.tree_mask[j])) - 1 - depth;
      if (args.window_left >= 0 && distance < -args.window_left) continue;
      if (args.window_right >= 0 && distance > args.window_right) continue;
      view.bits |= uint64_t{1} << j;
      view.keys.last = prefix + j + 1;
    }
  }
}

inline void view_tokens(Tile* tile) {
  const AttentionWork& work = tile->work;
  if (work.tree_mask != nullptr) {
    view_tree_tokens(tile);
  } else {
    for (int64_t t = 0; t < work.q_count; ++t) {
      tile->tokens[t] = {window_of(tile->args, tile->prefix + work.q_begin + t, work.num_keys),
                         ~uint64_t{0}};
    }
  }
  for (int64_t row = 0; row < tile->rows; ++row) {
    tile->views[row] = tile->tokens + row / tile->args.group;
  }
  tile->keys = {work.num_keys, 0};
  for (int64_t t = 0; t < work.q_count; ++t) {
    const Span keys = tile->tokens[t].keys;
    if (keys.empty()) continue;
    tile->keys = {min64(tile->keys.first, keys.first), max64(tile->keys.last, keys.last)};
  }
}

inline bool sees(const Tile& tile, const TokenView& view, int64_t key) {
  if (key < view.keys.first || key >= view.keys.last) return false;
  return tile.work.tree_mask == nullptr || key < tile.prefix ||
         (view.bits >> (key - tile.prefix) & 1) != 0;
}

// The keys among `within` that each block's rows see, as one span.
inline void find_seen(const Tile& tile, Span within) {
  for (int64_t block = 0; block < tile.num_blocks; ++block) {
    TokenView** views = tile.views + block * tile.block_rows;
    Span seen{within.last, within.first};
    for (int64_t r = 0; r < tile.rows_of(block); ++r) {
      const Span keys = views[r]->keys.cut(within);
      if (!keys.empty()) seen = {min64(seen.first, keys.first), max64(seen.last, keys.last)};
    }
    tile.seen[block] = seen;
  }
}

// Whether every token sees every key of `within`.
inline bool all_see(const Tile& tile, Span within) {
  if (tile.work.tree_mask != nullptr && within.last > tile.prefix) return false;
  for (int64_t t = 0; t < tile.work.q_count; ++t) {
    const Span keys = tile.tokens[t].keys;
    if (keys.first > within.first || keys.last < within.last) return false;
  }
  return true;
}

// ---- scratch space

// Hands out scratch space in lines of 64 bytes.
struct Arena {
  float* base;
  int64_t used = 0;  // floats

  template <class T>
  T* take(int64_t count) {
    float* p = base + used;
    used += round_up(count * static_cast<int64_t>(sizeof(T)), 64) / 4;
    return reinterpret_cast<T*>(p);
  }
};

inline void lay_out(Tile* tile, int64_t tokens, Arena* arena) {
  const AttentionArgs& args = tile->args;
  tile->rows = tokens * args.group;
  tile->num_blocks = (tile->rows + kMaxBlockRows - 1) / kMaxBlockRows;
  tile->block_rows = (tile->rows + tile->num_blocks - 1) / tile->num_blocks;
  tile->num_blocks = (tile->rows + tile->block_rows - 1) / tile->block_rows;
  tile->value_columns = round_up(args.value_dim, kPanel);
  tile->q = arena->take<float>(tile->rows * args.head_dim);
  tile->scores = arena->take<float>(tile->rows * kKeyTile);
  tile->acc = arena->take<float>(tile->rows * tile->value_columns);
  tile->merged =
      args.batch_invariant ? arena->take<float>(tile->rows * tile->value_columns) : tile->acc;
  tile->key_panels = arena->take<float>(kKeyChunk * args.head_dim);
  tile->value_panels = arena->take<float>(tile->value_columns / kPanel * kValuePanelStride);
  tile->largest = arena->take<float>(tile->rows);
  tile->total = arena->take<float>(tile->rows);
  tile->states = arena->take<MergeState>(tile->rows);
  tile->tokens = arena->take<TokenView>(tokens);
  tile->views = arena->take<TokenView*>(tile->rows);
  tile->seen = arena->take<Span>(tile->num_blocks);
}

}  // namespace fastinfer::cpu::FI_ISA
