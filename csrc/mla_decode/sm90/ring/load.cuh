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

// Whether the part has nothing to do, once its row of the plan is there.
__device__ inline bool is_idle(const uint8_t* base) {
  const auto& entry = *reinterpret_cast<const SplitKvEntry*>(base + kEntry);
  return last_work_of(entry) < entry.begin_work;
}

// Walks what part blockIdx.x owns and decides what comes next into the ring, for both values groups. Work by work: all
// of its tiles of one. Where works are cut, the scoring group cuts: tiles come all the same. One lane does it; what it
// knows lies in shared memory, because registers are full of the accumulator. Nothing here waits for memory: behind
// boxes, which all SMs ask for at once, a word takes 2 us. So lengths are asked for a work ahead and pages a tile.
class Planner {
 public:
  __device__ Planner(const Params& p, const Shape& shape, uint8_t* base, uint32_t shared)
      : p_(p), shape_(shape), base_(base), shared_(shared) {}

  // Of the request that a part begins with.
  struct First {
    int length, page;
  };

  // Reads the part's row of the plan, and at the same time what an even batch will want to know next. By a warp.
  // Describes the first queries, for which the row is enough: what is returned is on its way while they are asked for.
  __device__ First begin_part(Item* queries) const {
    const int likely = likely_request();
    const SplitKvEntry row = entry_of(p_, blockIdx.x);
    First first{p_.cache_seqlens[likely], shape_.cells > 0 ? cells_of(likely)[0] : 0};
    if (threadIdx.x % 32 != 0) return first;
    entry() = row;
    if (last_work_of(row) < row.begin_work) return first;
    const BlockPlace place = block_place(p_, row.begin_work);
    *queries = {Item::kQueries, place.block * kPlanRows, place.request};
    PlannerState& state = this->state();
    state.tiles_left = 0;
    state.count = 0;
    state.work = row.begin_work;
    const int cell = cell_of(row.begin_tile);
    if (place.request != likely) first.length = p_.cache_seqlens[place.request];
    if (place.request != likely || cell != 0) {
      first.page = cell < shape_.cells ? cells_of(place.request)[cell] : 0;
    }
    return first;
  }

  // By the lane, before it writes.
  __device__ void keep(const First& first) const {
    word(kLengthAhead) = first.length;
    word(kPageAhead) = first.page;
  }

  // Describes the next item. By a lane.
  __device__ void write(Item* item) const {
    PlannerState& state = this->state();
    if (state.tiles_left == 0) return begin_work(item);
    int page = state.page;
    if (page == kAsked) {
      attnops::sm90::wait_for_copies();
      page = word(kPageAhead);
    }
    *item = {Item::kKeys, state.token, page};
    const int left = state.tiles_left - 1, token = state.token + kPlanTileTokens;
    const bool turns = token == p_.page_table.page_size;
    state.tiles_left = left;
    state.token = turns ? 0 : token;
    if (turns) {
      ++state.cell;
      const bool more = --state.cells_left > 0;
      page = more ? kAsked : -1;
      if (more && left > 0) attnops::sm90::copy4(shared_ + kPageAhead, state.cell);
    }
    state.page = page;
  }

 private:
  __device__ SplitKvEntry& entry() const { return *reinterpret_cast<SplitKvEntry*>(base_ + kEntry); }
  __device__ PlannerState& state() const { return *reinterpret_cast<PlannerState*>(base_ + kPlanner); }
  __device__ Work* works() const { return reinterpret_cast<Work*>(base_ + kWorks); }
  __device__ volatile int& word(int at) const { return *reinterpret_cast<volatile int*>(base_ + at); }

  __device__ const int32_t* cells_of(int request) const {
    return p_.page_table.cells + request * p_.page_table.stride_request;
  }
  __device__ int cell_of(int tile) const { return shape_.by_page_size.divide(tile * kPlanTileTokens); }

  // The request that this part begins with, if works are even.
  __device__ int likely_request() const {
    const int request = static_cast<int>((static_cast<float>(group_of_part(p_)) + 0.001f) * shape_.requests_per_group);
    return min_of(request, p_.batch_size - 1);
  }

  // The queries of the next work, if the part has one. Its length is there.
  __device__ void begin_work(Item* item) const {
    PlannerState& state = this->state();
    const SplitKvEntry& entry = this->entry();
    const int work = state.work, last = last_work_of(entry);
    if (work > last) {
      item->kind = Item::kNothing;
      return;
    }
    attnops::sm90::wait_for_copies();
    const int length = length_of(word(kLengthAhead));
    const BlockPlace place = block_place(p_, work);
    const bool is_first = work == entry.begin_work;
    const int count = max_of(ceil_div(length, kPlanTileTokens), 1);
    const int begin = is_first ? entry.begin_tile : 0, end = work == entry.end_work ? entry.end_tile : count;
    const int keys_end = min_of(length, shape_.most_tokens);
    // Cuts are counted by the length, wherever the page table ends. There is a tile at least: somebody writes zeros.
    const int tiles = p_.fixed_split_tokens == 0 ? min_of(end, ceil_div(keys_end, kPlanTileTokens)) - begin
                                                 : min_of(end, count) - begin;
    const int some = max_of(tiles, 1);
    works()[state.count % kWorksAhead] = {
        place.request,
        place.block * kPlanRows,
        length,
        begin,
        work == last ? -some : some,
        p_.fixed_split_tokens == 0 ? balanced_partial(entry, work) : first_partial(place, count, begin)};
    // Where there are no keys, queries of no request, which come as zeros from nowhere.
    *item = {Item::kQueries, place.block * kPlanRows, length > 0 ? place.request : -1};

    const int key = begin * kPlanTileTokens, cell = cell_of(begin);
    const int cells_left = key < keys_end ? shape_.cells - cell : 0;
    const int32_t* at = cells_of(place.request) + cell;
    state.cell = at;
    state.cells_left = cells_left;
    state.tiles_left = some;
    state.token = key - cell * p_.page_table.page_size;
    // A work without keys has a tile of a page that does not exist, which reads as zeros.
    int page = kAsked;
    if (is_first) page = word(kPageAhead);
    if (cells_left <= 0) page = -1;
    state.page = page;
    state.work = work + 1;
    ++state.count;
    if (!is_first && cells_left > 0) attnops::sm90::copy4(shared_ + kPageAhead, at);
    if (work < last) {
      const int next = p_.division.by_works.divide(work + 1);
      attnops::sm90::copy4(shared_ + kLengthAhead, p_.cache_seqlens + next);
    }
  }

  // Where the results of a work's cuts go, from this part's first one on.
  __device__ int first_partial(const BlockPlace& place, int count, int begin) const {
    const int cut_tiles = p_.fixed_split_tokens / kPlanTileTokens, cuts = ceil_div(count, cut_tiles);
    if (cuts == 1) return -1;
    const int64_t first = first_cut(p_, place.request, place.block, cuts);
    // More cuts than the caller has room for: the merge makes it seen.
    if (!has_room(p_, first, cuts)) return kNoRoom;
    return static_cast<int>(first) + min_of(begin / cut_tiles, cuts - 1);
  }

  const Params& p_;
  const Shape& shape_;
  uint8_t* const base_;
  const uint32_t shared_;
};

// A values group fills the half of every slot that it gives back: group 0 the left half, group 1 the right half and the
// rope part. Each warp asks for one of the four columns of tiles.
class Loader {
 public:
  __device__ Loader(const Params& p, const Maps& maps, uint32_t shared) : p_(p), maps_(maps), shared_(shared) {}

  // Loads an item, once its slot has been given back in phase `parity`; or only if it has been by now: the place of
  // queries, of which the scoring group gives the right half back last. Says, by lane 0 and warp, whether it did.
  __device__ bool load(const Item& item, int slot, uint32_t parity, bool waits) const {
    bool asks = true;
    if (threadIdx.x % 32 == 0) {
      if (!waits) asks = attnops::sm90::mbarrier_test(shared_ + empty_half(slot, 1), parity);
      if (asks) ask(item, slot, parity);
    }
    asks = __shfl_sync(0xffffffffu, asks, 0);
    return asks;
  }

 private:
  __device__ void ask(const Item& item, int slot, uint32_t parity) const {
    if (item.kind == Item::kNothing) return;
    const int column = threadIdx.x / 32, half = threadIdx.x / kGroupThreads;
    const bool queries = item.kind == Item::kQueries, has_rope = column == 4;
    const CUtensorMap* map = queries ? &maps_.q : &maps_.kv;
    attnops::sm90::mbarrier_wait(shared_ + empty_half(slot, half), parity);
    attnops::sm90::mbarrier_arrive_expect(shared_ + full_slot(slot), has_rope ? 2 * kTileBytes : kTileBytes);
    copy(item, map, slot, column, column * 64);
    if (!has_rope) return;
    // Both groups read probabilities from its place.
    const bool apart = queries && p_.q_pe;
    attnops::sm90::mbarrier_wait(shared_ + empty_half(slot, 0), parity);
    copy(item, apart ? &maps_.q_pe : map, slot, kRopeTile, apart ? 0 : kHeadDimV);
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

}  // namespace attnops::mla_decode::sm90::ring
