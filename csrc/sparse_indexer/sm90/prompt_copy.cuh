#pragma once
#include "sparse_indexer/sm90/copy_boxes.cuh"

// Tiles of keys and groups of tokens for the kernel of prompts: one warp copies, keys and queries are two rings.
namespace attnops::sparse_indexer::sm90 {

inline constexpr int kPromptKeys = 192, kPromptKeyBytes = kPromptKeys * 128, kPromptStages = 3;
inline constexpr int kPromptColumns = kMaxBlocks * kBlockColumns, kPromptQueryBytes = kMaxBlocks * kBlockBytes;
inline constexpr int kPromptSlots = 2, kPromptTokens = 16;
inline constexpr int kPromptBytes = kPromptStages * kPromptKeyBytes + kPromptSlots * kPromptQueryBytes;

struct PromptTile {
  int first_key, parts;  // of 64 keys
  int slot;              // of the tokens' queries
  int last;              // of the CTA
};

struct PromptShared {
  alignas(16) PromptTile tiles[kPromptStages];
  alignas(16) float scales[kPromptStages][kPromptKeys];
  float weights[kPromptSlots][kPromptColumns];
  Seen seen[kPromptSlots][kPromptTokens];
  int num_rows[kPromptSlots];
  uint64_t full[kPromptStages], empty[kPromptStages], queries_full[kPromptSlots], queries_empty[kPromptSlots];
  Share share;
};

// Up to 16 bytes, and zeros behind them.
__device__ inline void copy_part(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

template <int kHeads>
struct PromptCopier {
  const LogitsParams& p;
  const Memory& memory;
  const Maps& maps;
  PromptShared& shared;
  uint32_t keys, queries;  // shared-memory addresses

  __device__ void run(const Groups& groups) const {
    if (shared.share.num_tiles() == 0) return;
    Walk walk{p, memory};
    walk.start(groups, shared.share);
    int stage = 0, copied = 0;  // groups
    uint32_t phase = 1;
    int cell = boxes().read_cell(walk);
#pragma unroll 1
    for (int64_t left = shared.share.num_tiles();;) {
      if (walk.is_new) copy_tokens(walk, copied++);
      attnops::sm90::mbarrier_wait(attnops::sm90::smem_address(&shared.empty[stage]), phase);
      copy_tile(walk, stage, (copied - 1) % kPromptSlots, cell, left == 1);
      if (--left == 0) return;
      if (++stage == kPromptStages) {
        stage = 0;
        phase ^= 1;
      }
      walk.advance();
      cell = boxes().read_cell(walk);
    }
  }

 private:
  __device__ Boxes<kPromptKeys> boxes() const { return {p, memory, maps}; }

  __device__ void copy_tokens(const Walk& walk, int number) const {
    const int lane = threadIdx.x % 32, slot = number % kPromptSlots;
    const uint32_t barrier = attnops::sm90::smem_address(&shared.queries_full[slot]);
    attnops::sm90::mbarrier_wait(attnops::sm90::smem_address(&shared.queries_empty[slot]),
                                 (number / kPromptSlots & 1) ^ 1);
    copy_queries<kHeads>(walk, maps, barrier, queries + slot * kPromptQueryBytes);
    copy_group<kHeads, 32>(walk, shared, slot, lane);
    if (lane == 0) shared.num_rows[slot] = walk.num_rows();
    attnops::sm90::arrive_after_copies(barrier);
    attnops::sm90::mbarrier_arrive(barrier);
  }

  __device__ void copy_tile(const Walk& walk, int stage, int slot, int cell, bool last) const {
    const int lane = threadIdx.x % 32;
    const uint32_t barrier = attnops::sm90::smem_address(&shared.full[stage]);
    const float* of_box = boxes().copy_keys(walk, keys + stage * kPromptKeyBytes, barrier, cell);
#pragma unroll
    for (int i = 0; i < ceil_div(kPromptKeys, 128); ++i) {
      const int row = 4 * (lane + 32 * i);
      const void* from = p.ragged ? static_cast<const void*>(p.k_scale) : p.pages.data;
      int bytes = 0;
      if (p.ragged) {
        const int64_t key = walk.first_key + row, there = p.num_keys - key;
        if (there > 0) from = p.k_scale + key, bytes = there < 4 ? static_cast<int>(there) * 4 : 16;
      } else if (const float* scales = boxes().scales_of(of_box, row); scales != nullptr) {
        from = scales, bytes = 16;
      }
      if (row < kPromptKeys) copy_part(attnops::sm90::smem_address(&shared.scales[stage][row]), from, bytes);
    }
    if (lane == 0) {
      const int parts = static_cast<int>(min_of<int64_t>(walk.end - walk.first_key + 63, kPromptKeys)) / 64;
      shared.tiles[stage] = {static_cast<int>(walk.first_key), parts, slot, last};
    }
    attnops::sm90::arrive_after_copies(barrier);
    attnops::sm90::mbarrier_arrive(barrier);
  }
};

}  // namespace attnops::sparse_indexer::sm90
