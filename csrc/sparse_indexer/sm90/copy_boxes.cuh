#pragma once
#include "device/sm90/barrier.cuh"
#include "device/sm90/copy.cuh"
#include "sparse_indexer/sm90/share.cuh"

// Tiles of keys and queries by the copy engine.
namespace attnops::sparse_indexer::sm90 {

// 4 bytes; zeros, and nothing is read, unless `valid`.
__device__ inline void copy_word(const void* to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(attnops::sm90::smem_address(to)), "l"(from),
               "r"(valid ? 4 : 0)
               : "memory");
}

// More bytes to come in this phase of the barrier; no arrival.
__device__ inline void expect_bytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// The weights of a group's tokens, and what these see. Each of kThreads threads does its part.
template <int kHeads, int kThreads, class Shared, class Tiles>
__device__ void copy_group(const Walk<Tiles>& walk, Shared& shared, int slot, int thread) {
  const LogitsParams& p = walk.p;
  const int num_rows = walk.num_rows();
  const int64_t first_row = walk.first_row();
  for (int i = thread; i < walk.memory.blocks * kBlockColumns; i += kThreads) {
    const int token = i / kHeads, head = i % kHeads;
    const bool valid = token < num_rows && head < p.num_heads;
    copy_word(&shared.weights[slot][i], valid ? p.weights + (first_row + token) * p.stride_weights + head : p.weights,
              valid);
  }
  if (thread >= 32) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (thread + 32 * i < num_rows) shared.seen[slot][thread + 32 * i] = walk.seen[i];
  }
}

// The queries of a group, a block a lane.
template <int kHeads, class Tiles>
__device__ void copy_queries(const Walk<Tiles>& walk, const Maps& maps, uint32_t barrier, uint32_t to) {
  const int lane = threadIdx.x % 32, token = lane * (kBlockColumns / kHeads);
  if (lane >= walk.memory.blocks || token >= walk.num_rows()) return;
  expect_bytes(barrier, kBlockBytes);
  attnops::sm90::copy_box(to + lane * kBlockBytes, &maps.queries, barrier, 0, 0,
                          static_cast<int>(walk.first_row()) + token);
}

// Lane l asks for box l of a tile, so it knows the page of that box.
template <class Tiles>
struct Boxes {
  const LogitsParams& p;
  const Memory& memory;
  const Maps& maps;

  __device__ int64_t key_of_box(const Walk<Tiles>& walk) const {
    return walk.first_key + static_cast<int>(threadIdx.x % 32) * memory.box_rows;
  }
  __device__ bool has_box(const Walk<Tiles>& walk) const {
    return static_cast<int>(threadIdx.x % 32) * memory.box_rows < Tiles::kKeys && key_of_box(walk) < walk.end;
  }

  // What the page table says of the lane's box; read long before it is used.
  __device__ int read_cell(const Walk<Tiles>& walk) const {
    if (p.ragged || !has_box(walk)) return 0;
    return p
        .page_table[walk.request * p.stride_table + page_of(key_of_box(walk), p.pages.page_size, p.pages.page_shift)];
  }

  // Asks for the lane's box. Returns where its scales begin, or null.
  __device__ const float* copy_keys(const Walk<Tiles>& walk, uint32_t tile, uint32_t barrier, int cell) const {
    const int lane = threadIdx.x % 32;
    const uint32_t to = tile + lane * memory.box_rows * 128;
    const int64_t key = key_of_box(walk);
    const bool has = has_box(walk), valid = has && (p.ragged || (cell >= 0 && cell < p.pages.num_pages));
    int64_t in_page = key;
    const float* scales = p.k_scale + key;
    if (!p.ragged) {
      const int64_t number = page_of(key, p.pages.page_size, p.pages.page_shift);
      in_page -= number * p.pages.page_size;
      scales = p.pages.scale(cell, static_cast<int>(in_page));
      if (has && !valid) page_of_key(p, walk.request, number, true);  // reports it
    }
    if (valid) {
      expect_bytes(barrier, memory.box_rows * 128);
      attnops::sm90::copy_box(to, &maps.keys, barrier, 0, static_cast<int>(in_page), cell);
    } else if (has) {
      clear(to);
    }
    return valid ? scales : nullptr;
  }

  // The scale of a row of the tile, whose box's scales begin at `of_box` in its lane; null where it has no box.
  __device__ const float* scales_of(const float* of_box, int row) const {
    const int box = row >> memory.box_shift;
    const auto* first = reinterpret_cast<const float*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(of_box), box));
    return first != nullptr ? first + (row - (box << memory.box_shift)) : nullptr;
  }

 private:
  // The keys of a page that the pool has not.
  __device__ void clear(uint32_t to) const {
#pragma unroll 1
    for (int i = 0; i < memory.box_rows * 128; i += 16) {
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to + i), "r"(0) : "memory");
    }
  }
};

// A warp for each stage: what a tile takes it is a chain of some 2000 cycles, longer than the memory takes for a tile.
template <int kHeads>
struct BoxCopier {
  static constexpr int kThreads = 32;  // of a tile

  const LogitsParams& p;
  const Memory& memory;
  const Maps& maps;
  Shared& shared;
  uint32_t keys, queries;  // shared-memory addresses

  __device__ void run(const Groups<BlockTiles>& groups) const {
    const int stage = (static_cast<int>(threadIdx.x) - kMultiply) / 32;
    if (stage >= memory.stages || stage >= shared.share.num_tiles()) return;
    Walk<BlockTiles> walk{p, memory};
    walk.start(groups, shared.share);
    int slot = 0;
    const auto advance = [&](int tiles) {
#pragma unroll 1
      for (; tiles > 0; --tiles) {
        walk.advance();
        if (walk.is_new && ++slot == memory.stages) slot = 0;
      }
    };
    advance(stage);
    uint32_t phase = 1;
    int cell = boxes().read_cell(walk);
    for (int64_t tile = stage;;) {
      attnops::sm90::mbarrier_wait(attnops::sm90::smem_address(&shared.empty[stage]), phase);
      copy_tile(walk, stage, slot, cell);
      tile += memory.stages;
      if (tile >= shared.share.num_tiles()) return;
      phase ^= 1;
      advance(memory.stages);
      cell = boxes().read_cell(walk);
    }
  }

 private:
  __device__ void copy_tile(const Walk<BlockTiles>& walk, int stage, int slot, int cell) const {
    const int lane = threadIdx.x % 32;
    const uint32_t barrier = attnops::sm90::smem_address(&shared.full[stage]);
    const float* scales = boxes().copy_keys(walk, keys + stage * kKeyBytes, barrier, cell);
    if (walk.is_new) {
      copy_queries<kHeads>(walk, maps, barrier, queries + slot * memory.blocks * kBlockBytes);
      copy_group<kHeads, kThreads>(walk, shared, slot, lane);
    }
    copy_scales(walk, stage, scales);
    if (lane == 0) shared.tiles[stage] = {static_cast<int>(walk.first_key), walk.num_rows(), slot};
    attnops::sm90::arrive_after_copies(barrier);
    attnops::sm90::mbarrier_arrive(barrier);
  }

  __device__ Boxes<BlockTiles> boxes() const { return {p, memory, maps}; }

  // `of_box`: where the scales of the lane's box begin. Those of a page come four at a time, also behind what the
  // request has: no logit is made of these.
  __device__ void copy_scales(const Walk<BlockTiles>& walk, int stage, const float* of_box) const {
    const int lane = threadIdx.x % 32;
    if (!p.ragged) {
#pragma unroll
      for (int i = 0; i < kTileKeys / 128; ++i) {
        const int row = 4 * (lane + 32 * i);
        const void* scales = boxes().scales_of(of_box, row);
        attnops::sm90::copy16(attnops::sm90::smem_address(&shared.scales[stage][row]),
                              scales != nullptr ? scales : p.pages.data, scales != nullptr);
      }
      return;
    }
    const int64_t left = walk.end - walk.first_key;
#pragma unroll
    for (int i = 0; i < kTileKeys / 32; ++i) {
      const int row = lane + 32 * i;
      const float* scales = boxes().scales_of(of_box, row);
      const bool valid = scales != nullptr && row < left;
      copy_word(&shared.scales[stage][row], valid ? scales : p.weights, valid);
    }
  }
};

}  // namespace attnops::sparse_indexer::sm90
