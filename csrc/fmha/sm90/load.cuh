#pragma once
#include "core/math.h"
#include "device/sm80/cp_async.cuh"
#include "device/sm80/mma.cuh"
#include "device/sm90/barrier.cuh"
#include "device/sm90/copy.cuh"
#include "device/sm90/wgmma.cuh"
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

inline constexpr int kProducerBarrier = 1;

// The warpgroup that brings queries, keys and values. All its threads arrive for each tile: where boxes of the copy
// engine serve, one warp asks for them; rows of small pages, and values of tiles with memory that nobody owns, are
// copied row by row, sixteen bytes a thread.
template <class Tr>
class Producer {
 public:
  using Layout = SharedLayout<Tr>;
  static constexpr int kBytes = sizeof(typename Tr::T);

  __device__ Producer(const Params& p, const Schedule& s, const Maps& maps, char* base)
      : p_(p), s_(s), maps_(maps), base_(base), shared_(hopper::smem_address(base)), tid_(threadIdx.x) {}

  __device__ __forceinline__ void run() {
    for (;;) {
      hopper::mbarrier_wait(shared_ + Layout::kQEmpty + 8 * q_ring_.stage, q_ring_.phase ^ 1);
      Work* slot = reinterpret_cast<Work*>(base_ + Layout::kWorks + q_ring_.stage * Layout::kWorkBytes);
      if (tid_ == 0) next_work(*slot);
      hopper::named_barrier_sync(kProducerBarrier, 128);
      const Work w = *slot;
      const uint32_t q_full = shared_ + Layout::kQFull + 8 * q_ring_.stage;
      if (w.num_tokens < 0) {
        announce<0>(0);
        if (tid_ == 0) {
          hopper::mbarrier_arrive(q_full);
          leave();
        }
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

  __device__ __forceinline__ void next_work(Work& slot) {
    Work w;
    w.num_tokens = 0;
    while (w.num_tokens == 0) {
      const int index = next_index_;
      if (index >= s_.num_works || !decode_work<Tr::kKeys>(p_, s_, index, w)) {
        w.num_tokens = -1;
      } else {
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

  // The last CTA to find no more work leaves the counters as it found them.
  __device__ __forceinline__ void leave() const {
    if (p_.semaphores == nullptr) return;
    __threadfence();
    if (atomicAdd(p_.semaphores + 1, 1) != static_cast<int>(gridDim.x) - 1) return;
    p_.semaphores[0] = 0;
    p_.semaphores[1] = 0;
  }

  __device__ __forceinline__ void bring_queries(const Work& w, uint32_t full) {
    const uint32_t destination = shared_ + Layout::kQ + q_ring_.stage * Tr::kQBytes;
    hopper::mbarrier_arrive_expect(full, Tr::kQkChunks * s_.chunk_tokens * s_.pack * 128);
#pragma unroll
    for (int c = 0; c < Tr::kQkChunks; ++c) {
      hopper::copy_box(destination + c * Tr::kRows * 128, maps_.q, full, 64 * c, w.q_head,
                       w.first_q_token + w.first_token);
    }
  }

  __device__ __forceinline__ bool by_rows() const { return s_.box_keys == 0; }

  __device__ __forceinline__ void look_up(const Work& w, int tile, int tile_end) {
    if (!by_rows() && p_.paged) {
      // A tile ahead, so that the table's latency is not the tiles'.
      here_.page = tile == w.tile_begin ? page_of_box(w, tile) : next_page_;
      if (tile + 1 < tile_end) next_page_ = page_of_box(w, tile + 1);
    }
    if (by_rows() || is_edge<Tr::kKeys>(w, tile)) find_places(w, tile);
  }

  __device__ __forceinline__ void bring_keys(const Work& w, int tile) {
    const uint32_t offset = 8 * k_ring_.stage, empty = shared_ + Layout::kKEmpty + offset;
    const uint32_t keys = shared_ + Layout::kK + k_ring_.stage * Tr::kKBytes, full = shared_ + Layout::kKFull + offset;
    if (by_rows()) {
      hopper::mbarrier_wait(empty, k_ring_.phase ^ 1);
      bring_rows_of<Tr::kQkChunks>(w, here_.rows, p_.k, p_.k_stride_page, p_.k_stride_token, p_.k_stride_head,
                                   p_.head_dim_qk, keys, full);
    } else {
      bring_boxes<Tr::kQkChunks>(w, tile, here_.page, maps_.k, keys, empty, k_ring_.phase ^ 1, full, w.key_begin,
                                 w.key_end);
    }
    k_ring_.advance();
  }

  __device__ __forceinline__ void bring_values(const Work& w, int tile, const Places& places) {
    const uint32_t offset = 8 * v_ring_.stage, empty = shared_ + Layout::kVEmpty + offset;
    const uint32_t values = shared_ + Layout::kV + v_ring_.stage * Tr::kVBytes,
                   full = shared_ + Layout::kVFull + offset;
    if (by_rows() || is_edge<Tr::kKeys>(w, tile)) {
      hopper::mbarrier_wait(empty, v_ring_.phase ^ 1);
      bring_rows_of<Tr::kVChunks>(w, places.rows, p_.v, p_.v_stride_page, p_.v_stride_token, p_.v_stride_head,
                                  p_.head_dim_v, values, full);
    } else {
      bring_boxes<Tr::kVChunks>(w, tile, places.page, maps_.v, values, empty, v_ring_.phase ^ 1, full, 0, INT32_MAX);
    }
    v_ring_.advance();
  }

  template <int kChunks, class... Arguments>
  __device__ __forceinline__ void bring_rows_of(const Arguments&... arguments) {
    if (p_.kv_dtype == DType::kFloat8E4M3) {
      convert_rows<kChunks>(arguments...);
    } else {
      bring_rows<kChunks>(arguments...);
    }
  }

  // The boxes of a tile that hold keys of [begin, end), when the stage is empty. All that can be known before is: what
  // comes between the wait and the first box is added to the time that each stage stays unused.
  template <int kChunks>
  __device__ __forceinline__ void bring_boxes(const Work& w, int tile, int lane_page, const CUtensorMap* map,
                                              uint32_t destination, uint32_t empty, uint32_t phase, uint32_t full,
                                              int begin, int end) {
    if (tid_ < 32) {
      constexpr int kMost = ceil_div(Tr::kKeys / 8 * kChunks, 32);  // boxes of a lane
      const int first_key = tile * Tr::kKeys;
      int page[kMost], token[kMost], row[kMost];
      unsigned wanted[kMost];
      int boxes = 0;
#pragma unroll
      for (int n = 0; n < kMost; ++n) {
        const int box = (tid_ + 32 * n) / kChunks, key = first_key + box * s_.box_keys;
        row[n] = box * s_.box_keys;
        token[n] = w.first_k_token + key;
        if (p_.paged) token[n] = key - s_.page_size.divide(key) * p_.page_table.page_size;
        page[n] = __shfl_sync(0xffffffffu, lane_page, box % 32);
        wanted[n] = __ballot_sync(0xffffffffu, row[n] < Tr::kKeys && key < end && key + s_.box_keys > begin);
        boxes += __popc(wanted[n]);
      }
      hopper::mbarrier_wait(empty, phase);
      if (tid_ == 0) hopper::mbarrier_arrive_expect(full, boxes * s_.box_keys * 128);
      __syncwarp();
#pragma unroll
      for (int n = 0; n < kMost; ++n) {
        if (wanted[n] >> tid_ & 1) {
          const int c = (tid_ + 32 * n) % kChunks;
          hopper::copy_box(destination + c * Tr::kKeys * 128 + row[n] * 128, map, full, 64 * c, token[n], w.kv_head,
                           page[n]);
        }
      }
    } else {
      hopper::mbarrier_wait(empty, phase);
      arrive(full);
    }
    announce<0>(0);
  }

  // The page of this lane's box of a tile. One outside the pool is a box outside the tensor: zeros.
  __device__ __forceinline__ int page_of_box(const Work& w, int tile) const {
    static_assert(Tr::kKeys / 8 <= 32, "a lane for each box");
    const int key = tile * Tr::kKeys + tid_ * s_.box_keys;
    const bool wanted = tid_ * s_.box_keys < Tr::kKeys && key + s_.box_keys > w.known_begin && key < w.seqlen_k;
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

  // Whether a tree mask leaves a key to some row of the tile.
  __device__ __forceinline__ bool is_seen(const Work& w, int key) const {
    if (p_.tree_mask == nullptr || key < w.draft) return true;
    for (int i = 0; i < w.num_tokens; ++i) {
      if (tree_allows(p_, w, w.first_token + i, key - w.draft)) return true;
    }
    return false;
  }

  template <int kChunks>
  __device__ __forceinline__ void bring_rows(const Work& w, const int2* places, const void* pool, int64_t stride_page,
                                             int64_t stride_token, int64_t stride_head, int head_dim,
                                             uint32_t destination, uint32_t full) {
    const char* head = static_cast<const char*>(pool) + (w.kv_head * stride_head) * kBytes + tid_ % 8 * 16;
#pragma unroll 4
    for (int row = tid_ / 8; row < Tr::kKeys; row += 16) {
      const int2 place = places[row];
      const char* source = head + (place.x * stride_page + place.y * stride_token) * kBytes;
      const uint32_t to = destination + hopper::swizzled(row, tid_ % 8);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const bool exists = place.x >= 0 && (c * 8 + tid_ % 8) * 16 < head_dim * kBytes;
        hopper::copy16(to + c * Tr::kKeys * 128, exists ? source + c * 128 : static_cast<const char*>(pool), exists);
      }
    }
    cp_async_commit();
    announce<1>(full);
  }

  // The same of e4m3 rows, which become 16-bit ones on their way through registers, eight elements a thread. Every e4m3
  // value is exact in fp16 and bf16; scales are the softmax's and the epilogue's.
  template <int kChunks>
  __device__ __forceinline__ void convert_rows(const Work& w, const int2* places, const void* pool, int64_t stride_page,
                                               int64_t stride_token, int64_t stride_head, int head_dim,
                                               uint32_t destination, uint32_t full) {
    const char* head = static_cast<const char*>(pool) + w.kv_head * stride_head + tid_ % 8 * 8;
#pragma unroll 4
    for (int row = tid_ / 8; row < Tr::kKeys; row += 16) {
      const int2 place = places[row];
      const char* source = head + place.x * stride_page + place.y * stride_token;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        uint2 bytes{0, 0};
        if (place.x >= 0 && (c * 8 + tid_ % 8) * 8 < head_dim) {
          bytes = __ldg(reinterpret_cast<const uint2*>(source + c * 64));
        }
        uint32_t wide[4];
        e4m3x4_to_half(bytes.x, wide[0], wide[1]);
        e4m3x4_to_half(bytes.y, wide[2], wide[3]);
        if constexpr (std::is_same_v<typename Tr::T, __nv_bfloat16>) {
#pragma unroll
          for (uint32_t& pair : wide) {
            const float2 values = __half22float2(reinterpret_cast<const __half2&>(pair));
            pair = pack2<__nv_bfloat16>(values.x, values.y);
          }
        }
        const uint32_t to = destination + c * Tr::kKeys * 128 + hopper::swizzled(row, tid_ % 8);
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(wide[0]), "r"(wide[1]), "r"(wide[2]),
                     "r"(wide[3])
                     : "memory");
      }
    }
    hopper::fence_async_proxy();
    arrive(full);
  }

  // One lane arrives for a warp: 128 arrivals a tile kept the barriers' unit so busy that products waited.
  __device__ __forceinline__ void arrive(uint32_t full) const {
    __syncwarp();
    hopper::mbarrier_arrive_if(full, tid_ % 32 == 0);
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

  const Params& p_;
  const Schedule& s_;
  const Maps& maps_;
  char* base_;
  uint32_t shared_;
  int tid_, next_index_ = static_cast<int>(blockIdx.x), gathered_ = 0;
  uint32_t unannounced_ = 0;
  int next_page_ = 0;
  Places here_{};
  Ring<Tr::kQStages> q_ring_;
  Ring<Tr::kStages> k_ring_, v_ring_;
};

}  // namespace attnops::fmha::sm90
