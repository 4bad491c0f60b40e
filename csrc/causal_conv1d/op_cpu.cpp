#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstring>

#include "causal_conv1d/checks.h"
#include "causal_conv1d/cpu/launch.h"
#include "core/math.h"
#include "cpu/slot_owners.h"
#include "torch_bindings/cpu_faults.h"

namespace attnops::causal_conv1d {
namespace {

// `run(request, begin, end)` convolves some channels of a request.
template <typename Run>
void run_all(const Params& p, const Run& run) {
  const int64_t blocks = ceil_div<int64_t>(p.channels, cpu::kBlock);
  torch::stable::parallel_for(0, p.batch_size * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task % blocks * cpu::kBlock;
      run(task / blocks, first, min_of(first + cpu::kBlock, p.channels));
    }
  });
}

// Tokens of no request are padding: zeros.
void clear_padding(const Params& p) {
  const int64_t size = size_of(p.dtype);
  const auto clear = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      std::memset(static_cast<char*>(p.out) + t * p.stride_out * size, 0, static_cast<size_t>(p.channels * size));
    }
  };
  clear(0, p.first_token(0));
  clear(p.first_token(p.batch_size), p.num_tokens);
}

void check_all(const char* op, const Params& p) {
  CpuFaults faults(op, "conv_states", p.report);
  attnops::cpu::SlotOwners owners = attnops::cpu::owners_of(p.state_indices, p.batch_size);
  for (int64_t request = 0; request < p.batch_size; ++request) {
    p.check_with(request, faults.report(),
                 [&](int64_t slot) { owners.check_next(p.op, slot, request, faults.report()); });
  }
  faults.check();
}

void run(const char* op, const Params& p) {
  check_all(op, p);
  clear_padding(p);
  run_all(p, [&](int64_t request, int64_t begin, int64_t end) { cpu::run_channels(p, request, begin, end); });
}

void causal_conv1d_cpu(const Tensor& out, const Tensor& conv_states, const Tensor& x, const Tensor& weight,
                       const OptionalTensor& bias, const Tensor& cu_seqlens, const Tensor& state_indices,
                       const OptionalTensor& has_initial_state, bool silu, const OptionalTensor& report) {
  run("causal_conv1d",
      checked_varlen({out, conv_states, x, weight, bias, state_indices, silu, report}, cu_seqlens, has_initial_state));
}

void causal_conv1d_update_cpu(const Tensor& out, const Tensor& conv_states, const Tensor& x, const Tensor& weight,
                              const OptionalTensor& bias, const Tensor& state_indices, bool silu,
                              const OptionalTensor& report, const OptionalTensor& windows,
                              const OptionalTensor& tree_mask) {
  const char* op = "causal_conv1d_update";
  const Arguments given{out, conv_states, x, weight, bias, state_indices, silu, report};
  if (!windows) {
    refuse_mask_alone(tree_mask);
    return run(op, checked_update(given));
  }
  const DraftParams p = checked_drafts(given, *windows, tree_mask);
  check_all(op, p.conv);
  run_all(p.conv, [&](int64_t request, int64_t begin, int64_t end) { cpu::run_drafts(p, request, begin, end); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CPU, m) {
  m.impl("causal_conv1d", TORCH_BOX(&causal_conv1d_cpu));
  m.impl("causal_conv1d_update", TORCH_BOX(&causal_conv1d_update_cpu));
}

}  // namespace attnops::causal_conv1d
