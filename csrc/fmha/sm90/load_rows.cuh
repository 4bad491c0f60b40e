#pragma once
#include "fmha/sm90/load.cuh"
#include "fmha/sm90/rows.cuh"

namespace attnops::fmha::sm90 {

// Which rows a lane looks up, for producers of rows.
template <class Tr>
class RowLookups : protected ProducerBase<Tr> {
  using Base = ProducerBase<Tr>;

 protected:
  using Base::Base, Base::p_, Base::s_;

  // What look-ups need of a work, in registers: read where the work lies, each would wait for the one before.
  struct View {
    const Work& work;
    const int32_t* cells;  // of the request's pages
    int tile_begin, tile_end, key_begin, key_end;
  };

  // Page and token of a row of a tile; token -1: no row of the tile sees the key.
  struct Cell {
    int page, token;
  };

  // Where a row of keys and one of values lie, in units from the pool.
  struct Place {
    uint32_t key, value;
  };

  __device__ __forceinline__ View view_of(const Work& w) const {
    return {w, p_.paged ? p_.page_table.row(w.request) : nullptr, w.tile_begin, w.tile_end, w.key_begin, w.key_end};
  }

  __device__ __forceinline__ Cell cell_of(const View& v, int tile, int row) const {
    if constexpr (Tr::kShape.plain) {  // keys behind the tiles are not asked for
      const int key = tile * Tr::kKeys + row;
      if (static_cast<unsigned>(key - v.key_begin) >= static_cast<unsigned>(v.key_end - v.key_begin)) return {0, -1};
      const int at = v.work.first_k_token + key;
      if (!p_.paged) return {0, at};
      const int cell = s_.page_size.divide(at);
      return {v.cells[cell], at - cell * p_.page_table.page_size};
    }
    const int key = v.work.place_of(tile) * Tr::kKeys + row;
    if (tile >= v.tile_end || row >= Tr::kKeys || key < v.key_begin || key >= v.key_end ||
        (p_.tree_mask != nullptr && !Base::is_seen(v.work, key))) {
      return {0, -1};
    }
    if (!p_.paged) return {0, v.work.first_k_token + key};
    const int cell = s_.page_size.divide(key);
    return {v.cells[cell], key - cell * p_.page_table.page_size};
  }

  __device__ __forceinline__ Place place_of(const View& v, int tile, int row, const Cell& at) const {
    if (at.token < 0) return {kNobody, kNobody};
    if (p_.paged) {
      if (p_.report != nullptr) {
        const int key = v.work.first_k_token + v.work.place_of(tile) * Tr::kKeys + row;
        Base::check_page(v.work, s_.page_size.divide(key), at.page);
      }
      if (at.page < 0 || at.page >= p_.page_table.num_pages) return {kNobody, kNobody};
    }
    const int head = v.work.kv_head;
    return {s_.key_rows.place_of(at.page, at.token, head), s_.value_rows.place_of(at.page, at.token, head)};
  }
};

// Keys and values of pages that are no boxes, and those of e4m3 for 16-bit queries of short calls, by four warps
// together.
//
// Nobody waits for copies of 16-bit rows: they arrive for their threads. e4m3 rows become wide ones in their place
// while the copies of the next tile come. Who computes fences both: here a fence would wait for those copies, too.
template <class Tr>
class RowProducer : RowLookups<Tr> {
  using Base = ProducerBase<Tr>;
  using Lookups = RowLookups<Tr>;
  using Layout = typename Base::Layout;
  using Cell = typename Lookups::Cell;
  using Place = typename Lookups::Place;
  using View = typename Lookups::View;
  using Base::arrive, Base::bring_queries, Base::have_queries_place, Base::next_work, Base::p_, Base::s_, Base::shared_,
      Base::tell, Base::tid_, Base::work_done, Base::work_ring_, Base::work_slot;

 public:
  __device__ __forceinline__ RowProducer(const Params& p, const Schedule& s, const Maps& maps, char* base)
      : Lookups(p, s, maps, base) {}

  // Others are made wide by a producer of their own.
  static __device__ __forceinline__ bool is_narrow(const Params& p) {
    return Tr::kWidensRows && p.kv_dtype == DType::kFloat8E4M3;
  }
  // Arrivals for a tile.
  static __device__ __forceinline__ int arrivals(const Params& p) { return is_narrow(p) ? 4 : 128; }

  __device__ __forceinline__ void run() {
    if constexpr (Tr::kWidensRows) {
      if (is_narrow(p_)) return run_as<true>();
    }
    run_as<false>();
  }

 private:
  template <bool kNarrow>
  __device__ __forceinline__ void run_as() {
#pragma unroll 1
    for (;;) {
      if (tid_ == 0) tell(this->template next_work<true, true>());
      // The last work's last values: their copies came while this one was looked up.
      if constexpr (kNarrow) finish_pending<0>();
      hopper::named_barrier_sync(kProducerBarrier, 128);
      const Work& w = *work_slot();
      const uint32_t done = work_done();
      const bool last = w.num_tokens < 0, has_tiles = !last && w.tile_begin < w.tile_end;
      const bool later = kQueriesLater && has_tiles && tid_ == 0 && !have_queries_place();
      if (tid_ == 0 && !later) bring_queries(w);
      if (last) return;
      if (tid_ == 0 && (Tr::kShort || !Base::is_long(w))) this->template take_index<true>();
      work_ring_.advance();
      if (has_tiles) bring_tiles<kNarrow>(w, later);
      if (tid_ >= 32) hopper::mbarrier_arrive(done);
    }
  }

  // With one place, those of the last work are free when its last keys are multiplied. So keys are asked for before.
  static constexpr bool kQueriesLater = Tr::kQStages == 1;

  // The scores of a tile are multiplied before the values of the tile ahead of it, so keys are asked for first. Cells
  // of the page table are asked for two tiles ahead, and looked at a tile later.
  template <bool kNarrow>
  __device__ __forceinline__ void bring_tiles(const Work& w, bool asks) {
    const View v = this->view_of(w);
    const int row = looked_up_row();
    Cell next{0, -1};
    Place here{kNobody, kNobody};
    uint32_t values = kNobody;  // of the tile before
#pragma unroll 1
    for (int tile = v.tile_begin - 2; tile <= v.tile_end; ++tile) {
      if (tile >= v.tile_begin && tile < v.tile_end) bring<true, kNarrow>(here.key);
      if (kQueriesLater && tile == v.tile_begin) {
        if (asks) bring_queries(w);
        __syncwarp();
      }
      const bool last_keys = !Tr::kShort && tile + 1 == v.tile_end && v.tile_end - v.tile_begin > 2;  // of a long work
      if (last_keys && tid_ == 0) this->template take_index<true>();
      const Cell after = this->cell_of(v, tile + 2, row);
      const uint32_t value = here.value;
      here = this->place_of(v, tile + 1, row, next);
      next = after;
      if (tile > v.tile_begin) bring<false, kNarrow>(values);
      values = value;
    }
  }

  template <bool kKeys, bool kNarrow>
  __device__ __forceinline__ void bring(uint32_t place) {
    constexpr int kChunks = kKeys ? Tr::kQkChunks : Tr::kVChunks;
    Ring<Tr::kStages>& ring = kKeys ? k_ring_ : v_ring_;
    const uint32_t tile =
        shared_ + (kKeys ? Layout::kK + ring.stage * Tr::kKBytes : Layout::kV + ring.stage * Tr::kVBytes);
    const uint32_t full = shared_ + (kKeys ? Layout::kKFull : Layout::kVFull) + 8 * ring.stage;
    hopper::mbarrier_wait(shared_ + (kKeys ? Layout::kKEmpty : Layout::kVEmpty) + 8 * ring.stage, ring.phase ^ 1);
    ring.advance();
    copy_pieces<Tr, kChunks, kNarrow>(kKeys ? p_.k : p_.v, kKeys ? s_.key_rows.unit : s_.value_rows.unit, place,
                                      kKeys ? p_.head_dim_qk : p_.head_dim_v, tile, piece_);
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
    if constexpr (Tr::kWidensRows) {
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
  }

  struct Pending {
    uint32_t full = 0, tile = 0;
    bool keys = false;
  };

  PieceOfRow piece_;
  Pending pending_;
  Ring<Tr::kStages> k_ring_, v_ring_;
};

}  // namespace attnops::fmha::sm90
