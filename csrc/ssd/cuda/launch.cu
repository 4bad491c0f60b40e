#include "device/common/linear_step.cuh"
#include "ssd/cuda/launch.h"

namespace attnops::ssd {

template <DType kState, int kMaxKeys>
void Decode<kState, kMaxKeys>::launch(const LinearStep& p, CUstream_st* stream) {
  using State = StateOf<kState>;
  launch_linear_step<false, false, State, kMaxKeys>("ssd_decode", p, stream);
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

}  // namespace attnops::ssd
