#pragma once
#include "core/math.h"
#include "device/sm80/cp_async.cuh"
#include "device/sm90/barrier.cuh"
#include "device/sm90/copy.cuh"
#include "device/sm90/wgmma.cuh"
#include "fmha/sm90/partial.cuh"
#include "fmha/sm90/traits.h"
#include "fmha/sm90/work.cuh"

namespace attnops::fmha::sm90 {

namespace hopper = attnops::sm90;

struct Maps {
  const CUtensorMap *q, *k, *v;
};

// Which stage of a ring comes next, and the parity of its barriers' phase.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// What both kinds of producers share. A producer is the warpgroup that brings queries, keys and values.
template <class Tr>
class ProducerBase {
 public:
  using Layout = SharedLayout<Tr>;

 protected:
  __device__ __forceinline__ ProducerBase(const Params& p, const Schedule& s, const Maps& maps, char* base)
      : p_(p),
        s_(s),
        maps_(maps),
        base_(base),
        shared_(hopper::smem_address(base)),
        tid_(static_cast<int>(threadIdx.x)),
        cuts_(cuts_of(p, s)) {}

  __device__ __forceinline__ Work* work_slot() const {
    return reinterpret_cast<Work*>(base_ + Layout::kWorks + q_ring_.stage * Layout::kWorkBytes);
  }

  // By one thread. Without tokens: no work is left.
  __device__ __forceinline__ void next_work(Work& slot) {
    Work w;
    w.num_tokens = 0;
    while (w.num_tokens == 0) {
      const int index = next_index_;
      if (index >= s_.num_works || !decode_work<Tr::kKeys>(p_, s_, cuts_, index, w)) {
        w.num_tokens = -1;
        w.slab = cuts_.pieces;
      } else {
        // Whoever merges waits for all pieces, and those that cannot be among them.
        if (w.num_tokens == 0 && index < cuts_.pieces * s_.works_per_tile) count_piece(p_, 4 * Tr::kWarpgroups);
        take_index();
      }
    }
    slot = w;
  }

  // CTAs take works in their order, whoever is free the next: costs differ, and SMs do not run alike.
  __device__ __forceinline__ void take_index() {
    next_index_ = p_.semaphores != nullptr ? static_cast<int>(gridDim.x) + atomicAdd(p_.semaphores, 1)
                                           : next_index_ + static_cast<int>(gridDim.x);
  }

  // By one thread, when no work is left.
  __device__ __forceinline__ void end(uint32_t q_full) const {
    hopper::mbarrier_arrive(q_full);
    if (cuts_.pieces == 0) leave(p_);  // else whoever has merged them does
  }

  __device__ __forceinline__ void bring_queries(const Work& w, uint32_t full) {
    const uint32_t destination = shared_ + Layout::kQ + q_ring_.stage * Tr::kQBytes;
    hopper::mbarrier_arrive_expect(full, Tr::kQkChunks * s_.chunk_tokens * s_.pack * 128);
#pragma unroll
    for (int c = 0; c < Tr::kQkChunks; ++c) {
      hopper::copy_box(destination + c * Tr::kRows * 128, maps_.q, full, Tr::kChunk * c, w.q_head,
                       w.first_q_token + w.first_token);
    }
  }

  // The boxes of a tile that hold keys of [begin, end), when the stage is empty, by one warp. All that can be known
  // before is: what comes between the wait and the first box is added to the time that each stage stays unused.
  template <int kChunks>
  __device__ __forceinline__ void bring_boxes(const Work& w, int tile, int lane_page, const CUtensorMap* map,
                                              uint32_t destination, uint32_t empty, uint32_t phase, uint32_t full,
                                              int begin, int end) {
    constexpr int kMost = ceil_div(Tr::kKeys / 8 * kChunks, 32);  // boxes of a lane
    const int lane = tid_ % 32, first_key = tile * Tr::kKeys;
    int page[kMost], token[kMost], row[kMost];
    unsigned wanted[kMost];
    int boxes = 0;
#pragma unroll
    for (int n = 0; n < kMost; ++n) {
      const int box = (lane + 32 * n) / kChunks, key = first_key + box * s_.box_keys;
      row[n] = box * s_.box_keys;
      token[n] = w.first_k_token + key;
      if (p_.paged) token[n] = key - s_.page_size.divide(key) * p_.page_table.page_size;
      page[n] = __shfl_sync(0xffffffffu, lane_page, box % 32);
      wanted[n] = __ballot_sync(0xffffffffu, row[n] < Tr::kKeys && key < end && key + s_.box_keys > begin);
      boxes += __popc(wanted[n]);
    }
    hopper::mbarrier_wait(empty, phase);
    if (lane == 0) hopper::mbarrier_arrive_expect(full, boxes * s_.box_keys * 128);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kMost; ++n) {
      if (wanted[n] >> lane & 1) {
        const int c = (lane + 32 * n) % kChunks;
        hopper::copy_box(destination + c * Tr::kKeys * 128 + row[n] * 128, map, full, Tr::kChunk * c, token[n],
                         w.kv_head, page[n]);
      }
    }
  }

  // The page of this lane's box of a tile; 0 where it is not needed. One outside the pool is a box outside the tensor:
  // zeros.
  __device__ __forceinline__ int page_of_box(const Work& w, int tile) const {
    static_assert(Tr::kKeys / 8 <= 32, "a lane for each box");
    if (!p_.paged || tile >= w.tile_end) return 0;
    const int lane = tid_ % 32, key = tile * Tr::kKeys + lane * s_.box_keys;
    const bool wanted = lane * s_.box_keys < Tr::kKeys && key + s_.box_keys > w.known_begin && key < w.seqlen_k;
    return wanted ? page_at(w, s_.page_size.divide(key)) : 0;
  }

  __device__ __forceinline__ int page_at(const Work& w, int cell) const {
    const int page = p_.page_table.row(w.request)[cell];
    if (p_.report != nullptr && (page < 0 || page >= p_.page_table.num_pages)) {
      record_fault(p_.report,
                   {ReportOp::kFmhaPaged, ReportKind::kPageIndex, w.request, cell, page, p_.page_table.num_pages});
    }
    return page;
  }

  // Whether a tree mask leaves a key to some row of the tile.
  __device__ __forceinline__ bool is_seen(const Work& w, int key) const { return sm90::is_seen(p_, w, key); }

  // One lane arrives for a warp: 128 arrivals a tile kept the barriers' unit so busy that products waited.
  __device__ __forceinline__ void arrive(uint32_t barrier) const {
    __syncwarp();
    hopper::mbarrier_arrive_if(barrier, tid_ % 32 == 0);
  }

  const Params& p_;
  const Schedule& s_;
  const Maps& maps_;
  char* base_;
  uint32_t shared_;
  int tid_, next_index_ = static_cast<int>(blockIdx.x);
  Cuts cuts_;
  Ring<Tr::kQStages> q_ring_;
};

inline constexpr int kProducerBarrier = 1;

// Keys and values of 16 bits in boxes of the copy engine. Warp 0 asks for them, but all warps arrive for each tile:
// values of tiles with memory that nobody owns are copied row by row, sixteen bytes a thread.
template <class Tr>
class BoxProducer : ProducerBase<Tr> {
  using Base = ProducerBase<Tr>;
  using Layout = typename Base::Layout;
  using Base::arrive, Base::base_, Base::bring_boxes, Base::bring_queries, Base::end, Base::is_seen, Base::maps_,
      Base::next_work, Base::p_, Base::page_at, Base::page_of_box, Base::q_ring_, Base::s_, Base::shared_, Base::tid_,
      Base::work_slot;
  static constexpr int kBytes = sizeof(typename Tr::T);

 public:
  __device__ __forceinline__ BoxProducer(const Params& p, const Schedule& s, const Maps& maps, char* base)
      : Base(p, s, maps, base) {}

  __device__ __forceinline__ void run() {
    for (;;) {
      hopper::mbarrier_wait(shared_ + Layout::kQEmpty + 8 * q_ring_.stage, q_ring_.phase ^ 1);
      Work* slot = work_slot();
      if (tid_ == 0) next_work(*slot);
      hopper::named_barrier_sync(kProducerBarrier, 128);
      const Work w = *slot;
      const uint32_t q_full = shared_ + Layout::kQFull + 8 * q_ring_.stage;
      if (w.num_tokens < 0) {
        announce<0>(0);
        if (tid_ == 0) end(q_full);
        return;
      }
      if (tid_ == 0) bring_queries(w, q_full);
      q_ring_.advance();
      // The scores of a tile are multiplied before the values of the tile ahead of it, so keys are asked for first.
      const int tile_end = w.tile_end;
      int tile = w.tile_begin;
      if (tile == tile_end) {
        announce<0>(0);  // whoever waits for them would keep the queries that the next work waits for
        continue;
      }
      look_up(w, tile, tile_end);
      bring_keys(w, tile);
      for (; tile < tile_end; ++tile) {
        const Places values = here_;
        if (tile + 1 < tile_end) {
          look_up(w, tile + 1, tile_end);
          bring_keys(w, tile + 1);
        }
        bring_values(w, tile, values);
      }
      // With one stage of queries the next work waits for this one, which waits for its last rows.
      if (Tr::kQStages == 1) announce<0>(0);
    }
  }

 private:
  // Where the keys of a tile lie: a page to a lane of the asking warp, or the rows' places in shared memory.
  struct Places {
    int page;
    const int2* rows;
  };

  __device__ __forceinline__ void look_up(const Work& w, int tile, int tile_end) {
    if (p_.paged) {
      // A tile ahead, so that the table's latency is not the tiles'.
      here_.page = tile == w.tile_begin ? page_of_box(w, tile) : next_page_;
      if (tile + 1 < tile_end) next_page_ = page_of_box(w, tile + 1);
    }
    if (is_edge<Tr::kKeys>(w, tile)) find_places(w, tile);
  }

  __device__ __forceinline__ void bring_keys(const Work& w, int tile) {
    const uint32_t offset = 8 * k_ring_.stage;
    const uint32_t keys = shared_ + Layout::kK + k_ring_.stage * Tr::kKBytes;
    ask<Tr::kQkChunks>(w, tile, here_.page, maps_.k, keys, shared_ + Layout::kKEmpty + offset, k_ring_.phase ^ 1,
                       shared_ + Layout::kKFull + offset, w.key_begin, w.key_end);
    k_ring_.advance();
  }

  __device__ __forceinline__ void bring_values(const Work& w, int tile, const Places& places) {
    const uint32_t offset = 8 * v_ring_.stage, empty = shared_ + Layout::kVEmpty + offset;
    const uint32_t values = shared_ + Layout::kV + v_ring_.stage * Tr::kVBytes,
                   full = shared_ + Layout::kVFull + offset;
    if (is_edge<Tr::kKeys>(w, tile)) {
      hopper::mbarrier_wait(empty, v_ring_.phase ^ 1);
      bring_rows<Tr::kVChunks>(w, places.rows, values, full);
    } else {
      ask<Tr::kVChunks>(w, tile, places.page, maps_.v, values, empty, v_ring_.phase ^ 1, full, 0, INT32_MAX);
    }
    v_ring_.advance();
  }

  // Warp 0 asks for boxes. All warps arrive, as they do for rows.
  template <int kChunks>
  __device__ __forceinline__ void ask(const Work& w, int tile, int lane_page, const CUtensorMap* map,
                                      uint32_t destination, uint32_t empty, uint32_t phase, uint32_t full, int begin,
                                      int end) {
    if (tid_ < 32) {
      bring_boxes<kChunks>(w, tile, lane_page, map, destination, empty, phase, full, begin, end);
    } else {
      hopper::mbarrier_wait(empty, phase);
      arrive(full);
    }
    announce<0>(0);
  }

  // Where each key of a tile lies; a negative page for keys that no row sees, which become zeros.
  __device__ __forceinline__ void find_places(const Work& w, int tile) {
    // Three in turn: keys of one tile are copied while values of the tile before are, and the next are looked up.
    int2* places = reinterpret_cast<int2*>(base_ + Layout::kPlaces) + gathered_ * Tr::kKeys;
    gathered_ = (gathered_ + 1) % Layout::kPlaceTiles;
    for (int i = tid_; i < Tr::kKeys; i += 128) {
      const int key = tile * Tr::kKeys + i;
      int2 place{-1, 0};
      if (key >= w.key_begin && key < w.key_end && is_seen(w, key)) {
        place = {0, w.first_k_token + key};
        if (p_.paged) {
          const int cell = s_.page_size.divide(key);
          place = {page_at(w, cell), key - cell * p_.page_table.page_size};
          if (place.x >= p_.page_table.num_pages) place.x = -1;
        }
      }
      places[i] = place;
    }
    here_.rows = places;
    hopper::named_barrier_sync(kProducerBarrier, 128);
  }

  // Values of an edge tile, by all warps.
  template <int kChunks>
  __device__ __forceinline__ void bring_rows(const Work& w, const int2* places, uint32_t destination, uint32_t full) {
    const char* head = static_cast<const char*>(p_.v) + (w.kv_head * p_.v_stride_head) * kBytes + tid_ % 8 * 16;
#pragma unroll 4
    for (int row = tid_ / 8; row < Tr::kKeys; row += 16) {
      const int2 place = places[row];
      const char* source = head + (place.x * p_.v_stride_page + place.y * p_.v_stride_token) * kBytes;
      const uint32_t to = destination + hopper::swizzled(row, tid_ % 8);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const bool exists = place.x >= 0 && (c * 8 + tid_ % 8) * 16 < p_.head_dim_v * kBytes;
        hopper::copy16(to + c * Tr::kKeys * 128, exists ? source + c * 128 : static_cast<const char*>(p_.v), exists);
      }
    }
    cp_async_commit();
    announce<1>(full);
  }

  // Tells of the tile whose rows were copied before, once they have landed, and remembers `full`, the barrier of the
  // newest: rows are copied while those of the tile ahead arrive. The matrix units read through another proxy.
  template <int kNewer>
  __device__ __forceinline__ void announce(uint32_t full) {
    if (unannounced_ != 0) {
      cp_async_wait<kNewer>();
      hopper::fence_async_proxy();
      arrive(unannounced_);
    }
    unannounced_ = full;
  }

  int gathered_ = 0, next_page_ = 0;
  uint32_t unannounced_ = 0;
  Places here_{};
  Ring<Tr::kStages> k_ring_, v_ring_;
};

}  // namespace attnops::fmha::sm90
