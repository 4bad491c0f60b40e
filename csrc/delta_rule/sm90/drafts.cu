#include "delta_rule/sm90/drafts.h"
#include "device/sm90/linear_verify_stream.cuh"

namespace attnops::delta_rule::sm90 {

bool launch_verify(const LinearVerify& params, CUstream_st* stream) {
  using attnops::sm90::launch_verify_stream;
  return launch_verify_stream<128, 128, true>("delta_verify", params, stream);
}

}  // namespace attnops::delta_rule::sm90
