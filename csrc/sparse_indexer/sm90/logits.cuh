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
// happen in registers, under the products of other warpgroups. Products keep shared memory so busy that whatever else
// goes through it, loads and shuffles, takes as long as one of them. So nobody waits for it: weights are asked for a
// block ahead, and lanes' sums meet under the products behind. Four warpgroups multiply; after them come those who
// copy.
namespace attnops::sparse_indexer::sm90 {

using namespace attnops::sm90;

// 16 bytes of shared memory, asked for here and not where they are used.
__device__ inline void read16(uint32_t address, uint32_t (&words)[4]) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address));
}

// A multiplying warpgroup: its 64 keys of every tile.
template <int kHeads>
class Multiplier {
  static constexpr int kTokens = kBlockColumns / kHeads;
  // Tokens are written two at a time: of a block, or of two blocks with one each.
  static constexpr int kPairs = max_of(kTokens / 2, 1);

  // A tile of keys and its group.
  struct Place {
    int stage, num_rows;
    uint32_t first_block;    // of the group's queries: a descriptor's word
    uint32_t weights, seen;  // addresses: of the lane's weights, and of what the group's tokens see
    float scale;             // of the lane's key
    int key;
  };
  // Of a lane's heads, for both of its keys.
  struct Sums {
    float of_token[kTokens][2];
  };
  // Of a lane's heads of a block.
  struct Weights {
    uint32_t words[kBlockColumns / 16][4];
  };
  // Sums of two tokens on their way through a quad, of which each lane ends with one key and one token.
  struct Pair {
    float own[2], got[2];
    uint32_t seen[4];
  };

 public:
  __device__ Multiplier(const LogitsParams& p, const Memory& memory, const Shared& shared, uint32_t keys,
                        uint32_t queries)
      : p_(p),
        memory_(memory),
        shared_(shared),
        keys_(keys + threadIdx.x / 128 * kBlockBytes),
        queries_(queries),
        pair_(__shfl_sync(~0u, static_cast<int>(threadIdx.x) % 4, threadIdx.x % 32)) {}

  template <bool kGathered>
  __device__ void run() {
    const bool early = memory_.slots > memory_.stages;
#pragma unroll 1
    for (int64_t left = shared_.num_tiles; left > 0; --left) {
      const Place place = next_place();
      if constexpr (kGathered) fence_async_proxy();  // rows arrive by ordinary writes
      load_keys(place.stage);
      if (early) release(place);
      multiply_blocks(place);
      if (!early) release(place);
    }
    meet();
    write();
  }

 private:
  // Waits for the next tile.
  __device__ Place next_place() {
    mbarrier_wait(smem_address(&shared_.full[stage_]), phase_);
    const Tile tile = shared_.tiles[stage_];
    // Lanes of a quad hold the same two keys; each writes one.
    const int key_in_tile = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + (pair_ & 1) * 8;
    const int slot = __shfl_sync(~0u, tile.slot, 0);
    const Place place{stage_,
                      __shfl_sync(~0u, tile.num_rows, 0),
                      uniform_operand(queries_ + slot * memory_.blocks * kBlockBytes),
                      smem_address(shared_.weights[slot]) + pair_ * kBlockColumns,
                      smem_address(shared_.seen[slot]),
                      shared_.scales[stage_][key_in_tile],
                      tile.first_key + key_in_tile};
    if (++stage_ == memory_.stages) {
      stage_ = 0;
      phase_ ^= 1;
    }
    return place;
  }
  __device__ void release(const Place& place) const { mbarrier_arrive(smem_address(&shared_.empty[place.stage])); }

  __device__ void load_keys(int stage) {
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16, chunk = threadIdx.x % 32 / 16;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      load_fragment(fragments_[step], keys_ + stage * kKeyBytes + swizzled(row, 2 * step + chunk));
    }
  }

  __device__ void multiply_blocks(const Place& place) {
    const int blocks = ceil_div(place.num_rows, kTokens);
    Weights weights;
    load_weights(weights, place, 0);
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      float d[kBlockColumns / 2];
      Sums sums, second;
      start(d, place, block);
      meet();
      wgmma_wait<0>(d);
      add_up(d, weights, sums);
      load_weights(weights, place, min_of(block + 1, blocks - 1));
      if constexpr (kTokens == 1) {
        if (++block == blocks) {  // the last token is alone: key -1 sees nothing
          write();
          hand_over(sums, sums, place, block - 1);
          return;
        }
        start(d, place, block);
        write();
        wgmma_wait<0>(d);
        add_up(d, weights, second);
        load_weights(weights, place, min_of(block + 1, blocks - 1));
        hand_over(sums, second, place, block - 1);
      } else {
        write();
        hand_over(sums, sums, place, block);
      }
    }
  }

  __device__ static void load_weights(Weights& weights, const Place& place, int block) {
#pragma unroll
    for (int i = 0; i < kBlockColumns / 16; ++i) {
      read16(place.weights + block * kBlockColumns * 4 + i * 16, weights.words[i]);
    }
  }

  // Chunks of 32 behind dim are zeros.
  __device__ void start(float (&d)[kBlockColumns / 2], const Place& place, int block) const {
    const uint32_t b = place.first_block + block * (kBlockBytes >> 4);
    pin(d);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      wgmma_e4m3(d, fragments_[step], group_descriptor<1024>(b + step * kStepKMajor), step != 0);
    }
    wgmma_commit();
  }

  __device__ static void add_up(const float (&d)[kBlockColumns / 2], const Weights& weights, Sums& sums) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) sums.of_token[i][0] = sums.of_token[i][1] = 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {  // of 8 columns
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float weight = __uint_as_float(weights.words[j / 2][j % 2 * 2 + i]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& sum = sums.of_token[j * 8 / kHeads][h];
          sum = fmaf(fmaxf(d[4 * j + 2 * h + i], 0.f), weight, sum);
        }
      }
    }
  }

  // Lanes begin to add up the sums of a block's tokens, or of two blocks'. A lane goes on with one of its two keys, and
  // the next lane gives it its part of that.
  __device__ void hand_over(const Sums& sums, const Sums& second, const Place& place, int block) {
    const bool odd = pair_ & 1;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      Pair& pair = pairs_[i];
      const int token = block * kTokens + 2 * i;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float(&of_keys)[2] = kTokens > 1 ? sums.of_token[(2 * i + j) % kTokens]
                                   : j == 0    ? sums.of_token[0]
                                               : second.of_token[0];
        pair.own[j] = odd ? of_keys[1] : of_keys[0];
        pair.got[j] = __shfl_xor_sync(~0u, odd ? of_keys[0] : of_keys[1], 1);
      }
      // A group of an odd number of tokens, a block each, has no last one for the upper lanes.
      const int own = kTokens > 1 ? token + pair_ / 2 : min_of(token + pair_ / 2, place.num_rows - 1);
      read16(place.seen + own * int{sizeof(Seen)}, pair.seen);
    }
    key_ = kTokens == 1 && block + pair_ / 2 >= place.num_rows ? -1 : place.key;
    scale_ = place.scale;
  }
  // Then with one of two tokens.
  __device__ void meet() {
    const bool upper = pair_ & 2;
#pragma unroll
    for (Pair& pair : pairs_) {
      const float first = pair.own[0] + pair.got[0], second = pair.own[1] + pair.got[1];
      pair.own[0] = upper ? second : first;
      pair.got[0] = __shfl_xor_sync(~0u, upper ? first : second, 2);
    }
  }
  __device__ void write() const {
#pragma unroll
    for (const Pair& pair : pairs_) {
      Seen seen;
      memcpy(&seen, pair.seen, sizeof seen);
      if (key_ < seen.begin || key_ >= seen.end) continue;
      const float logit = scale_ * (pair.own[0] + pair.got[0]);
      const int64_t at = seen.column + key_;
      if (p_.bf16) {
        static_cast<__nv_bfloat16*>(p_.logits)[at] = __float2bfloat16(logit);
      } else {
        static_cast<float*>(p_.logits)[at] = logit;
      }
    }
  }

  const LogitsParams& p_;
  const Memory& memory_;
  const Shared& shared_;
  uint32_t keys_, queries_;   // shared-memory addresses: the warpgroup's of the first tile, the first group's
  uint32_t fragments_[4][4];  // of the warp's 16 keys
  int pair_, stage_ = 0;
  uint32_t phase_ = 0;
  // What is on its way: of two tokens each, and the lane's key, -1 where nothing is.
  Pair pairs_[kPairs] = {};
  int key_ = -1;
  float scale_ = 0.f;
};

// Grid: as many CTAs as there are multiprocessors.
template <int kHeads, template <int> class Copier>
__global__ void __launch_bounds__(kThreads, 1)
    index_logits_kernel(const __grid_constant__ LogitsParams p, const __grid_constant__ Memory memory,
                        const __grid_constant__ Maps maps) {
  constexpr int kCopying = Copier<kHeads>::kThreads;
  constexpr bool kGathered = kCopying > 32;
  extern __shared__ __align__(1024) uint8_t dynamic[];
  __shared__ Shared shared;
  const uint32_t keys = smem_address(dynamic), queries = keys + memory.stages * kKeyBytes;
  const Groups groups{p, memory};
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
  find_share(groups, shared);
  __syncthreads();
  if (threadIdx.x >= kMultiply) {
    Copier<kHeads>{p, memory, maps, shared, keys, queries}.run(groups);
  } else {
    Multiplier<kHeads>(p, memory, shared, keys, queries).template run<kGathered>();
  }
}

}  // namespace attnops::sparse_indexer::sm90
