#pragma once
#include "mla_decode/sm90/results.cuh"
#include "mla_decode/sm90/ring/load_lists.cuh"
#include "mla_decode/sm90/ring/products.cuh"
#include "mla_decode/sm90/tile_products.cuh"

namespace attnops::mla_decode::sm90::ring {

// Group 0 accumulates columns 0 .. 255 of the output, group 1 the others: probabilities, from shared memory, times V.
template <typename T, int kGroup, class Feed = BoxFeed>
class Values {
  using Item = typename Feed::Item;
  using Planner = typename Feed::Planner;

 public:
  __device__ Values(const Params& p, const Maps& maps, typename Feed::Given given, uint8_t* base, uint32_t shared)
      : p_(p), maps_(maps), given_(given), base_(base), shared_(shared) {}

  __device__ void run() {
    const SplitKvEntry& entry = *reinterpret_cast<const SplitKvEntry*>(base_ + kEntry);
    typename Planner::State state{.walk = Walk(entry)};
    Planner planner(p_, entry, given_, state);
    const typename Feed::template Loader<kGroup> loader(p_, maps_, given_, base_, shared_);
    const bool plans = kGroup == 1 && threadIdx.x % kGroupThreads / 32 == 3;
    if (plans) start(planner);
    park(state);
    __syncthreads();
    attnops::sm90::launch_dependents();  // they may read the plan
    if (count_pieces(entry) == 0) return;
    int slot = 0, which = 0, flags = 0;
    uint32_t parity = 1;  // of the phase in which the slot was given back
    const auto advance = [&] {
      slot = next_slot(slot);
      parity ^= slot == 0;
    };
    Item late{ring::Item::kNothing, 0, 0};  // whose rope part is not yet loaded, into the slot before
    park(late);
    // What comes next into the ring has been written before the barrier that a thread has just passed. Once round the
    // ring to fill it; then every item is used and what comes next is loaded in its place.
    int loads = kSlots + 1;
    float o[128];
#pragma unroll 1
    while (true) {
#pragma unroll
      for (int i = 0; i < 128; ++i) o[i] = 0.f;
#pragma unroll 1
      for (; loads > 0; --loads) {
        attnops::sm90::named_barrier_sync(kItemReady, 2 * kGroupThreads);
        loader.load_rope(late, before_slot(slot), parity ^ (slot == 0), loader.ask(late));
        late.kind = ring::Item::kNothing;
        if (flags & kSameQueries) continue;
        const Item next = *item(which);  // the last in place of the piece's queries
        which ^= 1;
        const auto asked = loader.ask(next);
        loader.load_half(next, slot, parity, asked);
        loader.load_rope(next, slot, parity, asked);
        advance();
        if (plans && loads <= kSlots) planner.write(item(which));  // the first two have been there
      }
#pragma unroll 1
      do {
        const uint32_t at = uniform(shared_ + slot * kOperandBytes);
        attnops::sm90::named_barrier_sync(kGo + slot, kThreads);
        flags = base_[kFlags + slot * 4 + threadIdx.x % kGroupThreads / 32];
        if (flags & kRescales) rescale(slot, o);
        multiply(at, o);
        const Item next = *item(which);
        which ^= 1;
        const auto asked = loader.ask(next);
        if (plans) planner.write(item(which));
        attnops::sm90::wgmma_wait<0>(o);
        release(slot);
        loader.load_half(next, slot, parity, asked);
        if (flags & kLastOfPiece) {
          late = next;
          store(slot, o);
        } else {
          loader.load_rope(next, slot, parity, asked);
        }
        advance();
      } while (!(flags & kLastOfPiece));
      if (flags & kLastOfAll) return;
      loads = 1;
    }
  }

 private:
  // What one warp does before all others begin: barriers, the part's row of the plan, its first tile.
  __device__ void start(Planner& planner) const {
    constexpr int kWarps = kGroupThreads / 32;
    const int lane = threadIdx.x % 32;
    if (lane == 30) attnops::sm90::prefetch_map(&maps_.q);
    if (lane == 31) attnops::sm90::prefetch_map(&maps_.kv);
    if (lane == 0) {  // lanes would do it one after the other, too
#pragma unroll
      for (int i = 0; i < kBarrierCount; ++i) {
        const int at = kBarriers + 8 * i;
        int arrivals = kGroupThreads;
        if (at < empty_half(0, 0)) arrivals = Feed::kFullArrivals;
        if (at == kScoresRead) arrivals = kWarps;
        if (at == kTotalsRead) arrivals = 2 * kGroupThreads;
        attnops::sm90::mbarrier_init(shared_ + at, arrivals);
      }
    }
    attnops::sm90::mbarrier_init_fence();
    attnops::sm90::wait_for_prerequisites();
    planner.begin_part(reinterpret_cast<SplitKvEntry*>(base_ + kEntry));
    planner.write(item(0));  // queries
    planner.write(item(1));
  }

  __device__ Item* item(int which) const { return reinterpret_cast<Item*>(base_ + kItems) + which; }

  __device__ static int row(int h) { return threadIdx.x % kGroupThreads / 32 * 16 + threadIdx.x % 32 / 4 + 8 * h; }

  __device__ void rescale(int slot, float (&o)[128]) const {
    const uint8_t* shifts = base_ + kShifts + slot * 64;
    const float factor[2] = {power_of_half(shifts[row(0)]), power_of_half(shifts[row(1)])};
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] *= factor[i / 2 % 2];
  }

  // o += the probabilities of the slot at `at` times its half of V, in flight.
  __device__ void multiply(uint32_t at, float (&o)[128]) const {
    __syncwarp();
    const uint64_t probabilities = attnops::sm90::operand_descriptor(at + kRopeTile * kTileBytes);
    const uint64_t values = attnops::sm90::operand_descriptor(at + kGroup * 4 * kTileBytes);
    attnops::sm90::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      attnops::sm90::wgmma_n256<T>(o, probabilities + kk * attnops::sm90::kStepKMajor,
                                   values + kk * attnops::sm90::kStepMnMajor);
    }
    attnops::sm90::wgmma_commit();
  }

  __device__ void release(int slot) const { attnops::sm90::mbarrier_arrive(shared_ + empty_half(slot, kGroup)); }

  // The finished piece. Rows are staged in the place of the last tile's probabilities.
  __device__ void store(int slot, float (&o)[128]) const {
    attnops::sm90::named_barrier_sync(kTotalsWritten, kThreads);
    const float* totals = reinterpret_cast<const float*>(base_ + kTotals);
    RowState rows;
    RowSums sums;
    Piece piece;
#pragma unroll
    for (int h = 0; h < kRowsPerThread; ++h) {
      sums.total[h] = totals[row(h)];
      rows.maximum[h] = totals[64 + row(h)];
    }
    const StoredPiece stored = *reinterpret_cast<const StoredPiece*>(base_ + kFinished);
    piece.request = stored.request;
    piece.first_row = stored.first_row;
    piece.num_rows = stored.num_rows;
    piece.partial = stored.partial;
    attnops::sm90::mbarrier_arrive(shared_ + kTotalsRead);
    const int stage = slot * kOperandBytes + kRopeTile * kTileBytes;
    store_rows<T, Feed::kOptions>(p_, piece, rows, sums, kGroup, true, base_ + stage, shared_ + stage, o);
    attnops::sm90::fence_async_proxy();
  }

  const Params& p_;
  const Maps& maps_;
  const typename Feed::Given given_;
  uint8_t* const base_;
  const uint32_t shared_;
};

}  // namespace attnops::mla_decode::sm90::ring
