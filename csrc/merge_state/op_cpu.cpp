#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <string>

#include "merge_state/checks.h"
#include "merge_state/cpu/reference.h"

namespace attnops::merge_state {
namespace {

// Tokens per task: enough rows that a task outweighs its dispatch.
constexpr int64_t kGrain = 16;

// Calls `run` with a value of the element type: the one place that maps DType to C++ types here. The checks are those
// of all devices, so a dtype that only CUDA has kernels for arrives here, too.
template <class Run>
void dispatch(const char* op, DType dtype, const Run& run) {
  if (dtype == DType::kFloat32) return run(float{});
  if (dtype == DType::kFloat16) return run(attnops::cpu::Float16{});
  if (dtype == DType::kBFloat16) return run(attnops::cpu::BFloat16{});
  fail(op, std::string("no CPU kernel for ") + name_of(dtype));
}

void merge_state_cpu(const Tensor& out, const Tensor& lse, const Tensor& out_a, const Tensor& lse_a,
                     const Tensor& out_b, const Tensor& lse_b) {
  const Params params = checked_params(out, lse, out_a, lse_a, out_b, lse_b);
  dispatch("merge_state", params.dtype, [&](auto element) {
    torch::stable::parallel_for(0, params.num_tokens, kGrain, [&](int64_t begin, int64_t end) {
      cpu::merge_tokens<decltype(element)>(params, begin, end);
    });
  });
}

void merge_states_cpu(const Tensor& out, const Tensor& lse, const Tensor& outs, const Tensor& lses) {
  const ManyParams params = checked_many_params(out, lse, outs, lses);
  dispatch("merge_states", params.dtype, [&](auto element) {
    torch::stable::parallel_for(0, params.num_tokens, kGrain, [&](int64_t begin, int64_t end) {
      cpu::merge_many_tokens<decltype(element)>(params, begin, end);
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CPU, m) {
  m.impl("merge_state", TORCH_BOX(&merge_state_cpu));
  m.impl("merge_states", TORCH_BOX(&merge_states_cpu));
}

}  // namespace attnops::merge_state
