#pragma once
#include <cstdint>

// Barriers, fences and register reallocation of sm_90, one function per instruction.
namespace attnops::sm90 {

__device__ inline uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Transaction barriers in shared memory. A wait names the parity of the phase that it waits for, counted from 0.
__device__ inline void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialized barriers visible to the copy engine and to other CTAs of the cluster.
__device__ inline void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void mbarrier_arrive(uint32_t barrier, int count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Without a branch, which would end what the compiler lets fly asynchronously.
__device__ inline void mbarrier_arrive_if(uint32_t barrier, bool condition) {
  asm volatile(
      "{\n"
      ".reg .pred chosen;\n"
      "setp.ne.b32 chosen, %1, 0;\n"
      "@chosen mbarrier.arrive.shared::cta.b64 _, [%0];\n"
      "}\n" ::"r"(barrier),
      "r"(static_cast<int>(condition))
      : "memory");
}

__device__ inline void mbarrier_arrive_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Whether a phase is over, without waiting for it.
__device__ inline bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.b32 %0, 1, 0, done;\n}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// All threads that a barrier counts meet there, as at a hardware barrier.
__device__ inline void mbarrier_meet(uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .b64 phase;\n"
      ".reg .pred done;\n"
      "mbarrier.arrive.shared::cta.b64 phase, [%0];\n"
      "again:\n"
      "mbarrier.try_wait.shared::cta.b64 done, [%0], phase;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier)
      : "memory");
}

// Hardware barriers 1 .. 15 (0 is __syncthreads): `arrive` does not wait.
__device__ inline void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same, and whether any of the threads says yes.
__device__ inline bool named_barrier_any(int id, int threads, bool yes) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred mine, any;\n"
      "setp.ne.b32 mine, %3, 0;\n"
      "bar.red.or.pred any, %1, %2, mine;\n"
      "selp.b32 %0, 1, 0, any;\n"
      "}\n"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<int>(yes))
      : "memory");
  return any != 0;
}

__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Waits, and tells every thread whether any came with `value`.
__device__ inline bool named_barrier_or(int id, int threads, bool value) {
  uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred mine, any;\n"
      "setp.ne.u32 mine, %3, 0;\n"
      "barrier.cta.red.or.pred any, %1, %2, mine;\n"
      "selp.u32 %0, 1, 0, any;\n"
      "}\n"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(value))
      : "memory");
  return any != 0;
}

// Waits where `waits` says so, else only arrives: without a branch.
__device__ inline void named_barrier_meet(int id, int threads, bool waits) {
  asm volatile(
      "{\n"
      ".reg .pred waits;\n"
      "setp.ne.u32 waits, %2, 0;\n"
      "@waits bar.sync %0, %1;\n"
      "@!waits bar.arrive %0, %1;\n"
      "}\n" ::"r"(id),
      "r"(threads), "r"(static_cast<uint32_t>(waits))
      : "memory");
}

// Orders ordinary accesses to shared memory before those of the matrix units and the copy engine, or after them.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int kRegisters>
__device__ inline void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ inline void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Programmatic dependent launch: the next kernel may start, and: wait until the kernel before has finished and its
// writes are visible. Both do nothing in a plain launch.
__device__ inline void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ inline void wait_for_prerequisites() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace attnops::sm90
