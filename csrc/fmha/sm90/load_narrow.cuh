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
  // Four lanes share 64 values of a row, which become a chunk. Where chunks are even in number, eight lanes share two.
  // Eight neighbours store to two rows, one of them even: never two of them to the same banks.
  static constexpr bool kPairs = Tr::kQkChunks % 2 == 0 && Tr::kVChunks % 2 == 0;
  static constexpr int kRowsOfWarp = kPairs ? 4 : 8, kRowsOfPass = 4 * kRowsOfWarp;
  static_assert(Tr::kKeys % kRowsOfPass == 0);
  static constexpr int kKeyColumns = Tr::kQkChunks / (kPairs ? 2 : 1);  // pieces of a lane in one pass
  static constexpr int kValueColumns = Tr::kVChunks / (kPairs ? 2 : 1);
  static constexpr int kColumns = max_of(kKeyColumns, kValueColumns), kPasses = Tr::kKeys / kRowsOfPass;

  // A tile is held in one batch of passes or two, as there are registers.
  static constexpr int kBatches = kPasses * kColumns > 8 ? 2 : 1, kPassesOfBatch = ceil_div(kPasses, kBatches);

  static constexpr int kAtOnce = ceil_div(kPassesOfBatch, 2);  // passes that are stored before some are asked for
  using Held = uint32_t[kPassesOfBatch * kColumns][4];

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

  // The scores of a tile are multiplied before the values of the tile ahead of it. So tiles come as K0, K1, V0, K2, V1
  // and so on. What is under way is loaded and stored at one place each: else the assembler moves it, and waits. Cells
  // of the page table are asked for a tile ahead. Nothing is under way at the end: decoding a work takes all registers.
  template <bool k16>
  __device__ __forceinline__ void bring_tiles(const Work& w) {
    const int end = w.tile_end;
    int keys = w.tile_begin, values = keys;  // asked for next
    if (keys == end) return;
    Held raw;
    Cell here{}, before{}, next = cell_of(w, keys);
    bool under_way = false, were_keys = false;
#pragma unroll 1
    for (;;) {
      const bool newest = keys - values <= 1, are_keys = newest && keys < end, more = values < end;
      if (are_keys) {
        before = here;
        here = next;
        next = cell_of(w, keys + 1);
      }
      const char* const row = row_of(w, are_keys ? keys : values, newest ? here : before, are_keys, more);
      exchange<k16, kBatches - 1, 0>(raw, under_way, were_keys, are_keys, row);
      if (!more) return;
      expect(are_keys);
      if constexpr (kBatches == 2) exchange<k16, 0, 1>(raw, true, are_keys, are_keys, row);
      under_way = true;
      were_keys = are_keys;
      are_keys ? ++keys : ++values;
    }
  }

  // What is under way is keys or values for the next stage of their ring.
  __device__ __forceinline__ void expect(bool keys) {
    static_assert(Tr::kStages == 2);
    const uint32_t n = keys ? num_keys_ : num_values_, stage = n % 2;
    tile_ = shared_ + own_ + (keys ? Layout::kK + stage * Tr::kKBytes : Layout::kV + stage * Tr::kVBytes);
    full_ = shared_ + (keys ? Layout::kKFull : Layout::kVFull) + 8 * stage;
    empty_phase_ = n / 2 % 2 ^ 1;
    num_keys_ += keys;
    num_values_ += !keys;
  }

  // Stores the batch that is under way, if any, and asks for another one in its registers. `looked_up`: the row that
  // this lane looked up.
  template <bool k16, int kOld, int kNew>
  __device__ __forceinline__ void exchange(Held& raw, bool under_way, bool old_keys, bool keys, const char* looked_up) {
    static_assert(Layout::kKEmpty - Layout::kKFull == 8 * Tr::kStages);
    static_assert(Layout::kVEmpty - Layout::kVFull == 8 * Tr::kStages);
    if (kOld == 0 && under_way) hopper::mbarrier_wait(full_ + 8 * Tr::kStages, empty_phase_);
    const int head_dim = keys ? p_.head_dim_qk : p_.head_dim_v;
    const uint32_t second = tile_ ^ 16;  // of two neighbouring pieces
#pragma unroll
    for (int first = 0; first < kPassesOfBatch; first += kAtOnce) {
      if (under_way) {
#pragma unroll
        for (int n = first; n < min_of(first + kAtOnce, kPassesOfBatch); ++n) {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            const int at = (kOld * kPassesOfBatch + n) * kRowsOfPass * 128 + c * (kPairs ? 2 : 1) * Tr::kKeys * 128;
            if (kOld * kPassesOfBatch + n < kPasses && c < (old_keys ? kKeyColumns : kValueColumns)) {
              store(raw[n * kColumns + c], tile_ + at, second + at);
            }
          }
        }
      }
#pragma unroll
      for (int n = first; n < min_of(first + kAtOnce, kPassesOfBatch); ++n) {
        if (kNew * kPassesOfBatch + n >= kPasses) continue;
        const int lane = kRowsOfWarp * (kNew * kPassesOfBatch + n) + row_;
        const auto row = reinterpret_cast<const char*>(
            __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(looked_up), lane));
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          load<k16>(raw[n * kColumns + c], row, column_ + c * (kPairs ? 128 : 64), head_dim);
        }
      }
    }
    if (kOld == kBatches - 1 && under_way) arrive(full_);
  }

  // Sixteen values of a row, zeros behind its end. Through L1: in one part of L2 all SMs would ask for the row of
  // zeros.
  template <bool k16>
  __device__ __forceinline__ void load(uint32_t (&r)[4], const char* row, int column, int head_dim) {
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
  __device__ __forceinline__ void store(const uint32_t (&raw)[4], uint32_t first, uint32_t second) {
    uint32_t wide[8];
#pragma unroll
    for (int j = 0; j < 4; ++j) e4m3x4_to_half(raw[j], wide[2 * j], wide[2 * j + 1]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t* w = wide + 4 * half;
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(half == 0 ? first : second), "r"(w[0]), "r"(w[1]),
                   "r"(w[2]), "r"(w[3])
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

  // Zeros: nobody's row, or one of a page outside the pool; also where no tile is left.
  __device__ __forceinline__ const char* row_of(const Work& w, int tile, const Cell& at, bool keys, bool exists) const {
    const char* const zeros = reinterpret_cast<const char*>(kZeroRow);
    if (at.token < 0 || !exists) return zeros;
    if (p_.paged) {
      if (keys) {
        check_page(w, s_.page_size.divide(w.place_of(tile) * Tr::kKeys + looked_up_row()), at.page);
      }
      if (at.page < 0 || at.page >= p_.page_table.num_pages) return zeros;
    }
    const int64_t page = keys ? p_.k_stride_page : p_.v_stride_page;
    const int64_t token = keys ? p_.k_stride_token : p_.v_stride_token;
    const int64_t head = keys ? p_.k_stride_head : p_.v_stride_head;
    return static_cast<const char*>(keys ? p_.k : p_.v) + at.page * page + at.token * token + w.kv_head * head;
  }

  int row_, column_;                                // of a pass, in this warp; of this lane's first piece
  uint32_t own_;                                    // byte of this lane's first piece in a wide tile
  uint32_t tile_ = 0, full_ = 0, empty_phase_ = 0;  // of what is under way: place of this lane, barrier, parity
  uint32_t num_keys_ = 0, num_values_ = 0;          // tiles asked for, of all works: a Ring takes more registers
};

}  // namespace attnops::fmha::sm90
