#pragma once
#include <cuda_bf16.h>

#include "device/common/block_scan.cuh"
#include "device/common/pdl.cuh"
#include "device/sm90/barrier.cuh"
#include "device/sm90/copy.cuh"
#include "device/sm90/wgmma_fp8.cuh"
#include "sparse_indexer/logits.h"
#include "sparse_indexer/sm90/launch.h"

// Logits of index keys by products in FP8. Keys are rows of a product (64 a warpgroup), heads are columns: blocks of 64
// hold the heads of one token, or of several with few heads. Weights, ReLU and the sum over heads happen in registers.
// Four warpgroups multiply, so one's sums run under another's products; a fifth copies.
namespace attnops::sparse_indexer::sm90 {

using namespace attnops::sm90;

inline constexpr int kTileKeys = 256;  // 64 of each multiplying warpgroup
inline constexpr int kMultiply = 512, kCopy = 128, kThreads = kMultiply + kCopy;
inline constexpr int kBlockColumns = 64;
inline constexpr int kBlockBytes = kBlockColumns * 128;
inline constexpr int kKeyBytes = kTileKeys * 128;
inline constexpr int kMaxStages = 4, kMaxTokens = 64;

// A tile of a group: tokens that share their keys.
struct Tile {
  int64_t first_key, first_row;
  int num_rows, slot;  // tokens of the group, and which of the slots has their queries
};

// Behind the dynamic memory's tiles of keys and queries, which start on 1 KB.
struct Shared {
  Tile tiles[kMaxStages];
  float scales[kMaxStages][kTileKeys];
  float weights[kMaxStages][kMaxBlocks * kBlockColumns];
  KeyRange ranges[kMaxStages][kMaxTokens];
  uint64_t full[kMaxStages], empty[kMaxStages];
  int64_t first_group, first_tile, num_tiles;  // of this CTA
};

// How a launch divides its work; the same on the host and on the device.
template <int kHeads>
struct Division {
  static constexpr int kTokensPerBlock = kBlockColumns / kHeads;
  const LogitsParams& p;
  int blocks;

  __device__ int tokens() const { return blocks * kTokensPerBlock; }
  // Groups of a request, or of all rows of ragged keys.
  __device__ int64_t rows_together() const { return !p.ragged ? p.seqlen_q : p.num_rows; }
  __device__ int64_t groups_together() const { return ceil_div<int64_t>(rows_together(), tokens()); }
  __device__ int64_t groups() const {
    return rows_together() == 0 ? 0 : p.num_rows / rows_together() * groups_together();
  }
  __device__ int64_t first_row(int64_t group) const {
    return group / groups_together() * rows_together() + group % groups_together() * tokens();
  }
  __device__ int rows(int64_t group) const {
    const int64_t left = rows_together() - group % groups_together() * tokens();
    return static_cast<int>(min_of<int64_t>(left, tokens()));
  }
  // The keys that some token of the group sees.
  __device__ KeyRange keys(int64_t group) const {
    KeyRange all{INT64_MAX, 0, 0};
    const int64_t first = first_row(group);
    for (int i = 0; i < rows(group); ++i) {
      const KeyRange one = keys_of(p, first + i);
      if (one.end > one.begin) all = {min_of(all.begin, one.begin), max_of(all.end, one.end), 0};
    }
    return all;
  }
  __device__ static int64_t tiles(const KeyRange& keys) {
    return keys.end <= keys.begin ? 0 : ceil_div<int64_t>(keys.end - keys.begin, kTileKeys);
  }
};

// Every CTA gets the same number of tiles, one after the other. To be called by all threads.
template <int kHeads>
__device__ void find_share(const Division<kHeads>& division, Shared& shared) {
  const int64_t groups = division.groups();
  const int64_t each = ceil_div<int64_t>(groups, kThreads), begin = threadIdx.x * each;
  int64_t mine = 0, before = 0;
  for (int64_t g = begin; g < min_of(begin + each, groups); ++g) mine += division.tiles(division.keys(g));
  const int64_t total = block_exclusive_sum<kThreads>(mine, &before);
  const int64_t first = total * blockIdx.x / gridDim.x, last = total * (blockIdx.x + 1) / gridDim.x;
  if (threadIdx.x == 0) shared.num_tiles = last - first;
  if (before <= first && first < before + mine) {
    for (int64_t g = begin;; ++g) {
      const int64_t tiles = division.tiles(division.keys(g));
      if (first < before + tiles) {
        shared.first_group = g;
        shared.first_tile = first - before;
        break;
      }
      before += tiles;
    }
  }
}

// The copying warpgroup. Eight lanes bring a row.
template <int kHeads>
struct Copier {
  const LogitsParams& p;
  const Division<kHeads>& division;
  const Memory& memory;
  Shared& shared;
  uint32_t keys, queries;  // shared-memory addresses

  // 16 bytes of a row of 128, zeros where `source` is null.
  __device__ void copy_chunk(uint32_t to, const uint8_t* source) const {
    const void* from = source != nullptr ? source : p.q;
    if (memory.wide) {
      copy16(to, from, source != nullptr);
    } else {
#pragma unroll
      for (int i = 0; i < 16; i += 4) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to + i),
                     "l"(source != nullptr ? source + i : p.q), "r"(source != nullptr ? 4 : 0)
                     : "memory");
      }
    }
  }

  __device__ void copy_queries(int slot, int64_t first_row, int num_rows) const {
    const int thread = threadIdx.x - kMultiply, chunk = thread % 8;
    for (int i = thread / 8; i < division.blocks * kBlockColumns; i += kCopy / 8) {
      const int token = i / kHeads, head = i % kHeads;
      const bool valid = token < num_rows && head < p.num_heads && chunk * 16 < p.dim;
      const uint8_t* source =
          valid ? p.q + (first_row + token) * p.stride_token + head * p.stride_head + chunk * 16 : nullptr;
      copy_chunk(queries + slot * division.blocks * kBlockBytes + i / 64 * kBlockBytes + swizzled(i % 64, chunk),
                 source);
    }
    for (int i = thread; i < division.blocks * kBlockColumns; i += kCopy) {
      const int token = i / kHeads, head = i % kHeads;
      const bool valid = token < num_rows && head < p.num_heads;
      shared.weights[slot][i] = valid ? p.weights[(first_row + token) * p.stride_weights + head] : 0.f;
    }
    for (int i = thread; i < num_rows; i += kCopy) shared.ranges[slot][i] = keys_of(p, first_row + i);
  }

  // Where a key is in memory; both null where there is none.
  struct Source {
    const uint8_t* key;
    const float* scale;
  };
  __device__ Source find(int64_t request, int64_t key, int64_t end, bool reports) const {
    if (key >= end) return {nullptr, nullptr};
    if (p.ragged) return {p.k + key * p.stride_k, p.k_scale + key};
    const int64_t cell = page_of(key, p.pages.page_size, p.pages.page_shift);
    const int64_t page = page_of_key(p, request, cell, reports);
    if (page < 0) return {nullptr, nullptr};
    const int offset = static_cast<int>(key - cell * p.pages.page_size);
    return {p.pages.key(page, offset), p.pages.scale(page, offset)};
  }

  __device__ void copy_keys(int stage, int64_t request, int64_t first_key, int64_t end) const {
    const int thread = threadIdx.x - kMultiply, chunk = thread % 8;
    constexpr int kAtOnce = 8, kRows = kCopy / 8;
#pragma unroll 1
    for (int base = 0; base < kTileKeys; base += kAtOnce * kRows) {
      const uint8_t* sources[kAtOnce];  // at once: tables take long to read
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        sources[i] = find(request, first_key + base + i * kRows + thread / 8, end, chunk == 0).key;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = base + i * kRows + thread / 8;
        const bool valid = sources[i] != nullptr && chunk * 16 < p.dim;
        copy_chunk(keys + stage * kKeyBytes + row / 64 * kBlockBytes + swizzled(row % 64, chunk),
                   valid ? sources[i] + chunk * 16 : nullptr);
      }
    }
#pragma unroll
    for (int row = thread; row < kTileKeys; row += kCopy) {
      const float* source = find(request, first_key + row, end, false).scale;
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(smem_address(&shared.scales[stage][row])),
                   "l"(source != nullptr ? source : p.weights), "r"(source != nullptr ? 4 : 0)
                   : "memory");
    }
  }

  __device__ void run() const {
    const int thread = threadIdx.x - kMultiply;
    int64_t group = shared.first_group - 1, tile = 0, tiles = 0;
    KeyRange range{};
    int slot = -1;
    for (int64_t i = 0; i < shared.num_tiles; ++i) {
      const int stage = static_cast<int>(i % memory.stages);
      mbarrier_wait(smem_address(&shared.empty[stage]), static_cast<uint32_t>(i / memory.stages + 1) & 1);
      const bool is_first = i == 0;
      bool is_new = false;
      while (tile == tiles) {
        range = division.keys(++group);
        tiles = division.tiles(range);
        tile = is_first ? shared.first_tile : 0;
        is_new = true;
        if (is_first) break;
      }
      const int64_t first_row = division.first_row(group);
      const int num_rows = division.rows(group);
      if (is_new) {
        slot = (slot + 1) % memory.stages;
        copy_queries(slot, first_row, num_rows);
      }
      const int64_t first_key = range.begin + tile * kTileKeys;
      if (thread == 0) shared.tiles[stage] = {first_key, first_row, num_rows, slot};
      copy_keys(stage, !p.ragged ? first_row / p.seqlen_q : 0, first_key, range.end);
      ++tile;
      const uint32_t barrier = smem_address(&shared.full[stage]);
      arrive_after_copies(barrier);
      mbarrier_arrive(barrier);
    }
  }
};

// A multiplying warpgroup: its 64 keys of every tile.
template <int kHeads>
__device__ void multiply(const LogitsParams& p, const Division<kHeads>& division, const Memory& memory, Shared& shared,
                         uint32_t keys, uint32_t queries) {
  constexpr int kTokens = Division<kHeads>::kTokensPerBlock;
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int key_in_tile = group * 64 + warp * 16 + lane / 4, pair = lane % 4;
  for (int64_t i = 0; i < shared.num_tiles; ++i) {
    const int stage = static_cast<int>(i % memory.stages);
    mbarrier_wait(smem_address(&shared.full[stage]), static_cast<uint32_t>(i / memory.stages) & 1);
    fence_async_proxy();  // rows arrive by ordinary writes
    const Tile tile = shared.tiles[stage];
    const uint64_t a = operand_descriptor(keys + stage * kKeyBytes + group * kBlockBytes);
    // Lanes of a quad hold the same two keys; the first two write one each.
    const float scale = shared.scales[stage][key_in_tile + (pair == 1 ? 8 : 0)];
    const int64_t key = tile.first_key + key_in_tile + (pair == 1 ? 8 : 0);
#pragma unroll 1
    for (int block = 0; block < division.blocks; ++block) {
      if (block * kTokens >= tile.num_rows) break;
      const uint64_t b = operand_descriptor(queries + (tile.slot * division.blocks + block) * kBlockBytes);
      float d[32];
      pin(d);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {  // of 32; chunks behind dim are zeros
        wgmma_e4m3(d, a + step * kStepKMajor, b + step * kStepKMajor, step != 0);
      }
      wgmma_commit();
      const float2* weights = reinterpret_cast<const float2*>(shared.weights[tile.slot] + block * kBlockColumns) + pair;
      float sums[kTokens][2] = {};
      wgmma_wait<0>(d);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 w = weights[j * 4];
        const int token = j * 8 / kHeads;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          sums[token][h] = fmaf(fmaxf(d[4 * j + 2 * h], 0.f), w.x, sums[token][h]);
          sums[token][h] = fmaf(fmaxf(d[4 * j + 2 * h + 1], 0.f), w.y, sums[token][h]);
        }
      }
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          sums[token][h] += __shfl_xor_sync(~0u, sums[token][h], 1);
          sums[token][h] += __shfl_xor_sync(~0u, sums[token][h], 2);
        }
        const int t = block * kTokens + token;
        if (pair > 1 || t >= tile.num_rows) continue;
        const KeyRange range = shared.ranges[tile.slot][t];
        if (key < range.begin || key >= range.end) continue;
        const float logit = scale * (pair == 1 ? sums[token][1] : sums[token][0]);
        const int64_t at = (tile.first_row + t) * p.stride_row + range.first_column + key - range.begin;
        if (p.bf16) {
          static_cast<__nv_bfloat16*>(p.logits)[at] = __float2bfloat16(logit);
        } else {
          static_cast<float*>(p.logits)[at] = logit;
        }
      }
    }
    mbarrier_arrive(smem_address(&shared.empty[stage]));
  }
}

// Grid: as many CTAs as there are multiprocessors.
template <int kHeads>
__global__ void __launch_bounds__(kThreads, 1)
    index_logits_kernel(const __grid_constant__ LogitsParams p, const __grid_constant__ Memory memory) {
  extern __shared__ __align__(1024) uint8_t dynamic[];
  __shared__ Shared shared;
  const uint32_t keys = smem_address(dynamic), queries = keys + memory.stages * kKeyBytes;
  const Division<kHeads> division{p, memory.blocks};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < memory.stages; ++stage) {
      mbarrier_init(smem_address(&shared.full[stage]), 2 * kCopy);
      mbarrier_init(smem_address(&shared.empty[stage]), kMultiply);
    }
    mbarrier_init_fence();
  }
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (p.report != nullptr) {
    for (int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x; row < p.num_rows; row += gridDim.x * kThreads) {
      report_row(p, row);
    }
  }
  find_share(division, shared);
  __syncthreads();
  if (threadIdx.x >= kMultiply) {
    Copier<kHeads>{p, division, memory, shared, keys, queries}.run();
  } else {
    multiply(p, division, memory, shared, keys, queries);
  }
}

}  // namespace attnops::sparse_indexer::sm90
