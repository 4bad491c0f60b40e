#pragma once
#include "fmha/sm90/load.cuh"
#include "fmha/sm90/rows.cuh"

namespace attnops::fmha::sm90 {

// e4m3 keys and values of 16-bit queries, in boxes of the copy engine. They land as they are, in places of their own,
// and four warps write them wide where the products read. Warp 3 also asks for boxes, two tiles ahead. Who computes
// fences, as for gathered rows.
template <class Tr>
class NarrowProducer : ProducerBase<Tr> {
  using Base = ProducerBase<Tr>;
  using Layout = typename Base::Layout;
  using Base::arrive, Base::bring_queries, Base::is_seen, Base::maps_, Base::next_work, Base::p_, Base::page_of_box,
      Base::s_, Base::shared_, Base::tell, Base::tid_, Base::work_done, Base::work_ring_, Base::work_slot;

 public:
  static constexpr int kWarps = 4;  // arrive for a tile

  __device__ __forceinline__ NarrowProducer(const Params& p, const Schedule& s, const Maps& maps, char* base)
      : Base(p, s, maps, base) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;;) {
      if (tid_ == 0) tell(next_work());
      hopper::named_barrier_sync(kProducerBarrier, 128);
      const Work& w = *work_slot();
      const uint32_t done = work_done();
      if (tid_ == 0) bring_queries(w);
      if (w.num_tokens < 0) return;
      work_ring_.advance();
      bring_tiles(w);
      if (tid_ >= 32) hopper::mbarrier_arrive(done);
    }
  }

 private:
  struct Item {
    int tile;
    bool keys;
  };

  // The scores of a tile are multiplied before the values of the tile ahead of it: keys of the first tile, then in turns
  // keys of the next one and values of the last.
  static __device__ __forceinline__ Item item_of(const Work& w, int i) {
    const int tiles = w.tile_end - w.tile_begin;
    const bool last = i == 2 * tiles - 1, keys = !last && (i == 0 || i % 2 == 1);
    return {w.tile_begin + (keys ? (i + 1) / 2 : last ? tiles - 1 : i / 2 - 1), keys};
  }

  __device__ __forceinline__ void bring_tiles(const Work& w) {
    const int items = 2 * (w.tile_end - w.tile_begin);
    const bool asks = tid_ / 32 == 3;
    if (asks) {
      next_page_ = page_of_box(w, w.tile_begin);
      for (int i = 0; i < Layout::kNarrowStages && i < items; ++i) ask(w, item_of(w, i));
    }
#pragma unroll 1
    for (int i = 0; i < items; ++i) {
      const Item item = item_of(w, i);
      if (item.keys) {
        widen<Tr::kHeadDimQk>(w, item.tile, false, shared_ + Layout::kK + k_ring_.stage * Tr::kKBytes,
                              shared_ + Layout::kKFull + 8 * k_ring_.stage,
                              shared_ + Layout::kKEmpty + 8 * k_ring_.stage, k_ring_.phase ^ 1);
        k_ring_.advance();
      } else {
        widen<Tr::kHeadDimV>(w, item.tile, is_edge<Tr::kKeys>(w, item.tile),
                             shared_ + Layout::kV + v_ring_.stage * Tr::kVBytes,
                             shared_ + Layout::kVFull + 8 * v_ring_.stage,
                             shared_ + Layout::kVEmpty + 8 * v_ring_.stage, v_ring_.phase ^ 1);
        v_ring_.advance();
      }
      if (asks && i + Layout::kNarrowStages < items) ask(w, item_of(w, i + Layout::kNarrowStages));
    }
  }

  static __device__ __forceinline__ uint32_t narrow_tile(int stage) {
    return Layout::kNarrow + stage * Tr::kNarrowBytes;
  }

  // The boxes of a tile, by a warp: a lane has at most one.
  __device__ __forceinline__ void ask(const Work& w, Item item) {
    static_assert(Tr::kKeys / 8 <= 32);
    if (item.keys) {
      page_before_ = page_;
      page_ = next_page_;
      next_page_ = page_of_box(w, item.tile + 1);  // ahead, so that the table's latency is not the tiles'
    }
    // Values come after the keys of the next tile, where there is one.
    const int page = item.keys || item.tile + 1 == w.tile_end ? page_ : page_before_;
    const int row = tid_ % 32 * s_.box_keys, key = w.place_of(item.tile) * Tr::kKeys + row;
    int token = w.first_k_token + key;
    if (p_.paged) token = key - s_.page_size.divide(key) * p_.page_table.page_size;
    const bool whole = !item.keys && !is_edge<Tr::kKeys>(w, item.tile);
    const bool wanted =
        row < Tr::kKeys && (whole || (key < w.key_end && key + s_.box_keys > w.key_begin));
    const int row_bytes = item.keys ? Tr::kHeadDimQk : Tr::kHeadDimV;
    const int boxes = __popc(__ballot_sync(0xffffffffu, wanted));
    const uint32_t full = shared_ + Layout::kRawFull + 8 * asked_.stage;
    hopper::mbarrier_wait(shared_ + Layout::kRawEmpty + 8 * asked_.stage, asked_.phase ^ 1);
    if (tid_ % 32 == 0) hopper::mbarrier_arrive_expect(full, boxes * s_.box_keys * row_bytes);
    __syncwarp();
    if (wanted) {
      hopper::copy_box(shared_ + narrow_tile(asked_.stage) + row * row_bytes, item.keys ? maps_.k : maps_.v, full, 0,
                       token, w.kv_head, page);
    }
    asked_.advance();
  }

  // Zeros in place of this lane's pieces of values that no query sees, which may be NaN.
  template <int kHeadDim>
  __device__ __forceinline__ void clear_unseen_pieces(const Work& w, int tile) const {
    constexpr int kOfRow = kHeadDim / 16;
    const uint32_t own = shared_ + narrow_tile(narrow_.stage) + tid_ * 16;
#pragma unroll 1
    for (int n = 0; n < Tr::kKeys * kOfRow / 128; ++n) {
      const int key = w.place_of(tile) * Tr::kKeys + (tid_ + 128 * n) / kOfRow;
      if (key >= w.key_begin && key < w.key_end && is_seen(w, key)) continue;
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(own + n * 2048), "r"(0) : "memory");
    }
  }

  // Sixteen e4m3 a lane and pass, as two pieces of eight wide values. Lanes whose pieces would meet in a bank write the
  // second one first.
  template <int kHeadDim>
  __device__ __forceinline__ void widen(const Work& w, int tile, bool clear, uint32_t wide, uint32_t full,
                                        uint32_t empty, uint32_t phase) {
    constexpr int kOfRow = kHeadDim / 16, kPasses = Tr::kKeys * kOfRow / 128;
    constexpr int kAtOnce = kOfRow % 3 == 0 ? 3 : 4;
    constexpr int kRows = 128 * kAtOnce / kOfRow;  // of so many passes
    static_assert(128 * kAtOnce % kOfRow == 0 && kRows % 8 == 0 && Tr::kKeys % kRows == 0);
    uint32_t from = shared_ + narrow_tile(narrow_.stage) + tid_ * 16, to[kAtOnce];
    bool swapped[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int row = (tid_ + 128 * j) / kOfRow, piece = (tid_ + 128 * j) % kOfRow, chunk = piece / 4;
      swapped[j] = chunk % 2 != 0;
      to[j] = wide + chunk * Tr::kKeys * 128 + hopper::swizzled(row, piece % 4 * 2 + chunk % 2);
    }
    hopper::mbarrier_wait(shared_ + Layout::kRawFull + 8 * narrow_.stage, narrow_.phase);
    if (clear) clear_unseen_pieces<kHeadDim>(w, tile);
    hopper::mbarrier_wait(empty, phase);
#pragma unroll 1
    for (int i = 0; i < kPasses / kAtOnce; ++i) {
      uint32_t raw[kAtOnce][4];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(raw[j][0]), "=r"(raw[j][1]), "=r"(raw[j][2]), "=r"(raw[j][3])
                     : "r"(from + j * 2048)
                     : "memory");
      }
      __syncwarp();  // no load sinks below
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t values[kAtOnce][4];  // all before the first store: a lane alone would wait for each
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const bool second = (half != 0) != swapped[j];
          uint32_t eight[2] = {second ? raw[j][2] : raw[j][0], second ? raw[j][3] : raw[j][1]};
          sm90::widen<typename Tr::T>(eight, values[j]);
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to[j] ^ half * 16), "r"(values[j][0]),
                       "r"(values[j][1]), "r"(values[j][2]), "r"(values[j][3])
                       : "memory");
        }
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) to[j] += kRows * 128;
      from += kAtOnce * 2048;
    }
    arrive(shared_ + Layout::kRawEmpty + 8 * narrow_.stage);
    arrive(full);
    narrow_.advance();
  }

  int page_ = 0, page_before_ = 0, next_page_ = 0;  // of this lane's box, of the tiles whose keys were asked for
  Ring<Layout::kNarrowStages> asked_, narrow_;
  Ring<Tr::kStages> k_ring_, v_ring_;
};

}  // namespace attnops::fmha::sm90
