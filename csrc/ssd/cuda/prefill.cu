#include "device/common/linear_recurrence.cuh"
#include "device/common/request_order.cuh"
#include "ssd/cuda/chunks.h"
#include "ssd/cuda/launch.h"

namespace attnops::ssd {

template <int kMaxKeys>
void Tokens<kMaxKeys>::launch(const LinearPrefill& p, cudaStream_t stream) {
  launch_linear_recurrence<kMaxKeys, false, false>("ssd_prefill", p, stream);
}

template struct Tokens<64>;
template struct Tokens<128>;
template struct Tokens<256>;

void launch_plan(const RequestOrder& params, CUstream_st* stream) { launch_request_order("ssd_plan", params, stream); }

}  // namespace attnops::ssd
