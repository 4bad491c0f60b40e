#pragma once
#include "sparse_indexer/sm90/logits.cuh"
#include "sparse_indexer/sm90/prompt_copy.cuh"

// Logits of prompts: each warpgroup keeps some tokens of a group, their weights in registers, and all keys of the group
// pass it, 64 at a time.
namespace attnops::sparse_indexer::sm90 {

template <int kHeads, typename Out>
class PromptMultiplier {
  static constexpr int kColumns = kPromptColumns / 4;  // of a warpgroup
  static constexpr int kTokens = kColumns / kHeads;    // of a warpgroup
  static constexpr int kKeys = kTokens / 2;            // of a product, that a lane ends with
  static_assert(kTokens == 2 || kTokens == 4);

 public:
  static constexpr int kThreads = 512;
  static constexpr int kRegisters = 112, kCopierRegisters = 32;  // of the 96 at launch

  __device__ PromptMultiplier(const LogitsParams& p, PromptShared& shared, uint32_t keys, uint32_t queries)
      : p_(p), shared_(shared), keys_(keys), queries_(queries) {}

  __device__ void run() {
    if (shared_.share.num_tiles() == 0) return;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    group_ = __shfl_sync(~0u, threadIdx.x / 128, 0);
    pair_ = lane % 4;
    row_ = warp * 16 + lane / 4 + (kKeys == 1 && (pair_ & 2) ? 8 : 0);
    read_tile();
    slot_ = tile_slot_;
    wait_for_tokens();
    read_tokens();
#pragma unroll 1
    for (;;) {
      const uint32_t b = own_queries(slot_);
      const uint32_t a = uniform_operand(keys_ + stage_ * kPromptKeyBytes);
      const float* scales = own_scales();
#pragma unroll
      for (int part = 0; part < kPromptKeys / 64; ++part) {
        float d[kColumns / 2];
        start(d, a + part * (kBlockBytes >> 4), b);
        float scale[kKeys];
#pragma unroll
        for (int i = 0; i < kKeys; ++i) scale[i] = scales[64 * part + 8 * i];
        wgmma_wait<0>(d);
        const bool is_last = part + 1 == parts_;
        if (is_last) mbarrier_arrive(smem_address(&shared_.empty[stage_]));
        add_up(d, scale, first_key_ + 64 * part);
        if (is_last) break;
      }
      if (last_) return;
      next_stage();
      read_tile();
      if (tile_slot_ != slot_) {
        mbarrier_arrive(smem_address(&shared_.queries_empty[slot_]));
        slot_ = tile_slot_;
        wait_for_tokens();
        read_tokens();
      }
    }
  }

 private:
  __device__ void next_stage() {
    if (++stage_ == kPromptStages) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }

  __device__ void read_tile() {
    mbarrier_wait(smem_address(&shared_.full[stage_]), phase_);
    const PromptTile tile = shared_.tiles[stage_];
    first_key_ = tile.first_key + row_;
    parts_ = __shfl_sync(~0u, tile.parts, 0);
    tile_slot_ = __shfl_sync(~0u, tile.slot, 0);
    last_ = __shfl_sync(~0u, tile.last, 0);
  }
  __device__ uint32_t own_queries(int slot) const {
    return uniform_operand(queries_ + slot * kPromptQueryBytes + group_ * kColumns * 128);
  }
  __device__ const float* own_scales() const { return shared_.scales[stage_] + row_; }

  // Those of the tile, the next group.
  __device__ void wait_for_tokens() {
    mbarrier_wait(smem_address(&shared_.queries_full[tile_slot_]), groups_ / kPromptSlots & 1);
    ++groups_;
  }
  __device__ void read_tokens() {
    const float2* weights = reinterpret_cast<const float2*>(shared_.weights[slot_] + group_ * kColumns) + pair_;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const float2 w = weights[j * 4];
      weights_[2 * j] = w.x;
      weights_[2 * j + 1] = w.y;
    }
    const int num_rows = shared_.num_rows[slot_];
    const int token = group_ * kTokens + pair_ % kTokens;
    Seen seen{0, 0, 0};
    if (token < num_rows) seen = shared_.seen[slot_][token];
    logits_ = static_cast<Out*>(p_.logits) + seen.column;
    begin_ = seen.begin;
    count_ = max_of(seen.end - seen.begin, 0);
  }

  __device__ void start(float (&d)[kColumns / 2], uint32_t a, uint32_t b) const {
    pin(d);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {  // of 32; chunks behind dim are zeros
      wgmma_e4m3(d, group_descriptor<1024>(a + step * kStepKMajor), group_descriptor<1024>(b + step * kStepKMajor),
                 step != 0);
    }
    wgmma_commit();
  }

  __device__ void add_up(const float (&d)[kColumns / 2], const float (&scales)[kKeys], int key) const {
    float sums[kTokens][2] = {};
#pragma unroll
    for (int j = 0; j < kHeads / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          const int at = t * (kHeads / 8) + j;
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            sums[t][h] = fmaf(fmaxf(d[4 * at + 2 * h + e], 0.f), weights_[2 * at + e], sums[t][h]);
          }
        }
      }
    }
    // Lanes of a quad hold parts of the same sums. Each ends with a token, and with one key of two where there are two
    // tokens. The order of additions is that of Multiplier, so bits are.
    const bool odd = pair_ & 1, upper = pair_ & 2;
    float half[kTokens / 2][2];
#pragma unroll
    for (int t = 0; t < kTokens / 2; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        half[t][h] = odd ? sums[2 * t + 1][h] : sums[2 * t][h];
        half[t][h] += __shfl_xor_sync(~0u, odd ? sums[2 * t][h] : sums[2 * t + 1][h], 1);
      }
    }
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const float low = half[0][i], high = kTokens == 4 ? half[kTokens / 2 - 1][i] : half[0][1];
      const float sum = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, 2);
      write(key + 8 * i, scales[i] * sum);
    }
  }

  __device__ void write(int key, float logit) const {
    if (static_cast<uint32_t>(key - begin_) >= count_) return;
    if constexpr (sizeof(Out) == 2) {
      logits_[key] = __float2bfloat16(logit);
    } else {
      logits_[key] = logit;
    }
  }

  const LogitsParams& p_;
  PromptShared& shared_;
  uint32_t keys_, queries_;  // shared-memory addresses
  int group_, pair_, row_;
  int stage_ = 0, groups_ = 0, slot_ = 0;
  uint32_t phase_ = 0;
  int first_key_, parts_, tile_slot_, last_;  // of the tile
  float weights_[kColumns / 4];
  Out* logits_;  // of key 0 of the lane's token, which sees `count_` keys from `begin_` on
  int begin_;
  uint32_t count_;
};

template <int kHeads, typename Out>
__global__ void __launch_bounds__(PromptMultiplier<kHeads, Out>::kThreads + kCopy, 1)
    prompt_logits_kernel(const __grid_constant__ LogitsParams p, const __grid_constant__ Memory memory,
                         const __grid_constant__ Maps maps) {
  using Multiplier = PromptMultiplier<kHeads, Out>;
  constexpr int kMultiply = Multiplier::kThreads, kThreads = kMultiply + kCopy;
  extern __shared__ __align__(1024) uint8_t dynamic[];
  __shared__ PromptShared shared;
  const uint32_t keys = smem_address(dynamic), queries = keys + kPromptStages * kPromptKeyBytes;
  const Groups<PromptTiles> groups{p, memory};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kPromptStages; ++i) {
      mbarrier_init(smem_address(&shared.full[i]), 64);
      mbarrier_init(smem_address(&shared.empty[i]), kMultiply);
    }
    for (int i = 0; i < kPromptSlots; ++i) {
      mbarrier_init(smem_address(&shared.queries_full[i]), 64);
      mbarrier_init(smem_address(&shared.queries_empty[i]), kMultiply);
    }
    mbarrier_init_fence();
    prefetch_map(&maps.keys);
    prefetch_map(&maps.queries);
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
    registers_decrease<Multiplier::kCopierRegisters>();
    if (threadIdx.x < kMultiply + 32) PromptCopier<kHeads>{p, memory, maps, shared, keys, queries}.run(groups);
  } else {
    registers_increase<Multiplier::kRegisters>();
    Multiplier(p, shared, keys, queries).run();
  }
}

}  // namespace attnops::sparse_indexer::sm90
