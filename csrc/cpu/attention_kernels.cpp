// Attention of one tile of queries over a range of keys; compiled once per instruction set.
//
// A tile is up to 96 query tokens times the query heads of one KV head, so that its rows share
// every packed key and value. Keys are taken kKeyTile at a time: scores, then an online softmax
// (Milakov and Gimelshein 2018) that turns them into weights and keeps each row's running maximum
// and sum, then the weighted values. Scores are held in units of ln 2, so that 2^x serves.
//
// Nothing but visible keys is read. Where rows of a tile see different keys, a weight of 0 stands
// for an invisible one, which is right only for finite values; others are taken out and added to
// just the rows that see them (`repair_values`).
#include "attention_kernels.h"

#include "attention_micro.h"
#include "merge_row.h"

namespace fastinfer::cpu::FI_ISA {
namespace {

constexpr int64_t kKeyChunk =
    2 * kPanel;  // keys packed at a time, so that they are still in L1 when they are used
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;
constexpr float kInfinity = __builtin_inff();
constexpr int64_t kElementSize[kNumFormats] = {4, 2, 2, 1, 1};

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
  int64_t block_rows;     // rows of a register block; the last one may have fewer
  int64_t value_columns;  // value_dim rounded up to panels
  int64_t prefix;  // keys before the step's own; negative if there are more queries than keys
  Span keys;       // that any token sees
  TokenView tokens[kMaxTileTokens];

  float* q;       // [rows, head_dim], scaled
  float* scores;  // [rows, kKeyTile], then the weights
  float* acc;     // [rows, value_columns]
  float* merged;  // [rows, value_columns], with batch_invariant
  float* key_panels;
  float* value_panels;
  float* largest;      // [rows], of the scores so far
  float* total;        // [rows], of 2^(score - largest) so far
  MergeState* states;  // [rows], with batch_invariant

  const TokenView& view(int64_t row) const { return tokens[row / args.group]; }
};

// ---- which keys are visible

Span window_of(const AttentionArgs& args, int64_t position, int64_t num_keys) {
  Span keys{0, num_keys};
  if (args.window_left >= 0) keys.first = max64(0, position - args.window_left);
  if (args.window_right >= 0) keys.last = min64(num_keys, position + args.window_right + 1);
  return keys;
}

// With a tree mask a token's position, as query and as key, is its depth in the tree.
void view_tree_tokens(Tile* tile) {
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

void view_tokens(Tile* tile) {
  const AttentionWork& work = tile->work;
  if (work.tree_mask != nullptr) {
    view_tree_tokens(tile);
  } else {
    for (int64_t t = 0; t < work.q_count; ++t) {
      tile->tokens[t] = {window_of(tile->args, tile->prefix + work.q_begin + t, work.num_keys),
                         ~uint64_t{0}};
    }
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

// The keys that rows [row, row + count) see among `within`, as one span.
Span seen_by(const Tile& tile, int64_t row, int64_t count, Span within) {
  Span seen{within.last, within.first};
  for (int64_t t = row / tile.args.group; t <= (row + count - 1) / tile.args.group; ++t) {
    const Span keys = tile.tokens[t].keys.cut(within);
    if (!keys.empty()) seen = {min64(seen.first, keys.first), max64(seen.last, keys.last)};
  }
  return seen;
}

// Whether every token sees every key of `within`.
bool all_see(const Tile& tile, Span within) {
  if (tile.work.tree_mask != nullptr && within.last > tile.prefix) return false;
  for (int64_t t = 0; t < tile.work.q_count; ++t) {
    const Span keys = tile.tokens[t].keys;
    if (keys.first > within.first || keys.last < within.last) return false;
  }
  return true;
}

// ---- reading

template <class T>
void load_queries(Tile* tile) {
  const AttentionArgs& args = tile->args;
  const float scale = args.softcap > 0.0f ? args.scale / args.softcap : args.scale * kLog2E;
  for (int64_t row = 0; row < tile->rows; ++row) {
    const int64_t token = tile->work.q_begin + row / args.group;
    const int64_t head = tile->work.kv_head * args.group + row % args.group;
    const T* from = static_cast<const T*>(tile->work.q) + token * args.q_token_stride +
                    head * args.q_head_stride;
    float* to = tile->q + row * args.head_dim;
    int64_t d = 0;
    for (; d + kLanes <= args.head_dim; d += kLanes) store(to + d, load(from + d) * splat(scale));
    for (; d < args.head_dim; ++d) to[d] = to_float(from[d]) * scale;
  }
}

// Where keys [keys.first, keys.last) are; `rows` counts from `base`. Around them, up to whole
// panels, stand rows of zeros.
void find_rows(const Tile& tile, const KvSource& source, int64_t offset, int64_t base, Span keys,
               TileRows* rows) {
  const AttentionWork& work = tile.work;
  const int64_t block_size = tile.args.block_size;
  const char* data = static_cast<const char*>(source.data);
  const int64_t size = kElementSize[source.format];
  for (int64_t key = round_down(keys.first, kPanel); key < round_up(keys.last, kPanel); ++key) {
    const int64_t i = key - base;
    if (key < keys.first || key >= keys.last) {
      rows->data[i] = reinterpret_cast<const char*>(kZeroRow);
      rows->scale[i] = 0.0f;
      continue;
    }
    const int64_t block =
        block_size == 0 ? 0 : work.block_table[key / block_size * tile.args.block_table_stride];
    const int64_t token = block_size == 0 ? key : key % block_size;
    rows->data[i] = data + (offset + block * source.outer_stride + token * source.token_stride +
                            work.kv_head * source.head_stride) *
                               size;
    if (source.scale != nullptr) {
      rows->scale[i] =
          source.scale[block * source.scale_outer_stride + token * source.scale_token_stride +
                       work.kv_head * source.scale_head_stride];
    }
  }
}

// ---- one tile of keys

// scores = q . k for all keys of the panels that `keys` touches, block by block only where some row
// sees a key.
void score_keys(const Tile& tile, int64_t base, Span keys, const TileRows& rows) {
  const int64_t head_dim = tile.args.head_dim;
  const Span panels{round_down(keys.first, kPanel), round_up(keys.last, kPanel)};
  for (int64_t chunk = panels.first; chunk < panels.last; chunk += kKeyChunk) {
    const int64_t chunk_end = min64(chunk + kKeyChunk, panels.last);
    kPackKeys[tile.args.k.format](rows, chunk - base, chunk_end - base, head_dim, tile.key_panels);
    for (int64_t row = 0; row < tile.rows; row += tile.block_rows) {
      const int64_t count = min64(tile.block_rows, tile.rows - row);
      const Span seen = seen_by(tile, row, count, keys.cut({chunk, chunk_end}));
      if (seen.empty()) continue;
      const BlockFunctions& block = kBlocks[count - 1];
      const float* q = tile.q + row * head_dim;
      int64_t key = round_down(seen.first, kPanel);
      while (key < seen.last) {
        const bool wide = key + block.wide_panels * kPanel <= chunk_end;
        (wide ? block.score_wide : block.score_one)(
            q, head_dim, tile.key_panels + (key - chunk) * head_dim, head_dim,
            tile.scores + row * kKeyTile + (key - base));
        key += (wide ? block.wide_panels : 1) * kPanel;
      }
    }
  }
}

// Scores of invisible keys become -inf, between the panel bounds `span` (counted from `base`).
void mask_row(const Tile& tile, const TokenView& view, int64_t base, Span span, float* scores) {
  const Span keys{view.keys.first - base, view.keys.last - base};
  const int64_t tree_begin = tile.work.tree_mask == nullptr ? span.last : tile.prefix - base;
  for (int64_t j = span.first; j < span.last; j += kLanes) {
    if (j >= keys.first && j + kLanes <= min64(keys.last, tree_begin)) continue;
    for (int64_t i = j; i < j + kLanes; ++i) {
      if (!sees(tile, view, base + i)) scores[i] = -kInfinity;
    }
  }
}

// Scores of one row become weights 2^(score - largest); what was accumulated so far is rescaled
// when the maximum grows.
void soften_row(const Tile& tile, int64_t row, int64_t base, Span span) {
  float* scores = tile.scores + row * kKeyTile;
  if (tile.args.softcap > 0.0f) {
    const vf cap = splat(tile.args.softcap * kLog2E);
    for (int64_t j = span.first; j < span.last; j += kLanes)
      store(scores + j, cap * tanh(load(scores + j)));
  }
  mask_row(tile, tile.view(row), base, span, scores);

  vf top[2] = {splat(-kInfinity), splat(-kInfinity)};
  for (int64_t j = span.first; j < span.last; j += kPanel) {
    top[0] = vmax(top[0], load(scores + j));
    top[1] = vmax(top[1], load(scores + j + kLanes));
  }
  const float tile_largest = max(vmax(top[0], top[1]));
  const float before = tile.largest[row];
  const float largest = tile_largest > before ? tile_largest : before;
  const vf shift = splat(largest == -kInfinity ? 0.0f : largest);

  vf sums[2] = {};
  for (int64_t j = span.first; j < span.last; j += kPanel) {
    const vf a = exp2_nonpositive(load(scores + j) - shift);
    const vf b = exp2_nonpositive(load(scores + j + kLanes) - shift);
    store(scores + j, a);
    store(scores + j + kLanes, b);
    sums[0] += a;
    sums[1] += b;
  }
  float keep = 1.0f;
  if (largest != before) {
    keep = exp2_nonpositive(splat(before) - shift)[0];
    float* acc = tile.acc + row * tile.value_columns;
    for (int64_t c = 0; c < tile.value_columns; c += kLanes)
      store(acc + c, load(acc + c) * splat(keep));
  }
  tile.largest[row] = largest;
  tile.total[row] = tile.total[row] * keep + sum(sums[0] + sums[1]);
}

// Replaces what is not finite among packed values by 0; returns whether there was any.
bool take_out_nonfinite(float* panels, int64_t count, int64_t columns) {
  vi found = {};
  for (int64_t c = 0; c < columns; c += kPanel) {
    float* panel = panels + c / kPanel * kValuePanelStride;
    for (int64_t i = 0; i < count * kPanel; i += kLanes) {
      const vf x = load(panel + i);
      const vi bad = x - x != splat(0.0f);
      found |= bad;
      store(panel + i, select(bad, splat(0.0f), x));
    }
  }
  for (int i = 0; i < kLanes; ++i) {
    if (found[i] != 0) return true;
  }
  return false;
}

// Adds what `take_out_nonfinite` took out to the rows that see it; `panels` holds the values as
// they came.
void repair_values(const Tile& tile, const float* panels, Span keys) {
  for (int64_t key = keys.first; key < keys.last; ++key) {
    for (int64_t c = 0; c < tile.value_columns; ++c) {
      const float x =
          panels[c / kPanel * kValuePanelStride + (key - keys.first) * kPanel + c % kPanel];
      if (x - x == 0.0f) continue;
      for (int64_t row = 0; row < tile.rows; ++row) {
        if (sees(tile, tile.view(row), key)) tile.acc[row * tile.value_columns + c] += x;
      }
    }
  }
}

// acc += weights . values
void add_values(const Tile& tile, int64_t base, Span keys, const TileRows& rows) {
  const bool mixed = !all_see(tile, keys);
  // Many rows use a whole tile of values again and again; few rows are better served from L1.
  const int64_t chunk_keys = tile.rows <= kMaxBlockRows ? kKeyChunk : kKeyTile;
  for (int64_t chunk = keys.first; chunk < keys.last; chunk += chunk_keys) {
    const Span part{chunk, min64(chunk + chunk_keys, keys.last)};
    const auto pack = [&] {
      kPackValues[tile.args.v.format](rows, part.first - base, part.last - base,
                                      tile.args.value_dim, tile.value_panels);
    };
    pack();
    const bool taken_out =
        mixed && take_out_nonfinite(tile.value_panels, part.last - part.first, tile.value_columns);
    for (int64_t c = 0; c < tile.value_columns;) {
      int64_t columns = kPanel;
      for (int64_t row = 0; row < tile.rows; row += tile.block_rows) {
        const int64_t count = min64(tile.block_rows, tile.rows - row);
        const BlockFunctions& block = kBlocks[count - 1];
        const bool wide =
            tile.rows <= kMaxBlockRows && c + block.wide_panels * kPanel <= tile.value_columns;
        if (wide) columns = block.wide_panels * kPanel;
        const Span seen = seen_by(tile, row, count, part);
        if (seen.empty()) continue;
        (wide ? block.value_wide : block.value_one)(
            tile.scores + row * kKeyTile + (seen.first - base),
            tile.value_panels + c / kPanel * kValuePanelStride + (seen.first - part.first) * kPanel,
            seen.last - seen.first, tile.acc + row * tile.value_columns + c, tile.value_columns);
      }
      c += columns;
    }
    if (taken_out) {
      pack();
      repair_values(tile, tile.value_panels, part);
    }
  }
}

// ---- a piece of keys, and the whole item

// The normalised result of keys [keys.first, keys.last), in acc; row r's lse goes to total[r].
void attend_piece(const Tile& tile, Span keys) {
  for (int64_t i = 0; i < tile.rows; ++i) {
    tile.largest[i] = -kInfinity;
    tile.total[i] = 0.0f;
  }
  std::memset(tile.acc, 0, tile.rows * tile.value_columns * sizeof(float));
  const AttentionWork& work = tile.work;
  const int64_t first_tile = keys.empty() ? keys.last : round_down(keys.first, kKeyTile);
  for (int64_t base = first_tile; base < keys.last; base += kKeyTile) {
    const Span part = keys.cut({base, base + kKeyTile});
    TileRows rows;
    find_rows(tile, tile.args.k, work.k_offset, base, part, &rows);
    score_keys(tile, base, part, rows);
    for (int64_t row = 0; row < tile.rows; row += tile.block_rows) {
      const int64_t count = min64(tile.block_rows, tile.rows - row);
      const Span seen = seen_by(tile, row, count, part);
      if (seen.empty()) continue;
      const Span span{round_down(seen.first, kPanel) - base, round_up(seen.last, kPanel) - base};
      for (int64_t r = row; r < row + count; ++r) soften_row(tile, r, base, span);
    }
    find_rows(tile, tile.args.v, work.v_offset, base, part, &rows);
    add_values(tile, base, part, rows);
  }
  for (int64_t row = 0; row < tile.rows; ++row) {
    const float total = tile.total[row];
    const vf factor = splat(total == 0.0f ? 0.0f : 1.0f / total);
    float* acc = tile.acc + row * tile.value_columns;
    for (int64_t c = 0; c < tile.value_columns; c += kLanes) store(acc + c, load(acc + c) * factor);
    tile.total[row] = total == 0.0f ? -kInfinity : tile.largest[row] * kLn2 + __builtin_logf(total);
  }
}

template <class T>
void write_rows(const Tile& tile) {
  const AttentionArgs& args = tile.args;
  const AttentionWork& work = tile.work;
  for (int64_t row = 0; row < tile.rows; ++row) {
    const int64_t token = row / args.group;
    const int64_t head = work.kv_head * args.group + row % args.group;
    if (work.partial_out != nullptr) {
      const int64_t to = token * args.num_heads + head;
      std::memcpy(work.partial_out + to * args.value_dim, tile.acc + row * tile.value_columns,
                  args.value_dim * sizeof(float));
      work.partial_lse[to] = tile.total[row];
      continue;
    }
    T* out = static_cast<T*>(work.out) + (work.q_begin + token) * args.out_token_stride +
             head * args.out_head_stride;
    work.lse[head * args.lse_head_stride + work.q_begin + token] =
        merge_finish(tile.states[row], tile.merged + row * tile.value_columns,
                     args.sinks == nullptr ? nullptr : args.sinks + head, args.value_dim, out);
  }
}

// Scratch space in floats, handed out in lines of 64 bytes.
struct Arena {
  float* base;
  int64_t used = 0;

  float* take(int64_t count) {
    float* p = base + used;
    used += round_up(count, kPanel);
    return p;
  }
};

void lay_out(Tile* tile, int64_t rows, Arena* arena) {
  const AttentionArgs& args = tile->args;
  tile->value_columns = round_up(args.value_dim, kPanel);
  tile->q = arena->take(rows * args.head_dim);
  tile->scores = arena->take(rows * kKeyTile);
  tile->acc = arena->take(rows * tile->value_columns);
  tile->merged = args.batch_invariant ? arena->take(rows * tile->value_columns) : tile->acc;
  tile->key_panels = arena->take(kKeyChunk * args.head_dim);
  tile->value_panels = arena->take(tile->value_columns / kPanel * kValuePanelStride);
  tile->largest = arena->take(rows);
  tile->total = arena->take(rows);
  tile->states = reinterpret_cast<MergeState*>(arena->take(rows * 2));
}

int64_t scratch_floats(const AttentionArgs& args) {
  const AttentionWork none{};
  Tile tile{args, none};
  Arena arena{nullptr};
  lay_out(&tile, attention_tile_tokens(args.group) * args.group, &arena);
  return arena.used;
}

template <class T>
void attend(const AttentionArgs& args, const AttentionWork& work, float* scratch) {
  Tile tile{args, work};
  tile.rows = work.q_count * args.group;
  const int64_t blocks = (tile.rows + kMaxBlockRows - 1) / kMaxBlockRows;
  tile.block_rows = (tile.rows + blocks - 1) / blocks;
  tile.prefix = work.num_keys - work.num_queries;
  Arena arena{scratch};
  lay_out(&tile, tile.rows, &arena);
  view_tokens(&tile);
  load_queries<T>(&tile);
  const Span keys = tile.keys.cut({work.k_begin, work.k_end});
  if (work.partial_out != nullptr) {
    attend_piece(tile, keys);
    write_rows<T>(tile);
    return;
  }
  for (int64_t row = 0; row < tile.rows; ++row) tile.states[row] = MergeState{};
  const int64_t piece = args.batch_invariant ? kInvariantSplit : max64(1, keys.last);
  const int64_t first_piece = keys.empty() ? keys.last : round_down(keys.first, piece);
  for (int64_t begin = first_piece; begin < keys.last; begin += piece) {
    attend_piece(tile, keys.cut({begin, begin + piece}));
    for (int64_t row = 0; row < tile.rows; ++row) {
      const int64_t offset = row * tile.value_columns;
      merge_fold(&tile.states[row], tile.merged + offset, tile.acc + offset, tile.total[row],
                 args.value_dim);
    }
  }
  write_rows<T>(tile);
}

}  // namespace

extern const AttentionKernels attention_kernels = {
    {attend<float>, attend<bf16>, attend<fp16>},
    scratch_floats,
};

}  // namespace fastinfer::cpu::FI_ISA
