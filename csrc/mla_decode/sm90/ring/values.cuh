#pragma once
#include "mla_decode/sm90/ring/load.cuh"
#include "mla_decode/sm90/ring/products.cuh"
#include "mla_decode/sm90/ring/rows.cuh"
#include "mla_decode/sm90/tile_products.cuh"

namespace attnops::mla_decode::sm90::ring {

// Group 0 accumulates columns 0 .. 255 of the output, group 1 the others: probabilities, from shared memory, times V.
// Both run the same code, so that it is fetched once.
template <typename T>
class Values {
 public:
  __device__ Values(const Params& p, const Maps& maps, const Shape& shape, uint8_t* base, uint32_t shared)
      : p_(p), maps_(maps), shape_(shape), base_(base), shared_(shared) {}

  __device__ void run() {
    constexpr int kPlanningWarp = 7;
    const Planner planner(p_, shape_, base_, shared_);
    const Loader loader(p_, maps_, shared_);
    Planner::First first{};
    if (threadIdx.x / 32 == kPlanningWarp) first = start(planner);
    __syncthreads();
    attnops::sm90::launch_dependents();  // they may read the plan
    if (is_idle(base_)) return;
    const bool plans = threadIdx.x == kPlanningWarp * 32;
    int slot = 0, which = 0, flags = 0;
    uint32_t parity = 1;  // of the phase in which the slot was given back
    const auto advance = [&] {
      slot = next_slot(slot);
      parity ^= slot == 0;
    };
    // What comes next into the ring is written before the barrier that a thread passes next. Once round the ring to
    // fill it, and on to the place of the first queries; then every item is used and what comes next is loaded in its
    // place.
    constexpr int kFill = kSlots + 1;
    int loads = kFill;
    bool begun = false;
    float o[128];
#pragma unroll 1
    while (true) {
      bool asked = true;
#pragma unroll 1
      for (; loads > 0; --loads) {
        const bool is_first = !begun && loads == kFill;
        if (!is_first) attnops::sm90::named_barrier_sync(kItemReady, 2 * kGroupThreads);
        asked = loader.load(*item(which), slot, parity, !begun);
        which ^= 1;
        if (!begun) advance();
        if (!plans) continue;
        // The first queries are on their way, but their work is not yet described.
        if (is_first) planner.keep(first);
#pragma unroll 1
        for (int i = is_first ? 0 : 1; i < 2; ++i) {
          planner.write(i == 0 ? reinterpret_cast<Item*>(base_ + kFinished) : item(which));
        }
      }
      if (begun) {
        store(o);
        if (flags & kLastOfAll) return;
        if (!(flags & kSameQueries)) {
          if (!asked) loader.load(*item(which ^ 1), slot, parity, true);
          advance();
        }
      }
      begun = true;
#pragma unroll
      for (int i = 0; i < 128; ++i) o[i] = 0.f;
#pragma unroll 1
      do {
        const uint32_t at = uniform(shared_ + slot * kOperandBytes), values = uniform(at + half() * 4 * kTileBytes);
        attnops::sm90::named_barrier_sync(kGo + slot, kThreads);
        flags = base_[kFlags + slot * 4 + threadIdx.x % kGroupThreads / 32];
        if (flags & kRescales) rescale(slot, o);
        multiply(at, values, o);
        const Item next = *item(which);
        which ^= 1;
        if (plans) planner.write(item(which));
        attnops::sm90::wgmma_wait<0>(o);
        release(slot);
        loader.load(next, slot, parity, true);
        advance();
      } while (!(flags & kLastOfPiece));
      // The next piece's queries are in registers by now, if they had come. What takes their place is asked for before
      // the rows go out: memory would have nothing to do meanwhile.
      loads = flags & (kSameQueries | kLastOfAll) ? 0 : 1;
    }
  }

 private:
  // What one warp does before all others begin: barriers, the part's row of the plan, its
  // first queries.
  __device__ Planner::First start(const Planner& planner) const {
    constexpr int kWarps = kGroupThreads / 32;
    const int lane = threadIdx.x % 32;
    if (lane == 30) attnops::sm90::prefetch_map(&maps_.q);
    if (lane == 31) attnops::sm90::prefetch_map(&maps_.kv);
    if (lane == 0) {  // lanes would do it one after the other, too
#pragma unroll
      for (int i = 0; i < kBarrierCount; ++i) {
        const int at = kBarriers + 8 * i;
        int arrivals = kGroupThreads;
        if (at < empty_half(0, 0)) arrivals = 2 * kWarps;
        if (at == kScoresRead) arrivals = kWarps;
        if (at == kTotalsRead) arrivals = 2 * kGroupThreads;
        attnops::sm90::mbarrier_init(shared_ + at, arrivals);
      }
    }
    attnops::sm90::mbarrier_init_fence();
    attnops::sm90::wait_for_prerequisites();
    const Planner::First first = planner.begin_part(item(0));
    __syncwarp();
    return first;
  }

  __device__ static int half() { return threadIdx.x / kGroupThreads; }

  __device__ Item* item(int which) const { return reinterpret_cast<Item*>(base_ + kItems) + which; }

  __device__ static int row(int h) { return threadIdx.x % kGroupThreads / 32 * 16 + threadIdx.x % 32 / 4 + 8 * h; }

  __device__ void rescale(int slot, float (&o)[128]) const {
    const uint8_t* shifts = base_ + kShifts + slot * 64;
    const float factor[2] = {power_of_half(shifts[row(0)]), power_of_half(shifts[row(1)])};
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] *= factor[i / 2 % 2];
  }

  // o += the probabilities of the slot at `at` times the group's half of V, in flight.
  __device__ void multiply(uint32_t at, uint32_t half_at, float (&o)[128]) const {
    __syncwarp();
    const uint64_t probabilities = attnops::sm90::operand_descriptor(at + kRopeTile * kTileBytes);
    const uint64_t values = attnops::sm90::operand_descriptor(half_at);
    attnops::sm90::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      attnops::sm90::wgmma_n256<T>(o, probabilities + kk * attnops::sm90::kStepKMajor,
                                   values + kk * attnops::sm90::kStepMnMajor);
    }
    attnops::sm90::wgmma_commit();
  }

  __device__ void release(int slot) const { attnops::sm90::mbarrier_arrive(shared_ + empty_half(slot, half())); }

  // The finished piece.
  __device__ void store(float (&o)[128]) const {
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
    store_rows_from_registers<T>(p_, piece, rows, sums, half(), o);
  }

  const Params& p_;
  const Maps& maps_;
  const Shape& shape_;
  uint8_t* const base_;
  const uint32_t shared_;
};

}  // namespace attnops::mla_decode::sm90::ring
