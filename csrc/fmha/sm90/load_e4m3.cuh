#pragma once
#include "fmha/sm90/load.cuh"
#include "fmha/sm90/rows.cuh"
#include "fmha/sm90/transpose.cuh"

namespace attnops::fmha::sm90 {

inline constexpr int kTransposeBarrier = 1, kTransposers = 2;

// e4m3 keys and values for e4m3 queries. Their products take transposed values: warps 2 and 3 make them. Where boxes
// serve, warp 0 asks for keys and values, and a thread of warp 1 tells of works. Elsewhere warp 0 does that and brings
// rows of keys, and warp 1 rows of values. Each waits for its own copies alone, as a fence does for all copies of a
// thread.
template <class Tr>
class E4m3Producer : ProducerBase<Tr> {
  using Base = ProducerBase<Tr>;
  using Layout = typename Base::Layout;
  using Base::arrive, Base::bring_queries, Base::clear_unseen, Base::is_seen, Base::maps_, Base::next_work, Base::p_,
      Base::page_at, Base::page_of_box, Base::s_, Base::shared_, Base::tell, Base::work_done, Base::work_known,
      Base::work_ring_, Base::work_slot;

 public:
  __device__ __forceinline__ E4m3Producer(const Params& p, const Schedule& s, const Maps& maps, char* base)
      : Base(p, s, maps, base), warp_(static_cast<int>(threadIdx.x) / 32), lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ __forceinline__ void run() {
    if (!by_rows() && warp_ == 1) {
      if (lane_ == 0) this->template tell_works<false>();
      return;
    }
    const bool tells = by_rows() && warp_ == 0;
    for (;;) {
      const uint32_t done = work_done();
      if (tells) {
        if (lane_ == 0) {
          tell(next_work());
          hopper::mbarrier_arrive(work_known());
        }
        __syncwarp();
      } else {
        hopper::mbarrier_wait(work_known(), work_ring_.phase);
      }
      const Work& w = *work_slot();
      if (tells && lane_ == 0) bring_queries(w);
      if (w.num_tokens < 0) return;
      work_ring_.advance();
      if (warp_ >= 2) {
        transpose_values(w);
      } else if (by_rows()) {
        warp_ == 0 ? bring_by_rows<Tr::kQkChunks>(w, keys()) : bring_by_rows<Tr::kVChunks>(w, values());
      } else {
        bring_by_boxes(w);
      }
      if (!tells) hopper::mbarrier_arrive(done);
    }
  }

 private:
  // One of the two pools, and the tiles of it in shared memory.
  struct Pool {
    const void* rows;
    int64_t stride_page, stride_token, stride_head;  // bytes
    int head_dim;
    uint32_t tiles, tile_bytes, full, empty;
  };

  __device__ __forceinline__ bool by_rows() const { return s_.box_keys == 0; }

  __device__ __forceinline__ Pool keys() const {
    const int size = size_of(p_.kv_dtype);
    return {p_.k,
            p_.k_stride_page * size,
            p_.k_stride_token * size,
            p_.k_stride_head * size,
            p_.head_dim_qk,
            shared_ + Layout::kK,
            Tr::kKBytes,
            shared_ + Layout::kKFull,
            shared_ + Layout::kKEmpty};
  }

  __device__ __forceinline__ Pool values() const {
    const int size = size_of(p_.kv_dtype);
    return {p_.v,
            p_.v_stride_page * size,
            p_.v_stride_token * size,
            p_.v_stride_head * size,
            p_.head_dim_v,
            shared_ + Layout::kRaw,
            Tr::kRawBytes,
            shared_ + Layout::kRawFull,
            shared_ + Layout::kRawEmpty};
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

  template <int kChunks>
  __device__ __forceinline__ void bring_by_rows(const Work& w, const Pool& pool) {
    RowOffsets<Tr> offsets;
    if (w.tile_begin < w.tile_end) offsets = look_up(w, pool, w.tile_begin);
    for (int tile = w.tile_begin; tile < w.tile_end; ++tile) {
      RowOffsets<Tr> next;
      bring_rows<kChunks>(pool, offsets, [&] {
        if (tile + 1 < w.tile_end) next = look_up(w, pool, tile + 1);
      });
      offsets = next;
      ring_.advance();
    }
  }

  // Half of each tile of values, by one of two warps.
  __device__ __forceinline__ void transpose_values(const Work& w) {
    for (int tile = w.tile_begin, end = w.tile_end; tile < end; ++tile) {
      const uint32_t raw = shared_ + Layout::kRaw + ring_.stage * Tr::kRawBytes, offset = 8 * ring_.stage;
      hopper::mbarrier_wait(shared_ + Layout::kRawFull + offset, ring_.phase);
      if (!by_rows() && is_edge<Tr::kKeys>(w, tile)) {
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

  // Rows of a tile into its stage; `meanwhile` runs while they come.
  template <int kChunks, class Meanwhile>
  __device__ __forceinline__ void bring_rows(const Pool& pool, const RowOffsets<Tr>& offsets,
                                             const Meanwhile& meanwhile) {
    hopper::mbarrier_wait(pool.empty + 8 * ring_.stage, ring_.phase ^ 1);
    copy_rows<Tr, kChunks>(pool.rows, offsets, pool.head_dim, pool.tiles + ring_.stage * pool.tile_bytes);
    meanwhile();
    hopper::wait_for_copies();
    hopper::fence_async_proxy();  // the matrix units read through another proxy
    arrive(pool.full + 8 * ring_.stage);
  }

  // Where the rows of a tile lie that this lane looks up.
  __device__ __forceinline__ RowOffsets<Tr> look_up(const Work& w, const Pool& pool, int tile) const {
    RowOffsets<Tr> offsets;
#pragma unroll
    for (int j = 0; j < RowOffsets<Tr>::kCount; ++j) {
      const int row = 32 * j + lane_, key = w.place_of(tile) * Tr::kKeys + row;
      offsets.of[j] = RowOffsets<Tr>::kNone;
      if (row >= Tr::kKeys || key < w.key_begin || key >= w.key_end || !is_seen(w, key)) continue;
      int page = 0, token = w.first_k_token + key;
      if (p_.paged) {
        const int cell = s_.page_size.divide(key);
        page = page_at(w, cell);
        if (page < 0 || page >= p_.page_table.num_pages) continue;
        token = key - cell * p_.page_table.page_size;
      }
      offsets.of[j] = page * pool.stride_page + token * pool.stride_token + w.kv_head * pool.stride_head;
    }
    return offsets;
  }

  int warp_, lane_;
  Ring<Tr::kStages> ring_, v_ring_;  // of keys, or of what the warp brings; of values, by boxes
};

}  // namespace attnops::fmha::sm90
