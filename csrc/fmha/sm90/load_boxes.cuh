#pragma once
#include "fmha/sm90/load.cuh"

namespace attnops::fmha::sm90 {

// Keys and values of 16 bits in boxes of the copy engine. Warp 0 asks for keys and warp 1 for values: a box takes some
// 50 cycles of a warp, and a tile over small pages has many. Warp 3 looks after values of tiles with memory that nobody
// owns: they land, some rows become zeros, and only then does it arrive for the tile. A thread of warp 2 tells of
// works.
template <class Tr>
class BoxProducer : ProducerBase<Tr> {
  using Base = ProducerBase<Tr>;
  using Layout = typename Base::Layout;
  using Base::arrive, Base::clear_unseen, Base::maps_, Base::page_of_box, Base::s_, Base::shared_, Base::tid_,
      Base::work_done, Base::work_known, Base::work_ring_, Base::work_slot;

 public:
  static constexpr int kOfValues = 2;  // warps that arrive for them

  __device__ __forceinline__ BoxProducer(const Params& p, const Schedule& s, const Maps& maps, char* base)
      : Base(p, s, maps, base) {}

  __device__ __forceinline__ void run() {
    const int warp = tid_ / 32;
    if (warp == 2) {
      if constexpr (Tr::kTogether > 1) {
        this->tell_works_together();
      } else if (tid_ % 32 == 0) {
        this->template tell_works<Tr::kTakesLate || Tr::kShort>();
      }
      return;
    }
    for (;;) {
      hopper::mbarrier_wait(work_known(), work_ring_.phase);
      const Work w = *work_slot();
      hopper::mbarrier_arrive(work_done());  // it has read the work
      if (w.num_tokens < 0) return;
      work_ring_.advance();
      if (warp < 2) {
        ask(w, warp == 0);
      } else {
        look_after(w);
      }
    }
  }

 private:
  // The tiles of ragged keys, in few instructions: of works of one tile each costs until it is there. A lane has a box,
  // whose place in a tile it knows before there is a work.
  template <bool kOfKeys>
  __device__ __forceinline__ void ask_ragged(const Work& w, Ring<Tr::kStages>& ring) {
    constexpr int kChunks = kOfKeys ? Tr::kQkChunks : Tr::kVChunks, kBytes = kOfKeys ? Tr::kKBytes : Tr::kVBytes;
    static_assert(Tr::kKeys / 16 * kChunks <= 32);
    const int lane = tid_ % 32, row = lane / kChunks * s_.box_keys, column = lane % kChunks;
    const uint32_t inside = shared_ + (kOfKeys ? Layout::kK : Layout::kV) + column * Tr::kKeys * 128 + row * 128;
#pragma unroll 1
    for (int tile = w.tile_begin, tile_end = w.tile_end; tile < tile_end; ++tile) {
      if (Tr::kTakesLate && kOfKeys && tile + 1 == tile_end && Base::is_long(w)) arrive(shared_ + Layout::kLastKeys);
      const uint32_t offset = 8 * ring.stage;
      const bool edge = !kOfKeys && is_edge<Tr::kKeys>(w, tile);
      const int key = tile * Tr::kKeys + row;
      const bool within = key < w.key_end && key + s_.box_keys > w.key_begin;
      const bool wanted = row < Tr::kKeys && (within || (!kOfKeys && !edge));
      const int bytes = __popc(__ballot_sync(0xffffffffu, wanted)) * s_.box_keys * 128;
      const uint32_t full = shared_ + (kOfKeys ? Layout::kKFull : edge ? Layout::kRawFull : Layout::kVFull) + offset;
      hopper::mbarrier_wait(shared_ + (kOfKeys ? Layout::kKEmpty : Layout::kVEmpty) + offset, ring.phase ^ 1);
      if (lane == 0) hopper::mbarrier_arrive_expect(full, bytes);
      __syncwarp();
      if (wanted) {
        const CUtensorMap* const map = kOfKeys ? maps_.k : maps_.v;
        const uint32_t to = inside + ring.stage * kBytes;
        if (s_.cluster == 1) {
          hopper::copy_box(to, map, full, Tr::kChunk * column, w.first_k_token + key, w.kv_head, 0);
        } else if (lane % 2 == this->rank_) {
          hopper::copy_box_to_ctas(to, map, full, Tr::kChunk * column, w.first_k_token + key, w.kv_head, 0, 3);
        }
      }
      if (edge) arrive(shared_ + Layout::kVFull + offset);
      ring.advance();
    }
  }

  __device__ __forceinline__ void ask(const Work& w, bool keys) {
    if constexpr (Tr::kPlainWorks) {
      if (!this->p_.paged) return keys ? ask_ragged<true>(w, k_ring_) : ask_ragged<false>(w, v_ring_);
    }
    int next_page = page_of_box(w, w.tile_begin);
    for (int tile = w.tile_begin, tile_end = w.tile_end; tile < tile_end; ++tile) {
      if (Tr::kTakesLate && keys && tile + 1 == tile_end && Base::is_long(w)) arrive(shared_ + Layout::kLastKeys);
      const int page = next_page;
      next_page = page_of_box(w, tile + 1);  // a tile ahead, so that the table's latency is not the tiles'
      keys ? bring_keys(w, tile, page) : bring_values(w, tile, page);
    }
  }

  __device__ __forceinline__ void bring_keys(const Work& w, int tile, int page) {
    const uint32_t offset = 8 * k_ring_.stage;
    this->template bring_boxes<Tr::kQkChunks>(
        w, tile, page, maps_.k, shared_ + Layout::kK + k_ring_.stage * Tr::kKBytes, shared_ + Layout::kKEmpty + offset,
        k_ring_.phase ^ 1, shared_ + Layout::kKFull + offset, w.key_begin, w.key_end);
    k_ring_.advance();
  }

  __device__ __forceinline__ void bring_values(const Work& w, int tile, int page) {
    const uint32_t offset = 8 * v_ring_.stage, full = shared_ + Layout::kVFull + offset;
    const bool edge = is_edge<Tr::kKeys>(w, tile);
    this->template bring_boxes<Tr::kVChunks>(w, tile, page, maps_.v, shared_ + Layout::kV + v_ring_.stage * Tr::kVBytes,
                                             shared_ + Layout::kVEmpty + offset, v_ring_.phase ^ 1,
                                             edge ? shared_ + Layout::kRawFull + offset : full, edge ? w.key_begin : 0,
                                             edge ? w.key_end : INT32_MAX);
    if (edge) arrive(full);
    v_ring_.advance();
  }

  // What a tile of values needs beside its boxes.
  __device__ __forceinline__ void look_after(const Work& w) {
    this->prefetch_hidden(w);
    const int only = Tr::kFewKeys > 0 && s_.plain != 0 ? keys_of_only_tile<Tr::kKeys>(w) : 0;
    const int rows = only > 0 && only <= Tr::kFewKeys ? Tr::kFewKeys : Tr::kKeys;  // that are multiplied
    for (int tile = w.tile_begin, tile_end = w.tile_end; tile < tile_end; ++tile) {
      const uint32_t offset = 8 * v_ring_.stage;
      if (is_edge<Tr::kKeys>(w, tile)) {
        hopper::mbarrier_wait(shared_ + Layout::kRawFull + offset, raw_phases_ >> v_ring_.stage & 1);
        raw_phases_ ^= 1 << v_ring_.stage;
        clear_unseen(w, tile, shared_ + Layout::kV + v_ring_.stage * Tr::kVBytes, tid_ % 32, 32, rows);
        hopper::fence_async_proxy();  // the matrix units read through another proxy
      } else {
        hopper::mbarrier_wait(shared_ + Layout::kVEmpty + offset, v_ring_.phase ^ 1);
      }
      arrive(shared_ + Layout::kVFull + offset);
      v_ring_.advance();
    }
  }

  uint32_t raw_phases_ = 0;  // a bit for each stage
  Ring<Tr::kStages> k_ring_, v_ring_;
};

}  // namespace attnops::fmha::sm90
