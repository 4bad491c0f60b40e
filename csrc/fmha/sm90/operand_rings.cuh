#pragma once
#include "device/sm90/wgmma.cuh"
#include "fmha/sm90/load.cuh"

namespace attnops::fmha::sm90 {

// How a warpgroup that computes takes works, queries, keys and values, and gives their places back. Warpgroups may take
// turns in issuing products. kFence: copies of rows arrive without a fence.
template <class Tr, bool kFence>
class OperandRings {
 protected:
  using Layout = SharedLayout<Tr>;
  static constexpr int kTurnBarrier = 2;                                    // + warpgroup
  static constexpr int kVRows = Tr::kFp8 ? Tr::kHeadDimV : Tr::kChunkRows;  // of a chunk of values in shared memory

  __device__ __forceinline__ OperandRings(const Schedule& s, char* base)
      : s_(s),
        base_(base),
        shared_(hopper::smem_address(base)),
        group_(static_cast<int>(threadIdx.x) / 128 - 1),
        lane_(threadIdx.x % 32),
        everywhere_(hopper::address_in(shared_, lane_ < s.cluster ? lane_ : 0)),
        k_operand_(hopper::chunk_operand<Tr::kChunkRows>(shared_ + Layout::kK)),
        v_operand_(hopper::chunk_operand<kVRows>(shared_ + Layout::kV)) {}

  __device__ __forceinline__ void take_turn() const {
    if constexpr (Tr::kShape.turns) hopper::named_barrier_sync(kTurnBarrier + group_, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (Tr::kShape.turns) {
      hopper::named_barrier_arrive(kTurnBarrier + (group_ == Tr::kWarpgroups - 1 ? 0 : group_ + 1), 256);
    }
  }

  __device__ __forceinline__ void release(uint32_t barrier) const {
    __syncwarp();
    hopper::mbarrier_arrive_if(barrier, lane_ == 0);
  }

  // Once their last product is done.
  __device__ __forceinline__ void release_queries(bool last) const {
    hopper::mbarrier_arrive_if(shared_ + Layout::kQEmpty + 8 * q_ring_.stage, last && lane_ == 0);
  }

  // A stage of keys or values, in both CTAs of a pair. The assembler lays an arrival through the cluster behind much of
  // the softmax, even one at home: so a CTA alone goes without.
  __device__ __forceinline__ void release_stage(int barrier) const {
    const bool alone = s_.cluster == 1;
    __syncwarp();
    hopper::mbarrier_arrive_if(shared_ + barrier, alone && lane_ == 0);
    hopper::mbarrier_arrive_remote_if(everywhere_ + barrier, !alone && lane_ < 2);
  }

  __device__ __forceinline__ void await_keys() const {
    hopper::mbarrier_wait(shared_ + Layout::kKFull + 8 * k_ring_.stage, k_ring_.phase);
    if constexpr (kFence) hopper::fence_async_proxy();
  }

  __device__ __forceinline__ void await_values() const {
    hopper::mbarrier_wait(shared_ + Layout::kVFull + 8 * v_ring_.stage, v_ring_.phase);
    if constexpr (kFence) hopper::fence_async_proxy();
  }

  __device__ __forceinline__ void release_keys() {
    release_stage(Layout::kKEmpty + 8 * k_ring_.stage);
    k_ring_.advance();
    k_operand_ = hopper::chunk_operand<Tr::kChunkRows>(shared_ + Layout::kK + k_ring_.stage * Tr::kKBytes);
  }

  __device__ __forceinline__ void release_values() {
    release_stage(Layout::kVEmpty + 8 * v_ring_.stage);
    v_ring_.advance();
    v_operand_ = hopper::chunk_operand<kVRows>(shared_ + Layout::kV + v_ring_.stage * Tr::kVBytes);
  }

  // Of a work without rows for this warpgroup: the others multiply meanwhile.
  __device__ __forceinline__ void pass_by(const Work& w) {
    const int tile_end = w.tile_end;
#pragma unroll 1
    for (int tile = w.tile_begin; tile < tile_end; ++tile) {
      take_turn();
      pass_turn();
      hopper::mbarrier_wait(shared_ + Layout::kKFull + 8 * k_ring_.stage, k_ring_.phase);
      release_keys();
      hopper::mbarrier_wait(shared_ + Layout::kVFull + 8 * v_ring_.stage, v_ring_.phase);
      release_values();
    }
  }

  const Schedule& s_;
  char* base_;
  uint32_t shared_;
  int group_, lane_;
  uint32_t everywhere_;  // shared_ in CTA `lane` of the cluster
  uint32_t k_operand_, v_operand_;
  Ring<Tr::kWorkStages> work_ring_;
  Ring<Tr::kQStages> q_ring_;
  Ring<Tr::kStages> k_ring_, v_ring_;
};

}  // namespace attnops::fmha::sm90
