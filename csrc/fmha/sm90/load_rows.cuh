#pragma once
#include "fmha/sm90/load.cuh"
#include "fmha/sm90/rows.cuh"

namespace attnops::fmha::sm90 {

// Keys and values of pages that are no boxes, by four warps together. Nobody waits for their copies, which arrive for
// their threads. Who computes fences them: here a fence would wait for the next ones, too.
template <class Tr>
class RowProducer : ProducerBase<Tr> {
  using Base = ProducerBase<Tr>;
  using Layout = typename Base::Layout;
  using Base::bring_queries, Base::check_page, Base::is_seen, Base::next_work, Base::p_, Base::s_, Base::shared_,
      Base::take_index, Base::tell, Base::tid_, Base::work_done, Base::work_ring_, Base::work_slot;

 public:
  __device__ __forceinline__ RowProducer(const Params& p, const Schedule& s, const Maps& maps, char* base)
      : Base(p, s, maps, base) {}

  static constexpr int kArrivals = 128;  // for a tile

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;;) {
      if (tid_ == 0) tell(this->template next_work<Tr::kShort>());
      hopper::named_barrier_sync(kProducerBarrier, 128);
      const Work& w = *work_slot();
      const uint32_t done = work_done();
      if (tid_ == 0) bring_queries(w);  // those of the last work are free when its last keys are multiplied
      if (w.num_tokens < 0) return;
      if (Tr::kShort && tid_ == 0) take_index();
      work_ring_.advance();
      bring_tiles(w);
      if (tid_ >= 32) hopper::mbarrier_arrive(done);
    }
  }

 private:
  // Byte offsets of a row of keys and of values; negative: no row of the tile sees the key, or its page is outside the
  // pool.
  struct Place {
    int64_t key, value;
  };

  // The scores of a tile are multiplied before the values of the tile ahead of it, so keys are asked for first. Cells
  // of the page table are asked for two tiles ahead, and looked at a tile later.
  __device__ __forceinline__ void bring_tiles(const Work& w) {
    const int tile_end = w.tile_end;
    if (w.tile_begin == tile_end) return;
    Cell next = cell_of(w, w.tile_begin), after = cell_of(w, w.tile_begin + 1);
    Place here = place_of(w, w.tile_begin, next);
    next = after;
    int64_t values = kNobody;
#pragma unroll 1
    for (int tile = w.tile_begin; tile <= tile_end; ++tile) {
      if (tile < tile_end) bring<true>(here.key);
      after = cell_of(w, tile + 2);
      if (tile > w.tile_begin) bring<false>(values);
      values = here.value;
      here = place_of(w, tile + 1, next);
      next = after;
    }
  }

  template <bool kKeys>
  __device__ __forceinline__ void bring(int64_t offset) {
    constexpr int kChunks = kKeys ? Tr::kQkChunks : Tr::kVChunks;
    Ring<Tr::kStages>& ring = kKeys ? k_ring_ : v_ring_;
    const uint32_t tile =
        shared_ + (kKeys ? Layout::kK + ring.stage * Tr::kKBytes : Layout::kV + ring.stage * Tr::kVBytes);
    const uint32_t full = shared_ + (kKeys ? Layout::kKFull : Layout::kVFull) + 8 * ring.stage;
    hopper::mbarrier_wait(shared_ + (kKeys ? Layout::kKEmpty : Layout::kVEmpty) + 8 * ring.stage, ring.phase ^ 1);
    ring.advance();
    copy_pieces<Tr, kChunks>(kKeys ? p_.k : p_.v, offset, kKeys ? p_.head_dim_qk : p_.head_dim_v, tile, piece_);
    hopper::arrive_after_copies(full);
  }

  // Page and token of this lane's row of a tile; token -1: no row of the tile sees the key.
  struct Cell {
    int page, token;
  };

  __device__ __forceinline__ int key_of(const Work& w, int tile) const {
    return w.place_of(tile) * Tr::kKeys + looked_up_row();
  }

  __device__ __forceinline__ Cell cell_of(const Work& w, int tile) const {
    const int key = key_of(w, tile);
    if (tile >= w.tile_end || looked_up_row() >= Tr::kKeys || key < w.key_begin || key >= w.key_end ||
        !is_seen(w, key)) {
      return {0, -1};
    }
    if (!p_.paged) return {0, w.first_k_token + key};
    const int cell = s_.page_size.divide(key);
    return {p_.page_table.row(w.request)[cell], key - cell * p_.page_table.page_size};
  }

  __device__ __forceinline__ Place place_of(const Work& w, int tile, const Cell& at) const {
    if (at.token < 0) return {kNobody, kNobody};
    if (p_.paged) {
      check_page(w, s_.page_size.divide(key_of(w, tile)), at.page);
      if (at.page < 0 || at.page >= p_.page_table.num_pages) return {kNobody, kNobody};
    }
    const int size = size_of(p_.kv_dtype);
    return {(at.page * p_.k_stride_page + at.token * p_.k_stride_token + w.kv_head * p_.k_stride_head) * size,
            (at.page * p_.v_stride_page + at.token * p_.v_stride_token + w.kv_head * p_.v_stride_head) * size};
  }

  PieceOfRow piece_;
  Ring<Tr::kStages> k_ring_, v_ring_;
};

}  // namespace attnops::fmha::sm90
