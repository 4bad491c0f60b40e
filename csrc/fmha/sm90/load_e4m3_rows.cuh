#pragma once
#include "device/sm80/cp_async.cuh"
#include "fmha/sm90/load.cuh"
#include "fmha/sm90/load_rows.cuh"
#include "fmha/sm90/rows.cuh"
#include "fmha/sm90/transpose.cuh"

namespace attnops::fmha::sm90 {

// e4m3 keys and values of e4m3 queries whose pages are no boxes, by four warps. Keys arrive for who copies them. Values
// land beside their tiles, two tiles ahead of their products, and who has copied them transposes them: nobody else
// waits for its copies. Who computes fences both: here a fence would wait for the next copies.
//
// A warp has 32 rows of a tile, and its lane l looks up row l of them. Where tiles have 64 rows, two warps share 32 and
// each has half of the columns.
template <class Tr>
class E4m3RowProducer : RowLookups<Tr> {
  using Base = ProducerBase<Tr>;
  using Lookups = RowLookups<Tr>;
  using Layout = typename Base::Layout;
  using Cell = typename Lookups::Cell;
  using Place = typename Lookups::Place;
  using View = typename Lookups::View;
  using Base::arrive, Base::bring_queries, Base::next_work, Base::p_, Base::s_, Base::shared_, Base::tell, Base::tid_,
      Base::work_done, Base::work_ring_, Base::work_slot;

 public:
  static constexpr int kOfKeys = 128, kOfValues = 4;  // arrivals for a tile

  __device__ __forceinline__ E4m3RowProducer(const Params& p, const Schedule& s, const Maps& maps, char* base)
      : Lookups(p, s, maps, base) {
    const int lane = tid_ % 32, warp = tid_ / 32;
    block_ = warp % kBlocks;
    share_ = warp / kBlocks;
    piece_ = lane % 8;
    group_ = lane / 8;
    own_ = block_ * kBlockBytes + hopper::swizzled(group_, piece_);
    asm volatile(""
                 : "+r"(block_), "+r"(share_), "+r"(piece_), "+r"(group_), "+r"(own_));  // not made anew for each row
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;;) {
      if (tid_ == 0) tell(this->template next_work<true, true>());
      hopper::named_barrier_sync(kProducerBarrier, 128);
      const Work& w = *work_slot();
      const uint32_t done = work_done();
      const bool last = w.num_tokens < 0, has_tiles = !last && w.tile_begin < w.tile_end;
      if (tid_ == 0 && !has_tiles) bring_queries(w);
      if (last) return;
      if (tid_ == 0 && !has_tiles) this->template take_index<true>();
      work_ring_.advance();
      if (has_tiles) bring_tiles(w);
      if (tid_ >= 32) hopper::mbarrier_arrive(done);
    }
  }

 private:
  static constexpr int kBlocks = Tr::kKeys / 32, kShares = 4 / kBlocks, kBlockBytes = 32 * 128;
  static constexpr int kKeyChunks = Tr::kQkChunks / kShares, kValueChunks = Tr::kVChunks / kShares;  // of a warp
  static constexpr int kDimBlocks = Tr::kHeadDimV / kShares / 16;
  static_assert(kBlocks * kShares == 4 && kKeyChunks * kShares == Tr::kQkChunks &&
                kValueChunks * kShares == Tr::kVChunks);

  // Values of the tile before are transposed, and copies of the next tile begin. Cells of the page table are asked for
  // another tile ahead.
  __device__ __forceinline__ void bring_tiles(const Work& w) {
    const View v = this->view_of(w);
    const int row = 32 * block_ + tid_ % 32;
    Cell next{0, -1};
    Place here{kNobody, kNobody};
#pragma unroll 1
    for (int tile = v.tile_begin - 2; tile <= v.tile_end; ++tile) {
      if (tile + 1 == v.tile_end && tid_ == 0) this->template take_index<true>();  // with the last keys
      const Cell after = this->cell_of(v, tile + 2, row);
      here = this->place_of(v, tile + 1, row, next);
      next = after;
      if (tile > v.tile_begin) transpose();
      if (tile + 1 >= v.tile_begin && tile + 1 < v.tile_end) {
        copy<kValueChunks>(p_.v, s_.value_rows.unit, here.value, p_.head_dim_v,
                           shared_ + Layout::kRaw + raw_ring_.stage * Tr::kRawBytes);
        raw_ring_.advance();
        const uint32_t offset = 8 * k_ring_.stage;
        hopper::mbarrier_wait(shared_ + Layout::kKEmpty + offset, k_ring_.phase ^ 1);
        copy<kKeyChunks>(p_.k, s_.key_rows.unit, here.key, p_.head_dim_qk,
                         shared_ + Layout::kK + k_ring_.stage * Tr::kKBytes);
        hopper::arrive_after_copies(shared_ + Layout::kKFull + offset);
        k_ring_.advance();
      }
      cp_async_commit();
      if (tile + 1 == v.tile_begin) {  // with one place, when the last work's last keys are multiplied
        if (tid_ == 0) bring_queries(w);
        __syncwarp();
      }
    }
  }

  // Begins to copy this warp's part of a tile; eight lanes share a chunk of a row. Several rows are asked of other
  // lanes before any is copied.
  template <int kChunks>
  __device__ __forceinline__ void copy(const void* pool, uint32_t unit, uint32_t looked_up, int head_dim,
                                       uint32_t tile) const {
    constexpr int kPasses = 8, kAtOnce = 4;
    const int column = (share_ * kChunks * 8 + piece_) * 16;
    const char* source = static_cast<const char*>(pool) + column;
    asm volatile("" : "+l"(source));  // one addend of all addresses
    // The swizzle turns rows 4 to 7 of eight another way.
    const uint32_t to = tile + share_ * kChunks * Tr::kKeys * 128 + own_, turned = (to ^ 64) + 512;
#pragma unroll
    for (int first = 0; first < kPasses; first += kAtOnce) {
      uint32_t place[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) place[i] = __shfl_sync(0xffffffffu, looked_up, 4 * (first + i) + group_);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const char* const from = source + uint64_t{place[i]} * unit;  // not read where no row is
        const uint32_t at = ((first + i) % 2 == 0 ? to : turned) + (first + i) / 2 * 1024;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          hopper::copy16(at + c * Tr::kKeys * 128, from + c * 128, place[i] != kNobody && column + c * 128 < head_dim);
        }
      }
    }
  }

  // This warp's part of the oldest tile of values that is not transposed. Copies of one newer tile may be under way.
  __device__ __forceinline__ void transpose() {
    const uint32_t offset = 8 * v_ring_.stage;
    const uint32_t raw = shared_ + Layout::kRaw + v_ring_.stage * Tr::kRawBytes +
                         share_ * kValueChunks * Tr::kKeys * 128 + block_ * kBlockBytes;
    const uint32_t values = shared_ + Layout::kV + v_ring_.stage * Tr::kVBytes + share_ * kDimBlocks * 16 * 128;
    cp_async_wait<1>();
    __syncwarp();  // those of other lanes have landed, too
    transpose_rows<Tr::kKeys, kDimBlocks>(raw, values, block_, tid_ % 32, [&] {
      hopper::mbarrier_wait(shared_ + Layout::kVEmpty + offset, v_ring_.phase ^ 1);
    });
    arrive(shared_ + Layout::kVFull + offset);
    v_ring_.advance();
  }

  int block_, share_;  // of a tile's rows, of its columns
  int piece_, group_;  // of a lane: of 16 bytes in a chunk, of four rows
  uint32_t own_;       // byte of its first piece in a chunk of a tile
  Ring<Tr::kStages> k_ring_, v_ring_, raw_ring_;
};

}  // namespace attnops::fmha::sm90
