#include "delta_rule/cuda/launch.h"
#include "device/common/linear_step.cuh"

namespace attnops::delta_rule {

template <DType kState, int kMaxKeys>
void Decode<kState, kMaxKeys>::launch(const LinearStep& p, CUstream_st* stream) {
  using State = StateOf<kState>;
  p.gate_per_channel ? launch_linear_step<true, true, State, kMaxKeys>("delta_decode", p, stream)
                     : launch_linear_step<true, false, State, kMaxKeys>("delta_decode", p, stream);
}

template struct Decode<DType::kFloat32, 64>;
template struct Decode<DType::kFloat32, 128>;
template struct Decode<DType::kFloat32, 256>;
template struct Decode<DType::kBFloat16, 64>;
template struct Decode<DType::kBFloat16, 128>;
template struct Decode<DType::kBFloat16, 256>;
template struct Decode<DType::kFloat16, 64>;
template struct Decode<DType::kFloat16, 128>;
template struct Decode<DType::kFloat16, 256>;

}  // namespace attnops::delta_rule
