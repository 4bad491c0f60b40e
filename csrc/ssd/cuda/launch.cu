#include "core/impl_table.h"
#include "device/common/linear_step.cuh"
#include "ssd/cuda/launch.h"

namespace attnops::ssd {
namespace {

template <typename State, int kMaxKeys>
void launch_decode(const LinearStep& p, cudaStream_t stream) {
  launch_linear_step<false, false, State, kMaxKeys>("ssd_decode", p, stream);
}

constexpr LinearStepImpl kImpls[] = ATTNOPS_LINEAR_STEP_IMPLS(launch_decode);

}  // namespace

void launch(const LinearStep& params, CUstream_st* stream) {
  if (int64_t{params.batch_size} * params.num_heads == 0) return;  // a grid of zero CTAs is a launch error
  select_impl("ssd_decode", kImpls, params).launch(params, stream);
}

}  // namespace attnops::ssd
