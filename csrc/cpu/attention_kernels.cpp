// Attention of one tile of queries over a range of keys; compiled once per instruction set.
//
// A tile is some query tokens times the query heads of one KV head, so that its rows share every
// packed key and value. Keys are taken kKeyTile at a time: scores, then an online softmax
// (Milakov and Gimelshein 2018) that turns them into weights and keeps each row's running maximum
// and sum, then the weighted values.
//
// Nothing but visible keys is read. Where rows of a tile see different keys, a weight of 0 stands
// for an invisible one, which is right only for finite values; others are taken out and added to
// just the rows that see them (`repair_values`).
#include "attention_kernels.h"

#include "attention_micro.h"
#include "attention_tile.h"

namespace fastinfer::cpu::FI_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr int64_t kElementSize[kNumFormats] = {4, 2, 2, 1, 1};

// ---- reading

template <class T>
void load_queries(const Tile& tile) {
  const AttentionArgs& args = tile.args;
  for (int64_t row = 0; row < tile.rows; ++row) {
    const int64_t token = tile.work.q_begin + row / args.group;
    const int64_t head = tile.work.kv_head * args.group + row % args.group;
    const T* from = static_cast<const T*>(tile.work.q) + token * args.q_token_stride +
                    head * args.q_head_stride;
    const float scale = args.q_scale == nullptr ? 1.0f : args.q_scale[head];
    float* to = tile.q + row * args.head_dim;
    int64_t d = 0;
    for (; d + kLanes <= args.head_dim; d += kLanes) store(to + d, load(from + d) * splat(scale));
    for (; d < args.head_dim; ++d) to[d] = to_float(from[d]) * scale;
  }
}

// Indexed by ElementFormat; no queries are int8.
constexpr void (*kLoadQueries[kNumFormats])(const Tile& tile) = {
    load_queries<float>, load_queries<bf16>, load_queries<fp16>, nullptr, load_queries<fp8>};

// Where keys [keys.first, keys.last) are; `rows` counts from `base`. Around them, up to whole
// panels, stand rows of zeros.
void find_rows(const Tile& tile, const KvSource& source, int64_t offset, int64_t base, Span keys,
               TileRows* rows) {
  const int64_t block_size = tile.args.block_size;
  const int64_t head = tile.work.kv_head;
  for (int64_t key = round_down(keys.first, kPanel); key < round_up(keys.last, kPanel); ++key) {
    rows->data[key - base] = reinterpret_cast<const char*>(kZeroRow);
    rows->scale[key - base] = 0.0f;
  }
  for (int64_t key = keys.first; key < keys.last;) {
    // A run of keys that are token_stride apart.
    const int64_t index = block_size == 0 ? 0 : key / block_size;
    const int64_t token = key - index * block_size;
    const int64_t block =
        block_size == 0 ? 0 : tile.work.block_table[index * tile.args.block_table_stride];
    const int64_t end = block_size == 0 ? keys.last : min64(keys.last, (index + 1) * block_size);
    const int64_t size = kElementSize[source.format];
    const char* data = static_cast<const char*>(source.data) +
                       (offset + block * source.outer_stride + token * source.token_stride +
                        head * source.head_stride) *
                           size;
    const float* scale = source.scale;
    if (scale != nullptr) {
      scale += block * source.scale_outer_stride + token * source.scale_token_stride +
               head * source.scale_head_stride;
    }
    for (int64_t i = key - base; key < end; ++key, ++i) {
      rows->data[i] = data;
      data += source.token_stride * size;
      rows->scale[i] = scale == nullptr ? 1.0f : *scale;
      if (scale != nullptr) scale += source.scale_token_stride;
    }
  }
}

// ---- one tile of keys

// scores = q . k for all keys of the panels that `keys` touches, where some row of a block sees
// one.
void score_keys(const Tile& tile, int64_t base, Span keys, const TileRows& rows,
                Prefetch* prefetch) {
  const int64_t head_dim = tile.args.head_dim;
  const Span panels{round_down(keys.first, kPanel), round_up(keys.last, kPanel)};
  for (int64_t chunk = panels.first; chunk < panels.last; chunk += kKeyChunk) {
    const int64_t chunk_end = min64(chunk + kKeyChunk, panels.last);
    kPackKeys[tile.args.k.format](rows, chunk - base, chunk_end - base, head_dim, tile.key_panels,
                                  prefetch);
    for (int64_t block = 0; block < tile.num_blocks; ++block) {
      prefetch->advance();
      const Span seen = tile.seen[block].cut({chunk, chunk_end});
      if (seen.empty()) continue;
      const int64_t row = block * tile.block_rows;
      const BlockFunctions& functions = kBlocks[tile.rows_of(block) - 1];
      int64_t key = round_down(seen.first, kPanel);
      while (key < seen.last) {
        const bool wide = key + functions.wide_panels * kPanel <= chunk_end;
        (wide ? functions.score_wide : functions.score_one)(
            tile.q + row * head_dim, head_dim, tile.key_panels + (key - chunk) * head_dim, head_dim,
            tile.scores + row * kKeyTile + (key - base));
        key += (wide ? functions.wide_panels : 1) * kPanel;
      }
    }
  }
}

// Which of the keys base + j ... base + j + 7 the row sees.
inline vi visible_lanes(const Tile& tile, const TokenView& view, int64_t base, int64_t j) {
  vi visible = {};
  if (tile.work.tree_mask != nullptr) {
    for (int i = 0; i < kLanes; ++i) visible[i] = sees(tile, view, base + j + i) ? -1 : 0;
    return visible;
  }
  const vi lane = vi{0, 1, 2, 3, 4, 5, 6, 7};
  const int32_t first = static_cast<int32_t>(max64(view.keys.first - base - j, 0));
  const int32_t last = static_cast<int32_t>(min64(view.keys.last - base - j, kLanes));
  return (lane >= (vi{} + first)) & (lane < (vi{} + last));
}

// Scores of one row become weights e^(score - largest); what was accumulated so far is rescaled
// when the maximum grows. `span` is in whole panels, counted from `base`.
void soften_row(const Tile& tile, int64_t row, int64_t base, Span span) {
  const TokenView& view = *tile.views[row];
  float* scores = tile.scores + row * kKeyTile;
  float factor = tile.args.scale;
  if (tile.args.softcap > 0.0f) {
    const vf scale = splat(tile.args.scale / tile.args.softcap);
    const vf cap = splat(tile.args.softcap);
    factor = 1.0f;
    for (int64_t j = span.first; j < span.last; j += kLanes) {
      store(scores + j, cap * tanh(load(scores + j) * scale));
    }
  }

  // Scores of invisible keys become -inf.
  const Span inside{
      view.keys.first - base,
      (tile.work.tree_mask == nullptr ? view.keys.last : min64(view.keys.last, tile.prefix)) -
          base};
  vf top[2] = {splat(-kInfinity), splat(-kInfinity)};
  for (int64_t j = span.first; j < span.last; j += kPanel) {
    vf a = load(scores + j) * splat(factor), b = load(scores + j + kLanes) * splat(factor);
    if (j < inside.first || j + kPanel > inside.last) {
      a = select(visible_lanes(tile, view, base, j), a, splat(-kInfinity));
      b = select(visible_lanes(tile, view, base, j + kLanes), b, splat(-kInfinity));
    }
    store(scores + j, a);
    store(scores + j + kLanes, b);
    top[0] = larger(top[0], a);
    top[1] = larger(top[1], b);
  }
  const float tile_largest = reduce_larger(larger(top[0], top[1]));
  const float before = tile.largest[row];
  const float largest = tile_largest > before ? tile_largest : before;
  const vf shift = splat(largest == -kInfinity ? 0.0f : largest);

  vf sums[2] = {};
  for (int64_t j = span.first; j < span.last; j += kPanel) {
    const vf a = exp_nonpositive(load(scores + j) - shift);
    const vf b = exp_nonpositive(load(scores + j + kLanes) - shift);
    store(scores + j, a);
    store(scores + j + kLanes, b);
    sums[0] += a;
    sums[1] += b;
  }
  float keep = 1.0f;
  if (largest != before) {
    keep = exp_nonpositive(splat(before) - shift)[0];
    float* acc = tile.acc + row * tile.value_columns;
    for (int64_t c = 0; c < tile.value_columns; c += kLanes)
      store(acc + c, load(acc + c) * splat(keep));
  }
  tile.largest[row] = largest;
  tile.total[row] = tile.total[row] * keep + reduce_sum(sums[0] + sums[1]);
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
        if (sees(tile, *tile.views[row], key)) tile.acc[row * tile.value_columns + c] += x;
      }
    }
  }
}

// acc += weights . values
void add_values(const Tile& tile, int64_t base, Span keys, const TileRows& rows,
                Prefetch* prefetch) {
  const bool mixed = !all_see(tile, keys);
  for (int64_t chunk = round_down(keys.first, kChain); chunk < keys.last; chunk += kChain) {
    const Span part = keys.cut({chunk, chunk + kChain});
    const auto pack = [&] {
      kPackValues[tile.args.v.format](rows, part.first - base, part.last - base,
                                      tile.args.value_dim, tile.value_panels, prefetch);
    };
    pack();
    const bool taken_out =
        mixed && take_out_nonfinite(tile.value_panels, part.last - part.first, tile.value_columns);
    int64_t columns = kPanel;
    for (int64_t c = 0; c < tile.value_columns; c += columns) {
      columns = kPanel;
      for (int64_t block = 0; block < tile.num_blocks; ++block) {
        if (c == 0) prefetch->advance();
        const BlockFunctions& functions = kBlocks[tile.rows_of(block) - 1];
        const bool wide =
            tile.num_blocks == 1 && c + functions.wide_panels * kPanel <= tile.value_columns;
        if (wide) columns = functions.wide_panels * kPanel;
        const Span seen = tile.seen[block].cut(part);
        if (seen.empty()) continue;
        const int64_t row = block * tile.block_rows;
        (wide ? functions.value_wide : functions.value_one)(
            tile.scores + row * kKeyTile + (seen.first - base),
            tile.value_panels + c / kPanel * kValuePanelStride + (seen.first - part.first) * kPanel,
            seen.last - seen.first, tile.acc + row * tile.value_columns + c, tile.value_columns);
      }
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
  const AttentionArgs& args = tile.args;
  const AttentionWork& work = tile.work;
  const int64_t first_tile = keys.empty() ? keys.last : round_down(keys.first, kKeyTile);
  const auto keys_of = [keys](int64_t base) { return keys.cut({base, base + kKeyTile}); };
  TileRows key_rows, value_rows;
  if (first_tile < keys.last) {
    find_rows(tile, args.k, work.k_offset, first_tile, keys_of(first_tile), &key_rows);
  }
  for (int64_t base = first_tile; base < keys.last; base += kKeyTile) {
    const Span part = keys_of(base);
    find_seen(tile, part);
    find_rows(tile, args.v, work.v_offset, base, part, &value_rows);
    // Between them, packing and the products call on it so often.
    Prefetch values(value_rows, part.first - base, part.last - base,
                    args.value_dim * kElementSize[args.v.format],
                    kKeyTile / kLanes + tile.num_blocks * (kKeyTile / kKeyChunk));
    score_keys(tile, base, part, key_rows, &values);
    for (int64_t block = 0; block < tile.num_blocks; ++block) {
      const Span seen = tile.seen[block];
      if (seen.empty()) continue;
      const Span span{round_down(seen.first, kPanel) - base, round_up(seen.last, kPanel) - base};
      const int64_t row = block * tile.block_rows;
      for (int64_t r = 0; r < tile.rows_of(block); ++r) soften_row(tile, row + r, base, span);
    }
    const Span next = keys_of(base + kKeyTile);
    if (!next.empty()) find_rows(tile, args.k, work.k_offset, base + kKeyTile, next, &key_rows);
    Prefetch next_keys(key_rows, next.first - base - kKeyTile, next.last - base - kKeyTile,
                       args.head_dim * kElementSize[args.k.format],
                       kKeyTile / kLanes + tile.num_blocks * (kKeyTile / kChain));
    add_values(tile, base, part, value_rows, &next_keys);
  }
  for (int64_t row = 0; row < tile.rows; ++row) {
    const float total = tile.total[row];
    const vf factor = splat(total == 0.0f ? 0.0f : 1.0f / total);
    float* acc = tile.acc + row * tile.value_columns;
    for (int64_t c = 0; c < tile.value_columns; c += kLanes) store(acc + c, load(acc + c) * factor);
    tile.total[row] = total == 0.0f ? -kInfinity : tile.largest[row] + __builtin_logf(total);
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

int64_t scratch_floats(const AttentionArgs& args) {
  const AttentionWork none{};
  Tile tile{args, none};
  Arena arena{nullptr};
  lay_out(&tile, attention_tile_tokens(args.group), &arena);
  return arena.used;
}

template <class T>
void attend(const AttentionArgs& args, const AttentionWork& work, float* scratch) {
  Tile tile{args, work};
  tile.prefix = work.num_keys - work.num_queries;
  Arena arena{scratch};
  lay_out(&tile, work.q_count, &arena);
  view_tokens(&tile);
  kLoadQueries[args.q_format](tile);
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
