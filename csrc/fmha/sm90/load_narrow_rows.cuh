#pragma once
#include "device/sm80/mma.cuh"
#include "fmha/sm90/load.cuh"
#include "fmha/sm90/load_rows.cuh"
#include "fmha/sm90/rows.cuh"

namespace attnops::fmha::sm90 {

// e4m3 keys and values of 16-bit queries whose pages are no boxes, or whose rows start on 8 bytes, by four warps. A
// lane copies pieces of 16 values to a place of its own, and makes them fp16 where the products read a step later. So
// nobody else waits for its copies. Who computes fences what it stores: here a fence would wait for the next copies.
//
// A warp has rows 8 warp to 8 warp + 7 of each 32 of a tile. Its lane l looks up number l % 8 of the (l / 8)th eight.
template <class Tr>
class NarrowRowProducer : RowLookups<Tr> {
  using Base = ProducerBase<Tr>;
  using Lookups = RowLookups<Tr>;
  using Layout = typename Base::Layout;
  using Cell = typename Lookups::Cell;
  using Place = typename Lookups::Place;
  using View = typename Lookups::View;
  using Base::arrive, Base::bring_queries, Base::have_queries_place, Base::next_work, Base::p_, Base::s_, Base::shared_,
      Base::tell, Base::tid_, Base::work_done, Base::work_ring_, Base::work_slot;

 public:
  static constexpr int kWarps = 4;  // that arrive for a tile

  __device__ __forceinline__ NarrowRowProducer(const Params& p, const Schedule& s, const Maps& maps, char* base)
      : Lookups(p, s, maps, base) {}

  __device__ __forceinline__ void run() {
    const auto bits = reinterpret_cast<uintptr_t>(p_.k) | reinterpret_cast<uintptr_t>(p_.v);
    const int64_t strides = p_.k_stride_page | p_.k_stride_token | p_.k_stride_head | p_.v_stride_page |
                            p_.v_stride_token | p_.v_stride_head | p_.head_dim_qk | p_.head_dim_v;
    (bits | static_cast<uintptr_t>(strides)) % 16 == 0 ? run_as<16>() : run_as<8>();
  }

 private:
  static_assert(Tr::kRawStages >= 2, "one place for keys, one for values");
  static_assert(Tr::kKeys % 32 == 0);

  // What a lane has of a tile with kChunks chunks of 64 values. Eight neighbours have two rows, the first of an even
  // number, so their stores of two pieces each meet no bank twice under the swizzle. Where chunks are even in number
  // the two rows have different ones, and a warp has half of each eight rows at a time.
  template <int kChunks>
  struct Part {
    static constexpr bool kPairs = kChunks % 2 == 0;
    static constexpr int kBlocks = Tr::kKeys / 32, kHalves = kPairs ? 2 : 1;
    static constexpr int kOfRow = kPairs ? kChunks / 2 : kChunks;  // pieces of a lane in a row
    static constexpr int kOfBlock = kHalves * kOfRow, kPieces = kBlocks * kOfBlock;
    static constexpr int kColumnStep = kPairs ? 128 : 64;

    int row, column;  // of the first piece, among the eight of the warp
    uint32_t to;      // its byte in a wide tile

    __device__ __forceinline__ Part() {
      const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
      const int chunk = kPairs ? (lane / 4 ^ lane / 8) % 2 : 0;
      row = kPairs ? lane / 16 * 2 + lane / 4 % 2 : lane / 4;
      column = 64 * chunk + lane % 4 * 16;
      to = chunk * Tr::kKeys * 128 + hopper::swizzled(8 * warp + row, lane % 4 * 2);
      asm volatile("" : "+r"(row), "+r"(column), "+r"(to));  // not made anew for each tile
    }

    // Byte of a piece, from `to` or, in the second half of eight rows, where the swizzle turns another way, from
    // `to ^ 64`.
    static __device__ __forceinline__ constexpr int target_of(int block, int half, int i) {
      return block * 4096 + half * 512 + i * (kPairs ? 2 : 1) * Tr::kKeys * 128;
    }
  };
  using KPart = Part<Tr::kQkChunks>;
  using VPart = Part<Tr::kVChunks>;

  template <int kCopyBytes>
  __device__ __forceinline__ void run_as() {
    const KPart k_part;
    const VPart v_part;
#pragma unroll 1
    for (;;) {
      bool asked = false;  // for queries
      if (tid_ == 0) {
        tell(this->template next_work<false>());
        asked = work_slot()->tile_begin < work_slot()->tile_end && work_slot()->num_tokens > 0 && have_queries_place();
        if (asked) bring_queries(*work_slot());
      }
      hopper::named_barrier_sync(kProducerBarrier, 128);
      const Work& w = *work_slot();
      const uint32_t done = work_done();
      const bool last = w.num_tokens < 0, has_tiles = !last && w.tile_begin < w.tile_end;
      if (tid_ == 0 && !has_tiles) bring_queries(w);
      if (last) return;
      work_ring_.advance();
      if (has_tiles) bring_tiles<kCopyBytes>(w, k_part, v_part, tid_ == 0 && !asked);
      if (tid_ >= 32) hopper::mbarrier_arrive(done);
    }
  }

  // The keys of a tile, then the values of the tile before. Copies are a tile of each ahead, cells of the page table
  // another one.
  template <int kCopyBytes>
  __device__ __forceinline__ void bring_tiles(const Work& w, const KPart& k_part, const VPart& v_part, bool asks) {
    const View v = this->view_of(w);
    const int lane = tid_ % 32, row = lane / 8 * 32 + tid_ / 32 * 8 + lane % 8;
    uint32_t raw = shared_ + Layout::kRaw + tid_ * 16;
    asm volatile("" : "+r"(raw));  // not made anew for each piece
    Cell next{0, -1};
    Place here{kNobody, kNobody};
#pragma unroll 1
    for (int tile = v.tile_begin - 2; tile <= v.tile_end; ++tile) {
      const uint32_t value = here.value;
      const Cell after = this->cell_of(v, tile + 2, row);
      here = this->place_of(v, tile + 1, row, next);
      next = after;
      if (tile >= v.tile_begin && tile < v.tile_end) {
        widen(k_part, raw, shared_ + Layout::kK + k_ring_.stage * Tr::kKBytes, Layout::kKFull, Layout::kKEmpty,
              k_ring_);
      }
      const bool more = tile + 1 >= v.tile_begin && tile + 1 < v.tile_end;
      copy<kCopyBytes>(k_part, p_.k, s_.key_rows.unit, here.key, p_.head_dim_qk, raw, more);
      if (tile + 1 == v.tile_begin) {  // with one place, when the last work's last keys are multiplied
        if (asks) bring_queries(w);
        __syncwarp();
      }
      if (tile > v.tile_begin) {
        widen(v_part, raw + Tr::kRawBytes, shared_ + Layout::kV + v_ring_.stage * Tr::kVBytes, Layout::kVFull,
              Layout::kVEmpty, v_ring_);
      }
      copy<kCopyBytes>(v_part, p_.v, s_.value_rows.unit, value, p_.head_dim_v, raw + Tr::kRawBytes,
                       tile >= v.tile_begin && tile < v.tile_end);
    }
  }

  // Begins to copy this lane's pieces of a tile, or nothing: as many groups of copies are newer than those waited for.
  template <int kCopyBytes, class P>
  __device__ __forceinline__ void copy(const P& part, const void* pool, uint32_t unit, uint32_t looked_up, int head_dim,
                                       uint32_t raw, bool any) const {
    if (any) {
      const char* source = static_cast<const char*>(pool) + part.column;
      asm volatile("" : "+l"(source));  // one addend of all addresses
      const int width = head_dim - part.column;
      constexpr int kAtOnce = min_of(4, P::kBlocks * P::kHalves);
#pragma unroll
      for (int n = 0; n < P::kBlocks * P::kHalves; n += kAtOnce) {
        uint32_t place[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce && n + i < P::kBlocks * P::kHalves; ++i) {
          const int block = (n + i) / P::kHalves, half = (n + i) % P::kHalves;
          place[i] = __shfl_sync(0xffffffffu, looked_up, 8 * block + 4 * half + part.row);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce && n + i < P::kBlocks * P::kHalves; ++i) {
          const char* const from = source + uint64_t{place[i]} * unit;  // not read where no row is
#pragma unroll
          for (int c = 0; c < P::kOfRow; ++c) {
            const uint32_t to = raw + ((n + i) * P::kOfRow + c) * 2048;
            const int column = c * P::kColumnStep;
            if constexpr (kCopyBytes == 16) {
              hopper::copy16(to, from + column, place[i] != kNobody && column < width);
            } else {
              hopper::copy8(to, from + column, place[i] != kNobody && column < width);
              hopper::copy8(to + 8, from + column + 8, place[i] != kNobody && column + 8 < width);
            }
          }
        }
      }
    }
    cp_async_commit();
  }

  // Makes fp16 of this lane's pieces of a tile, and tells of it. Pieces are loaded some ahead of the one that is
  // stored, the first of them before the wide place is free: a lane would wait for each.
  template <class P>
  __device__ __forceinline__ void widen(const P& part, uint32_t raw, uint32_t wide, int full, int empty,
                                        Ring<Tr::kStages>& ring) const {
    constexpr int kAhead = min_of(4, P::kPieces);
    const uint32_t to = wide + part.to, turned = to ^ 64;
    uint32_t values[kAhead][4];
    const auto load = [&](int n) {
      uint32_t(&r)[4] = values[n % kAhead];
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                   : "r"(raw + n * 2048)
                   : "memory");
    };
    cp_async_wait<1>();
#pragma unroll
    for (int n = 0; n < kAhead; ++n) load(n);
    hopper::mbarrier_wait(shared_ + empty + 8 * ring.stage, ring.phase ^ 1);
#pragma unroll
    for (int n = 0; n < P::kPieces; ++n) {
      const int block = n / P::kOfBlock, half = n % P::kOfBlock / P::kOfRow, i = n % P::kOfRow;
      uint32_t(&r)[4] = values[n % kAhead], pairs[8];
#pragma unroll
      for (int j = 0; j < 4; ++j) e4m3x4_to_half(r[j], pairs[2 * j], pairs[2 * j + 1]);
      if (n + kAhead < P::kPieces) load(n + kAhead);
      const uint32_t base = half == 0 ? to : turned;
      store(base + P::target_of(block, half, i), pairs);
      store((base ^ 16) + P::target_of(block, half, i), pairs + 4);
    }
    arrive(shared_ + full + 8 * ring.stage);
    ring.advance();
  }

  static __device__ __forceinline__ void store(uint32_t to, const uint32_t* v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
  }

  Ring<Tr::kStages> k_ring_, v_ring_;
};

}  // namespace attnops::fmha::sm90
