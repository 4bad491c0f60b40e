#pragma once
#include "fmha/sm90/load.cuh"
#include "fmha/sm90/rows.cuh"

namespace attnops::fmha::sm90 {

// Keys and values of pages that are no boxes, and e4m3 ones for 16-bit queries, by four warps together.
//
// Nobody waits for copies of 16-bit rows: they arrive for their threads, and who computes fences them. e4m3 rows become
// wide ones in their place while the copies of the next tile come.
template <class Tr>
class RowProducer : ProducerBase<Tr> {
  using Base = ProducerBase<Tr>;
  using Layout = typename Base::Layout;
  using Base::arrive, Base::bring_queries, Base::is_seen, Base::next_work, Base::p_, Base::page_at, Base::s_,
      Base::shared_, Base::tell, Base::tid_, Base::work_done, Base::work_ring_, Base::work_slot;

 public:
  __device__ __forceinline__ RowProducer(const Params& p, const Schedule& s, const Maps& maps, char* base)
      : Base(p, s, maps, base), narrow_(is_narrow(p)) {}

  static __device__ __forceinline__ bool is_narrow(const Params& p) { return p.kv_dtype == DType::kFloat8E4M3; }
  // Arrivals for a tile.
  static __device__ __forceinline__ int arrivals(const Params& p) { return is_narrow(p) ? 4 : 128; }

  __device__ __forceinline__ void run() {
    for (;;) {
      if (tid_ == 0) tell(next_work());
      hopper::named_barrier_sync(kProducerBarrier, 128);
      const Work w = *work_slot();
      if (tid_ >= 32) hopper::mbarrier_arrive(work_done());  // it has read the work
      if (w.num_tokens < 0) finish_pending<0>();
      if (tid_ == 0) bring_queries(w);  // those of the last work are free when its last keys are multiplied
      if (w.num_tokens < 0) return;
      work_ring_.advance();
      bring_tiles(w);
      // Whoever waits for the last tile of values keeps the place of a work.
      if (w.tile_begin == w.tile_end) finish_pending<0>();
    }
  }

 private:
  // Byte offsets of a row of keys and of values; negative: no row of the tile sees the key, or its page is outside the
  // pool.
  struct Place {
    int64_t key, value;
  };

  // The scores of a tile are multiplied before the values of the tile ahead of it, so keys are asked for first.
  __device__ __forceinline__ void bring_tiles(const Work& w) {
    const int tile_end = w.tile_end;
    int tile = w.tile_begin;
    if (tile == tile_end) return;
    Place here = look_up(w, tile), next = look_up(w, tile + 1);
    bring<true>(here.key);
    for (; tile < tile_end; ++tile) {
      const int64_t values = here.value;
      if (tile + 1 < tile_end) {
        here = next;
        bring<true>(here.key);
        next = look_up(w, tile + 2);  // ahead, so that the table's latency is not the tiles'
      }
      bring<false>(values);
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
    const void* const pool = kKeys ? p_.k : p_.v;
    const int head_dim = kKeys ? p_.head_dim_qk : p_.head_dim_v;
    if (narrow_) {
      copy_pieces<Tr, kChunks, true>(pool, offset, head_dim, tile);
      cp_async_commit();
      finish_pending<1>();
      pending_ = {full, tile, kKeys};
    } else {
      copy_pieces<Tr, kChunks, false>(pool, offset, head_dim, tile);
      hopper::arrive_after_copies(full);
    }
  }

  // Makes wide values of the tile whose copies began before, and tells of it.
  template <int kNewer>
  __device__ __forceinline__ void finish_pending() {
    if (pending_.full == 0) return;
    cp_async_wait<kNewer>();
    if (pending_.keys) {
      widen_pieces<Tr, Tr::kQkChunks>(pending_.tile);
    } else {
      widen_pieces<Tr, Tr::kVChunks>(pending_.tile);
    }
    hopper::fence_async_proxy();  // the matrix units read through another proxy
    arrive(pending_.full);
    pending_.full = 0;
  }

  // Where this lane's row of a tile lies.
  __device__ __forceinline__ Place look_up(const Work& w, int tile) const {
    const int row = looked_up_row(), key = w.place_of(tile) * Tr::kKeys + row;
    if (row >= Tr::kKeys || key < w.key_begin || key >= w.key_end || !is_seen(w, key)) return {kNobody, kNobody};
    int page = 0, token = w.first_k_token + key;
    if (p_.paged) {
      const int cell = s_.page_size.divide(key);
      page = page_at(w, cell);
      if (page < 0 || page >= p_.page_table.num_pages) return {kNobody, kNobody};
      token = key - cell * p_.page_table.page_size;
    }
    const int size = size_of(p_.kv_dtype);
    return {(page * p_.k_stride_page + token * p_.k_stride_token + w.kv_head * p_.k_stride_head) * size,
            (page * p_.v_stride_page + token * p_.v_stride_token + w.kv_head * p_.v_stride_head) * size};
  }

  struct Pending {
    uint32_t full = 0, tile = 0;
    bool keys = false;
  };

  bool narrow_;
  Pending pending_;
  Ring<Tr::kStages> k_ring_, v_ring_;
};

}  // namespace attnops::fmha::sm90
