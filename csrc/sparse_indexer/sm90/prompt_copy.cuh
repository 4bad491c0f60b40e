#pragma once
#include "sparse_indexer/sm90/copy_boxes.cuh"

// Tiles of keys and groups of tokens for the kernel of prompts: one warp copies, keys and queries are two rings.
namespace attnops::sparse_indexer::sm90 {

inline constexpr int kPromptKeys = PromptTiles::kKeys, kPromptKeyBytes = kPromptKeys * 128, kPromptStages = 3;
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

template <int kHeads>
struct PromptCopier {
  const LogitsParams& p;
  const Memory& memory;
  const Maps& maps;
  PromptShared& shared;
  uint32_t keys, queries;  // shared-memory addresses

  __device__ void run(const Groups<PromptTiles>& groups) const {
    if (shared.share.num_tiles() == 0) return;
    Walk<PromptTiles> walk{p, memory};
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
  __device__ Boxes<PromptTiles> boxes() const { return {p, memory, maps}; }

  __device__ void copy_tokens(const Walk<PromptTiles>& walk, int number) const {
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

  __device__ void copy_tile(const Walk<PromptTiles>& walk, int stage, int slot, int cell, bool last) const {
    const int lane = threadIdx.x % 32;
    const uint32_t barrier = attnops::sm90::smem_address(&shared.full[stage]);
    const float* of_box = boxes().copy_keys(walk, keys + stage * kPromptKeyBytes, barrier, cell);
#pragma unroll
    for (int i = 0; i < ceil_div(kPromptKeys, 128); ++i) copy_scales(walk, stage, of_box, 4 * (lane + 32 * i));
    if (lane == 0) {
      const int parts = static_cast<int>(min_of<int64_t>(walk.end - walk.first_key + 63, kPromptKeys)) / 64;
      shared.tiles[stage] = {static_cast<int>(walk.first_key), parts, slot, last};
    }
    attnops::sm90::arrive_after_copies(barrier);
    attnops::sm90::mbarrier_arrive(barrier);
  }

  // Of four rows of the tile, by all lanes.
  __device__ void copy_scales(const Walk<PromptTiles>& walk, int stage, const float* of_box, int row) const {
    const float* from = nullptr;
    int64_t left = 4;  // that there are
    if (p.ragged) {
      from = p.k_scale + walk.first_key + row;
      left = p.num_keys - walk.first_key - row;
    } else {
      from = boxes().scales_of(of_box, row);
    }
    if (row >= kPromptKeys) return;
    float* to = &shared.scales[stage][row];
    if (left >= 4) {
      const bool valid = from != nullptr;
      attnops::sm90::copy16(attnops::sm90::smem_address(to), valid ? static_cast<const void*>(from) : p.pages.data,
                            valid);
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) copy_word(to + i, i < left ? from + i : p.k_scale, i < left);
  }
};

}  // namespace attnops::sparse_indexer::sm90
