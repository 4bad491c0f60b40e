#pragma once
#include "fmha/sm90/load.cuh"
#include "fmha/sm90/rows.cuh"

namespace attnops::fmha::sm90 {

// Keys and values of pages that are no boxes, and e4m3 ones for 16-bit queries, by four warps together.
//
// Nobody waits for copies of 16-bit rows: they arrive for their threads. e4m3 rows become wide ones in their place
// while the copies of the next tile come. Who computes fences both: here a fence would wait for those copies, too.
template <class Tr>
class RowProducer : ProducerBase<Tr> {
  using Base = ProducerBase<Tr>;
  using Layout = typename Base::Layout;
  using Base::arrive, Base::bring_queries, Base::check_page, Base::is_seen, Base::next_work, Base::p_, Base::s_,
      Base::shared_, Base::take_index, Base::tell, Base::tid_, Base::work_done, Base::work_ring_, Base::work_slot;

 public:
  __device__ __forceinline__ RowProducer(const Params& p, const Schedule& s, const Maps& maps, char* base)
      : Base(p, s, maps, base), narrow_(is_narrow(p)) {}

  static __device__ __forceinline__ bool is_narrow(const Params& p) { return p.kv_dtype == DType::kFloat8E4M3; }
  // Arrivals for a tile.
  static __device__ __forceinline__ int arrivals(const Params& p) { return is_narrow(p) ? 4 : 128; }

  __device__ __forceinline__ void run() { narrow_ ? run_as<true>() : run_as<false>(); }

 private:
  // Passes over a tile, and those whose addresses registers hold while their place is not free.
  static constexpr int kPasses = Tr::kKeys / kRowsOfPass;
  static constexpr int kAhead = Tr::kProducerRegisters >= 72 || kPasses <= 4 ? kPasses : 4;

  // Byte offsets of a row of keys and of values; negative: no row of the tile sees the key, or its page is outside the
  // pool.
  struct Place {
    int64_t key, value;
  };

  template <bool kNarrow>
  __device__ __forceinline__ void run_as() {
#pragma unroll 1
    for (;;) {
      if (tid_ == 0) tell(this->template next_work<Tr::kShort>());
      hopper::named_barrier_sync(kProducerBarrier, 128);
      const Work& w = *work_slot();
      const uint32_t done = work_done();
      if (kNarrow && w.num_tokens < 0) finish_pending<0>();
      if (tid_ == 0) bring_queries(w);  // those of the last work are free when its last keys are multiplied
      if (w.num_tokens < 0) return;
      if (Tr::kShort && tid_ == 0) take_index();
      work_ring_.advance();
      bring_tiles<kNarrow>(w);
      if (tid_ >= 32) hopper::mbarrier_arrive(done);
      // Whoever waits for the last tile of values keeps the place of a work.
      if (kNarrow && w.tile_begin == w.tile_end) finish_pending<0>();
    }
  }

  // The scores of a tile are multiplied before the values of the tile ahead of it, so keys are asked for first. Cells
  // of the page table are asked for two tiles ahead, and looked at a tile later.
  template <bool kNarrow>
  __device__ __forceinline__ void bring_tiles(const Work& w) {
    const int tile_end = w.tile_end;
    if (w.tile_begin == tile_end) return;
    Cell next = cell_of(w, w.tile_begin), after = cell_of(w, w.tile_begin + 1);
    Place here = place_of<kNarrow>(w, w.tile_begin, next);
    next = after;
    int64_t values = kNobody;
#pragma unroll 1
    for (int tile = w.tile_begin; tile <= tile_end; ++tile) {
      if (tile < tile_end) bring<true, kNarrow>(here.key);
      after = cell_of(w, tile + 2);
      if (tile > w.tile_begin) bring<false, kNarrow>(values);
      values = here.value;
      here = place_of<kNarrow>(w, tile + 1, next);
      next = after;
    }
  }

  template <bool kKeys, bool kNarrow>
  __device__ __forceinline__ void bring(int64_t offset) {
    constexpr int kChunks = kKeys ? Tr::kQkChunks : Tr::kVChunks;
    Ring<Tr::kStages>& ring = kKeys ? k_ring_ : v_ring_;
    const uint32_t tile =
        shared_ + (kKeys ? Layout::kK + ring.stage * Tr::kKBytes : Layout::kV + ring.stage * Tr::kVBytes);
    const uint32_t full = shared_ + (kKeys ? Layout::kKFull : Layout::kVFull) + 8 * ring.stage;
    const void* const pool = kKeys ? p_.k : p_.v;
    const int head_dim = kKeys ? p_.head_dim_qk : p_.head_dim_v;
    PieceSources<kAhead> sources;
    sources.template look_up<kNarrow ? 8 : 16>(pool, offset, 0, piece_);
    hopper::mbarrier_wait(shared_ + (kKeys ? Layout::kKEmpty : Layout::kVEmpty) + 8 * ring.stage, ring.phase ^ 1);
    ring.advance();
    copy_pieces<Tr, kChunks, kNarrow>(sources, 0, head_dim, tile, piece_);
    if constexpr (kAhead < kPasses) {
      PieceSources<kPasses - kAhead> rest;
      rest.template look_up<kNarrow ? 8 : 16>(pool, offset, kAhead, piece_);
      copy_pieces<Tr, kChunks, kNarrow>(rest, kAhead, head_dim, tile, piece_);
    }
    if constexpr (kNarrow) {
      cp_async_commit();
      finish_pending<1>();
      pending_ = {full, tile, kKeys};
    } else {
      hopper::arrive_after_copies(full);
    }
  }

  // Makes wide values of the tile whose copies began before, and tells of it.
  template <int kNewer>
  __device__ __forceinline__ void finish_pending() {
    if (pending_.full == 0) return;
    cp_async_wait<kNewer>();
    if (Tr::kQkChunks == Tr::kVChunks || pending_.keys) {
      widen_pieces<Tr, Tr::kQkChunks>(pending_.tile, piece_);
    } else {
      widen_pieces<Tr, Tr::kVChunks>(pending_.tile, piece_);
    }
    arrive(pending_.full);
    pending_.full = 0;
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

  template <bool kNarrow>
  __device__ __forceinline__ Place place_of(const Work& w, int tile, const Cell& at) const {
    if (at.token < 0) return {kNobody, kNobody};
    if (p_.paged) {
      check_page(w, s_.page_size.divide(key_of(w, tile)), at.page);
      if (at.page < 0 || at.page >= p_.page_table.num_pages) return {kNobody, kNobody};
    }
    constexpr int kSize = kNarrow ? 1 : sizeof(typename Tr::Caller);
    return {(at.page * p_.k_stride_page + at.token * p_.k_stride_token + w.kv_head * p_.k_stride_head) * kSize,
            (at.page * p_.v_stride_page + at.token * p_.v_stride_token + w.kv_head * p_.v_stride_head) * kSize};
  }

  struct Pending {
    uint32_t full = 0, tile = 0;
    bool keys = false;
  };

  bool narrow_;
  PieceOfRow piece_;
  Pending pending_;
  Ring<Tr::kStages> k_ring_, v_ring_;
};

}  // namespace attnops::fmha::sm90
