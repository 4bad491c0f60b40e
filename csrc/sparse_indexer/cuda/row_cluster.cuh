#pragma once
#include <cstdint>

// The CTAs that select from one row together.
namespace attnops::sparse_indexer {

// CTAs of a row. Before Hopper there is one.
struct Cluster {
  int rank, size;

#if __CUDA_ARCH__ >= 900
  __device__ static int own_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<int>(rank);
  }
  __device__ static int launched() {
    uint32_t size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return static_cast<int>(size);
  }
  __device__ void arrive() const {
    if (size > 1) asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  }
  __device__ void wait() const {
    if (size > 1) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
  }
  // Threads that have ended count as arrived.
  __device__ void sync() const {
    if (size == 1) return __syncthreads();
    arrive();
    wait();
  }
  template <typename T>
  __device__ uint32_t address(const T* local, int other) const {
    uint32_t remote;
    const uint32_t own = static_cast<uint32_t>(__cvta_generic_to_shared(local));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(own), "r"(other));
    return remote;
  }
  __device__ uint2 load(const uint2* local, int other) const {
    uint2 v;
    asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];"
                 : "=r"(v.x), "=r"(v.y)
                 : "r"(address(local, other))
                 : "memory");
    return v;
  }
  __device__ uint32_t load(const uint32_t* local, int other) const {
    uint32_t v;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(address(local, other)) : "memory");
    return v;
  }
#else
  __device__ static int own_rank() { return 0; }
  __device__ static int launched() { return 1; }
  __device__ void arrive() const {}
  __device__ void wait() const {}
  __device__ void sync() const { __syncthreads(); }
  __device__ uint2 load(const uint2* local, int) const { return *local; }
  __device__ uint32_t load(const uint32_t* local, int) const { return *local; }
#endif
};

}  // namespace attnops::sparse_indexer
