#include "xqa_decode/cpu/driver.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "core/report.h"
#include "xqa_decode/cpu/request.h"
#include "xqa_decode/plan.h"

namespace attnops::xqa_decode::cpu {
namespace {

// Heads of one request are computed side by side, tile by tile, because their rows are neighbours in memory. A tile of
// all of them (what is done with makes room for what is fetched) and their state stay within a core's L2 cache.
constexpr int64_t kTileBytesAtOnce = 512 * 1024;
constexpr int64_t kStateBytesAtOnce = 256 * 1024;
constexpr int kMaxHeadsAtOnce = 64;

int heads_at_once(const Params& p, int64_t state_bytes) {
  const int64_t tile_bytes = int64_t{2} * kTileTokens * p.head_dim * size_of(p.kv_dtype);
  const int64_t fit = min_of(kTileBytesAtOnce / tile_bytes, kStateBytesAtOnce / state_bytes);
  return static_cast<int>(max_of<int64_t>(1, min_of<int64_t>(min_of(p.num_kv_heads, kMaxHeadsAtOnce), fit)));
}

// Memory that a part works in, one allocation, cut into aligned pieces.
class Scratch {
 public:
  explicit Scratch(int64_t bytes)
      : memory_(static_cast<char*>(::operator new(bytes, kAlignment))), next_(memory_.get()) {}

  template <typename T>
  T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(next_);
    next_ += size(count * sizeof(T));
    return piece;
  }
  static int64_t size(int64_t bytes) { return round_up<int64_t>(bytes, 64); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(char* p) const { ::operator delete(p, kAlignment); }
  };
  std::unique_ptr<char, Free> memory_;
  char* next_;
};

// Where the pieces of neighbouring heads go.
struct Destination {
  bool direct;        // to out and lse
  int64_t slot;       // else: row of out_partial of the first head
  int64_t head_step;  // from one head's row to the next one's
};

// Works [head, head + num_heads) of one request over the tiles [tile_begin, tile_end).
struct Piece {
  int request, head, num_heads;
  int tile_begin, tile_end;
  int fetch_end;  // tiles up to here are read soon, by this piece or the next
  Destination to;
};

class Part {
 public:
  Part(const Params& params, const TileKernel& kernel)
      : p_(params),
        kernel_(kernel),
        group_(params.num_q_heads / params.num_kv_heads),
        num_rows_(params.seqlen_q * group_),
        q_bytes_(Scratch::size(round_up<int64_t>(num_rows_, kPackedRows) * kernel.q_row_bytes(params.head_dim))),
        acc_stride_(kernel.acc_stride(params.head_dim)),
        acc_bytes_(Scratch::size(static_cast<int64_t>(num_rows_) * acc_stride_ * sizeof(float))),
        max_heads_(heads_at_once(params, q_bytes_ + acc_bytes_)),
        zero_bytes_(params.head_dim * static_cast<int64_t>(sizeof(float))),
        scratch_(max_heads_ * (q_bytes_ + acc_bytes_ + 2 * Scratch::size(num_rows_ * sizeof(float))) +
                 Scratch::size(num_rows_ * sizeof(uint64_t)) + Scratch::size(params.seqlen_q * sizeof(uint64_t)) +
                 Scratch::size(kernel.scratch_bytes(params.head_dim)) + Scratch::size(zero_bytes_)),
        q_(scratch_.take<char>(max_heads_ * q_bytes_)),
        acc_(scratch_.take<float>(max_heads_ * acc_bytes_ / sizeof(float))),
        row_visible_(scratch_.take<uint64_t>(num_rows_)),
        token_visible_(scratch_.take<uint64_t>(params.seqlen_q)),
        tile_scratch_(scratch_.take<char>(kernel.scratch_bytes(params.head_dim))),
        zeros_(scratch_.take<char>(zero_bytes_)),
        row_max_(scratch_.take<float>(max_heads_ * Scratch::size(num_rows_ * sizeof(float)) / sizeof(float))),
        row_sum_(scratch_.take<float>(max_heads_ * Scratch::size(num_rows_ * sizeof(float)) / sizeof(float))) {
    std::memset(zeros_, 0, zero_bytes_);
    if (kernel.begin) kernel.begin();
  }
  Part(const Part&) = delete;
  ~Part() {
    if (kernel_.end) kernel_.end();
  }

  void run(const SplitKvEntry& entry, int part) {
    const int last_work = entry.end_tile > 0 ? entry.end_work : entry.end_work - 1;
    for (int work = entry.begin_work; work <= last_work;) {
      const int request = work / p_.num_kv_heads, head = work % p_.num_kv_heads;
      const int tiles = tiles_of(request);
      const int begin = work == entry.begin_work ? entry.begin_tile : 0;
      const int end = work == entry.end_work ? entry.end_tile : tiles;
      int heads = 1;
      if (begin == 0 && end == tiles) {  // whole works of one request go side by side
        const int whole_end = entry.end_tile > 0 ? entry.end_work : last_work + 1;
        heads = min_of(min_of(whole_end - work, p_.num_kv_heads - head), max_heads_);
      }
      if (p_.fixed_split_tokens != 0) {
        run_cuts({request, head, heads, begin, end, end, {}}, tiles);
      } else if (begin == 0 && end == tiles) {
        run_piece({request, head, heads, begin, end, end, {true, 0, 0}});
      } else {
        run_piece({request, head, heads, begin, end, end, {false, partial_slot(part, work == entry.begin_work), 0}});
      }
      work += heads;
    }
  }

 private:
  int tiles_of(int request) const {
    return visible_tiles(p_.cache_seqlens[request], p_.seqlen_q, p_.window_left, kTileTokens).count;
  }

  // Batch-invariant mode: every cut by itself, from fresh state.
  void run_cuts(const Piece& piece, int tiles) {
    const int cut_tiles = tiles_of_cut(p_.fixed_split_tokens, tiles);
    const int64_t cuts = ceil_div(tiles, cut_tiles);
    const int64_t first_slot = int64_t{p_.num_splits[piece.request]} * p_.num_kv_heads + piece.head * cuts;
    const int64_t heads_that_fit = max_of<int64_t>(p_.num_partials - first_slot, 0) / cuts;  // merge_fixed shows others
    if (cuts > 1 && heads_that_fit == 0) return;
    for (int tile = piece.tile_begin; tile < piece.tile_end; tile += cut_tiles) {
      Piece cut = piece;
      if (cuts > 1) cut.num_heads = static_cast<int>(min_of<int64_t>(piece.num_heads, heads_that_fit));
      cut.tile_begin = tile;
      cut.tile_end = min_of(tile + cut_tiles, piece.tile_end);
      cut.to = {cuts == 1, first_slot + tile / cut_tiles, cuts};
      run_piece(cut);
    }
  }

  void run_piece(const Piece& piece) {
    const RequestKeys keys(p_, piece.request, /*report_faults=*/piece.head == 0);
    for (int h = 0; h < piece.num_heads; ++h) start(piece, h);
    TileAddresses* now = &addresses_[0];
    TileAddresses* next = &addresses_[1];
    keys.locate(piece.tile_begin, *now);
    const int tile_end = min_of(piece.tile_end, keys.end_tile());
    for (int tile = piece.tile_begin; tile < tile_end; ++tile) {
      next->count = 0;
      if (tile + 1 < piece.fetch_end) keys.locate(tile + 1, *next);
      if (now->count > 0) attend_tile(piece, keys, *now, *next);
      TileAddresses* const done = now;
      now = next;
      next = done;
    }
    for (int h = 0; h < piece.num_heads; ++h) finish(piece, h);
  }

  // Pack the queries of a head and reset its state.
  void start(const Piece& piece, int h) {
    const int row_bytes = kernel_.q_row_bytes(p_.head_dim);
    const int64_t element = size_of(p_.dtype);
    const RequestTokens tokens(p_, piece.request);
    for (int row = 0; row < num_rows_; ++row) {
      const int64_t offset = tokens.query_offset(p_, row / group_) +
                             static_cast<int64_t>((piece.head + h) * group_ + row % group_) * p_.q_stride_head;
      kernel_.pack_q(static_cast<const char*>(p_.q) + offset * element, p_.head_dim,
                     q_ + h * q_bytes_ + static_cast<int64_t>(row) * row_bytes);
      row_max(h)[row] = -INFINITY;
      row_sum(h)[row] = 0.f;
    }
    if (kernel_.arrange_q) kernel_.arrange_q(q_ + h * q_bytes_, num_rows_, p_.head_dim);
    std::memset(acc(h), 0, acc_bytes_);
  }

  void attend_tile(const Piece& piece, const RequestKeys& keys, const TileAddresses& now, const TileAddresses& next) {
    const uint64_t* visible = visibility(keys, now);
    const int64_t element = size_of(p_.kv_dtype);
    for (int h = 0; h < piece.num_heads; ++h) {
      const int64_t k_offset = (piece.head + h) * p_.k_stride_head * element;
      const int64_t v_offset = (piece.head + h) * p_.v_stride_head * element;
      for (int t = 0; t < kTileTokens; ++t) {
        const bool used = (seen_by_any_ >> t & 1) != 0;
        k_rows_[t] = used ? now.k[t] + k_offset : zeros_;
        v_rows_[t] = used ? now.v[t] + v_offset : zeros_;
      }
      const float k_scale = p_.k_scale ? p_.k_scale[(piece.head + h) * p_.k_scale_stride] : 1.f;
      const float scale = p_.softmax_scale * k_scale;
      const bool capped = p_.logit_cap != 0.f;
      kernel_.attend({.num_rows = num_rows_,
                      .head_dim = p_.head_dim,
                      .group = group_,
                      .num_tokens = now.count,
                      .k_rows = k_rows_,
                      .v_rows = v_rows_,
                      .visible = visible,
                      .fetch_rows = fetch_rows_,
                      .num_fetch = rows_to_fetch(piece, h, now, next),
                      .fetch_bytes = static_cast<int>(p_.head_dim * element),
                      .q = q_ + h * q_bytes_,
                      .acc = acc(h),
                      .row_max = row_max(h),
                      .row_sum = row_sum(h),
                      .scratch = tile_scratch_,
                      .score_scale = capped ? scale / p_.logit_cap : scale * kLog2e,
                      .score_cap = p_.logit_cap * kLog2e});
    }
  }

  // Fills fetch_rows_ with what head h's turn fetches ahead, in the order of memory: where a token's heads are
  // neighbours, its share of the next tile's tokens with all heads; else the next head's rows of this tile, or the
  // first of the next. A token's values follow its keys where a page has them side by side.
  int rows_to_fetch(const Piece& piece, int h, const TileAddresses& now, const TileAddresses& next) {
    const int64_t element = size_of(p_.kv_dtype);
    const int64_t k_step = p_.k_stride_head * element, v_step = p_.v_stride_head * element;
    const bool by_token = k_step < p_.k_stride_token * element && p_.k_stride_head > 0;
    const bool last = h + 1 == piece.num_heads;
    const TileAddresses& from = by_token || last ? next : now;
    const int begin = by_token ? from.count * h / piece.num_heads : 0;
    const int end = by_token ? from.count * (h + 1) / piece.num_heads : from.count;
    const int head = piece.head + (by_token || last ? 0 : h + 1);
    const int heads = by_token ? piece.num_heads : 1;
    const char** to = fetch_rows_;
    const auto add = [&](const char* const* rows, int64_t head_step, int t) {
      for (int i = 0; i < heads; ++i) *to++ = rows[t] + (head + i) * head_step;
    };
    const bool side_by_side = begin < end && std::abs(from.v[begin] - from.k[begin]) < p_.k_stride_token * element;
    for (int t = begin; t < end; ++t) {
      add(from.k, k_step, t);
      if (side_by_side) add(from.v, v_step, t);
    }
    for (int t = begin; t < end && !side_by_side; ++t) add(from.v, v_step, t);
    return static_cast<int>(to - fetch_rows_);
  }

  // Per row, or null when every row sees every token of the tile. Sets seen_by_any_.
  const uint64_t* visibility(const RequestKeys& keys, const TileAddresses& tile) {
    const uint64_t all = low_bits(tile.count) & tile.readable;
    bool everywhere = all == low_bits(tile.count);
    seen_by_any_ = 0;
    for (int i = 0; i < p_.seqlen_q; ++i) {
      token_visible_[i] = keys.visible_bits(i, tile) & all;
      seen_by_any_ |= token_visible_[i];
      everywhere = everywhere && token_visible_[i] == all;
    }
    if (everywhere) return nullptr;
    for (int row = 0; row < num_rows_; ++row) row_visible_[row] = token_visible_[row / group_];
    return row_visible_;
  }

  void finish(const Piece& piece, int h) {
    const float v_scale = p_.v_scale ? p_.v_scale[(piece.head + h) * p_.v_scale_stride] : 1.f;
    for (int row = 0; row < num_rows_; ++row) {
      const float sum = row_sum(h)[row];
      const bool empty = sum == 0.f;
      const float lse = empty ? -INFINITY : (row_max(h)[row] + log2f(sum)) * kLn2;
      const float factor = empty ? 0.f : v_scale / sum;
      const float* values = acc(h) + static_cast<int64_t>(row) * acc_stride_;
      if (piece.to.direct) {
        const OutputRow to(p_, piece.request, piece.head + h, row);
        if (!to.exists) continue;
        kernel_.store(values, p_.head_dim, factor * to.sink_factor(lse), to.out);
        if (to.lse) *to.lse = lse;
      } else {
        const int64_t to = (piece.to.slot + h * piece.to.head_step) * num_rows_ + row;
        kernel_.store_partial(values, p_.head_dim, factor, p_.out_partial + to * p_.head_dim);
        p_.lse_partial[to] = lse;
      }
    }
  }

  float* acc(int h) { return acc_ + h * acc_bytes_ / static_cast<int64_t>(sizeof(float)); }
  float* row_max(int h) {
    return row_max_ + h * Scratch::size(num_rows_ * sizeof(float)) / static_cast<int64_t>(sizeof(float));
  }
  float* row_sum(int h) {
    return row_sum_ + h * Scratch::size(num_rows_ * sizeof(float)) / static_cast<int64_t>(sizeof(float));
  }

  const Params& p_;
  const TileKernel& kernel_;
  const int group_, num_rows_;
  const int64_t q_bytes_;
  const int acc_stride_;
  const int64_t acc_bytes_;
  const int max_heads_;
  const int64_t zero_bytes_;
  Scratch scratch_;
  char* q_;
  float* acc_;
  uint64_t* row_visible_;
  uint64_t* token_visible_;
  char* tile_scratch_;
  char* zeros_;
  float* row_max_;
  float* row_sum_;
  uint64_t seen_by_any_ = 0;
  TileAddresses addresses_[2];
  const char* k_rows_[kTileTokens];
  const char* v_rows_[kTileTokens];
  const char* fetch_rows_[2 * (kTileTokens + kMaxHeadsAtOnce)];
};

// Merges the rows of one work. Split s is row slot(s) of the partial results.
template <class Slot>
void merge_work(const Params& p, const TileKernel& kernel, int work, int num_splits, const Slot& slot) {
  const int group = p.num_q_heads / p.num_kv_heads, num_rows = p.seqlen_q * group;
  float total[kMaxHeadDim];
  for (int row = 0; row < num_rows; ++row) {
    float lse_max = -INFINITY;
    for (int s = 0; s < num_splits; ++s) lse_max = fmaxf(lse_max, p.lse_partial[slot(s) * num_rows + row]);
    float sum = 0.f;
    for (int d = 0; d < p.head_dim; ++d) total[d] = 0.f;
    for (int s = 0; s < num_splits && lse_max > -INFINITY; ++s) {
      const int64_t from = slot(s) * num_rows + row;
      const float weight = expf(p.lse_partial[from] - lse_max);
      if (weight == 0.f) continue;
      sum += weight;
      const float* values = p.out_partial + from * p.head_dim;
      for (int d = 0; d < p.head_dim; ++d) total[d] += weight * values[d];
    }
    const float lse = sum > 0.f ? lse_max + logf(sum) : lse_max;
    const OutputRow to(p, work / p.num_kv_heads, work % p.num_kv_heads, row);
    if (!to.exists) continue;
    const float factor = sum > 0.f ? to.sink_factor(lse) / sum : 0.f;
    for (int d = 0; d < p.head_dim; ++d) total[d] *= factor;
    kernel.round(total, p.head_dim, to.out);
    if (to.lse) *to.lse = lse;
  }
}

// A result that nobody can take for an answer, where the caller has no room for the cuts.
void store_nan(const Params& p, const TileKernel& kernel, int work, int64_t partials) {
  const int request = work / p.num_kv_heads, rows = p.seqlen_q * (p.num_q_heads / p.num_kv_heads);
  if (p.report) {
    record_fault(p.report, {ReportOp::kXqaDecode, ReportKind::kLength, request, 0, partials, p.num_partials + 1});
  }
  float nan[kMaxHeadDim];
  std::fill(nan, nan + p.head_dim, NAN);
  for (int row = 0; row < rows; ++row) {
    const OutputRow to(p, request, work % p.num_kv_heads, row);
    if (!to.exists) continue;
    kernel.round(nan, p.head_dim, to.out);
    if (to.lse) *to.lse = NAN;
  }
}

SplitKvEntry entry_of(const Params& p, int part) {
  SplitKvEntry entry;
  std::memcpy(&entry, p.tile_scheduler_metadata + part * kSplitKvEntrySize, sizeof(entry));
  return entry;
}

}  // namespace

void run_part(const Params& params, const TileKernel& kernel, int part) {
  const SplitKvEntry entry = entry_of(params, part);
  if (entry.begin_work == entry.end_work && entry.begin_tile == entry.end_tile) return;
  Part(params, kernel).run(entry, part);
}

void merge_balanced(const Params& params, const TileKernel& kernel, int index) {
  const SplitKvEntry entry = entry_of(params, index);
  if (entry.begin_work == entry.end_work && entry.begin_tile == entry.end_tile) return;
  const int work = entry.end_tile > 0 ? entry.end_work : entry.end_work - 1;
  const bool starts_here = work != entry.begin_work || entry.begin_tile == 0;
  if (entry.last_num_splits <= 1 || !starts_here) return;
  merge_work(params, kernel, work, entry.last_num_splits,
             [&](int split) -> int64_t { return partial_slot(index + split, split > 0 || work == entry.begin_work); });
}

void merge_fixed(const Params& params, const TileKernel& kernel, int index) {
  const int request = index / params.num_kv_heads, head = index % params.num_kv_heads;
  const int cuts = params.num_splits[request + 1] - params.num_splits[request];
  if (cuts <= 1) return;
  const int64_t base =
      static_cast<int64_t>(params.num_splits[request]) * params.num_kv_heads + static_cast<int64_t>(head) * cuts;
  if (base + cuts > params.num_partials) return store_nan(params, kernel, index, base + cuts);
  merge_work(params, kernel, index, cuts, [&](int split) { return base + split; });
}

}  // namespace attnops::xqa_decode::cpu
