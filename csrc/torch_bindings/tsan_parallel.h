#pragma once
// Included before every source of the CPU module in a build with ThreadSanitizer (cmake/attnops.cmake), and in no
// other. OpenMP is not instrumented: what a caller wrote before a parallel region, and what workers wrote in it, looks
// unordered. This names the edges that the region has at its begin and at its end, and hides no race inside of it.
#include <torch/csrc/stable/ops.h>

extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);

namespace torch::stable {

// Lies on the caller's stack, so two regions have nothing in common.
template <class Run>
struct TsanRegion {
  const Run* run;
  char begin, end;

  // Its own reads come before the edge that it names.
  __attribute__((no_sanitize("thread"), noinline)) static void work(int64_t first, int64_t last, void* region) {
    auto* r = static_cast<TsanRegion*>(region);
    __tsan_acquire(&r->begin);
    (*r->run)(first, last);
    __tsan_release(&r->end);
  }
};

template <class Run>
void tsan_parallel_for(int64_t begin, int64_t end, int64_t grain, const Run& run) {
  TsanRegion<Run> region{&run, 0, 0};
  __tsan_release(&region.begin);
  STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(begin, end, grain, &TsanRegion<Run>::work, &region));
  __tsan_acquire(&region.end);
}

}  // namespace torch::stable

#define parallel_for tsan_parallel_for
