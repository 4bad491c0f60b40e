#pragma once
#include "core/report.h"
#include "scheduler/split_kv_bounds.h"
#include "xqa_decode/cuda/traits.cuh"
#include "xqa_decode/plan.h"

namespace attnops::xqa_decode {

// How the partial results of one work are numbered: split i lies in row `first` for i = 0, else `second + (i - 1)
// step`.
struct Splits {
  int index, count;  // of the piece at hand; count 1: no partial results
  int64_t first, second;
  int step;
  int arrivals;  // splits of the work that this part has made once the piece is done; 0: it makes the next one, too

  __device__ int64_t slot(int i) const { return i == 0 ? first : second + static_cast<int64_t>(i - 1) * step; }
};

// Tokens that a request's cells of the page table have room for. Out of line where they must be looked up: what is only
// jumped over costs short calls their instruction fetches.
__device__ __noinline__ inline int tokens_in_csr(const Params& p, int request) {
  return p.page_table.num_tokens(request);
}
__device__ __forceinline__ int tokens_in_table(const Params& p, int request) {
  return p.page_table.kv_indptr ? tokens_in_csr(p, request) : p.table_tokens;
}

// The same in kernels of short calls over e4m3 pages. Behind a call the compiler takes ring places and addresses for
// different from lane to lane, and computes them so, tile after tile.
__device__ __forceinline__ int tokens_in_table_inline(const Params& p, int request) {
  return p.page_table.kv_indptr ? p.page_table.num_tokens(request) : p.table_tokens;
}

// A part's row of the plan, whoever wrote it: its works are works that there are. The rest is brought within bounds by
// PieceWalk, while it waits for a length.
struct PartEntry : SplitKvEntry {
  bool has_work;

  __device__ __forceinline__ PartEntry(const Params& p, const Shape& shape, int part) {
    const int32_t* row = p.tile_scheduler_metadata + static_cast<int64_t>(part) * kSplitKvEntrySize;
    load(row, begin_work, begin_tile, end_work, end_tile);
    load(row + 4, begin_split, begin_num_splits, last_num_splits, first_part);
    has_work = attnops::has_work(*this, shape.plan_works, shape.plan_groups);
    end_work = at_most(end_work, shape.plan_works);
  }

  // Instead of a row: one whole work.
  __device__ __forceinline__ explicit PartEntry(int begin_work) {
    this->begin_work = begin_work, end_work = begin_work + 1;
    begin_tile = end_tile = begin_split = first_part = 0;
    begin_num_splits = last_num_splits = 1;
    has_work = true;
  }

 private:
  // Volatile: the second half would else be asked for once the first has been looked at.
  __device__ __forceinline__ static void load(const int32_t* at, int& a, int& b, int& c, int& d) {
    asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(at));
  }
};

// The pieces of one part of the plan, in order: a run of keys of one work for one block of its rows. The keys' stream
// and the arithmetic walk them independently, the stream ahead. All lanes of a warp hold the same state.
//
// In batch-invariant mode a piece is one cut of a work. A part often makes several cuts of a work in a row, a *run*; a
// stream that only brings keys may walk whole runs.
//
// kMayCut: whether there may be such a plan. Kernels that none is given to leave out what is for cuts alone.
template <bool kMayCut>
class PieceWalkOf {
 public:
  // Of a part that has work.
  __device__ PieceWalkOf(const Params& p, const Shape& shape, const PartEntry& entry, int part)
      : p_(p),
        row_blocks_(shape.row_blocks),
        group_(shape.heads_side_by_side ? p.num_kv_heads : 1),
        work_(entry.begin_work) {
    int group = part;  // of the plan
    if (group_ > 1) {
      group = shape.by_kv_heads.divide(part);
      request_ = work_;
      kv_head_ = part - group * group_;
    } else {
      request_ = shape.by_kv_heads.divide(work_);
      kv_head_ = work_ - request_ * p.num_kv_heads;
    }
    next_length_ = __ldg(p.cache_seqlens + request_);
    entry_ = clamped(entry, {shape.plan_works, shape.plan_groups, !cuts_works()}, group);
    row_block_ = row_blocks_ - 1, end_tile_ = entry_.begin_tile;
    num_tiles_ = end_tile_ + 1;  // as if the piece before ended here, inside the work
    // The part that holds the first tile of the first work may have begun with an earlier work.
    first_part_begins_ =
        __ldg(p.tile_scheduler_metadata + static_cast<int64_t>(entry_.first_part) * group_ * kSplitKvEntrySize);
  }

  // From here on whole runs, where cuts end with a round of `round_tokens` (a power of two).
  __device__ void walk_runs(int round_tokens) {
    if (row_blocks_ > 1 || !cuts_works()) return;
    run_round_ = round_tokens;
    if (length_ >= 0 && cut_ends_round()) end_tile_ = min_of(run_end(), num_tiles_);
  }

  // Goes to the next piece; false when there is none.
  __device__ bool next() {
    if (++row_block_ < row_blocks_) return true;
    row_block_ = 0;
    tile_ = end_tile_;
    if (tile_ >= num_tiles_) {
      ++work_;
      tile_ = 0;
      if (group_ > 1 || ++kv_head_ == p_.num_kv_heads) {
        if (group_ == 1) kv_head_ = 0;
        ++request_;
        length_ = -1;
      }
    }
    if (work_ > entry_.end_work || (work_ == entry_.end_work && tile_ >= entry_.end_tile)) return false;
    open();
    return true;
  }

  __device__ int work() const { return group_ > 1 ? work_ * group_ + kv_head_ : work_; }
  __device__ int request() const { return request_; }
  __device__ int kv_head() const { return kv_head_; }
  __device__ int row_block() const { return row_block_; }
  __device__ bool last_row_block() const { return row_block_ + 1 == row_blocks_; }
  __device__ int length() const { return length_; }
  __device__ const KvRange& keys() const { return keys_; }  // that some row of the request may see
  __device__ int first_token() const { return (first_tile_ + tile_) * kPlanTileTokens; }
  __device__ int end_token() const { return min_of((first_tile_ + end_tile_) * kPlanTileTokens, keys_.end); }
  // More cuts than the caller has room for: nothing is computed, and that must not pass for an answer.
  __device__ bool overflows() const { return overflows_; }
  __device__ bool starts_work() const { return tile_ == 0; }
  // Batch-invariant mode: tiles of a cut, the piece's own and the work's.
  __device__ int tiles_of_one_cut() const { return cut_tiles(); }
  __device__ int tiles() const { return end_tile_ - tile_; }
  // Whether the piece before had the same work and the same rows.
  __device__ bool continues_run() const { return row_blocks_ == 1 && tile_ > run_begin(); }
  // Whether this is the part's last piece, all row blocks counted as one.
  __device__ bool is_last() const {
    const bool ends_work = end_tile_ >= num_tiles_;
    const int next_work = ends_work ? work_ + 1 : work_;
    const int next_tile = ends_work ? 0 : end_tile_;
    return next_work > entry_.end_work || (next_work == entry_.end_work && next_tile >= entry_.end_tile);
  }

  // Calls `visit` with request, KV head and row block of the piece after this one, if there is one.
  template <class Visit>
  __device__ __forceinline__ void look_ahead(const Visit& visit) const {
    if (row_block_ + 1 < row_blocks_) return visit(request_, kv_head_, row_block_ + 1);
    if (is_last()) return;
    if (end_tile_ < num_tiles_) return visit(request_, kv_head_, 0);
    if (group_ > 1) return visit(request_ + 1, kv_head_, 0);
    const bool same_request = kv_head_ + 1 < p_.num_kv_heads;
    visit(same_request ? request_ : request_ + 1, same_request ? kv_head_ + 1 : 0, 0);
  }

  // Calls `visit` with all that differs between parts or pieces: for those who keep it elsewhere meanwhile.
  template <class Visit>
  __device__ __forceinline__ void visit_state(const Visit& visit) {
    visit(entry_.begin_work), visit(entry_.begin_tile), visit(entry_.end_work), visit(entry_.end_tile);
    visit(entry_.begin_split), visit(entry_.begin_num_splits), visit(entry_.last_num_splits), visit(entry_.first_part);
    visit(work_), visit(tile_), visit(end_tile_), visit(num_tiles_), visit(first_tile_), visit(row_block_);
    visit(next_length_), visit(first_part_begins_), visit(request_), visit(kv_head_), visit(length_);
    visit(keys_.begin), visit(keys_.end);
  }

  __device__ Splits splits() const {
    if (cuts_works()) {
      const int index = tile_ / cut_tiles(), cuts = num_cuts();
      const int64_t first = first_cut(cuts);
      return {index, cuts, first, first + 1, 1, end_tile_ == run_end() ? index - run_begin_cut() + 1 : 0};
    }
    const int last_work = entry_.end_tile > 0 ? entry_.end_work : entry_.end_work - 1;
    const bool begins = work_ == entry_.begin_work;
    const int count = begins ? entry_.begin_num_splits : work_ == last_work ? entry_.last_num_splits : 1;
    if (count <= 1) return {0, 1, 0, 0, 0, 1};
    const int first = begins ? entry_.first_part : entry_.first_part + entry_.begin_split;
    const bool alone = begins && (entry_.begin_split == 0 || first_part_begins_ == work_);
    const int head = group_ > 1 ? kv_head_ : 0;
    return {begins ? entry_.begin_split : 0,
            count,
            partial_slot(first, alone) * group_ + head,
            partial_slot(first + 1, true) * group_ + head,
            2 * group_,
            1};
  }

 protected:
  // Goes to a whole work that is in no row, whose length is known.
  __device__ __forceinline__ void start(int request, int kv_head, int length) {
    request_ = request, kv_head_ = kv_head;
    work_ = group_ > 1 ? request : request * p_.num_kv_heads + kv_head;
    entry_.begin_work = work_, entry_.end_work = work_ + 1;
    tile_ = 0, row_block_ = 0;
    length_ = length_of(length);
    find_tiles();
    end_tile_ = num_tiles_;
  }

  __device__ bool cuts_works() const { return kMayCut && p_.fixed_split_tokens != 0; }

  // The part's tiles of the work.
  __device__ int run_begin() const { return work_ == entry_.begin_work ? entry_.begin_tile : 0; }
  __device__ int run_end() const { return work_ == entry_.end_work ? entry_.end_tile : num_tiles_; }

  __device__ int run_begin_cut() const { return work_ == entry_.begin_work ? entry_.begin_split : 0; }
  __device__ bool cut_ends_round() const {
    return run_round_ > 0 && (cut_tiles() * kPlanTileTokens & (run_round_ - 1)) == 0;
  }

  // Of the work at hand, in batch-invariant mode. Computed where they are asked for: registers that hold them from
  // piece to piece are taken from the arithmetic between, in every mode.
  __device__ int cut_tiles() const { return tiles_of_cut(p_.fixed_split_tokens, num_tiles_); }
  __device__ int num_cuts() const { return ceil_div(num_tiles_, cut_tiles()); }

  // Row of the partial results.
  __device__ int64_t first_cut(int cuts) const {
    // What is below zero is far above, and has no room, either.
    const uint64_t before = static_cast<uint32_t>(__ldg(p_.num_splits + request_));
    return static_cast<int64_t>(before * static_cast<uint32_t>(p_.num_kv_heads)) +
           static_cast<int64_t>(kv_head_) * cuts;
  }

  __device__ void open() {
    if (length_ < 0) {
      length_ = length_of(next_length_);
      if (request_ + 1 < p_.batch_size) next_length_ = __ldg(p_.cache_seqlens + request_ + 1);
      find_tiles();
    }
    end_tile_ = run_end();
    overflows_ = false;
    if (cuts_works()) {
      const int cuts = num_cuts();
      // No more than the work has, as a planner's rows say themselves.
      tile_ = min_of(tile_, num_tiles_ - 1), end_tile_ = min_of(end_tile_, num_tiles_);
      if (!cut_ends_round()) end_tile_ = min_of(end_tile_, tile_ + cut_tiles());
      overflows_ = cuts > 1 && first_cut(cuts) + cuts > p_.num_partials;
    }
  }

  // Those of the request at hand, whose length is known.
  __device__ __forceinline__ void find_tiles() {
    keys_ = visible_keys(length_, p_.seqlen_q, p_.window_left);
    const TileRange tiles = visible_tiles(length_, p_.seqlen_q, p_.window_left, kPlanTileTokens);
    first_tile_ = tiles.first;
    num_tiles_ = tiles.count;
    clip_to_table();
  }

  // Keys beyond the table are seen by nobody, and faults in checked mode.
  __device__ void clip_to_table() {
    keys_.end = min_of(keys_.end, tokens_in_table(p_, request_));
    if (p_.report && keys_.end < length_ && threadIdx.x == 0) record_length(p_, request_);
  }

  __device__ __noinline__ static void record_length(const Params& p, int request) {
    const int64_t capacity = p.page_table.num_cells(request) * p.page_table.page_size;
    record_fault(p.report,
                 {ReportOp::kXqaDecode, ReportKind::kLength, request, 0, p.cache_seqlens[request], capacity + 1});
  }

  const Params& p_;
  int row_blocks_;
  int group_;  // parts side by side, each with a KV head of its own: a work of the plan is then a whole request
  SplitKvEntry entry_;
  int work_, end_tile_;
  int tile_ = 0, row_block_;
  int run_round_ = 0;                    // of walk_runs
  int next_length_, first_part_begins_;  // loads that nobody has to wait for yet
  int request_, kv_head_, length_ = -1, first_tile_ = 0, num_tiles_;
  KvRange keys_{0, 0};
  bool overflows_ = false;
};

using PieceWalk = PieceWalkOf<true>;

// How many chunks a piece has.
template <class Tr, class Piece>
__device__ int num_chunks(const Piece& piece) {
  return piece.overflows() ? 0 : ceil_div(max_of(piece.end_token() - piece.first_token(), 0), Tr::kChunk);
}

// Warps in groups of `row_groups` share their keys. In each round a warp copies one chunk, and computes with those of
// its whole group: round r of warp w brings chunk r * kWarps + w.
template <class Tr>
__device__ int num_rounds(int chunks, int group_first_warp) {
  return ceil_div(max_of(chunks - group_first_warp, 0), Tr::kWarps);
}

}  // namespace attnops::xqa_decode
