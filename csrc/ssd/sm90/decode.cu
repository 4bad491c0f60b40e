#include "device/sm90/linear_step_stream.cuh"
#include "ssd/sm90/decode.h"

namespace attnops::ssd::sm90 {

template <DType kState, int kMaxKeys>
void Stream<kState, kMaxKeys>::launch(const LinearStep& p, CUstream_st* stream) {
  using attnops::sm90::launch_linear_stream;
  using State = StateOf<kState>;
  launch_linear_stream<false, false, State, kMaxKeys>("ssd_decode", p, stream);
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

}  // namespace attnops::ssd::sm90
