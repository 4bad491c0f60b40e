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

// Both at once, where `now`: without a branch, which loads under way would be waited for at.
__device__ __forceinline__ void wait_and_let_next_start(bool now) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n .reg .pred now;\n setp.ne.b32 now, %0, 0;\n"
      " @now griddepcontrol.wait;\n @now griddepcontrol.launch_dependents;\n}" ::"r"(static_cast<int>(now))
      : "memory");
#endif
}

}  // namespace attnops
