#include "fmha/cpu/kernel.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace attnops::fmha::cpu {

using attnops::cpu::kKeyMultiple;
using attnops::cpu::kPanel;
using attnops::cpu::kSumLanes;
using attnops::cpu::round_up_to;

namespace {

// Keys per packed tile: large enough that rescaling and loop overheads vanish, small enough for the first-level cache
// to hold a block of scores and for the second to hold the panels. Tiles start at multiples of it, so that what a row
// computes depends on its own keys only.
constexpr int kTileKeys = 128;
constexpr int kTileWords = kTileKeys / 64;
static_assert(kCutKeys % kTileKeys == 0);
constexpr int kRowBlock = 64;  // rows whose scores are alive at a time

// Hands out pieces of one allocation on cache-line boundaries; with a null base it only counts.
class Carver {
 public:
  explicit Carver(char* base) : base_(base) {}
  template <typename T>
  T* take(int64_t count, int element_size = sizeof(T)) {
    T* piece = reinterpret_cast<T*>(base_ + used_);
    used_ += round_up_to(count * element_size, kLine);
    return piece;
  }
  static constexpr int64_t kLine = 64;
  int64_t used_ = 0;

 private:
  char* base_;
};

// What a tree mask leaves of keys [first_key, first_key + 64) to a query token: tree_allows, 64 at a time.
uint64_t tree_bits(const Params& p, const Request& r, int token, int first_key) {
  const int64_t draft = static_cast<int64_t>(first_key) - (static_cast<int64_t>(r.seqlen_k) - r.seqlen_q);
  if (draft <= -64) return ~uint64_t{0};
  const int prefix = static_cast<int>(std::max<int64_t>(-draft, 0));  // keys before the new tokens
  const int64_t first_bit = std::max<int64_t>(draft, 0);
  const uint8_t* row = tree_row(p, r, token);
  unsigned __int128 bytes = 0;
  for (int i = 0; i < 9 && first_bit / 8 + i < p.tree_mask_bytes; ++i) {
    bytes |= static_cast<unsigned __int128>(row[first_bit / 8 + i]) << (8 * i);
  }
  const uint64_t bits = static_cast<uint64_t>(bytes >> (first_bit % 8));
  return bits << prefix | ((uint64_t{1} << prefix) - 1);
}

// Bits [begin, end) of a row of `words` words.
void set_bits(uint64_t* row, int words, int begin, int end) {
  for (int i = 0; i < words; ++i) {
    const int low = std::clamp(begin - 64 * i, 0, 64), high = std::clamp(end - 64 * i, 0, 64);
    const auto below = [](int n) { return n == 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1; };
    row[i] = below(std::max(high, low)) & ~below(low);
  }
}

}  // namespace

Kernel::Kernel(const Params& params, const attnops::cpu::TileOps& ops)
    : p_(params),
      ops_(ops),
      dim_qk_(static_cast<int>(round_up_to(params.head_dim_qk, ops.k_multiple))),
      dim_v_(static_cast<int>(round_up_to(params.head_dim_v, kPanel))) {
  const int element = ops.element_size;
  const auto carve = [&](char* base) {
    Carver carver(base);
    queries_ = carver.take<char>(int64_t{kMaxRows} * dim_qk_, element);
    keys_ = carver.take<char>(int64_t{kTileKeys} * dim_qk_, element);
    values_ = carver.take<char>(int64_t{kTileKeys} * dim_v_, element);
    scores_ = carver.take<float>(kRowBlock * kTileKeys);
    probs_ = element == sizeof(float) ? static_cast<void*>(scores_) : carver.take<char>(kRowBlock * kTileKeys, element);
    for (PartialRows* rows : {&own_, &total_}) {
      rows->acc = carver.take<float>(int64_t{kMaxRows} * dim_v_);
      rows->row_max = carver.take<float>(kMaxRows);
      rows->row_sum = carver.take<float>(kMaxRows * kSumLanes);
    }
    visible_ = carver.take<uint64_t>(kRowBlock * kTileWords);
    q_rows_ = carver.take<const void*>(kMaxRows);
    for (KeyTile& tile : tiles_) {
      tile.k_rows = carver.take<const void*>(kTileKeys);
      tile.v_rows = carver.take<const void*>(kTileKeys);
    }
    return carver.used_;
  };
  storage_.reset(new char[carve(nullptr) + Carver::kLine]);
  const uintptr_t address = reinterpret_cast<uintptr_t>(storage_.get());
  carve(storage_.get() + (Carver::kLine - address % Carver::kLine) % Carver::kLine);
}

void Kernel::run(const Work& w) {
  const KeyRange keys = keys_of_work(p_, w), cuts = cuts_of_work(p_, w);
  load_queries(w);
  for (int cut = cuts.begin; cut < cuts.end; ++cut) {
    begin(w);
    attend_keys(w, {std::max(keys.begin, cut * kCutKeys), std::min(keys.end, (cut + 1) * kCutKeys)});
    if (cut > cuts.begin) add_rows(total_, own_, 0, w.num_rows, dim_v_);
    if (cut == cuts.begin) std::swap(total_, own_);
  }
  store(w, total_);
}

void Kernel::run_cut(const Work& w, int cut, const PartialRows& result) {
  const KeyRange keys = keys_of_work(p_, w);
  const PartialRows own = std::exchange(own_, result);
  load_queries(w);
  begin(w);
  attend_keys(w, {std::max(keys.begin, cut * kCutKeys), std::min(keys.end, (cut + 1) * kCutKeys)});
  own_ = own;
}

void Kernel::begin(const Work& w) {
  std::fill_n(own_.acc, static_cast<int64_t>(w.num_rows) * dim_v_, 0.f);
  std::fill_n(own_.row_max, w.num_rows, -INFINITY);
  std::fill_n(own_.row_sum, w.num_rows * kSumLanes, 0.f);
}

// Tiles that are hidden from all rows are left out: a row's bits are the same with them.
void Kernel::attend_keys(const Work& w, KeyRange keys) {
  const int end = keys.end, hidden_begin = hidden_from(p_, w.request, w.token(w.num_rows - 1)).begin,
            hidden_end = hidden_from(p_, w.request, w.token(0)).end;
  // The first key from `key` on of a tile that is not left out.
  const auto seen_from = [&](int key) {
    const auto last = [](int k) { return (k / kTileKeys + 1) * kTileKeys; };
    while (key < end && key >= hidden_begin && last(key) <= hidden_end) key = last(key);
    return key;
  };
  int begin = seen_from(keys.begin);
  if (begin < end) gather(w, begin, end, tiles_[0]);
  while (begin < end) {
    const KeyTile& tile = tiles_[0];
    ops_.pack_keys(keys_, tile.k_rows, tile.num_columns, p_.head_dim_qk, dim_qk_, p_.kv_dtype);
    ops_.pack_values(values_, tile.v_rows, tile.num_columns, p_.head_dim_v, dim_v_, p_.kv_dtype);
    const int next = seen_from((begin / kTileKeys + 1) * kTileKeys);
    if (next < end) {
      gather(w, next, end, tiles_[1]);
      prefetch(tiles_[1]);
    }
    for (int row = 0; row < w.num_rows; row += kRowBlock) attend(w, row, std::min(kRowBlock, w.num_rows - row), tile);
    std::swap(tiles_[0], tiles_[1]);
    begin = next;
  }
}

// The rows of the tile that holds key `begin`, as far as keys [begin, end) go. What lies before is not even packed: the
// tile then starts later, on a multiple of kKeyMultiple, which changes no sum.
void Kernel::gather(const Work& w, int begin, int end, KeyTile& tile) {
  const int tile_end = std::min(end, (begin / kTileKeys + 1) * kTileKeys);
  tile.first_key = begin / kKeyMultiple * kKeyMultiple;
  tile.num_columns = static_cast<int>(round_up_to(tile_end - tile.first_key, kKeyMultiple));
  std::fill_n(tile.k_rows, tile.num_columns, nullptr);
  std::fill_n(tile.v_rows, tile.num_columns, nullptr);
  const int skipped = begin - tile.first_key;
  tile.faulty = gather_rows(p_, w.request, w.kv_head, begin, tile_end, tile.k_rows + skipped, tile.v_rows + skipped);
  const bool tree = p_.tree_mask && tile_end > w.request.seqlen_k - w.request.seqlen_q;
  if (tree || tile_end > hidden_from(p_, w.request, w.token(0)).begin) drop_unseen(w, tile);
}

// Keys of the tile that are hidden from every row are packed as zeros: what they hold may be NaN, and a
// probability of zero does not select it away in a product.
void Kernel::drop_unseen(const Work& w, KeyTile& tile) const {
  uint64_t seen[kTileWords] = {}, bits[kTileWords];
  for (int token = w.token(0); token <= w.token(w.num_rows - 1); ++token) {
    seen_by(w, token, tile.first_key, tile.num_columns, bits);
    for (int i = 0; i < kTileWords; ++i) seen[i] |= bits[i];
  }
  for (int j = 0; j < tile.num_columns; ++j) {
    if ((seen[j / 64] >> (j % 64) & 1) == 0) tile.k_rows[j] = tile.v_rows[j] = nullptr;
  }
}

// Rows of a tile are far apart in memory, where no hardware prefetcher finds them: they are asked for while the tile
// before is in work.
void Kernel::prefetch(const KeyTile& tile) const {
  const int64_t k_bytes = static_cast<int64_t>(p_.head_dim_qk) * size_of(p_.kv_dtype);
  const int64_t v_bytes = static_cast<int64_t>(p_.head_dim_v) * size_of(p_.kv_dtype);
  const auto fetch = [](const void* row, int64_t bytes) {
    if (row == nullptr) return;
    for (int64_t at = 0; at < bytes; at += Carver::kLine) __builtin_prefetch(static_cast<const char*>(row) + at, 0, 2);
  };
  for (int j = 0; j < tile.num_columns; ++j) {
    fetch(tile.k_rows[j], k_bytes);
    fetch(tile.v_rows[j], v_bytes);
  }
}

// Rows in the compute type. A negative scale of the scores moves its sign here: the softmax wants it positive.
void Kernel::load_queries(const Work& w) {
  const float scale = p_.softmax_scale * scale_of(p_.k_scale, p_.k_scale_stride, w.kv_head);
  for (int row = 0; row < w.num_rows; ++row) q_rows_[row] = query_row(p_, w, row);
  ops_.load_rows(queries_, dim_qk_, q_rows_, w.num_rows, p_.head_dim_qk, dim_qk_, p_.dtype, scale < 0.f ? -1.f : 1.f);
  scale_ = std::fabs(scale);
}

// One online softmax step of a block of rows over the columns of the packed tile that some of them see.
void Kernel::attend(const Work& w, int first_row, int num_rows, const KeyTile& tile) {
  const int first_key = tile.first_key, num_columns = tile.num_columns;
  const auto [low, high] = key_bounds(p_, w.request, w.token(first_row), w.token(first_row + num_rows - 1));
  const int begin = std::max(low.begin - first_key, 0) / kKeyMultiple * kKeyMultiple;
  const int end = std::min(static_cast<int>(round_up_to(std::max(high.end - first_key, 0), kKeyMultiple)), num_columns);
  if (begin >= end) return;

  // Every row sees every column when even the last row's first key and the first row's last key are outside.
  const bool all_in_range = high.begin <= first_key + begin && low.end >= first_key + end;
  const bool tree = p_.tree_mask && first_key + end > w.request.seqlen_k - w.request.seqlen_q;
  const bool hidden = first_key + end > hidden_from(p_, w.request, w.token(first_row)).begin;
  const bool masked = !all_in_range || tree || hidden || tile.faulty;
  if (masked) set_visible(w, first_row, num_rows, first_key + begin, end - begin, tile);

  const int element = ops_.element_size;
  const char* queries = static_cast<const char*>(queries_) + static_cast<int64_t>(first_row) * dim_qk_ * element;
  const char* keys = static_cast<const char*>(keys_) + static_cast<int64_t>(begin) * dim_qk_ * element;
  const char* values = static_cast<const char*>(values_) + static_cast<int64_t>(begin) * kPanel * element;
  float* acc = own_.acc + static_cast<int64_t>(first_row) * dim_v_;
  ops_.gemm(scores_, kTileKeys, queries, dim_qk_, keys, dim_qk_, num_rows, end - begin, dim_qk_, false);
  ops_.softmax({.scores = scores_,
                .ld_scores = kTileKeys,
                .probs = probs_,
                .ld_probs = kTileKeys,
                .m = num_rows,
                .n = end - begin,
                .visible = masked ? visible_ : nullptr,
                .ld_visible = kTileWords,
                .scale = scale_,
                .logit_cap = p_.logit_cap,
                .row_max = own_.row_max + first_row,
                .row_sum = own_.row_sum + first_row * kSumLanes,
                .out = acc,
                .ld_out = dim_v_,
                .n_out = dim_v_});
  ops_.gemm(acc, dim_v_, probs_, kTileKeys, values, num_columns, num_rows, dim_v_, end - begin, true);
}

// Bit j: the token sees key `begin_key` + j.
void Kernel::seen_by(const Work& w, int token, int begin_key, int num_columns, uint64_t* bits) const {
  const KeyRange range = keys_of(p_, w.request, token);
  set_bits(bits, kTileWords, range.begin - begin_key, std::min(range.end - begin_key, num_columns));
  for (int i = 0; p_.tree_mask && i < kTileWords; ++i) {
    bits[i] &= tree_bits(p_, w.request, token, begin_key + 64 * i);
  }
  if (!p_.hidden_keys) return;
  uint64_t hidden[kTileWords];
  const KeyRange keys = hidden_from(p_, w.request, token);
  const auto in_tile = [&](int64_t key) {
    return static_cast<int>(std::clamp<int64_t>(key - begin_key, 0, kTileKeys));
  };
  set_bits(hidden, kTileWords, in_tile(keys.begin), in_tile(keys.end));
  for (int i = 0; i < kTileWords; ++i) bits[i] &= ~hidden[i];
}

// visible_[row]: bit j says that the row sees key `begin_key` + j.
void Kernel::set_visible(const Work& w, int first_row, int num_rows, int begin_key, int num_columns,
                         const KeyTile& tile) {
  for (int row = 0; row < num_rows; ++row) {
    uint64_t* bits = visible_ + row * kTileWords;
    const int token = w.token(first_row + row);
    if (row > 0 && token == w.token(first_row + row - 1)) {  // another head of the same token
      std::copy_n(bits - kTileWords, kTileWords, bits);
      continue;
    }
    seen_by(w, token, begin_key, num_columns, bits);
    for (int j = 0; tile.faulty && j < num_columns; ++j) {
      if (tile.k_rows[begin_key + j - tile.first_key] == nullptr) bits[j / 64] &= ~(uint64_t{1} << (j % 64));
    }
  }
}

void Kernel::store(const Work& w, const PartialRows& result) {
  constexpr float kLn2 = 0.6931471805599453f;
  float* factors = result.row_max;  // each is read before it is overwritten
  void* rows[kMaxRows];
  for (int row = 0; row < w.num_rows; ++row) {
    float sum = 0.f;
    for (int lane = 0; lane < kSumLanes; ++lane) sum += result.row_sum[row * kSumLanes + lane];
    factors[row] = finish_row(p_, w, row, result.row_max[row] * kLn2, sum);
    rows[row] = out_row(p_, w, row);
  }
  ops_.store_rows(rows, result.acc, dim_v_, factors, w.num_rows, p_.head_dim_v, p_.dtype);
}

}  // namespace attnops::fmha::cpu
