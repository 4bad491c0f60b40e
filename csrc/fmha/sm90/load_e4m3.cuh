#pragma once
#include "fmha/sm90/load.cuh"
#include "fmha/sm90/transpose.cuh"

namespace attnops::fmha::sm90 {

inline constexpr int kTransposeBarrier = 1, kTransposers = 2;

// Boxes of e4m3 keys and values for e4m3 queries. Their products take transposed values: warps 2 and 3 make them. Warp
// 0 asks for keys and values, and a thread of warp 1 tells of works.
template <class Tr>
class E4m3Producer : ProducerBase<Tr> {
  using Base = ProducerBase<Tr>;
  using Layout = typename Base::Layout;
  using Base::arrive, Base::bring_queries, Base::clear_unseen, Base::maps_, Base::page_of_box, Base::shared_,
      Base::take_index, Base::tell, Base::work_done, Base::work_known, Base::work_ring_, Base::work_slot;

 public:
  __device__ __forceinline__ E4m3Producer(const Params& p, const Schedule& s, const Maps& maps, char* base)
      : Base(p, s, maps, base), warp_(static_cast<int>(threadIdx.x) / 32), lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ __forceinline__ void run() {
    if (warp_ == 1) {
      if (lane_ == 0) tell_works();
      return;
    }
    for (;;) {
      const uint32_t done = work_done();
      hopper::mbarrier_wait(work_known(), work_ring_.phase);
      const Work& w = *work_slot();
      if (w.num_tokens < 0) return;
      work_ring_.advance();
      warp_ >= 2 ? transpose_values(w) : bring_by_boxes(w);
      hopper::mbarrier_arrive(done);
    }
  }

 private:
  // Whoever holds works that it does not compute may keep what another CTA waits for. So the work behind a long one is
  // taken when the one before that is done: there is time to decode it, and for its queries. Short works leave none.
  __device__ __forceinline__ void tell_works() {
    constexpr int kMostTilesOfShort = 8;
    for (;;) {
      const Work w = this->template next_work<true>();
      const bool exists = w.num_tokens > 0, is_short = exists && w.tile_end - w.tile_begin <= kMostTilesOfShort;
      if (is_short) take_index();
      tell(w);
      hopper::mbarrier_arrive(work_known());
      bring_queries(w);
      if (!exists) return;
      work_ring_.advance();
      if (is_short) continue;
      hopper::mbarrier_wait(work_done(), work_ring_.phase ^ 1);
      take_index();
    }
  }

  // The scores of a tile are multiplied before the values of the tile ahead of it, so keys are asked for first.
  __device__ __forceinline__ void bring_by_boxes(const Work& w) {
    int page = 0, next_page = page_of_box(w, w.tile_begin);
    for (int tile = w.tile_begin; tile <= w.tile_end; ++tile) {
      const int page_before = page;
      if (tile < w.tile_end) {
        page = next_page;
        next_page = page_of_box(w, tile + 1);  // ahead, so that the table's latency is not the tiles'
        const uint32_t offset = 8 * ring_.stage;
        this->template bring_boxes<Tr::kQkChunks>(w, tile, page, maps_.k,
                                                  shared_ + Layout::kK + ring_.stage * Tr::kKBytes,
                                                  shared_ + Layout::kKEmpty + offset, ring_.phase ^ 1,
                                                  shared_ + Layout::kKFull + offset, w.key_begin, w.key_end);
        ring_.advance();
      }
      if (tile > w.tile_begin) {
        const uint32_t offset = 8 * v_ring_.stage;
        this->template bring_boxes<Tr::kVChunks>(
            w, tile - 1, page_before, maps_.v, shared_ + Layout::kRaw + v_ring_.stage * Tr::kRawBytes,
            shared_ + Layout::kRawEmpty + offset, v_ring_.phase ^ 1, shared_ + Layout::kRawFull + offset, 0, INT32_MAX);
        v_ring_.advance();
      }
    }
  }

  // Half of each tile of values, by one of two warps.
  __device__ __forceinline__ void transpose_values(const Work& w) {
    for (int tile = w.tile_begin, end = w.tile_end; tile < end; ++tile) {
      const uint32_t raw = shared_ + Layout::kRaw + ring_.stage * Tr::kRawBytes, offset = 8 * ring_.stage;
      hopper::mbarrier_wait(shared_ + Layout::kRawFull + offset, ring_.phase);
      if (is_edge<Tr::kKeys>(w, tile)) {
        clear_unseen(w, tile, raw, 32 * (warp_ % 2) + lane_, 32 * kTransposers);
        hopper::named_barrier_sync(kTransposeBarrier, 32 * kTransposers);
      }
      hopper::mbarrier_wait(shared_ + Layout::kVEmpty + offset, ring_.phase ^ 1);
      transpose_tile<Tr::kKeys, Tr::kHeadDimV>(raw, shared_ + Layout::kV + ring_.stage * Tr::kVBytes, warp_ % 2, lane_);
      hopper::fence_async_proxy();
      arrive(shared_ + Layout::kVFull + offset);
      arrive(shared_ + Layout::kRawEmpty + offset);
      ring_.advance();
    }
  }

  int warp_, lane_;
  Ring<Tr::kStages> ring_, v_ring_;  // of keys, or of what is transposed; of values
};

}  // namespace attnops::fmha::sm90
