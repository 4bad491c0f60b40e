#pragma once
// Included before every source of the CPU module in a build with ThreadSanitizer (cmake/attnops.cmake), and in no
// other. OpenMP is not instrumented: what a caller wrote before a parallel region, and what workers wrote in it, looks
// unordered. This names the edges that the region has at its begin and at its end, and hides no race inside of it.
#include <torch/csrc/stable/ops.h>

extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);

namespace torch::stable {

template <class Run>
void tsan_parallel_for(int64_t begin, int64_t end, int64_t grain, const Run& run) {
  char before = 0, after = 0;
  __tsan_release(&before);
  parallel_for(begin, end, grain, [&](int64_t first, int64_t last) {
    __tsan_acquire(&before);
    run(first, last);
    __tsan_release(&after);
  });
  __tsan_acquire(&after);
}

}  // namespace torch::stable

#define parallel_for tsan_parallel_for
