#include "conv_step/sm90/step.cuh"
#include "conv_step/sm90/step.h"
#include "core/impl_table.h"
#include "device/common/capability.h"

namespace attnops::conv_step::sm90 {
namespace {

constexpr const char* kOp = "delta_conv_decode";

template <typename State, int kMaxKeys>
bool launch_of(const causal_conv1d::Params& conv, const LinearStep& p, cudaStream_t stream) {
  constexpr int kBlockRows = kStepThreads / (kMaxKeys / kLaneElements) * kStepRows;
  const bool vectors = p.key_dim * sizeof(State) % 16 == 0 &&
                       rows_aligned(p.states, sizeof(State), 16, p.stride_slot, p.stride_head, p.stride_row);
  const int row_blocks = ceil_div(p.value_dim, kBlockRows), ctas = p.num_heads * row_blocks;
  const int cluster = p.heads_per_group * row_blocks;
  if (!vectors || cluster > kMostCtas || int64_t{p.batch_size} * ctas > INT32_MAX) return false;
  static ImplCounts chosen(kOp, {kMaxKeys == 64 ? "sm90_one_launch_64" : "sm90_one_launch_128"});
  chosen.counts[0].fetch_add(1, std::memory_order_relaxed);
  const LaunchShape shape{.blocks = p.batch_size * ctas,
                          .threads = kStepThreads,
                          .shared_bytes = 0,
                          .max_shared_bytes = 0,
                          .cluster = cluster};
  if (p.gate_per_channel) {
    launch_dependent<&conv_step_kernel<State, kMaxKeys, true>>(kOp, shape, stream, conv, p, row_blocks);
  } else {
    launch_dependent<&conv_step_kernel<State, kMaxKeys, false>>(kOp, shape, stream, conv, p, row_blocks);
  }
  return true;
}

template <typename State>
bool launch_state(const causal_conv1d::Params& conv, const LinearStep& p, cudaStream_t stream) {
  return p.key_dim <= 64 ? launch_of<State, 64>(conv, p, stream) : launch_of<State, 128>(conv, p, stream);
}

}  // namespace

bool launch(const causal_conv1d::Params& conv, const LinearStep& step, CUstream_st* stream) {
  // Float32 gates take the two launches: beside a gate per channel their loads would not fit into the registers.
  const bool tokens = step.dtype == DType::kBFloat16 && step.gate_dtype == step.dtype && conv.width == kWidth &&
                      rows_aligned(conv.weight, 2, 8);
  if (!tokens || step.batch_size == 0 || step.value_dim == 0 || step.key_dim > 128) return false;
  if (usable_sm(kOp) != 90) return false;
  if (step.state_dtype == DType::kFloat32) return launch_state<float>(conv, step, stream);
  if (step.state_dtype == DType::kBFloat16) return launch_state<__nv_bfloat16>(conv, step, stream);
  return false;
}

}  // namespace attnops::conv_step::sm90
