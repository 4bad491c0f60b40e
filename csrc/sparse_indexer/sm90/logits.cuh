#pragma once
#include <cuda_bf16.h>

#include "device/common/pdl.cuh"
#include "device/sm90/barrier.cuh"
#include "device/sm90/wgmma_few.cuh"
#include "device/sm90/wgmma_fp8.cuh"
#include "sparse_indexer/sm90/copy_boxes.cuh"
#include "sparse_indexer/sm90/copy_rows.cuh"
#include "sparse_indexer/sm90/share.cuh"

// Logits of index keys by products in FP8. Keys are rows of a product (64 a warpgroup, in registers), heads are
// columns: blocks of 64 hold the heads of one token, or of several with few heads. Weights, ReLU and the sum over heads
// happen in registers, under the products of the next block. Four warpgroups multiply; behind them come those who copy.
namespace attnops::sparse_indexer::sm90 {

using namespace attnops::sm90;

// A multiplying warpgroup: its 64 keys of every tile.
template <int kHeads, bool kAhead>
class Multiplier {
  static constexpr int kTokens = kBlockColumns / kHeads;

 public:
  __device__ Multiplier(const LogitsParams& p, const Memory& memory, const Shared& shared, uint32_t keys,
                        uint32_t queries)
      : p_(p), memory_(memory), shared_(shared), keys_(keys), queries_(queries) {}

  template <bool kGathered>
  __device__ void run() {
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    pair_ = lane % 4;
    // Lanes of a quad hold the same two keys; the first two write one each.
    const int key_in_tile = group * 64 + warp * 16 + lane / 4 + (pair_ & 1) * 8;
    const uint32_t fragments = keys_ + group * kBlockBytes;
    int stage = 0;
    uint32_t phase = 0;
#pragma unroll 1
    for (int64_t left = shared_.share.num_tiles(); left > 0; --left) {
      mbarrier_wait(smem_address(&shared_.full[stage]), phase);
      if constexpr (kGathered) fence_async_proxy();  // rows arrive by ordinary writes
      const Tile tile = shared_.tiles[stage];
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        load_fragment(fragments_[step],
                      fragments + stage * kKeyBytes + swizzled(warp * 16 + lane % 16, 2 * step + lane / 16));
      }
      scale_ = shared_.scales[stage][key_in_tile];
      key_ = tile.first_key + key_in_tile;
      slot_ = __shfl_sync(~0u, tile.slot, 0);
      num_rows_ = __shfl_sync(~0u, tile.num_rows, 0);
      multiply_blocks();
      mbarrier_arrive(smem_address(&shared_.empty[stage]));
      if (++stage == memory_.stages) {
        stage = 0;
        phase ^= 1;
      }
    }
  }

 private:
  __device__ void multiply_blocks() {
    const int blocks = ceil_div(num_rows_, kTokens);
    if constexpr (!kAhead) {
#pragma unroll 1
      for (int block = 0; block < blocks; ++block) {
        float d[32];
        start(d, block);
        wgmma_wait<0>(d);
        add_up(d, block);
      }
      return;
    }
    float even[32], odd[32];
    start(even, 0);
#pragma unroll 1
    for (int block = 0;; block += 2) {
      if (block + 1 == blocks) {
        wgmma_wait<0>(even);
        add_up(even, block);
        break;
      }
      start(odd, block + 1);
      wgmma_wait<1>(even);
      add_up(even, block);
      if (block + 2 == blocks) {
        wgmma_wait<0>(odd);
        add_up(odd, block + 1);
        break;
      }
      start(even, block + 2);
      wgmma_wait<1>(odd);
      add_up(odd, block + 1);
    }
  }

  __device__ void start(float (&d)[32], int block) {
    const uint32_t b = uniform_operand(queries_ + (slot_ * memory_.blocks + block) * kBlockBytes);
    pin(d);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {  // of 32; chunks behind dim are zeros
      wgmma_e4m3(d, fragments_[step], group_descriptor<1024>(b + step * kStepKMajor), step != 0);
    }
    wgmma_commit();
  }

  __device__ void add_up(const float (&d)[32], int block) const {
    const float2* weights = reinterpret_cast<const float2*>(shared_.weights[slot_] + block * kBlockColumns) + pair_;
    float sums[kTokens][2] = {};
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
    for (int i = 0; i < kTokens; ++i) {
      // Each lane goes on with one of its two keys, which the next lane has given it its part of.
      const bool odd = pair_ & 1;
      float sum = odd ? sums[i][1] : sums[i][0];
      sum += __shfl_xor_sync(~0u, odd ? sums[i][0] : sums[i][1], 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      write(block * kTokens + i, sum);
    }
  }

  __device__ void write(int token, float sum) const {
    if (pair_ > 1 || token >= num_rows_) return;
    const Seen seen = shared_.seen[slot_][token];
    if (key_ < seen.begin || key_ >= seen.end) return;
    const float logit = scale_ * sum;
    const int64_t at = seen.column + key_;
    if (p_.bf16) {
      static_cast<__nv_bfloat16*>(p_.logits)[at] = __float2bfloat16(logit);
    } else {
      static_cast<float*>(p_.logits)[at] = logit;
    }
  }

  const LogitsParams& p_;
  const Memory& memory_;
  const Shared& shared_;
  uint32_t keys_, queries_;   // shared-memory addresses
  uint32_t fragments_[4][4];  // of the warp's 16 keys
  float scale_;
  int key_;
  int pair_, slot_, num_rows_;
};

// Of the 96 of a thread at launch, where two blocks are in flight.
inline constexpr int kCopierRegisters = 32, kMultiplierRegisters = 112;

// Grid: as many CTAs as there are multiprocessors.
template <int kHeads, bool kAhead, template <int> class Copier>
__global__ void __launch_bounds__(kThreads, 1)
    index_logits_kernel(const __grid_constant__ LogitsParams p, const __grid_constant__ Memory memory,
                        const __grid_constant__ Maps maps) {
  constexpr int kCopying = Copier<kHeads>::kThreads;
  constexpr bool kGathered = kCopying > 32;
  extern __shared__ __align__(1024) uint8_t dynamic[];
  __shared__ Shared shared;
  const uint32_t keys = smem_address(dynamic), queries = keys + memory.stages * kKeyBytes;
  const Groups<BlockTiles> groups{p, memory};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < memory.stages; ++stage) {
      mbarrier_init(smem_address(&shared.full[stage]), 2 * kCopying);
      mbarrier_init(smem_address(&shared.empty[stage]), kMultiply);
    }
    mbarrier_init_fence();
    if (!kGathered) {
      prefetch_map(&maps.keys);
      prefetch_map(&maps.queries);
    }
  }
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (p.report != nullptr) {
    for (int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x; row < p.num_rows; row += gridDim.x * kThreads) {
      report_row(p, row);
    }
  }
  find_share<kThreads>(groups, shared.share);
  __syncthreads();
  if (threadIdx.x >= kMultiply) {
    if constexpr (kAhead) registers_decrease<kCopierRegisters>();
    Copier<kHeads>{p, memory, maps, shared, keys, queries}.run(groups);
  } else {
    if constexpr (kAhead) registers_increase<kMultiplierRegisters>();
    Multiplier<kHeads, kAhead>(p, memory, shared, keys, queries).template run<kGathered>();
  }
}

}  // namespace attnops::sparse_indexer::sm90
