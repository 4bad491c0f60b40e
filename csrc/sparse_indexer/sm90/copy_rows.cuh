#pragma once
#include "sparse_indexer/sm90/copy_boxes.cuh"

// Tiles of keys and queries row by row, for pages that no box fits and rows on 4-byte boundaries.
namespace attnops::sparse_indexer::sm90 {

// A warpgroup. Eight lanes bring a row.
template <int kHeads>
struct RowCopier {
  static constexpr int kThreads = 128;

  const LogitsParams& p;
  const Memory& memory;
  const Maps& maps;
  Shared& shared;
  uint32_t keys, queries;  // shared-memory addresses

  __device__ void run(const Groups<BlockTiles>& groups) const {
    if (shared.share.num_tiles() == 0) return;
    Walk<BlockTiles> walk{p, memory};
    walk.start(groups, shared.share);
    const int thread = threadIdx.x - kMultiply;
    int stage = 0, slot = -1;
    uint32_t phase = 1;
    for (int64_t left = shared.share.num_tiles();;) {
      attnops::sm90::mbarrier_wait(attnops::sm90::smem_address(&shared.empty[stage]), phase);
      if (walk.is_new) {
        if (++slot == memory.stages) slot = 0;
        copy_queries(walk, slot);
        copy_group<kHeads, kThreads>(walk, shared, slot, thread);
      }
      if (thread == 0) shared.tiles[stage] = {static_cast<int>(walk.first_key), walk.num_rows(), slot};
      copy_keys(walk, stage);
      const uint32_t barrier = attnops::sm90::smem_address(&shared.full[stage]);
      attnops::sm90::arrive_after_copies(barrier);
      attnops::sm90::mbarrier_arrive(barrier);
      if (--left == 0) return;
      if (++stage == memory.stages) {
        stage = 0;
        phase ^= 1;
      }
      walk.advance();
    }
  }

 private:
  // 16 bytes of a row of 128, zeros where `source` is null.
  __device__ void copy_chunk(uint32_t to, const uint8_t* source) const {
    const void* from = source != nullptr ? source : p.q;
    if (memory.wide) {
      attnops::sm90::copy16(to, from, source != nullptr);
    } else {
#pragma unroll
      for (int i = 0; i < 16; i += 4) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to + i),
                     "l"(source != nullptr ? source + i : p.q), "r"(source != nullptr ? 4 : 0)
                     : "memory");
      }
    }
  }

  __device__ void copy_queries(const Walk<BlockTiles>& walk, int slot) const {
    const int thread = threadIdx.x - kMultiply, chunk = thread % 8;
    for (int i = thread / 8; i < memory.blocks * kBlockColumns; i += kThreads / 8) {
      const int token = i / kHeads, head = i % kHeads;
      const bool valid = token < walk.num_rows() && head < p.num_heads && chunk * 16 < p.dim;
      const uint8_t* source =
          valid ? p.q + (walk.first_row() + token) * p.stride_token + head * p.stride_head + chunk * 16 : nullptr;
      copy_chunk(
          queries + slot * memory.blocks * kBlockBytes + i / 64 * kBlockBytes + attnops::sm90::swizzled(i % 64, chunk),
          source);
    }
  }

  // Where a key is in memory; both null where there is none.
  struct Source {
    const uint8_t* key;
    const float* scale;
  };
  __device__ Source find(const Walk<BlockTiles>& walk, int64_t key, bool reports) const {
    if (key >= walk.end) return {nullptr, nullptr};
    if (p.ragged) return {p.k + key * p.stride_k, p.k_scale + key};
    const int64_t cell = page_of(key, p.pages.page_size, p.pages.page_shift);
    const int64_t page = page_of_key(p, walk.request, cell, reports);
    if (page < 0) return {nullptr, nullptr};
    const int offset = static_cast<int>(key - cell * p.pages.page_size);
    return {p.pages.key(page, offset), p.pages.scale(page, offset)};
  }

  // A thread finds the two rows of its place in both halves of a tile; eight lanes then bring each.
  __device__ void copy_keys(const Walk<BlockTiles>& walk, int stage) const {
    const int thread = threadIdx.x - kMultiply, lane = thread % 32, chunk = thread % 8;
    static_assert(kTileKeys == 2 * kThreads);
    Source sources[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) sources[half] = find(walk, walk.first_key + thread + half * kThreads, true);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* scale = sources[half].scale;
      copy_word(&shared.scales[stage][thread + half * kThreads], scale != nullptr ? scale : p.weights,
                scale != nullptr);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int from = i * 4 + lane / 8, row = thread - lane + from + half * kThreads;
        const auto* source =
            reinterpret_cast<const uint8_t*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(sources[half].key), from));
        const bool valid = source != nullptr && chunk * 16 < p.dim;
        copy_chunk(keys + stage * kKeyBytes + row / 64 * kBlockBytes + attnops::sm90::swizzled(row % 64, chunk),
                   valid ? source + chunk * 16 : nullptr);
      }
    }
  }
};

}  // namespace attnops::sparse_indexer::sm90
