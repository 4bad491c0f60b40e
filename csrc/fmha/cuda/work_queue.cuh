#pragma once
#include "fmha/sm90/merge.cuh"

namespace attnops::fmha {

using sm90::Schedule;
using sm90::Work;

// The works of a CTA, one after another: pieces, then whole tiles, in the plan's order (sm90::decode_work). With
// semaphores CTAs take them from one counter, whoever is free the next; without, each has every gridDim.x-th.
//
// The CTA's first thread alone looks for a work, while the copies of the one before are on their way. It knows the
// next work's number by then, and asks for the number of the one behind.
template <class Tr>
class WorkQueue {
 public:
  // The work of now, the one behind it, and the number of the one behind that: in shared memory.
  struct Shared {
    Work work, following;
    int next;
    sm90::Cuts cuts;
  };

  __device__ __forceinline__ WorkQueue(const Params& p, const Schedule& s, char* shared)
      : p_(p), s_(s), shared_(*reinterpret_cast<Shared*>(shared)) {}

  // Tokens of a work: 0 and more; kNone where there are no more works.
  static constexpr int kNone = -1;
  __device__ __forceinline__ const Work& work() const { return shared_.work; }
  __device__ __forceinline__ int pieces() const { return shared_.cuts.pieces; }

  // The first work has neither tokens nor keys. By all threads.
  __device__ __forceinline__ void begin() const {
    if (threadIdx.x == 0) {
      shared_.work.num_tokens = shared_.work.tile_begin = shared_.work.tile_end = 0;
      shared_.next = static_cast<int>(blockIdx.x);
      shared_.cuts = sm90::cuts_of(p_, s_);
    }
    __syncthreads();
  }

  // By all threads, when nobody needs the work of now.
  __device__ __forceinline__ void advance() const {
    constexpr int kWords = sizeof(Work) / 4;
    static_assert(sizeof(Work) % 4 == 0 && kWords <= Tr::kThreads);
    __syncthreads();
    const int i = static_cast<int>(threadIdx.x);
    if (i < kWords) reinterpret_cast<int*>(&shared_.work)[i] = reinterpret_cast<const int*>(&shared_.following)[i];
    __syncthreads();
  }

  // Finds the work behind that of now. By the first thread.
  __device__ __noinline__ void find() const {
    Work w;
    int index = shared_.next;
    for (;;) {
      const int taken = p_.semaphores != nullptr ? atomicAdd(p_.semaphores, 1) : 0;
      const bool exists = index < s_.num_works && sm90::decode_work<Tr::kKeys>(p_, s_, shared_.cuts, index, w);
      if (!exists) w.num_tokens = kNone;
      if (exists && w.num_tokens == 0 && index < shared_.cuts.pieces * s_.works_per_tile) {
        sm90::count_piece(p_, Tr::kComputeWarps);  // whoever merges waits for those that cannot be, too
      }
      index = following(index, taken);
      if (w.num_tokens != 0) break;
    }
    shared_.next = index;
    shared_.following = w;
  }

 private:
  // Whatever the counter holds, no more works than there are.
  __device__ __forceinline__ int following(int index, int taken) const {
    const int ctas = static_cast<int>(gridDim.x);
    if (p_.semaphores == nullptr) return index + ctas;
    return ctas + static_cast<int>(min_of(static_cast<uint32_t>(taken), static_cast<uint32_t>(s_.num_works)));
  }

  const Params& p_;
  const Schedule& s_;
  Shared& shared_;
};

}  // namespace attnops::fmha
