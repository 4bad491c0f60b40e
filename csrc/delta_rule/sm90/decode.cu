#include "delta_rule/sm90/decode.h"
#include "device/sm90/linear_step_stream.cuh"

namespace attnops::delta_rule::sm90 {

template <DType kState, int kMaxKeys>
void Stream<kState, kMaxKeys>::launch(const LinearStep& p, CUstream_st* stream) {
  using attnops::sm90::launch_linear_stream;
  using State = StateOf<kState>;
  p.gate_per_channel ? launch_linear_stream<true, true, State, kMaxKeys>("delta_decode", p, stream)
                     : launch_linear_stream<true, false, State, kMaxKeys>("delta_decode", p, stream);
}

template struct Stream<DType::kFloat32, 64>;
template struct Stream<DType::kFloat32, 128>;
template struct Stream<DType::kFloat32, 256>;
template struct Stream<DType::kBFloat16, 64>;
template struct Stream<DType::kBFloat16, 128>;
template struct Stream<DType::kBFloat16, 256>;
template struct Stream<DType::kFloat16, 64>;
template struct Stream<DType::kFloat16, 128>;
template struct Stream<DType::kFloat16, 256>;

}  // namespace attnops::delta_rule::sm90
