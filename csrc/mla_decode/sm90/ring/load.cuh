#pragma once
#include "device/sm90/barrier.cuh"
#include "device/sm90/copy.cuh"
#include "device/sm90/wgmma.cuh"
#include "mla_decode/sm90/modes.h"
#include "mla_decode/sm90/pieces.cuh"
#include "mla_decode/sm90/ring/layout.h"

namespace attnops::mla_decode::sm90::ring {

// Keeps an object in local memory between uses: these groups' registers are full.
template <class X>
__device__ inline void park(X& x) {
  asm volatile("" ::"l"(&x) : "memory");
}

// Walks what part blockIdx.x owns, work by work: all of its tiles of one. Where works are cut, whoever computes them
// cuts: tiles come all the same.
class Walk {
 public:
  __device__ explicit Walk(const SplitKvEntry& entry) : entry_(entry) {}

  // The part's row of the plan is there.
  __device__ void begin() { work_ = entry_.begin_work; }

  // Of the next piece.
  __device__ BlockPlace block(const Params& p) const { return block_place(p, work_); }

  // Describes the next piece, but for its place among partial results.
  __device__ TileRange next(const Params& p, const BlockPlace& place, int cache_seqlen, Piece& piece) {
    const bool is_first = work_ == entry_.begin_work;
    const TileRange range = describe_work<Options::kCommon>(p, place, cache_seqlen, piece);
    const int begin = is_first ? entry_.begin_tile : 0, end = work_ == entry_.end_work ? entry_.end_tile : range.count;
    piece.first_tile = range.first + begin;
    // Cuts are counted by the length, wherever the page table ends.
    piece.num_tiles =
        p.fixed_split_tokens == 0 ? tiles_in_table(piece, end - begin) : max_of(min_of(end, range.count) - begin, 1);
    ++work_;
    return range;
  }

  // Where the results of the piece that `next` has described go; of its first cut, if it is cut.
  __device__ void place(const Params& p, const TileRange& range, Piece& piece) const {
    if (p.fixed_split_tokens == 0) {
      piece.partial = balanced_partial(entry_, work_ - 1);
      return;
    }
    const int cut_tiles = p.fixed_split_tokens / kPlanTileTokens, cuts = ceil_div(range.count, cut_tiles);
    const int64_t first = first_cut(p, piece.request, piece.first_row / kPlanRows, cuts);
    const int cut = min_of((piece.first_tile - range.first) / cut_tiles, cuts - 1);
    piece.partial = cuts > 1 ? static_cast<int>(first + cut) : -1;
    if (cuts == 1 || has_room(p, first, cuts)) return;
    // More cuts than the caller has room for: the merge makes it seen.
    piece.partial = -1;
    piece.num_rows = 0;
  }

 private:
  const SplitKvEntry& entry_;
  int work_ = 0;
};

// Pieces of a part: one of every work.
__device__ inline int count_pieces(const SplitKvEntry& entry) { return last_work_of(entry) - entry.begin_work + 1; }

// Decides what comes next into the ring. One warp does, for both values groups; its state is parked in local memory,
// because registers are full of the accumulator. Nothing here divides or waits for memory between two tiles.
class Planner {
 public:
  struct State {
    Walk walk;
    Piece piece;
    int tiles_left;       // of the piece, those that hold keys
    int token;            // of the next tile in its page
    const int32_t* cell;  // of the page table, for the next tile
    const int32_t* end_cell;
    int page;  // of the next tile
    int left;  // of the part's pieces, one of every work
    bool queries_next;
  };

  __device__ Planner(const Params& p, const SplitKvEntry& entry, int even_shares, State& state)
      : p_(p), entry_(entry), even_shares_(even_shares), state_(state) {}

  // Reads the part's row of the plan, and at the same time what an even batch will want to know next. Everything here
  // is read before the first box is asked for: behind boxes, which all SMs ask for at once, a word takes 2 us.
  __device__ void begin_part(SplitKvEntry* entry) {
    State& state = state_;
    const int lane = threadIdx.x % 32;
    const SplitKvEntry row = entry_of(p_, blockIdx.x);
    const int likely = likely_request();
    const int32_t* cells = p_.page_table.row(likely);
    int length = p_.cache_seqlens[likely], page = p_.page_table.max_pages > 0 ? cells[0] : 0;
    if (lane == 0) *entry = row;
    __syncwarp();
    state.left = count_pieces(entry_);
    if (state.left == 0) return;
    state.walk.begin();
    const int request = block_place(p_, entry_.begin_work).request, cell = cell_of(entry_.begin_tile);
    if (request != likely) length = p_.cache_seqlens[request];
    if (request != likely || cell != 0) page = cell < p_.page_table.max_pages ? p_.page_table.row(request)[cell] : 0;
    begin_piece(length, page);
  }

  // Describes the next item.
  __device__ void write(Item* item) {
    State& state = state_;
    if (state.left == 0) {
      item->kind = Item::kNothing;
      return;
    }
    if (state.queries_next) {
      *item = {Item::kQueries, state.piece.first_row, state.piece.request};
      state.queries_next = false;
      return;
    }
    *item = {Item::kKeys, state.token, state.page};
    if (--state.tiles_left == 0) return end_piece();
    state.token += kPlanTileTokens;
    if (state.token != p_.page_table.page_size) return;
    state.token = 0;
    state.page = ++state.cell < state.end_cell ? *state.cell : -1;
  }

 private:
  __device__ int cell_of(int tile) const {
    const int page_size = p_.page_table.page_size;
    return page_size == kPlanTileTokens ? tile : tile * kPlanTileTokens / page_size;
  }

  // The request that this part begins with, if works are even.
  __device__ int likely_request() const {
    const int request = static_cast<int>(static_cast<int64_t>(group_of_part(p_)) * p_.batch_size / even_shares_);
    return min_of(request, p_.batch_size - 1);
  }

  __device__ void begin_piece(int length, int page) {
    State& state = state_;
    state.walk.next(p_, state.walk.block(p_), length, state.piece);
    const Piece& piece = state.piece;
    const int cell = cell_of(piece.first_tile), key = piece.first_tile * kPlanTileTokens;
    state.queries_next = true;
    state.tiles_left = piece.num_tiles;
    state.cell = p_.page_table.row(piece.request) + cell;
    state.end_cell = p_.page_table.row(piece.request) + p_.page_table.max_pages;
    state.token = key - cell * p_.page_table.page_size;
    // A request without keys has a tile all the same: of a page that does not exist, which reads as zeros.
    state.page = key >= piece.keys.end ? -1 : page;
  }

  __device__ void end_piece() {
    if (--state_.left == 0) return;
    const int request = state_.walk.block(p_).request;
    begin_piece(p_.cache_seqlens[request], p_.page_table.max_pages > 0 ? p_.page_table.row(request)[0] : 0);
  }

  const Params& p_;
  const SplitKvEntry& entry_;
  const int even_shares_;  // of the plan, if works are even
  State& state_;
};

// One values group fills the half of every slot that it gives back: group 0 the left half, group 1 the right half and
// the rope part. Each warp asks for one of the four columns of tiles.
template <int kGroup>
class Loader {
 public:
  struct Asked {};  // ahead of an item's place: nothing

  __device__ Loader(const Params& p, const Maps& maps, int, uint8_t*, uint32_t shared)
      : p_(p), maps_(maps), shared_(shared) {}

  __device__ Asked ask(const Item&) const { return {}; }

  // Loads an item but for its rope part, as soon as its slot has been given back in phase `parity`.
  __device__ void load_half(const Item& item, int slot, uint32_t parity, const Asked&) const {
    if (threadIdx.x % 32 == 0 && item.kind != Item::kNothing) {
      const int column = kGroup * 4 + warp();
      const uint32_t barrier = shared_ + full_slot(slot);
      wait_empty(slot, kGroup, parity);
      attnops::sm90::mbarrier_arrive_expect(barrier, has_rope() ? 2 * kTileBytes : kTileBytes);
      copy(item, map_of(item), slot, column, column * 64);
    }
    __syncwarp();
  }

  // The rope part, whose place both groups read probabilities from.
  __device__ void load_rope(const Item& item, int slot, uint32_t parity, const Asked&) const {
    if (kGroup == 0 || !has_rope()) return;
    if (threadIdx.x % 32 == 0 && item.kind != Item::kNothing) {
      wait_empty(slot, 0, parity);
      const bool apart = item.kind == Item::kQueries && p_.q_pe;
      copy(item, apart ? &maps_.q_pe : map_of(item), slot, kRopeTile, apart ? 0 : kHeadDimV);
    }
    __syncwarp();
  }

 private:
  __device__ static int warp() { return threadIdx.x % kGroupThreads / 32; }
  __device__ static bool has_rope() { return kGroup == 1 && warp() == 0; }

  __device__ const CUtensorMap* map_of(const Item& item) const {
    return item.kind == Item::kQueries ? &maps_.q : &maps_.kv;
  }

  __device__ void wait_empty(int slot, int half, uint32_t parity) const {
    attnops::sm90::mbarrier_wait(shared_ + empty_half(slot, half), parity);
  }

  __device__ void copy(const Item& item, const CUtensorMap* map, int slot, int column, int x) const {
    attnops::sm90::copy_box(shared_ + slot * kOperandBytes + column * kTileBytes, map, shared_ + full_slot(slot), x,
                            item.row, item.plane, kReadOnce);
  }

  // What createpolicy makes of L2::evict_first, in no register.
  static constexpr uint64_t kReadOnce = 0x12F0000000000000;

  const Params& p_;
  const Maps& maps_;
  const uint32_t shared_;
};

// What fills the ring, and what for: tiles of pages.
struct BoxFeed {
  using Item = ring::Item;
  using Planner = ring::Planner;
  template <int kGroup>
  using Loader = ring::Loader<kGroup>;
  using Given = int;  // shares of an even plan
  static constexpr Options kOptions = Options::kCommon;
  static constexpr int kFullArrivals = 2 * kGroupThreads / 32;  // of a slot
};

}  // namespace attnops::mla_decode::sm90::ring
