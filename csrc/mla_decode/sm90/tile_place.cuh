#pragma once
#include "device/sm90/barrier.cuh"
#include "device/sm90/copy.cuh"
#include "device/sm90/wgmma.cuh"
#include "mla_decode/sm90/layout.h"

// Where a loading warp puts what it brings: its half of one of the two KV buffers, and the barriers of that.
namespace attnops::mla_decode::sm90 {

using attnops::sm90::mbarrier_wait;

class TilePlace {
 protected:
  __device__ TilePlace(uint8_t* base, uint32_t shared, bool read_once)
      : base_(base),
        shared_(shared),
        read_once_(attnops::sm90::l2_policy(read_once)),
        warp_(threadIdx.x % kGroupThreads / 32),
        lane_(threadIdx.x % 32),
        buffer_(warp_ / 2),
        part_(warp_ == 0 || warp_ == 3 ? kPartLeft : kPartRight) {}

  __device__ bool has_rope() const { return warp_ % 2 == 0; }  // with the half that is given back first

  __device__ void wait_empty(int part) const {
    mbarrier_wait(shared_ + barrier_empty(buffer_, part), empty_parity_ ^ 1);
  }

  __device__ uint32_t kv_tile(int column) const {
    return shared_ + kKv + buffer_ * kOperandBytes + column * kTileBytes;
  }

  __device__ uint32_t unit_full(int unit) const { return shared_ + barrier_full(buffer_, unit); }

  // Tells the consumers that the warp's copies of a unit are there, once all but the last kPending groups have landed;
  // for kWarps of the buffer's two.
  template <int kPending, int kWarps>
  __device__ void hand_over(int unit) const {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
    attnops::sm90::fence_async_proxy();  // rows arrive by ordinary writes
    attnops::sm90::mbarrier_arrive(unit_full(unit), kWarps);
  }

  __device__ static void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

  uint8_t* const base_;
  const uint32_t shared_;
  const uint64_t read_once_;
  const int warp_, lane_;
  const int buffer_;           // 0: even tiles of a piece, 1: odd ones
  const int part_;             // of the columns
  uint32_t empty_parity_ = 0;  // of the next phase
};

}  // namespace attnops::mla_decode::sm90
