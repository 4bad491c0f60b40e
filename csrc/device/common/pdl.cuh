#pragma once

namespace attnops {

// Programmatic dependent launch (CUDA programming guide): a kernel launched with the attribute may start before the
// kernels ahead of it in the stream have ended, and must not touch what they read or write before it has waited.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

// From here on the next kernel may take the SMs that this one leaves free.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

}  // namespace attnops
