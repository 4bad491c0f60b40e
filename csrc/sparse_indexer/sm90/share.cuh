#pragma once
#include "device/common/block_scan.cuh"
#include "sparse_indexer/logits.h"
#include "sparse_indexer/sm90/launch.h"

// Which tiles of keys a CTA multiplies with which tokens, one after the other.
namespace attnops::sparse_indexer::sm90 {

inline constexpr int kTileKeys = 256;  // 64 of each multiplying warpgroup
inline constexpr int kMultiply = 512, kCopy = 128, kThreads = kMultiply + kCopy;
inline constexpr int kBlockColumns = 64;
inline constexpr int kBlockBytes = kBlockColumns * 128;
inline constexpr int kKeyBytes = kTileKeys * 128;
inline constexpr int kMaxStages = 4, kMaxTokens = 64;

// How keys are divided: into tiles of kKeys, the first of which begins at a multiple of kApart. Beginning with a group
// takes a CTA as long as kStart tiles.
struct BlockTiles {
  static constexpr int kKeys = kTileKeys, kApart = 1, kStart = 0;
};
struct PromptTiles {
  static constexpr int kKeys = 192, kApart = 4, kStart = 1;
};

// A tile of a group: tokens that share their keys.
struct Tile {
  int first_key;
  int num_rows, slot;  // tokens of the group, and which of the slots has their queries
};

// What a token sees: keys from `begin` on, and where logits has its key 0.
struct Seen {
  int begin, end;
  int64_t column;
};

// A CTA's tiles, counted from any one on, and where they begin.
struct Share {
  int64_t begin, end;
  int first_group;
  int64_t first_tile;  // of the group

  __device__ int64_t num_tiles() const { return end - begin; }
};

// Behind the dynamic memory's tiles of keys and queries, which start on 1 KB.
struct Shared {
  Tile tiles[kMaxStages];
  alignas(16) float scales[kMaxStages][kTileKeys];
  float weights[kMaxStages][kMaxBlocks * kBlockColumns];
  Seen seen[kMaxStages][kMaxTokens];
  uint64_t full[kMaxStages], empty[kMaxStages];
  Share share;
};

// Groups of rows: those of a request, or of all rows of ragged keys, `memory.tokens` at a time.
template <class Tiles>
struct Groups {
  const LogitsParams& p;
  const Memory& memory;

  __device__ int first_in_request(int group) const { return group % memory.groups_together * memory.tokens; }
  __device__ int first_of_request(int group) const { return group / memory.groups_together * memory.rows_together; }
  // The keys that some token of the group sees, from a multiple of kApart on.
  __device__ KeyRange keys(int group) const {
    KeyRange all{INT64_MAX, 0, 0};
    const int in_request = first_in_request(group), first = first_of_request(group) + in_request;
    for (int i = 0; i < min_of(memory.rows_together - in_request, memory.tokens); ++i) {
      const KeyRange one = keys_of(p, first + i);
      if (one.end > one.begin) all = {min_of(all.begin, one.begin), max_of(all.end, one.end), 0};
    }
    all.begin -= all.begin % Tiles::kApart;
    return all;
  }
  __device__ int64_t tiles(int group) const {
    const KeyRange range = keys(group);
    return range.end <= range.begin ? 0 : ceil_div<int64_t>(range.end - range.begin, Tiles::kKeys);
  }
};

// Every CTA gets the same work, one tile after the other. To be called by all threads.
template <int kThreads, class Tiles>
__device__ void find_share(const Groups<Tiles>& groups, Share& share) {
  constexpr int kStart = Tiles::kStart;
  const int count = groups.memory.groups, each = ceil_div(count, kThreads);
  const int begin = min_of<int64_t>(int64_t{each} * static_cast<int>(threadIdx.x), count);
  const int end = min_of<int64_t>(int64_t{begin} + each, count);
  if (threadIdx.x == 0) share.begin = share.end = 0;
  int64_t mine = 0, before = 0;
  for (int g = begin; g < end; ++g) mine += groups.tiles(g) + kStart;
  const int64_t total = block_exclusive_sum<kThreads>(mine, &before);
  const int64_t first = total * blockIdx.x / gridDim.x, last = total * (blockIdx.x + 1) / gridDim.x;
  if (kStart == 0 && threadIdx.x == 0) share.end = last - first;
  const bool has_first = before <= first && first < before + mine;
  if (!has_first && (kStart == 0 || last <= before || last > before + mine)) return;
  for (int g = begin; g < end; ++g) {
    const int64_t cost = each == 1 ? mine : groups.tiles(g) + kStart;
    if (before <= first && first < before + cost) {
      share.first_group = g;
      share.first_tile = max_of<int64_t>(first - before - kStart, 0);
      if (kStart == 0) return;
      share.begin = before - int64_t{kStart} * g + share.first_tile;
    }
    if (kStart > 0 && before < last && last <= before + cost) {
      share.end = before - int64_t{kStart} * g + max_of<int64_t>(last - before - kStart, 0);
    }
    before += cost;
  }
}

// A warp's way through the tiles of its CTA's share. Lane l knows tokens l and l + 32 of the group.
template <class Tiles>
struct Walk {
  const LogitsParams& p;
  const Memory& memory;
  int request, in_request;  // of the group's first token
  int64_t first_key, begin, end;
  bool is_new;  // the group's first tile here
  Seen seen[2];

  __device__ int64_t first_row() const { return int64_t{request} * memory.rows_together + in_request; }
  __device__ int num_rows() const { return min_of(memory.rows_together - in_request, memory.tokens); }

  // The first tile of a share that has one.
  __device__ void start(const Groups<Tiles>& groups, const Share& share) {
    request = share.first_group / memory.groups_together;
    in_request = groups.first_in_request(share.first_group);
    read_group();
    first_key = begin + share.first_tile * Tiles::kKeys;
    if constexpr (Tiles::kStart > 0) find_group();  // the group may have no keys
  }

  // The next tile, which there must be.
  __device__ void advance() {
    first_key += Tiles::kKeys;
    is_new = false;
    find_group();
  }

 private:
  // That of the next tile, from this one on.
  __device__ void find_group() {
    while (first_key >= end) {
      in_request += memory.tokens;
      if (in_request >= memory.rows_together) {
        in_request = 0;
        ++request;
      }
      read_group();
    }
  }

  __device__ void read_group() {
    const int lane = threadIdx.x % 32;
    begin = INT64_MAX;
    end = 0;
    is_new = true;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = lane + 32 * i;
      KeyRange range{0, 0, 0};
      if (token < num_rows()) range = keys_of(p, first_row() + token);
      seen[i] = {static_cast<int>(range.begin), static_cast<int>(max_of<int64_t>(range.end, 0)),
                 (first_row() + token) * p.stride_row + range.first_column - range.begin};
      if (range.end > range.begin) {
        begin = min_of(begin, range.begin);
        end = max_of(end, range.end);
      }
    }
    if (memory.tokens == 1) {
      begin = __shfl_sync(~0u, begin, 0);
      end = __shfl_sync(~0u, end, 0);
    } else {
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        begin = min_of(begin, __shfl_xor_sync(~0u, begin, step));
        end = max_of(end, __shfl_xor_sync(~0u, end, step));
      }
    }
    begin -= begin % Tiles::kApart;
    first_key = begin;
  }
};

}  // namespace attnops::sparse_indexer::sm90
