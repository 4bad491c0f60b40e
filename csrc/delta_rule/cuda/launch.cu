#include "core/impl_table.h"
#include "delta_rule/cuda/launch.h"
#include "device/common/linear_step.cuh"

namespace attnops::delta_rule {
namespace {

template <typename State, int kMaxKeys>
void launch_decode(const LinearStep& p, cudaStream_t stream) {
  p.gate_per_channel ? launch_linear_step<true, true, State, kMaxKeys>("delta_decode", p, stream)
                     : launch_linear_step<true, false, State, kMaxKeys>("delta_decode", p, stream);
}

constexpr LinearStepImpl kImpls[] = ATTNOPS_LINEAR_STEP_IMPLS(launch_decode);

}  // namespace

void launch(const LinearStep& params, CUstream_st* stream) {
  if (int64_t{params.batch_size} * params.num_heads == 0) return;  // a grid of zero CTAs is a launch error
  select_impl("delta_decode", kImpls, params).launch(params, stream);
}

}  // namespace attnops::delta_rule
