#pragma once
#include <cstdint>

#include "device/sm90/guess.cuh"

// Thread-block clusters: CTAs that run at the same time and reach each other's shared memory.
namespace attnops::sm90 {

__device__ inline int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// A barrier of all threads of the cluster, in two halves. What a thread wrote before it arrived is there for all after
// they have waited.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The same for threads that have written nothing but barriers, made visible by mbarrier_init_fence.
__device__ inline void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// Where an address of this CTA's shared memory lies in that of CTA `rank`.
__device__ inline uint32_t address_in(uint32_t address, int rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

// Stores to another CTA that its barrier counts, in bytes, when they have come.
__device__ inline void store_async(uint32_t remote, float4 v, uint32_t remote_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(remote_barrier)
      : "memory");
}

__device__ inline void store_async(uint32_t remote, float2 v, uint32_t remote_barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(remote),
               "f"(v.x), "f"(v.y), "r"(remote_barrier)
               : "memory");
}

__device__ inline void store_async(uint32_t remote, int v, uint32_t remote_barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(remote), "r"(v),
               "r"(remote_barrier)
               : "memory");
}

// Arrives at a barrier of any CTA of the cluster (`address_in`), without a branch, and orders reads alone: to publish
// writes to the cluster would cost a fence of the whole GPU.
__device__ inline void mbarrier_arrive_remote_if(uint32_t remote, bool condition) {
  asm volatile(
      "{\n"
      ".reg .pred chosen;\n"
      "setp.ne.b32 chosen, %1, 0;\n"
      "@chosen mbarrier.arrive.shared::cluster.b64 _, [%0];\n"
      "}\n" ::"r"(remote),
      "r"(static_cast<int>(condition))
      : "memory");
}

// Waits for a phase of a barrier that other CTAs of the cluster complete.
__device__ inline void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace attnops::sm90
