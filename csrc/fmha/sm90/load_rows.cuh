#pragma once
#include "fmha/sm90/load.cuh"
#include "fmha/sm90/rows.cuh"
#include "fmha/sm90/transpose.cuh"

namespace attnops::fmha::sm90 {

inline constexpr int kTransposeBarrier = 1, kTransposers = 2;

// Keys and values of pages that are no boxes, and e4m3 ones. A tile is brought by one warp: warps 0 and 1 take turns at
// tiles of keys, warps 2 and 3 at tiles of values. Each waits for its own copies alone, as a fence does for all copies
// of a thread.
//
// e4m3 products take transposed values: warps 2 and 3 make them. Warp 0 then brings all keys, and warp 1 the rows of
// values; where boxes serve, warp 0 asks for both.
template <class Tr>
class RowProducer : ProducerBase<Tr> {
  using Base = ProducerBase<Tr>;
  using Layout = typename Base::Layout;
  using Base::arrive, Base::bring_boxes, Base::bring_queries, Base::end, Base::is_seen, Base::maps_, Base::next_work,
      Base::p_, Base::page_at, Base::page_of_box, Base::q_ring_, Base::s_, Base::shared_, Base::tid_, Base::work_slot;

 public:
  __device__ __forceinline__ RowProducer(const Params& p, const Schedule& s, const Maps& maps, char* base)
      : Base(p, s, maps, base), warp_(static_cast<int>(threadIdx.x) / 32), lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ __forceinline__ void run() {
    if (!by_rows() && warp_ == 1) return;
    for (;;) {
      Work* slot = work_slot();
      const uint32_t known = shared_ + Layout::kWorkKnown + 8 * q_ring_.stage,
                     full = shared_ + Layout::kQFull + 8 * q_ring_.stage,
                     empty = shared_ + Layout::kQEmpty + 8 * q_ring_.stage;
      if (warp_ == 0) {
        hopper::mbarrier_wait(empty, q_ring_.phase ^ 1);
        if (lane_ == 0) {
          next_work(*slot);
          hopper::mbarrier_arrive(known);
        }
        __syncwarp();
      } else {
        hopper::mbarrier_wait(known, q_ring_.phase);
      }
      const Work& w = *slot;
      if (w.num_tokens < 0) {
        if (tid_ == 0) end(full);
        return;
      }
      if (tid_ == 0) bring_queries(w, full);
      q_ring_.advance();
      if (Tr::kFp8 && warp_ >= 2) {
        transpose_values(w);
      } else if (by_rows()) {
        const bool of_keys = Tr::kFp8 ? warp_ == 0 : warp_ < 2;
        of_keys ? bring_by_rows<Tr::kQkChunks>(w, keys()) : bring_by_rows<Tr::kVChunks>(w, values());
      } else if constexpr (Tr::kFp8) {
        bring_by_boxes(w);
      }
      if (warp_ != 0) arrive(empty);
    }
  }

 private:
  // Where values come first.
  static constexpr int kValues = Tr::kFp8 ? Layout::kRawV : Layout::kV;
  static constexpr int kValuesBytes = Tr::kFp8 ? Tr::kRawVBytes : Tr::kVBytes;
  static constexpr int kValuesFull = Tr::kFp8 ? Layout::kRawFull : Layout::kVFull;
  static constexpr int kValuesEmpty = Tr::kFp8 ? Layout::kRawEmpty : Layout::kVEmpty;

  // One of the two pools, and the tiles of it in shared memory.
  struct Pool {
    const void* rows;
    int64_t stride_page, stride_token, stride_head;  // bytes
    int head_dim;
    uint32_t tiles, tile_bytes, full, empty;
  };

  __device__ __forceinline__ bool by_rows() const { return !Tr::kFp8 || s_.box_keys == 0; }

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
            shared_ + kValues,
            kValuesBytes,
            shared_ + kValuesFull,
            shared_ + kValuesEmpty};
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
        bring_boxes<Tr::kQkChunks>(w, tile, page, maps_.k, shared_ + Layout::kK + ring_.stage * Tr::kKBytes,
                                   shared_ + Layout::kKEmpty + offset, ring_.phase ^ 1,
                                   shared_ + Layout::kKFull + offset, w.key_begin, w.key_end);
        ring_.advance();
      }
      if (tile > w.tile_begin) {
        const uint32_t offset = 8 * v_ring_.stage;
        bring_boxes<Tr::kVChunks>(w, tile - 1, page_before, maps_.v, shared_ + kValues + v_ring_.stage * kValuesBytes,
                                  shared_ + kValuesEmpty + offset, v_ring_.phase ^ 1, shared_ + kValuesFull + offset, 0,
                                  INT32_MAX);
        v_ring_.advance();
      }
    }
  }

  // The tiles of a work that are this warp's: all, or those of a stage.
  template <int kChunks>
  __device__ __forceinline__ void bring_by_rows(const Work& w, const Pool& pool) {
    constexpr int kTurns = Tr::kFp8 ? 1 : 2;
    static_assert(Tr::kStages == 2, "a warp for each stage");
    Ring<Tr::kStages> ring = ring_;
    int tile = w.tile_begin;
    if (kTurns == 2 && ring.stage != (warp_ & 1)) {
      ring.advance();
      ++tile;
    }
    RowOffsets<Tr> offsets;
    if (tile < w.tile_end) offsets = look_up(w, pool, tile);
    for (; tile < w.tile_end; tile += kTurns) {
      RowOffsets<Tr> next;
      const auto look_ahead = [&] {
        if (tile + kTurns < w.tile_end) next = look_up(w, pool, tile + kTurns);
      };
      if (!Tr::kFp8 && p_.kv_dtype == DType::kFloat8E4M3) {
        bring_rows<kChunks, true>(pool, offsets, ring, look_ahead);
      } else {
        bring_rows<kChunks, false>(pool, offsets, ring, look_ahead);
      }
      offsets = next;
#pragma unroll
      for (int i = 0; i < kTurns; ++i) ring.advance();
    }
    const int tiles = w.tile_end - w.tile_begin;
    if (tiles & 1) ring_.advance();
    ring_.phase ^= tiles >> 1 & 1;
  }

  // Half of each tile of values, by one of two warps.
  __device__ __forceinline__ void transpose_values(const Work& w) {
    for (int tile = w.tile_begin, end = w.tile_end; tile < end; ++tile) {
      const uint32_t raw = shared_ + Layout::kRawV + ring_.stage * Tr::kRawVBytes, offset = 8 * ring_.stage;
      hopper::mbarrier_wait(shared_ + Layout::kRawFull + offset, ring_.phase);
      if (!by_rows() && is_edge<Tr::kKeys>(w, tile)) {
        clear_unseen(w, tile, raw);
        hopper::named_barrier_sync(kTransposeBarrier, 32 * kTransposers);
      }
      hopper::mbarrier_wait(shared_ + Layout::kVEmpty + offset, ring_.phase ^ 1);
      if constexpr (Tr::kFp8) {
        transpose_tile<Tr::kKeys, Tr::kHeadDimV>(raw, shared_ + Layout::kV + ring_.stage * Tr::kVBytes, warp_ % 2,
                                                 lane_);
      }
      hopper::fence_async_proxy();
      arrive(shared_ + Layout::kVFull + offset);
      arrive(shared_ + Layout::kRawEmpty + offset);
      ring_.advance();
    }
  }

  // Zeros in place of values that no row of the tile sees, which may be NaN.
  __device__ __forceinline__ void clear_unseen(const Work& w, int tile, uint32_t raw) const {
    for (int row = 32 * (warp_ % 2) + lane_; row < Tr::kKeys; row += 32 * kTransposers) {
      const int key = tile * Tr::kKeys + row;
      if (key >= w.known_begin && key < w.key_end && is_seen(w, key)) continue;
#pragma unroll
      for (int i = 0; i < Tr::kVChunks * 8; ++i) {
        asm volatile(
            "st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(raw + i / 8 * Tr::kKeys * 128 + row * 128 + i % 8 * 16),
            "r"(0)
            : "memory");
      }
    }
  }

  // Rows of a tile into its stage; `meanwhile` runs while they come.
  template <int kChunks, bool kNarrow, class Meanwhile>
  __device__ __forceinline__ void bring_rows(const Pool& pool, const RowOffsets<Tr>& offsets,
                                             const Ring<Tr::kStages>& ring, const Meanwhile& meanwhile) {
    const uint32_t tile = pool.tiles + ring.stage * pool.tile_bytes;
    hopper::mbarrier_wait(pool.empty + 8 * ring.stage, ring.phase ^ 1);
    copy_rows<Tr, kChunks, kNarrow>(pool.rows, offsets, pool.head_dim, tile);
    meanwhile();
    hopper::wait_for_copies();
    if constexpr (kNarrow) widen_rows<Tr, kChunks>(tile);
    hopper::fence_async_proxy();  // the matrix units read through another proxy
    arrive(pool.full + 8 * ring.stage);
  }

  // Where the rows of a tile lie that this lane looks up.
  __device__ __forceinline__ RowOffsets<Tr> look_up(const Work& w, const Pool& pool, int tile) const {
    RowOffsets<Tr> offsets;
#pragma unroll
    for (int j = 0; j < RowOffsets<Tr>::kCount; ++j) {
      const int row = 32 * j + lane_, key = tile * Tr::kKeys + row;
      offsets.of[j] = kNobody;
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
