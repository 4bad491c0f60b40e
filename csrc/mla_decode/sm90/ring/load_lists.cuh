#pragma once
#include "mla_decode/sm90/modes.h"
#include "mla_decode/sm90/ring/load.cuh"

// Rows that lists select, into the ring: 16 bytes at a time, by the warps that ask for boxes elsewhere.
namespace attnops::mla_decode::sm90::ring {

// A piece's queries, or a tile of the list of request `plane`: its entries from `row` on, those before `end`.
struct alignas(16) ListItem {
  Item::Kind kind;
  int row, plane, end;
};
static_assert(sizeof(ListItem) == sizeof(Item));

// As Planner, of calls without a plan.
class ListPlanner {
 public:
  struct State {
    Walk walk;
    Piece piece;
    int tiles_left, key;  // of the piece: those that hold keys; the first entry of the next
    int left;             // of the part's pieces
    bool queries_next;
  };

  __device__ ListPlanner(const Params& p, const SplitKvEntry& entry, const ListedRows&, State& state)
      : p_(p), entry_(entry), state_(state) {}

  __device__ void begin_part(SplitKvEntry* entry) {
    const SplitKvEntry row = entry_for<Options::kSelected>(p_, blockIdx.x);
    if (threadIdx.x % 32 == 0) *entry = row;
    __syncwarp();
    state_.left = count_pieces(entry_);
    if (state_.left == 0) return;
    state_.walk.begin();
    begin_piece();
  }

  __device__ void write(ListItem* item) {
    State& state = state_;
    const Piece& piece = state.piece;
    if (state.left == 0) {
      item->kind = Item::kNothing;
      return;
    }
    if (state.queries_next) {
      *item = {Item::kQueries, piece.first_row, piece.request, 0};
      state.queries_next = false;
      return;
    }
    *item = {Item::kKeys, state.key, piece.request, piece.keys.end};
    state.key += kPlanTileTokens;
    if (--state.tiles_left > 0 || --state.left == 0) return;
    begin_piece();
  }

 private:
  __device__ void begin_piece() {
    State& state = state_;
    const BlockPlace place = state.walk.block(p_);
    state.walk.next(p_, place, keys_of<Options::kSelected>(p_, place.request), state.piece);
    state.queries_next = true;
    state.tiles_left = state.piece.num_tiles;
    state.key = state.piece.first_tile * kPlanTileTokens;
  }

  const Params& p_;
  const SplitKvEntry& entry_;
  State& state_;
};

// As Loader. Each lane arrives when what it copies has landed; at a barrier of keys and at one of queries as many. One
// more arrival says that it is known which keys there are: that of copies orders copies alone.
template <int kGroup>
class ListLoader {
 public:
  // Of a tile's entries, those of the lane: lane and lane + 32.
  struct Asked {
    int row[2];
  };

  __device__ ListLoader(const Params& p, const Maps& maps, const ListedRows& rows, uint8_t* base, uint32_t shared)
      : p_(p), maps_(maps), rows_(rows), base_(base), shared_(shared) {}

  // Nobody waits for them here.
  __device__ Asked ask(const ListItem& item) const {
    Asked asked;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int entry = item.row + lane() + 32 * i;
      const bool listed = item.kind == Item::kKeys && entry < item.end;
      asked.row[i] = listed ? p_.selected.list(item.plane)[entry] : -1;
    }
    return asked;
  }

  __device__ void load_half(const ListItem& item, int slot, uint32_t parity, const Asked& asked) const {
    if (item.kind == Item::kNothing) return;
    const uint32_t barrier = shared_ + full_slot(slot);
    attnops::sm90::mbarrier_wait(shared_ + empty_half(slot, kGroup), parity);
    const int column = kGroup * 4 + warp();
    if (item.kind == Item::kKeys) {
      gather(asked, slot, column);
      attnops::sm90::arrive_after_copies(barrier);
      if (tells()) tell(asked, slot);
    } else {
      copy_queries(item, &maps_.q, slot, column, column * 64);
    }
    if (tells() && lane() == 0) attnops::sm90::mbarrier_arrive(barrier);
  }

  __device__ void load_rope(const ListItem& item, int slot, uint32_t parity, const Asked& asked) const {
    if (!has_rope() || item.kind == Item::kNothing) return;
    attnops::sm90::mbarrier_wait(shared_ + empty_half(slot, 0), parity);
    if (item.kind == Item::kKeys) {
      gather(asked, slot, kRopeTile);
      attnops::sm90::arrive_after_copies(shared_ + full_slot(slot));
    } else {
      copy_queries(item, p_.q_pe ? &maps_.q_pe : &maps_.q, slot, kRopeTile, p_.q_pe ? 0 : kHeadDimV);
    }
  }

 private:
  static constexpr uint32_t kNoRow = ~0u;

  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ static int warp() { return threadIdx.x % kGroupThreads / 32; }
  __device__ static bool has_rope() { return kGroup == 1 && warp() == 0; }
  __device__ static bool tells() { return kGroup == 0 && warp() == 0; }

  __device__ void copy_queries(const ListItem& item, const CUtensorMap* map, int slot, int column, int x) const {
    const uint32_t barrier = shared_ + full_slot(slot);
    if (lane() == 0) {
      attnops::sm90::mbarrier_arrive_expect(barrier, kTileBytes);
      attnops::sm90::copy_box(shared_ + slot * kOperandBytes + column * kTileBytes, map, barrier, x, item.row,
                              item.plane, kReadOnce);
    } else {
      attnops::sm90::mbarrier_arrive(barrier);
    }
    __syncwarp();
  }

  // Which of the tile's keys there are.
  __device__ void tell(const Asked& asked, int slot) const {
    const uint32_t first = __ballot_sync(0xffffffffu, p_.selected.has_row(asked.row[0]));
    const uint32_t second = __ballot_sync(0xffffffffu, p_.selected.has_row(asked.row[1]));
    if (lane() == 0) {
      reinterpret_cast<volatile uint64_t*>(base_ + kListedKeys)[slot] = first | static_cast<uint64_t>(second) << 32;
    }
  }

  __device__ uint32_t place_of(int row) const {
    if (!p_.selected.has_row(row)) return kNoRow;
    const uint32_t page = rows_.by_page_size.divide(row);
    const uint32_t token = row - page * p_.selected.page_size;
    return page * rows_.units.per_page + token * rows_.units.per_token;
  }

  // A column of 64 of a tile: eight lanes copy the 128 bytes of a row, zeros where it is no key.
  __device__ void gather(const Asked& asked, int slot, int column) const {
    const uint32_t places[2] = {place_of(asked.row[0]), place_of(asked.row[1])};
    const uint8_t* pool = static_cast<const uint8_t*>(p_.kv_pages) + column * 128 + lane() % 8 * 16;
    // The swizzle repeats after eight rows, which are two steps.
    const uint32_t even =
        shared_ + slot * kOperandBytes + column * kTileBytes + attnops::sm90::swizzled(lane() / 8, lane() % 8);
    const uint32_t odd = (even ^ 64) + 512;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const uint32_t place = __shfl_sync(0xffffffffu, places[i / 8], 4 * (i % 8) + lane() / 8);
      const bool there = place != kNoRow;
      const uint8_t* source = pool + uint64_t{there ? place : 0} * rows_.units.bytes;
      attnops::sm90::copy16((i % 2 ? odd : even) + i / 2 * 1024, source, there);
    }
  }

  // What createpolicy makes of L2::evict_first, in no register.
  static constexpr uint64_t kReadOnce = 0x12F0000000000000;

  const Params& p_;
  const Maps& maps_;
  const ListedRows& rows_;
  uint8_t* const base_;
  const uint32_t shared_;
};

// What fills the ring, and what for.
struct ListFeed {
  using Item = ListItem;
  using Planner = ListPlanner;
  template <int kGroup>
  using Loader = ListLoader<kGroup>;
  using Given = const ListedRows&;
  static constexpr Options kOptions = Options::kSelected;
  static constexpr int kFullArrivals = kTilesQk * 32 + 1;  // of a slot
};

}  // namespace attnops::mla_decode::sm90::ring
