#pragma once
#include "sparse_indexer/sm90/logits.cuh"

// Logits of prompts: each multiplying warpgroup keeps some tokens of a group, with their weights in registers, and the
// keys of a tile pass it 64 at a time. So a product has many columns.
namespace attnops::sparse_indexer::sm90 {

enum : int { kPlain, kTurns, kHalves, kNoSums, kTurnsEarly, kNoProducts, kLate, kLateTurns };

template <int kHeads, int kColumns, int kMode>
class WideMultiplier {
  static constexpr int kBlocks = kColumns == 192 ? 9 : 8;
  static constexpr int kGroups = kBlocks * kBlockColumns / kColumns;  // warpgroups
  static constexpr int kTokens = kColumns / kHeads;
  static constexpr int kPartTokens = kMode == kHalves ? kTokens / 2 : kTokens;
  static constexpr int kUnit = kPartTokens == 2 || kPartTokens == 6 ? 2 : 4;  // tokens that lanes of a quad divide
  static constexpr int kUnits = (kTokens + kUnit - 1) / kUnit;
  static constexpr int kTurnBarrier = 1;
  static constexpr bool kIsLate = kMode == kLate || kMode == kLateTurns, kTakesTurns = kMode == kTurns || kMode == kLateTurns;

 public:
  static constexpr int kMultiply = kGroups * 128;
  static constexpr int kRegisters = kGroups == 2 ? 232 : kGroups == 3 ? 160 : 112, kCopierRegisters = kGroups == 2 ? 40 : 32;

  __device__ WideMultiplier(const LogitsParams& p, const Memory& memory, const Shared& shared, uint32_t keys,
                            uint32_t queries)
      : p_(p), memory_(memory), shared_(shared), keys_(keys), queries_(queries) {}

  __device__ void run() {
    group_ = __shfl_sync(~0u, threadIdx.x / 128, 0);
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    pair_ = lane % 4;
    row_ = warp * 16 + lane / 4;
    int stage = 0, slot = -1;
    uint32_t phase = 0;
    if constexpr (kTakesTurns || kMode == kTurnsEarly) {
      if (group_ == kGroups - 1) named_barrier_arrive(kTurnBarrier, 256);
    }
#pragma unroll 1
    for (int left = static_cast<int>(shared_.num_tiles); left > 0; --left) {
      mbarrier_wait(smem_address(&shared_.full[stage]), phase);
      const Tile tile = shared_.tiles[stage];
      if (const int now = __shfl_sync(~0u, tile.slot, 0); now != slot) {
        slot = now;
        if constexpr (kIsLate) finish_late();
        read_tokens(slot, tile.num_rows);
      }
      const uint32_t empty = smem_address(&shared_.empty[stage]);
      multiply(uniform_operand(keys_ + stage * kKeyBytes),
               uniform_operand(queries_ + (slot * kBlocks + group_ * (kColumns / kBlockColumns)) * kBlockBytes),
               shared_.scales[stage] + row_, tile.first_key + row_, empty);
      if (++stage == memory_.stages) {
        stage = 0;
        phase ^= 1;
      }
    }
    if constexpr (kIsLate) finish_late();
  }

 private:
  __device__ void finish_late() {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) finish(late_[u], seen_[u], late_near_, late_far_, late_key_);
    late_key_ = -1024;
  }

  __device__ void read_tokens(int slot, int num_rows) {
    const float2* weights = reinterpret_cast<const float2*>(shared_.weights[slot] + group_ * kColumns) + pair_;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const float2 w = weights[j * 4];
      weights_[2 * j] = w.x;
      weights_[2 * j + 1] = w.y;
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int token = group_ * kTokens + u * kUnit + pair_ % kUnit;
      seen_[u] = token < num_rows && u * kUnit + pair_ % kUnit < kTokens ? shared_.seen[slot][token] : Seen{0, 0, 0};
    }
  }

  __device__ void multiply(uint32_t a, uint32_t b, const float* scales, int key, uint32_t empty) {
    constexpr int kParts = kTileKeys / 64;
    if constexpr (kMode == kHalves) {
      float low[kColumns / 4], high[kColumns / 4];
      constexpr uint32_t kHalf = kColumns / 2 * 128 >> 4;
      start(low, a, b);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        start(high, a, b + kHalf);
        const float near = scales[part * 64], far = scales[part * 64 + 8];
        wgmma_wait<1>(low);
        add_up<0>(low, near, far, key);
        if (part == kParts - 1) {
          wgmma_wait<0>(high);
          mbarrier_arrive(empty);
          add_up<1>(high, near, far, key);
          break;
        }
        a += kBlockBytes >> 4;
        start(low, a, b);
        wgmma_wait<1>(high);
        add_up<1>(high, near, far, key);
        key += 64;
      }
    } else {
#pragma unroll 1
      for (int part = 0; part < kParts; ++part) {
        float d[kColumns / 2];
        if constexpr (kTakesTurns || kMode == kTurnsEarly) {
          named_barrier_sync(kTurnBarrier + group_, 256);
        }
        start(d, a, b);
        if constexpr (kIsLate) finish_late();
        const float near = scales[part * 64], far = scales[part * 64 + 8];
        if constexpr (kMode == kTurnsEarly) named_barrier_arrive(kTurnBarrier + (group_ + 1) % kGroups, 256);
        if constexpr (kTakesTurns) {
          wgmma_wait<1>(d);
          named_barrier_arrive(kTurnBarrier + (group_ + 1) % kGroups, 256);
        }
        wgmma_wait<0>(d);
        if (part == kParts - 1) mbarrier_arrive(empty);
        add_up<0>(d, near, far, key);
        late_near_ = near, late_far_ = far, late_key_ = key;
        a += kBlockBytes >> 4;
        key += 64;
      }
    }
  }

  template <int kCount>
  __device__ void start(float (&d)[kCount], uint32_t a, uint32_t b) {
    pin(d);
    if (kMode == kNoProducts) return;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {  // of 32; chunks behind dim are zeros
      wgmma_e4m3(d, group_descriptor<1024>(a + step * kStepKMajor), group_descriptor<1024>(b + step * kStepKMajor),
                 step != 0);
      if (kTakesTurns && step == 2) wgmma_commit();
    }
    wgmma_commit();
  }

  // Half kHalf of the warpgroup's columns, or all.
  template <int kHalf, int kCount>
  __device__ void add_up(const float (&d)[kCount], float near, float far, int key) {
    constexpr int kHere = kMode == kHalves ? kUnits / 2 : kUnits;
    static_assert(kHere > 0);
#pragma unroll
    for (int i = 0; i < kHere; ++i) {
      const int u = kHalf * kHere + i;
      float sums[kUnit][2] = {};
      if constexpr (kMode == kNoSums) {
        sums[0][0] = d[i];
      } else {
#pragma unroll
        for (int j = 0; j < kHeads / 8; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
#pragma unroll
            for (int t = 0; t < kUnit; ++t) {
              if (u * kUnit + t >= kTokens) continue;
              const int at = (i * kUnit + t) * (kHeads / 8) + j;
              const float w = weights_[2 * (at + kHalf * kCount / 4) + e];
#pragma unroll
              for (int h = 0; h < 2; ++h) sums[t][h] = fmaf(fmaxf(d[4 * at + 2 * h + e], 0.f), w, sums[t][h]);
            }
          }
        }
      }
      if constexpr (kIsLate) {
#pragma unroll
        for (int t = 0; t < kUnit; ++t) late_[u][t][0] = sums[t][0], late_[u][t][1] = sums[t][1];
      } else {
        finish(sums, seen_[u], near, far, key);
      }
    }
  }

  // Lanes of a quad hold parts of the same sums. Each ends with a token of its own.
  __device__ void finish(const float (&sums)[kUnit][2], const Seen& seen, float near, float far, int key) const {
    const bool odd = pair_ & 1, upper = pair_ & 2;
    float half[kUnit / 2][2];
#pragma unroll
    for (int t = 0; t < kUnit / 2; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        half[t][h] = odd ? sums[2 * t + 1][h] : sums[2 * t][h];
        half[t][h] += __shfl_xor_sync(~0u, odd ? sums[2 * t][h] : sums[2 * t + 1][h], 1);
      }
    }
    if constexpr (kUnit == 4) {
      float all[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        all[h] = upper ? half[1][h] : half[0][h];
        all[h] += __shfl_xor_sync(~0u, upper ? half[0][h] : half[1][h], 2);
      }
      write(seen, key, near * all[0]);
      write(seen, key + 8, far * all[1]);
    } else {
      float all = upper ? half[0][1] : half[0][0];
      all += __shfl_xor_sync(~0u, upper ? half[0][0] : half[0][1], 2);
      write(seen, key + (upper ? 8 : 0), (upper ? far : near) * all);
    }
  }

  __device__ void write(const Seen& seen, int key, float logit) const {
    if (key < seen.begin || key >= seen.end) return;
    const int64_t at = seen.column + key;
    if (p_.bf16) {
      static_cast<__nv_bfloat16*>(p_.logits)[at] = __float2bfloat16(logit);
    } else {
      static_cast<float*>(p_.logits)[at] = logit;
    }
  }

  const LogitsParams& p_;
  const Memory& memory_;
  const Shared& shared_;
  uint32_t keys_, queries_;  // shared-memory addresses
  int group_, pair_, row_;
  float weights_[kColumns / 4];
  Seen seen_[kUnits] = {};
  float late_[kUnits][kUnit][2] = {}, late_near_ = 0, late_far_ = 0;
  int late_key_ = -1024;
};

template <int kHeads, int kColumns, int kMode>
__global__ void __launch_bounds__(WideMultiplier<kHeads, kColumns, kMode>::kMultiply + kCopy, 1)
    wide_logits_kernel(const __grid_constant__ LogitsParams p, const __grid_constant__ Memory memory,
                       const __grid_constant__ Maps maps) {
  using Multiplier = WideMultiplier<kHeads, kColumns, kMode>;
  constexpr int kMultiply = Multiplier::kMultiply, kThreads = kMultiply + kCopy;
  extern __shared__ __align__(1024) uint8_t dynamic[];
  __shared__ Shared shared;
  const uint32_t keys = smem_address(dynamic), queries = keys + memory.stages * kKeyBytes;
  const Groups groups{p, memory};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < memory.stages; ++stage) {
      mbarrier_init(smem_address(&shared.full[stage]), 64);
      mbarrier_init(smem_address(&shared.empty[stage]), kMultiply);
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
  find_share<kThreads>(groups, shared);
  __syncthreads();
  if (threadIdx.x >= kMultiply) {
    registers_decrease<Multiplier::kCopierRegisters>();
    BoxCopier<kHeads, kMultiply>{p, memory, maps, shared, keys, queries}.run(groups);
  } else {
    registers_increase<Multiplier::kRegisters>();
    Multiplier(p, memory, shared, keys, queries).run();
  }
}

}  // namespace attnops::sparse_indexer::sm90
