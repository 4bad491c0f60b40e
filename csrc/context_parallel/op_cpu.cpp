#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "context_parallel/checks.h"

namespace attnops::context_parallel {
namespace {

constexpr int64_t kGrain = 4096;  // rows per task that outweigh its dispatch

template <class Params>
void run_cpu(const Params& params) {
  torch::stable::parallel_for(0, params.size(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) params.run(i);
  });
}

void seqlens_cpu(const Tensor& local_seqlens, const Tensor& seqlens, int64_t rank, int64_t world_size,
                 int64_t interleave, int64_t tokens_per_request) {
  run_cpu(checked_seqlens(local_seqlens, seqlens, rank, world_size, interleave, tokens_per_request));
}

void slots_cpu(const Tensor& local_slots, const Tensor& slots, int64_t rank, int64_t world_size, int64_t interleave) {
  run_cpu(checked_slots(local_slots, slots, rank, world_size, interleave));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CPU, m) {
  m.impl("context_parallel_seqlens", TORCH_BOX(&seqlens_cpu));
  m.impl("context_parallel_slots", TORCH_BOX(&slots_cpu));
}

}  // namespace attnops::context_parallel
