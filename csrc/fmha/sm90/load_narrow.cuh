#pragma once
#include "device/sm80/mma.cuh"
#include "fmha/sm90/load.cuh"
#include "fmha/sm90/rows.cuh"

namespace attnops::fmha::sm90 {

// What is read in place of rows that are not there, up to head dim 256. A load that a predicate guards would go through
// registers of its own, and wait.
static __device__ const uint4 kZeroRow[16] = {};

// e4m3 keys and values of 16-bit queries, by four warps together. A lane holds sixteen values of each of its rows in
// registers. It stores them as fp16 when their stage is free, and asks for those of the next tile as their registers
// become free. So the next tile is under way without a place in shared memory.
//
// Who computes fences, as for gathered rows of 16 bits: here a fence would wait for what is under way.
template <class Tr>
class NarrowProducer : ProducerBase<Tr> {
  using Base = ProducerBase<Tr>;
  using Layout = typename Base::Layout;
  using Base::arrive, Base::bring_queries, Base::check_page, Base::is_seen, Base::next_work, Base::p_, Base::s_,
      Base::shared_, Base::tell, Base::tid_, Base::work_done, Base::work_ring_, Base::work_slot;

 public:
  static constexpr int kArrivals = 4;  // for a tile

  __device__ __forceinline__ NarrowProducer(const Params& p, const Schedule& s, const Maps& maps, char* base)
      : Base(p, s, maps, base) {
    const int lane = tid_ % 32, chunk = kPairs ? lane / 8 % 2 : 0;
    row_ = kPairs ? lane / 16 * 2 + lane / 4 % 2 : lane / 4;
    column_ = 64 * chunk + lane % 4 * 16;
    own_ = chunk * Tr::kKeys * 128 + hopper::swizzled(tid_ / 32 * kRowsOfWarp + row_, lane % 4 * 2);
  }

  __device__ __forceinline__ void run() {
    const int64_t bits = reinterpret_cast<int64_t>(p_.k) | reinterpret_cast<int64_t>(p_.v) | p_.k_stride_page |
                         p_.k_stride_token | p_.k_stride_head | p_.v_stride_page | p_.v_stride_token |
                         p_.v_stride_head | p_.head_dim_qk | p_.head_dim_v;
    bits % 16 == 0 ? run_as<true>() : run_as<false>();
  }

 private:
  enum Kind { kNone, kKeys, kValues };

  // Four lanes share 64 values of a row, which become a chunk. Where chunks are even in number, eight lanes share two.
  // Eight neighbours store to two rows, one of them even: never two of them to the same banks.
  static constexpr bool kPairs = Tr::kQkChunks % 2 == 0 && Tr::kVChunks % 2 == 0;
  static constexpr int kRowsOfWarp = kPairs ? 4 : 8, kRowsOfPass = 4 * kRowsOfWarp;
  static_assert(Tr::kKeys % kRowsOfPass == 0);

  static constexpr int columns_of(Kind kind) {  // pieces of a lane in one pass
    return (kind == kKeys ? Tr::kQkChunks : Tr::kVChunks) / (kPairs ? 2 : 1);
  }
  static constexpr int pieces_of(Kind kind) { return Tr::kKeys / kRowsOfPass * columns_of(kind); }

  // A tile is held in batches of as many pieces as there are registers for.
  static constexpr int kMostPieces = Tr::kProducerRegisters >= 72 ? 8 : 5;
  static constexpr int batches_of(Kind kind) { return ceil_div(pieces_of(kind), kMostPieces); }
  static constexpr int batch_of(Kind kind) { return ceil_div(pieces_of(kind), batches_of(kind)); }
  static constexpr int kHeld = max_of(batch_of(kKeys), batch_of(kValues));
  static constexpr bool kAlike = Tr::kQkChunks == Tr::kVChunks;

  // k16: rows, and pieces of them, start on 16 bytes; else on 8.
  template <bool k16>
  __device__ __forceinline__ void run_as() {
#pragma unroll 1
    for (;;) {
      if (tid_ == 0) tell(next_work());
      hopper::named_barrier_sync(kProducerBarrier, 128);
      const Work& w = *work_slot();
      const uint32_t done = work_done();
      if (tid_ == 0) bring_queries(w);  // those of the last work are free when its last keys are multiplied
      if (w.num_tokens < 0) return;
      work_ring_.advance();
      __syncwarp();
      bring_tiles<k16>(w);
      if (tid_ >= 32) hopper::mbarrier_arrive(done);
    }
  }

  // The scores of a tile are multiplied before the values of the tile ahead of it, so keys are asked for first. Cells
  // of the page table are asked for a tile ahead. Nothing is under way at the end: decoding a work takes all registers.
  template <bool k16>
  __device__ __forceinline__ void bring_tiles(const Work& w) {
    const int begin = w.tile_begin, end = w.tile_end;
    if (begin == end) return;
    Cell here = cell_of(w, begin), next = cell_of(w, begin + 1);
    bring<k16, kNone, kKeys>(row_of<kKeys>(w, begin, here));
#pragma unroll 1
    for (int tile = begin + 1; tile < end; ++tile) {
      const Cell before = here;
      here = next;
      next = cell_of(w, tile + 1);
      const char* const keys = row_of<kKeys>(w, tile, here);
      if (kAlike || tile > begin + 1) {
        bring<k16, kValues, kKeys>(keys);
      } else {
        bring<k16, kKeys, kKeys>(keys);
      }
      bring<k16, kKeys, kValues>(row_of<kValues>(w, tile - 1, before));
    }
    const char* const values = row_of<kValues>(w, end - 1, here);
    if (kAlike || end - begin > 1) {
      bring<k16, kValues, kValues>(values);
    } else {
      bring<k16, kKeys, kValues>(values);
    }
    exchange<k16, kValues, batches_of(kValues) - 1, kNone, 0>(nullptr);
  }

  // Asks for a tile, and stores what was asked for before. The tile's last batch stays under way. `looked_up`: the row
  // that this lane looked up.
  template <bool k16, Kind kOld, Kind kNew>
  __device__ __forceinline__ void bring(const char* looked_up) {
    exchange<k16, kOld, kOld == kNone ? 0 : batches_of(kOld) - 1, kNew, 0>(looked_up);
    Ring<Tr::kStages>& ring = kNew == kKeys ? k_ring_ : v_ring_;
    tile_ = shared_ + own_ +
            (kNew == kKeys ? Layout::kK + ring.stage * Tr::kKBytes : Layout::kV + ring.stage * Tr::kVBytes);
    full_ = shared_ + (kNew == kKeys ? Layout::kKFull : Layout::kVFull) + 8 * ring.stage;
    empty_phase_ = ring.phase ^ 1;
    ring.advance();
    static_assert(batches_of(kNew) <= 2);
    if constexpr (batches_of(kNew) == 2) exchange<k16, kNew, 0, kNew, 1>(looked_up);
  }

  // Stores the batch that is under way, and asks for another one in its registers.
  template <bool k16, Kind kOld, int kOldBatch, Kind kNew, int kNewBatch>
  __device__ __forceinline__ void exchange(const char* looked_up) {
    static_assert(Layout::kKEmpty - Layout::kKFull == 8 * Tr::kStages);
    static_assert(Layout::kVEmpty - Layout::kVFull == 8 * Tr::kStages);
    if constexpr (kOld != kNone && kOldBatch == 0) {
      hopper::mbarrier_wait(full_ + 8 * Tr::kStages, empty_phase_);
    }
    const char* from = nullptr;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if constexpr (kOld != kNone) {
        const int piece = kOldBatch * batch_of(kOld) + i;
        if (i < batch_of(kOld) && piece < pieces_of(kOld)) {
          const int pass = piece / columns_of(kOld), c = piece % columns_of(kOld);
          store(i, tile_ + pass * kRowsOfPass * 128 + c * (kPairs ? 2 : 1) * Tr::kKeys * 128);
        }
      }
      if constexpr (kNew != kNone) {
        const int piece = kNewBatch * batch_of(kNew) + i;
        if (i < batch_of(kNew) && piece < pieces_of(kNew)) {
          const int pass = piece / columns_of(kNew), c = piece % columns_of(kNew);
          if (i == 0 || c == 0) {
            from = reinterpret_cast<const char*>(
                __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(looked_up), kRowsOfWarp * pass + row_));
          }
          const int column = column_ + c * (kPairs ? 128 : 64);
          load<k16>(i, from, column, kNew == kKeys ? p_.head_dim_qk : p_.head_dim_v);
        }
      }
    }
    if constexpr (kOld != kNone) {
      if constexpr (kOldBatch == batches_of(kOld) - 1) arrive(full_);
    }
  }

  // Sixteen values of a row, zeros behind its end. Through L1: in one part of L2 all SMs would ask for the row of
  // zeros.
  template <bool k16>
  __device__ __forceinline__ void load(int i, const char* row, int column, int head_dim) {
    uint32_t(&r)[4] = raw_[i];
    const char* const zeros = reinterpret_cast<const char*>(kZeroRow);
    if constexpr (k16) {
      asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                   : "l"(column < head_dim ? row + column : zeros)
                   : "memory");
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = column + 8 * half;
        asm volatile("ld.global.v2.b32 {%0, %1}, [%2];"
                     : "=r"(r[2 * half]), "=r"(r[2 * half + 1])
                     : "l"(at < head_dim ? row + at : zeros)
                     : "memory");
      }
    }
  }

  // Every e4m3 value is exact in fp16; scales are the softmax's and the epilogue's.
  __device__ __forceinline__ void store(int i, uint32_t to) {
    uint32_t wide[8];
#pragma unroll
    for (int j = 0; j < 4; ++j) e4m3x4_to_half(raw_[i][j], wide[2 * j], wide[2 * j + 1]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t* w = wide + 4 * half;
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to ^ 16 * half), "r"(w[0]), "r"(w[1]), "r"(w[2]),
                   "r"(w[3])
                   : "memory");
    }
  }

  // Page and token of the row of a tile that this lane looks up; token -1: no row of the work sees the key.
  struct Cell {
    int page, token;
  };

  __device__ __forceinline__ int looked_up_row() const {
    const int lane = tid_ % 32;
    return lane / kRowsOfWarp * kRowsOfPass + tid_ / 32 * kRowsOfWarp + lane % kRowsOfWarp;
  }

  __device__ __forceinline__ Cell cell_of(const Work& w, int tile) const {
    const int row = looked_up_row(), key = w.place_of(tile) * Tr::kKeys + row;
    if (tile >= w.tile_end || row >= Tr::kKeys || key < w.key_begin || key >= w.key_end || !is_seen(w, key)) {
      return {0, -1};
    }
    if (!p_.paged) return {0, w.first_k_token + key};
    const int cell = s_.page_size.divide(key);
    return {p_.page_table.row(w.request)[cell], key - cell * p_.page_table.page_size};
  }

  // Zeros: nobody's row, or one of a page outside the pool.
  template <Kind kKind>
  __device__ __forceinline__ const char* row_of(const Work& w, int tile, const Cell& at) const {
    const char* const zeros = reinterpret_cast<const char*>(kZeroRow);
    if (at.token < 0) return zeros;
    if (p_.paged) {
      if (kKind == kKeys) {
        check_page(w, s_.page_size.divide(w.place_of(tile) * Tr::kKeys + looked_up_row()), at.page);
      }
      if (at.page < 0 || at.page >= p_.page_table.num_pages) return zeros;
    }
    if constexpr (kKind == kKeys) {
      return static_cast<const char*>(p_.k) + at.page * p_.k_stride_page + at.token * p_.k_stride_token +
             w.kv_head * p_.k_stride_head;
    } else {
      return static_cast<const char*>(p_.v) + at.page * p_.v_stride_page + at.token * p_.v_stride_token +
             w.kv_head * p_.v_stride_head;
    }
  }

  int row_, column_;                                // of a pass, in this warp; of this lane's first piece
  uint32_t own_;                                    // byte of this lane's first piece in a wide tile
  uint32_t tile_ = 0, full_ = 0, empty_phase_ = 0;  // of what is under way: place of this lane, barrier, parity
  uint32_t raw_[kHeld][4];
  Ring<Tr::kStages> k_ring_, v_ring_;
};

}  // namespace attnops::fmha::sm90
