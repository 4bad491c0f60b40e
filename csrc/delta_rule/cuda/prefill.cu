#include "delta_rule/cuda/chunks.h"
#include "delta_rule/cuda/launch.h"
#include "device/common/linear_recurrence.cuh"
#include "device/common/request_order.cuh"

namespace attnops::delta_rule {

template <int kMaxKeys>
void Tokens<kMaxKeys>::launch(const LinearPrefill& p, cudaStream_t stream) {
  p.step.gate_per_channel ? launch_linear_recurrence<kMaxKeys, true, true>("delta_prefill", p, stream)
                          : launch_linear_recurrence<kMaxKeys, true, false>("delta_prefill", p, stream);
}

template struct Tokens<64>;
template struct Tokens<128>;
template struct Tokens<256>;

void launch_plan(const RequestOrder& params, CUstream_st* stream) {
  launch_request_order("delta_plan", params, stream);
}

}  // namespace attnops::delta_rule
