#pragma once
#include <cstdint>

#include "device/sm90/barrier.cuh"
#include "device/sm90/cluster.cuh"

// The CTAs that select from one row together.
namespace attnops::sparse_indexer {

// CTAs of a row. Before Hopper there is one.
struct Cluster {
  int rank, size;

#if __CUDA_ARCH__ >= 900
  __device__ static int own_rank() { return attnops::sm90::cluster_rank(); }
  __device__ static int launched() {
    uint32_t size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return static_cast<int>(size);
  }

  // By one thread: barriers that count the bytes which all CTAs of a row send to this one.
  __device__ static void make(uint64_t* first, uint64_t* second) {
    attnops::sm90::mbarrier_init(address(first), 1);
    attnops::sm90::mbarrier_init(address(second), 1);
    attnops::sm90::mbarrier_init_fence();
  }
  // By all threads, behind it: all CTAs have begun, and have their barriers.
  __device__ void meet() const {
    if (size == 1) return;
    attnops::sm90::cluster_arrive_relaxed();
    attnops::sm90::cluster_wait();
  }
  __device__ static void expect(uint64_t* barrier, uint32_t bytes) {
    attnops::sm90::mbarrier_arrive_expect(address(barrier), static_cast<int>(bytes));
  }
  __device__ static void await(uint64_t* barrier, uint32_t parity) {
    attnops::sm90::mbarrier_wait_cluster(address(barrier), parity);
  }
  // To where `to` is in another CTA, or in this one. A fence of the whole GPU, as a barrier of the cluster would need
  // for it, takes longer than all else here.
  __device__ static void send(uint32_t* to, uint32_t value, uint64_t* barrier, int other) {
    attnops::sm90::store_async(address(to, other), static_cast<int>(value), address(barrier, other));
  }
  __device__ static void send(uint32_t* to, const uint4& value, uint64_t* barrier, int other) {
    const float4 v{__uint_as_float(value.x), __uint_as_float(value.y), __uint_as_float(value.z),
                   __uint_as_float(value.w)};
    attnops::sm90::store_async(address(to, other), v, address(barrier, other));
  }

 private:
  __device__ static uint32_t address(const void* own) { return attnops::sm90::smem_address(own); }
  __device__ static uint32_t address(const void* own, int other) {
    return attnops::sm90::address_in(address(own), other);
  }
#else
  __device__ static int own_rank() { return 0; }
  __device__ static int launched() { return 1; }
  __device__ static void make(uint64_t*, uint64_t*) {}
  __device__ void meet() const {}
  __device__ static void expect(uint64_t*, uint32_t) {}
  __device__ static void await(uint64_t*, uint32_t) {}
  __device__ static void send(uint32_t*, uint32_t, uint64_t*, int) {}
  __device__ static void send(uint32_t*, const uint4&, uint64_t*, int) {}
#endif
};

}  // namespace attnops::sparse_indexer
