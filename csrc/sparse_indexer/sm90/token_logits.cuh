#pragma once
#include "device/common/pdl.cuh"
#include "device/sm90/barrier.cuh"
#include "device/sm90/copy.cuh"
#include "device/sm90/wgmma_few.cuh"
#include "device/sm90/wgmma_fp8.cuh"
#include "sparse_indexer/sm90/copy_boxes.cuh"
#include "sparse_indexer/sm90/share.cuh"

// Logits of keys in pages of 64 and multiples of it, where the tokens of each request fit few blocks of columns. A tile
// is 64 keys for one of two warpgroups, which do not wait for each other; it is multiplied with one block after the
// other. An SM has two CTAs, so that those of the next kernel come up while others still run.
namespace attnops::sparse_indexer::sm90 {

using namespace attnops::sm90;

inline constexpr int kStepKeys = 64, kStepScales = kStepKeys * 128, kStepBytes = kStepScales + 1024;
inline constexpr int kTokenWarpgroups = 2, kTokenCtas = 2;
inline constexpr int kTokenMultiply = 128 * kTokenWarpgroups, kTokenThreads = kTokenMultiply + 64;
// As many groups' queries as warpgroups: the last tiles of a CTA may be of as many groups, and nobody gives theirs
// back.
inline constexpr int kTokenSlots = kTokenWarpgroups;

// What the memory of half an SM holds, for up to so many blocks of columns.
template <int kBlocks>
struct TokenRoom {
  static constexpr int kRows = kBlocks == 4 ? 256 : 512;  // of a call, at most
  // A stage has tiles of one warpgroup alone: else that could take the tile of the round before for its own.
  static constexpr int kStages = kBlocks == 1 ? 8 : kBlocks == 2 ? 6 : 4;
  static constexpr int kQueryBytes = kBlocks * kBlockBytes;
  static constexpr int kBytes = kStages * kStepBytes + kTokenSlots * kQueryBytes;
  static_assert(kStages % kTokenWarpgroups == 0);
};

// Blocks of columns that a kernel is compiled for: 1, 2 or 4, as many as the tokens of a request may need.
template <int kHeads>
inline constexpr int kMostTokenBlocks = kHeads == 8    ? 1
                                        : kHeads == 16 ? 2
                                                       : 4;

// A request that has keys.
struct TokenRequest {
  int tiles_before, request, keys;
};

// A tile.
struct Step {
  int first_key, request;
  int number;  // of the request, among those that the CTA has tiles of
  int left;    // tiles of the CTA behind this one; -1: there is no tile
};

template <int kBlocks>
struct TokenShared {
  using Room = TokenRoom<kBlocks>;
  alignas(16) Step steps[Room::kStages];
  float weights[kTokenSlots][kBlocks * kBlockColumns];
  TokenRequest requests[Room::kRows];
  int ends[Room::kRows];  // keys that a row sees
  int count, total;       // of `requests`, and their tiles
  uint64_t full[Room::kStages], empty[Room::kStages], queries_full[kTokenSlots], queries_empty[kTokenSlots];
};

// Lengths of rows, and the requests that have keys, by one warp: lengths are read once, and all at a time.
template <int kBlocks>
__device__ void list_requests(const LogitsParams& p, const Memory& memory, TokenShared<kBlocks>& shared) {
  const int lane = threadIdx.x % 32, rows = memory.rows_together, num_rows = static_cast<int>(p.num_rows);
  const auto capacity = static_cast<int>(min_of(p.max_pages * p.pages.page_size, p.columns));
#pragma unroll 8
  for (int row = lane; row < num_rows; row += 32) {
    shared.ends[row] = max_of(min_of(p.cache_seqlens[row], capacity), 0);
  }
  __syncwarp();
  const auto keys_of_request = [&](int request) {
    int keys = shared.ends[request * rows];
    for (int i = 1; i < rows; ++i) keys = max_of(keys, shared.ends[request * rows + i]);
    return keys;
  };
  const int each = ceil_div(memory.groups, 32);
  const int begin = min_of(lane * each, memory.groups), end = min_of(begin + each, memory.groups);
  int tiles = 0, listed = 0;
  for (int request = begin; request < end; ++request) {
    const int keys = keys_of_request(request);
    tiles += ceil_div(keys, kStepKeys);
    listed += keys > 0;
  }
  int tiles_to = tiles, listed_to = listed;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other_tiles = __shfl_up_sync(~0u, tiles_to, step), other_listed = __shfl_up_sync(~0u, listed_to, step);
    if (lane >= step) {
      tiles_to += other_tiles;
      listed_to += other_listed;
    }
  }
  if (lane == 31) {
    shared.total = tiles_to;
    shared.count = listed_to;
  }
  int before = tiles_to - tiles, at = listed_to - listed;
  for (int request = begin; request < end; ++request) {
    const int keys = keys_of_request(request);
    if (keys == 0) continue;
    shared.requests[at++] = {before, request, keys};
    before += ceil_div(keys, kStepKeys);
  }
}

template <int kHeads, int kBlocks>
class TokenCopier {
  using Room = TokenRoom<kBlocks>;

 public:
  __device__ TokenCopier(const LogitsParams& p, const Memory& memory, const Maps& maps, TokenShared<kBlocks>& shared,
                         uint32_t keys, uint32_t queries)
      : p_(p), memory_(memory), maps_(maps), shared_(shared), keys_(keys), queries_(queries) {
    const int64_t total = shared.total;
    first_ = static_cast<int>(total * blockIdx.x / gridDim.x);
    end_ = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x);
  }

  __device__ void copy_queries() const {
    if (first_ >= end_) return;
    const int lane = threadIdx.x % 32, from = find(first_), to = find(end_ - 1);
#pragma unroll 1
    for (int listed = from; listed <= to; ++listed) {
      const int number = listed - from, slot = number % kTokenSlots;
      const int row = shared_.requests[listed].request * memory_.rows_together;
      const uint32_t barrier = smem_address(&shared_.queries_full[slot]);
      mbarrier_wait(smem_address(&shared_.queries_empty[slot]), (number / kTokenSlots & 1) ^ 1);
      if (lane == 0) {
        mbarrier_arrive_expect(barrier, blocks() * kBlockBytes);
        for (int block = 0; block < blocks(); ++block) {
          copy_box(queries_ + slot * Room::kQueryBytes + block * kBlockBytes, &maps_.queries, barrier, 0, 0,
                   row + block * (kBlockColumns / kHeads));
        }
      }
#pragma unroll
      for (int i = 0; i < kBlocks * kBlockColumns / 32; ++i) {
        const int column = lane + 32 * i, token = column / kHeads, head = column % kHeads;
        const bool valid = token < memory_.rows_together && head < p_.num_heads;
        const float* from_weights = p_.weights + int64_t{row + token} * p_.stride_weights + head;
        copy_word(&shared_.weights[slot][column], valid ? from_weights : p_.weights, valid);
      }
      arrive_after_copies(barrier);
    }
  }

  // Each lane looks up the page of one of 32 tiles.
  __device__ void copy_keys() const {
    const int lane = threadIdx.x % 32, from = first_ < end_ ? find(first_) : 0;
    const uint64_t once = l2_policy(true);
    int stage = 0;
    uint32_t phase = 1;
#pragma unroll 1
    for (int batch = first_; batch < end_; batch += 32) {
      const int tile = min_of(batch + lane, end_ - 1), listed = find(tile);
      const TokenRequest request = shared_.requests[listed];
      const int first_key = (tile - request.tiles_before) * kStepKeys;
      const int64_t cell = page_of(first_key, p_.pages.page_size, p_.pages.page_shift);
      const int own_page = static_cast<int>(page_of_key(p_, request.request, cell, batch + lane < end_));
      const int own_place = static_cast<int>(first_key - cell * p_.pages.page_size);
      const int count = min_of(end_ - batch, 32);
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        const int key = __shfl_sync(~0u, first_key, i), number = __shfl_sync(~0u, listed, i) - from;
        const int of_request = __shfl_sync(~0u, request.request, i), page = __shfl_sync(~0u, own_page, i);
        const int in_page = __shfl_sync(~0u, own_place, i);
        const uint32_t barrier = smem_address(&shared_.full[stage]), to = keys_ + stage * kStepBytes;
        mbarrier_wait(smem_address(&shared_.empty[stage]), phase);
        if (page < 0) clear(to);
        if (lane == 0) {
          shared_.steps[stage] = {key, of_request, number, end_ - 1 - batch - i};
          if (page < 0) {
            mbarrier_arrive(barrier);
          } else {
            mbarrier_arrive_expect(barrier, kStepKeys * (128 + 4));
            copy_box(to, &maps_.keys, barrier, 0, in_page, page, once);
            if (!memory_.wide) {
              copy_bytes(to + kStepScales, p_.pages.scale(page, in_page), kStepKeys * 4, barrier, once);
            }
          }
        }
        if (++stage == Room::kStages) {
          stage = 0;
          phase ^= 1;
        }
      }
    }
    // Of warpgroups without a tile.
    const int none = end_ - first_ + lane;
    if (none < kTokenWarpgroups) {
      shared_.steps[none].left = -1;
      mbarrier_arrive(smem_address(&shared_.full[none]));
    }
  }

 private:
  __device__ int blocks() const { return kBlocks == 1 ? 1 : memory_.blocks; }

  // The listed request of a tile.
  __device__ int find(int tile) const {
    int low = 0, high = shared_.count - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (shared_.requests[middle].tiles_before <= tile) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }

  // Zeros for keys of a page that the pool has not, by the warp.
  __device__ static void clear(uint32_t tile) {
#pragma unroll 1
    for (int i = threadIdx.x % 32 * 16; i < kStepBytes; i += 32 * 16) {
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(tile + i), "r"(0) : "memory");
    }
    fence_async_proxy();
    __syncwarp();
  }

  const LogitsParams& p_;
  const Memory& memory_;
  const Maps& maps_;
  TokenShared<kBlocks>& shared_;
  uint32_t keys_, queries_;  // shared-memory addresses
  int first_, end_;          // tiles of the CTA
};

template <int kHeads, int kBlocks, typename Out>
class TokenMultiplier {
  using Room = TokenRoom<kBlocks>;
  static constexpr int kTokens = kBlockColumns / kHeads;

 public:
  __device__ TokenMultiplier(const LogitsParams& p, const Memory& memory, const TokenShared<kBlocks>& shared,
                             const uint8_t* tiles, uint32_t keys, uint32_t queries)
      : p_(p), memory_(memory), shared_(shared), keys_(keys), queries_(queries) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    pair_ = lane % 4;
    row_ = warp * 16 + lane / 4 + (pair_ & 1) * 8;
    // Scales that come with a page's rows are swizzled as these.
    scales_ = reinterpret_cast<const float*>(tiles + kStepScales) + (memory.wide && row_ >= 32 ? row_ ^ 4 : row_);
  }

  __device__ void run() {
    int stage = __shfl_sync(~0u, threadIdx.x / 128, 0), number = -1;
    uint32_t phase = 0;
#pragma unroll 1
    for (;;) {
      mbarrier_wait(smem_address(&shared_.full[stage]), phase);
      const Step step = shared_.steps[stage];
      const int left = __shfl_sync(~0u, step.left, 0), next = __shfl_sync(~0u, step.number, 0);
      if (left < 0) return;
      if (number != next) {
        // Those between are of other warpgroups alone, but wait for this one.
        for (; number != next; ++number) {
          if (number >= 0) mbarrier_arrive(smem_address(&shared_.queries_empty[number % kTokenSlots]));
          const int slot = (number + 1) % kTokenSlots;
          mbarrier_wait(smem_address(&shared_.queries_full[slot]), (number + 1) / kTokenSlots & 1);
        }
        slot_ = number % kTokenSlots;
        first_row_ = step.request * memory_.rows_together;
        if constexpr (kBlocks == 1) read_tokens(0);
      }
      const uint32_t keys = uniform_operand(keys_ + stage * kStepBytes);
      const float scale = scales_[stage * (kStepBytes / 4)];
      const int key = step.first_key + row_;
      if constexpr (kBlocks == 1) {
        float d[32];
        start(d, keys, 0);
        wgmma_wait<0>(d);
        mbarrier_arrive(smem_address(&shared_.empty[stage]));
        add_up(d, scale, key);
      } else {
#pragma unroll 1
        for (int block = 0; block + 1 < memory_.blocks; block += 2) {
          float first[32], second[32];
          start(first, keys, block);
          start(second, keys, block + 1);
          wgmma_wait<1>(first);
          read_tokens(block);  // registers hold one block
          add_up(first, scale, key);
          wgmma_wait<0>(second);
          if (block + 2 >= memory_.blocks) mbarrier_arrive(smem_address(&shared_.empty[stage]));
          read_tokens(block + 1);
          add_up(second, scale, key);
        }
        if (kBlocks > 2 && memory_.blocks % 2 == 1) {  // three: the last stands beside none
          float last[32];
          start(last, keys, memory_.blocks - 1);
          read_tokens(memory_.blocks - 1);
          wgmma_wait<0>(last);
          mbarrier_arrive(smem_address(&shared_.empty[stage]));
          add_up(last, scale, key);
        }
      }
      if (left < kTokenWarpgroups) return;
      stage += kTokenWarpgroups;
      if (stage >= Room::kStages) {
        stage -= Room::kStages;
        phase ^= 1;
      }
    }
  }

 private:
  __device__ void start(float (&d)[32], uint32_t keys, int block) const {
    const uint32_t queries = uniform_operand(queries_ + slot_ * Room::kQueryBytes + block * kBlockBytes);
    pin(d);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {  // of 32; chunks behind dim are zeros
      wgmma_e4m3(d, group_descriptor<1024>(keys + step * kStepKMajor),
                 group_descriptor<1024>(queries + step * kStepKMajor), step != 0);
    }
    wgmma_commit();
  }

  // Of a block of the request's columns.
  __device__ void read_tokens(int block) {
    const int first = block * kTokens;
    const auto* weights = reinterpret_cast<const float2*>(shared_.weights[slot_] + block * kBlockColumns) + pair_;
#pragma unroll
    for (int j = 0; j < 8; ++j) weights_[j] = weights[j * 4];
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      ends_[i] = first + i < memory_.rows_together ? shared_.ends[first_row_ + first + i] : 0;
    }
    logits_ = static_cast<Out*>(p_.logits) + (first_row_ + first) * p_.stride_row;
  }

  // In the order of Multiplier, so bits are its.
  __device__ void add_up(const float (&d)[32], float scale, int key) const {
    float sums[kTokens][2] = {};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int token = j * 8 / kHeads;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sums[token][h] = fmaf(fmaxf(d[4 * j + 2 * h], 0.f), weights_[j].x, sums[token][h]);
        sums[token][h] = fmaf(fmaxf(d[4 * j + 2 * h + 1], 0.f), weights_[j].y, sums[token][h]);
      }
    }
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      // Each lane goes on with one of its two keys, which the next lane has given it its part of.
      const bool odd = pair_ & 1;
      float sum = odd ? sums[i][1] : sums[i][0];
      sum += __shfl_xor_sync(~0u, odd ? sums[i][0] : sums[i][1], 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (pair_ <= 1 && key < ends_[i]) {
        if constexpr (sizeof(Out) == 2) {
          logits_[i * p_.stride_row + key] = __float2bfloat16(scale * sum);
        } else {
          logits_[i * p_.stride_row + key] = scale * sum;
        }
      }
    }
  }

  const LogitsParams& p_;
  const Memory& memory_;
  const TokenShared<kBlocks>& shared_;
  uint32_t keys_, queries_;  // shared-memory addresses
  const float* scales_;      // of the lane's key
  int pair_, row_;
  int slot_ = 0, first_row_ = 0;  // of the request: where its queries are, and its first token
  float2 weights_[8];             // of a block
  int ends_[kTokens];
  Out* logits_ = nullptr;  // of the block's first token
};

// Grid: as many CTAs as run at once.
template <int kHeads, int kBlocks, typename Out>
__global__ void __launch_bounds__(kTokenThreads, kTokenCtas)
    token_logits_kernel(const __grid_constant__ LogitsParams p, const __grid_constant__ Memory memory,
                        const __grid_constant__ Maps maps) {
  using Room = TokenRoom<kBlocks>;
  constexpr int kMultiplying = kTokenMultiply / 32;  // warps; then one copies keys, and one queries
  extern __shared__ __align__(1024) uint8_t dynamic[];
  __shared__ TokenShared<kBlocks> shared;
  const uint32_t keys = smem_address(dynamic), queries = keys + Room::kStages * kStepBytes;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Room::kStages; ++i) {
      mbarrier_init(smem_address(&shared.full[i]), 1);
      mbarrier_init(smem_address(&shared.empty[i]), 128);
    }
    for (int i = 0; i < kTokenSlots; ++i) {
      mbarrier_init(smem_address(&shared.queries_full[i]), 1 + 32);
      mbarrier_init(smem_address(&shared.queries_empty[i]), kTokenMultiply);
    }
    mbarrier_init_fence();
    prefetch_map(&maps.keys);
    prefetch_map(&maps.queries);
  }
  __syncthreads();
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (warp == kMultiplying) {
    list_requests(p, memory, shared);
  } else if (warp < kMultiplying && p.report != nullptr) {
    const int64_t threads = int64_t{gridDim.x} * kTokenMultiply;
    for (int64_t row = int64_t{blockIdx.x} * kTokenMultiply + threadIdx.x; row < p.num_rows; row += threads) {
      report_row(p, row);
    }
  }
  __syncthreads();
  if (warp < kMultiplying) {
    TokenMultiplier<kHeads, kBlocks, Out>(p, memory, shared, dynamic, keys, queries).run();
    return;
  }
  const TokenCopier<kHeads, kBlocks> copier(p, memory, maps, shared, keys, queries);
  if (warp == kMultiplying) {
    copier.copy_keys();
  } else {
    copier.copy_queries();
  }
}

}  // namespace attnops::sparse_indexer::sm90
