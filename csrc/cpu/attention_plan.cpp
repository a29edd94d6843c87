// CPU: reads and checks lengths, and plans which keys are attended to together.
#include "attention_plan.h"

#include <algorithm>
#include <cstring>

#include "attention_kernels.h"

namespace fastinfer::cpu {
namespace {

void check_cumulative(const char* op, const char* name, const int32_t* cu, int64_t num_sequences,
                      int64_t total, const char* max_name, int64_t max_length) {
  FI_CHECK(cu[0] == 0, op, name, ": expected 0 as first element, got ", cu[0]);
  for (int64_t b = 0; b < num_sequences; ++b) {
    FI_CHECK(cu[b + 1] >= cu[b], op, name, ": expected elements that never decrease, got ", cu[b],
             " then ", cu[b + 1], " at index ", b);
    const int64_t length = static_cast<int64_t>(cu[b + 1]) - cu[b];
    FI_CHECK(length <= max_length, op, name, ": expected at most ", max_name, " = ", max_length,
             " tokens a sequence, got ", length, " in sequence ", b);
  }
  FI_CHECK(cu[num_sequences] == total, op, name, ": expected the number of tokens ", total,
           " as last element, got ", cu[num_sequences]);
}

// Threads take items one by one, so an item should be a small part of a thread's share.
constexpr int64_t kItemsPerThread = 4;

// FNV-1a over the lengths, so that a plan made for others is noticed.
uint64_t digest(const AttentionLengths& lengths) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const std::vector<int32_t>* part : {&lengths.q_begin, &lengths.keys}) {
    for (int32_t value : *part) hash = (hash ^ static_cast<uint32_t>(value)) * 0x100000001b3u;
  }
  return hash;
}

int32_t narrow(int64_t x) {
  return static_cast<int32_t>(std::min<int64_t>(x, INT32_MAX));
}

int64_t round_up(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

// Keys that query tokens [q_begin, q_begin + q_count) of a sequence may see.
struct KeyRange {
  int64_t begin;
  int64_t end;
};

KeyRange visible_range(const PlanHeader& header, int64_t queries, int64_t keys, int64_t q_begin,
                       int64_t q_count) {
  const int64_t first = keys - queries;  // position of token 0
  int64_t low = first + q_begin, high = first + q_begin + q_count - 1;
  int64_t window_right = header.window_right;
  if (queries <= kMaxTreeTokens) {
    // There may be a tree mask, which a plan does not know: positions then start before the step's
    // own keys, and any of these may be visible. The kernel cuts the range down to what is.
    low = first - 1;
    window_right = -1;
  }
  KeyRange range{0, keys};
  if (header.window_left >= 0) range.begin = std::clamp<int64_t>(low - header.window_left, 0, keys);
  if (window_right >= 0)
    range.end = std::clamp<int64_t>(high + window_right + 1, range.begin, keys);
  return range;
}

}  // namespace

AttentionLengths read_lengths(const AttentionProblem& p) {
  const int64_t batch = p.num_sequences;
  AttentionLengths lengths;
  if (p.layout == AttentionLayout::kDense) {
    for (int64_t b = 0; b <= batch; ++b) lengths.q_begin.push_back(narrow(b * p.max_seqlen_q));
    lengths.keys.assign(batch, narrow(p.max_seqlen_k));
    return lengths;
  }
  check_cumulative(p.op, "cu_seqlens_q", p.cu_seqlens_q, batch, p.total_q, "max_seqlen_q",
                   p.max_seqlen_q);
  lengths.q_begin.assign(p.cu_seqlens_q, p.cu_seqlens_q + batch + 1);
  if (p.layout == AttentionLayout::kRagged) {
    check_cumulative(p.op, "cu_seqlens_k", p.cu_seqlens_k, batch, p.total_k, "max_seqlen_k",
                     p.max_seqlen_k);
    for (int64_t b = 0; b < batch; ++b)
      lengths.keys.push_back(p.cu_seqlens_k[b + 1] - p.cu_seqlens_k[b]);
    return lengths;
  }
  for (int64_t b = 0; b < batch; ++b) {
    FI_CHECK(p.seq_lens[b] >= 0 && p.seq_lens[b] <= p.max_seqlen_k, p.op,
             "seq_lens: expected 0 to max_seqlen_k = ", p.max_seqlen_k, ", got ", p.seq_lens[b],
             " for sequence ", b);
  }
  lengths.keys.assign(p.seq_lens, p.seq_lens + batch);
  return lengths;
}

void check_block_table(const AttentionProblem& p, const AttentionLengths& lengths) {
  for (int64_t b = 0; b < lengths.count(); ++b) {
    const int64_t used = (lengths.keys[b] + p.block_size - 1) / p.block_size;
    FI_CHECK(used <= p.max_blocks, p.op, "seq_lens: expected at most the ",
             p.max_blocks * p.block_size, " tokens that a row of block_table covers, got ",
             lengths.keys[b], " for sequence ", b);
    for (int64_t i = 0; i < used; ++i) {
      const int64_t block =
          p.block_table[b * p.block_table_strides[0] + i * p.block_table_strides[1]];
      FI_CHECK(block >= 0 && block < p.num_blocks, p.op, "block_table: expected blocks from 0 to ",
               p.num_blocks - 1, " among the used entries, got ", block, " in entry ", i,
               " of sequence ", b);
    }
  }
}

PlanHeader plan_header(const AttentionProblem& p, const AttentionLengths& lengths) {
  PlanHeader header{};
  header.magic = kPlanMagic;
  header.num_sequences = narrow(p.num_sequences);
  header.total_q = narrow(p.total_q);
  header.num_heads = narrow(p.num_heads);
  header.num_kv_heads = narrow(p.num_kv_heads);
  header.batch_invariant = p.batch_invariant;
  header.max_seqlen_q = narrow(p.max_seqlen_q);
  header.max_seqlen_k = narrow(p.max_seqlen_k);
  header.window_left = narrow(p.window_left);
  header.window_right = p.causal ? 0 : narrow(p.window_right);
  const uint64_t hash = digest(lengths);
  header.lengths_low = static_cast<int32_t>(hash);
  header.lengths_high = static_cast<int32_t>(hash >> 32);
  return header;
}

AttentionPlan make_plan(const PlanHeader& header, const AttentionLengths& lengths,
                        int64_t threads) {
  AttentionPlan plan{header, {}};
  const int64_t group = header.num_heads / header.num_kv_heads;
  int64_t tile_tokens = attention_tile_tokens(group);
  // Short prompts are cut finer, so that there is something for every thread.
  while (header.total_q / tile_tokens * header.num_kv_heads < threads * kItemsPerThread &&
         tile_tokens / 2 * group >= 2 * kPlanMinTileRows) {
    tile_tokens /= 2;
  }
  struct Tile {
    PlanItem item;
    int64_t cost;
  };
  std::vector<Tile> tiles;
  int64_t total_cost = 0;
  for (int64_t b = 0; b < lengths.count(); ++b) {
    const int64_t queries = lengths.queries(b), keys = lengths.keys[b];
    for (int64_t begin = 0; begin < queries; begin += tile_tokens) {
      const int64_t count = std::min(tile_tokens, queries - begin);
      const KeyRange range = visible_range(header, queries, keys, begin, count);
      const int64_t cost = (range.end - range.begin + 1) * count;
      tiles.push_back({{narrow(b), narrow(begin), narrow(count), narrow(range.begin),
                        narrow(range.end), -1, 0, 1},
                       cost});
      total_cost += cost;
    }
  }
  // The long ones go first.
  std::stable_sort(tiles.begin(), tiles.end(),
                   [](const Tile& a, const Tile& b) { return a.cost > b.cost; });
  const int64_t share = total_cost * header.num_kv_heads / (threads * kItemsPerThread);
  const int64_t max_partial_rows = plan_partial_rows(header.total_q, header.max_seqlen_k);
  int64_t partial_rows = 0;
  for (const Tile& tile : tiles) {
    const PlanItem& whole = tile.item;
    int64_t piece = whole.k_end;  // pieces are cut at multiples of this
    if (threads > 1 && tile.cost > share) {
      piece = round_up(std::max<int64_t>(share / whole.q_count, kPlanMinSplit), kKeyTile);
      if (header.batch_invariant) piece = kInvariantSplit;
    }
    piece = std::max<int64_t>(piece, 1);
    const int64_t first = whole.k_begin / piece;
    const int64_t splits = std::max<int64_t>(1, (whole.k_end + piece - 1) / piece - first);
    if (splits == 1 || partial_rows + splits * whole.q_count > max_partial_rows) {
      plan.items.push_back(whole);
      continue;
    }
    for (int64_t s = 0; s < splits; ++s) {
      PlanItem item = whole;
      item.k_begin = narrow(std::max<int64_t>(whole.k_begin, (first + s) * piece));
      item.k_end = narrow(std::min<int64_t>(whole.k_end, (first + s + 1) * piece));
      item.partial_row = narrow(partial_rows);
      item.split = narrow(s);
      item.num_splits = narrow(splits);
      plan.items.push_back(item);
      partial_rows += whole.q_count;
    }
  }
  plan.header.num_items = narrow(static_cast<int64_t>(plan.items.size()));
  plan.header.num_partial_rows = narrow(partial_rows);
  return plan;
}

void write_plan(const AttentionPlan& plan, int32_t* rows, int64_t num_rows) {
  std::memset(rows, 0, num_rows * kPlanColumns * sizeof(int32_t));
  std::memcpy(rows, &plan.header, sizeof(PlanHeader));
  if (plan.items.empty()) return;
  std::memcpy(rows + kPlanHeaderRows * kPlanColumns, plan.items.data(),
              plan.items.size() * sizeof(PlanItem));
}

AttentionPlan read_plan(const char* op, const PlanHeader& expected, const AttentionLengths& lengths,
                        const int32_t* rows, int64_t num_rows) {
  AttentionPlan plan;
  std::memcpy(&plan.header, rows, sizeof(PlanHeader));
  const PlanHeader& got = plan.header;
  FI_CHECK(got.magic == kPlanMagic, op,
           "plan: expected a tensor that plan_attention made, got another");
  const auto same = [op](const char* what, int64_t made_for, int64_t called_with) {
    FI_CHECK(made_for == called_with, op, "plan: expected a plan made for ", what, " = ",
             called_with, " as this call has, got one made for ", made_for);
  };
  same("a batch of sequences", got.num_sequences, expected.num_sequences);
  same("total_q", got.total_q, expected.total_q);
  same("num_heads", got.num_heads, expected.num_heads);
  same("num_kv_heads", got.num_kv_heads, expected.num_kv_heads);
  same("max_seqlen_q", got.max_seqlen_q, expected.max_seqlen_q);
  same("max_seqlen_k", got.max_seqlen_k, expected.max_seqlen_k);
  same("window_left", got.window_left, expected.window_left);
  same("window_right (0 when causal)", got.window_right, expected.window_right);
  same("batch_invariant", got.batch_invariant, expected.batch_invariant);
  FI_CHECK(got.lengths_low == expected.lengths_low && got.lengths_high == expected.lengths_high, op,
           "plan: expected a plan made for this call's cu_seqlens_q and seq_lens, got one made for "
           "other lengths");

  const int64_t max_partial_rows = plan_partial_rows(expected.total_q, expected.max_seqlen_k);
  FI_CHECK(got.num_items >= 0 && got.num_items <= num_rows - kPlanHeaderRows &&
               got.num_partial_rows >= 0 && got.num_partial_rows <= max_partial_rows,
           op, "plan: expected at most ", num_rows - kPlanHeaderRows, " items and ",
           max_partial_rows, " partial rows, got ", got.num_items, " and ", got.num_partial_rows);
  plan.items.resize(got.num_items);
  if (!plan.items.empty()) {
    std::memcpy(plan.items.data(), rows + kPlanHeaderRows * kPlanColumns,
                plan.items.size() * sizeof(PlanItem));
  }
  for (size_t i = 0; i < plan.items.size(); ++i) {
    const PlanItem& item = plan.items[i];
    const bool known = item.sequence >= 0 && item.sequence < expected.num_sequences;
    const int64_t queries = known ? lengths.queries(item.sequence) : 0;
    const int64_t keys = known ? lengths.keys[item.sequence] : 0;
    const int64_t last_row = static_cast<int64_t>(item.partial_row) +
                             (static_cast<int64_t>(item.num_splits) - item.split) * item.q_count;
    const bool fits =
        known && item.q_begin >= 0 && item.q_count >= 1 && item.q_count <= queries - item.q_begin &&
        item.q_count <= attention_tile_tokens(expected.num_heads / expected.num_kv_heads) &&
        item.k_begin >= 0 && item.k_begin <= item.k_end && item.k_end <= keys && item.split >= 0 &&
        item.split < item.num_splits &&
        (item.num_splits == 1 || (item.partial_row >= 0 && last_row <= got.num_partial_rows));
    FI_CHECK(fits, op, "plan: expected items as plan_attention writes them, got an item ", i,
             " that no plan holds");
  }
  return plan;
}

}  // namespace fastinfer::cpu
