#include <torch/csrc/stable/library.h>

#include "context_parallel/checks.h"
#include "context_parallel/cuda/launch.h"
#include "torch_bindings/stream.h"

namespace attnops::context_parallel {
namespace {

void seqlens_cuda(const Tensor& local_seqlens, const Tensor& seqlens, int64_t rank, int64_t world_size,
                  int64_t interleave, int64_t tokens_per_request) {
  const SeqlensParams params =
      checked_seqlens(local_seqlens, seqlens, rank, world_size, interleave, tokens_per_request);
  const OnDevice guard(seqlens);
  launch(params, current_stream(seqlens));
}

void slots_cuda(const Tensor& local_slots, const Tensor& slots, int64_t rank, int64_t world_size, int64_t interleave) {
  const SlotsParams params = checked_slots(local_slots, slots, rank, world_size, interleave);
  const OnDevice guard(slots);
  launch(params, current_stream(slots));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CUDA, m) {
  m.impl("context_parallel_seqlens", TORCH_BOX(&seqlens_cuda));
  m.impl("context_parallel_slots", TORCH_BOX(&slots_cuda));
}

}  // namespace attnops::context_parallel
