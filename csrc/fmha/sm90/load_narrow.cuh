#pragma once
#include "device/sm80/mma.cuh"
#include "fmha/sm90/load.cuh"
#include "fmha/sm90/rows.cuh"

namespace attnops::fmha::sm90 {

// e4m3 keys and values of 16-bit queries, in boxes of the copy engine. Warp 0 tells of works and asks for tiles, which
// land as they are: rows of 64 bytes for each chunk of the wide tile. Warps 1 to 3 make them fp16 where the products
// read. So a place is free as soon as it has been read, and asking never waits for widening of the same tile.
//
// Tiles come in the order in which they are multiplied: the keys of a tile, then the values of the tile before.
template <class Tr>
class NarrowProducer : ProducerBase<Tr> {
  using Base = ProducerBase<Tr>;
  using Layout = typename Base::Layout;
  using Base::bring_queries, Base::is_seen, Base::maps_, Base::next_work, Base::p_, Base::page_of_box, Base::s_,
      Base::shared_, Base::take_index, Base::tell, Base::tid_, Base::work_done, Base::work_known, Base::work_ring_,
      Base::work_slot;

 public:
  static constexpr int kWideners = 3;  // warps that arrive for a wide tile

  __device__ __forceinline__ NarrowProducer(const Params& p, const Schedule& s, const Maps& maps, char* base)
      : Base(p, s, maps, base), lane_(static_cast<int>(threadIdx.x) % 32) {
    asm volatile("" : "+r"(lane_));  // not read again for each tile
  }

  __device__ __forceinline__ void run() { tid_ / 32 > 0 ? widen_works() : bring_works(); }

 private:
  // With one place of queries, those of the last work are free late: so many tiles are asked for before.
  static constexpr int kTilesFirst = Tr::kQStages == 1 ? Tr::kRawStages : 0;

  __device__ __forceinline__ void bring_works() {
#pragma unroll 1
    for (;;) {
      if (lane_ == 0) {
        tell(this->template next_work<true>());
        hopper::mbarrier_arrive(work_known());
      }
      __syncwarp();
      const Work& w = *work_slot();
      const bool last = w.num_tokens < 0;
      const int tiles = last ? 0 : 2 * (w.tile_end - w.tile_begin);
      if (lane_ == 0 && (kTilesFirst == 0 || tiles == 0)) bring_queries(w);
      __syncwarp();
      if (last) return;
      if (tiles == 0 && lane_ == 0) take_index();
      work_ring_.advance();
      bring_tiles(w, tiles);
    }
  }

  // Works differ in cost: the next one is taken with the last keys of this one.
  __device__ __forceinline__ void take_index_at(const Work& w, int tile) {
    if (tile + 1 == w.tile_end && lane_ == 0) take_index();
    __syncwarp();
  }

  // Behind tile number `asked` of a work with so many tiles.
  __device__ __forceinline__ void bring_queries_behind(const Work& w, int asked, int tiles) {
    if constexpr (kTilesFirst > 0) {
      if (asked == min_of(kTilesFirst, tiles) && lane_ == 0) bring_queries(w);
      __syncwarp();
    }
  }

  __device__ __forceinline__ uint32_t raw_place() const { return shared_ + Layout::kRaw + raw_.stage * Tr::kRawBytes; }
  __device__ __forceinline__ uint32_t raw_full() const { return shared_ + Layout::kRawFull + 8 * raw_.stage; }
  __device__ __forceinline__ uint32_t raw_empty() const { return shared_ + Layout::kRawEmpty + 8 * raw_.stage; }

  __device__ __forceinline__ void bring_tiles(const Work& w, int tiles) {
    int page = 0, next_page = page_of_box(w, w.tile_begin), asked = 0;
#pragma unroll 1
    for (int tile = w.tile_begin; tile <= w.tile_end && tiles > 0; ++tile) {
      const int page_before = page;
      if (tile < w.tile_end) {
        page = next_page;
        next_page = page_of_box(w, tile + 1);  // ahead, so that the table's latency is not the tiles'
        take_index_at(w, tile);
        ask<Tr::kQkChunks>(w, tile, page, maps_.k, w.key_begin, w.key_end);
        bring_queries_behind(w, ++asked, tiles);
      }
      if (tile > w.tile_begin) {
        const bool edge = is_edge<Tr::kKeys>(w, tile - 1);
        ask<Tr::kVChunks>(w, tile - 1, page_before, maps_.v, edge ? w.key_begin : 0, edge ? w.key_end : INT32_MAX);
        bring_queries_behind(w, ++asked, tiles);
      }
    }
  }

  // The boxes of a tile that hold keys of [begin, end): a lane has at most one.
  template <int kChunks>
  __device__ __forceinline__ void ask(const Work& w, int tile, int page, const CUtensorMap* map, int begin, int end) {
    constexpr int kRowBytes = 64 * kChunks;
    const int row = lane_ * s_.box_keys, key = w.place_of(tile) * Tr::kKeys + row;
    int token = w.first_k_token + key;
    if (p_.paged) token -= s_.page_size.divide(token) * p_.page_table.page_size;
    const bool wanted = row < Tr::kKeys && key < end && key + s_.box_keys > begin;
    const int boxes = __popc(__ballot_sync(0xffffffffu, wanted));
    hopper::mbarrier_wait(raw_empty(), raw_.phase ^ 1);
    if (lane_ == 0) hopper::mbarrier_arrive_expect(raw_full(), boxes * s_.box_keys * kRowBytes);
    __syncwarp();
    if (wanted) {
      hopper::copy_box(raw_place() + row * kRowBytes, map, raw_full(), 0, token, w.kv_head, page);
    }
    raw_.advance();
  }

  // What a lane makes wide of a tile with kChunks chunks: sixteen values of a row at a time, four lanes a chunk. Eight
  // neighbours have two rows, the first of an even number: so their stores, two pieces of a row each, meet no bank
  // twice under the swizzle. Where chunks are even in number the two rows have different ones, and their loads meet no
  // bank twice either; else the rows are an odd number of 64 bytes long, which does the same.
  template <int kChunks>
  struct Part {
    static constexpr bool kPairs = kChunks % 2 == 0;
    static constexpr int kRowBytes = 64 * kChunks;
    static constexpr int kRows = kPairs ? 4 : 8;                     // of a warp's group
    static constexpr int kOfGroup = kPairs ? kChunks / 2 : kChunks;  // pieces of a lane in a group
    static constexpr int kGroups = Tr::kKeys / kRows, kStep = kWideners * kRows;
    static constexpr int kPieces = ceil_div(kGroups, kWideners) * kOfGroup;
    static constexpr int kOfAll = kGroups / kWideners * kOfGroup;  // the rest is not every warp's

    int row;            // the first
    uint32_t from, to;  // bytes in a tile as it comes, and in a wide one
    bool has_rest;

    __device__ __forceinline__ Part() {
      const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 - 1;
      const int chunk = kPairs ? (lane / 4 ^ lane / 8) % 2 : 0;
      row = warp * kRows + (kPairs ? lane / 16 * 2 + lane / 4 % 2 : lane / 4);
      from = row * kRowBytes + 64 * chunk + lane % 4 * 16;
      to = chunk * Tr::kKeys * 128 + hopper::swizzled(row, lane % 4 * 2);
      has_rest = warp < kGroups % kWideners;
    }

    static __device__ __forceinline__ constexpr int group_of(int piece) { return piece / kOfGroup; }
    // Bytes from the first piece.
    static __device__ __forceinline__ constexpr int source_of(int piece) {
      return group_of(piece) * kStep * kRowBytes + piece % kOfGroup * (kPairs ? 128 : 64);
    }
    static __device__ __forceinline__ constexpr int target_of(int piece) {
      return group_of(piece) * kStep * 128 + piece % kOfGroup * (kPairs ? 2 : 1) * Tr::kKeys * 128;
    }
    // Groups of four rows take the swizzle's upper half in turns.
    static __device__ __forceinline__ constexpr int flip_of(int piece) {
      return kPairs && group_of(piece) % 2 ? 64 : 0;
    }
  };

  __device__ __forceinline__ void widen_works() {
    const Part<Tr::kQkChunks> k_part;
    const Part<Tr::kVChunks> v_part;
#pragma unroll 1
    for (;;) {
      hopper::mbarrier_wait(work_known(), work_ring_.phase);
      const Work& w = *work_slot();
      if (w.num_tokens < 0) return;
      const uint32_t done = work_done();
      work_ring_.advance();
      const int begin = w.tile_begin, end = w.tile_end;
#pragma unroll 1
      for (int tile = begin; tile <= end && begin < end; ++tile) {
        if (tile < end) widen_keys(k_part);
        if (tile == begin) continue;
        if (is_edge<Tr::kKeys>(w, tile - 1)) {
          widen_values<true>(v_part, unseen(v_part, w, tile - 1));
        } else {
          widen_values<false>(v_part, 0);
        }
      }
      hopper::mbarrier_arrive(done);
    }
  }

  __device__ __forceinline__ void widen_keys(const Part<Tr::kQkChunks>& part) {
    const uint32_t offset = 8 * k_ring_.stage;
    widen<false>(part, 0, shared_ + Layout::kK + k_ring_.stage * Tr::kKBytes, shared_ + Layout::kKFull + offset,
                 shared_ + Layout::kKEmpty + offset, k_ring_.phase ^ 1);
    k_ring_.advance();
  }

  template <bool kClears>
  __device__ __forceinline__ void widen_values(const Part<Tr::kVChunks>& part, uint32_t unseen) {
    const uint32_t offset = 8 * v_ring_.stage;
    widen<kClears>(part, unseen, shared_ + Layout::kV + v_ring_.stage * Tr::kVBytes, shared_ + Layout::kVFull + offset,
                   shared_ + Layout::kVEmpty + offset, v_ring_.phase ^ 1);
    v_ring_.advance();
  }

  // Groups whose key no row of the work sees, a bit each: its value may be NaN.
  template <int kChunks>
  __device__ __forceinline__ uint32_t unseen(const Part<kChunks>& part, const Work& w, int tile) const {
    uint32_t groups = 0;
    int key = w.place_of(tile) * Tr::kKeys + part.row;
#pragma unroll 1
    for (int i = 0; i < ceil_div(Part<kChunks>::kGroups, kWideners); ++i, key += Part<kChunks>::kStep) {
      if (key < w.key_begin || key >= w.key_end || !is_seen(w, key)) groups |= 1u << i;
    }
    return groups;
  }

  // This warp's part of a tile. Pieces are loaded some ahead of the one that is stored, the first of them before the
  // wide place is free: a lane would wait for each.
  template <bool kClears, int kChunks>
  __device__ __forceinline__ void widen(const Part<kChunks>& part, uint32_t unseen, uint32_t wide, uint32_t full,
                                        uint32_t empty, uint32_t phase) {
    using P = Part<kChunks>;
    constexpr int kAhead = min_of(4, P::kOfAll);
    const uint32_t from = raw_place() + part.from, to = wide + part.to, flipped = to ^ 64;
    uint32_t raw[kAhead][4];
    const auto load = [&](int n) {
      uint32_t(&r)[4] = raw[n % kAhead];
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                   : "r"(from + P::source_of(n))
                   : "memory");
    };
    hopper::mbarrier_wait(raw_full(), raw_.phase);
#pragma unroll
    for (int n = 0; n < kAhead; ++n) load(n);
    hopper::mbarrier_wait(empty, phase);
#pragma unroll
    for (int n = 0; n < P::kPieces; ++n) {
      if (n >= P::kOfAll && !part.has_rest) continue;
      uint32_t(&r)[4] = raw[n % kAhead], values[8];
      if (kClears && unseen >> P::group_of(n) & 1) r[0] = r[1] = r[2] = r[3] = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) e4m3x4_to_half(r[i], values[2 * i], values[2 * i + 1]);
      if (n + kAhead < P::kPieces && (n + kAhead < P::kOfAll || part.has_rest)) load(n + kAhead);
      const uint32_t base = P::flip_of(n) ? flipped : to;
      store(base + P::target_of(n), values);
      store((base ^ 16) + P::target_of(n), values + 4);
    }
    arrive(raw_empty());
    raw_.advance();
    hopper::fence_async_proxy();  // the matrix units read through another proxy
    arrive(full);
  }

  // One lane for its warp.
  __device__ __forceinline__ void arrive(uint32_t barrier) const {
    __syncwarp();
    hopper::mbarrier_arrive_if(barrier, lane_ == 0);
  }

  static __device__ __forceinline__ void store(uint32_t to, const uint32_t* v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
  }

  int lane_;
  Ring<Tr::kRawStages> raw_;
  Ring<Tr::kStages> k_ring_, v_ring_;
};

}  // namespace attnops::fmha::sm90
