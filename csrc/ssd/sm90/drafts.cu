#include "device/sm90/linear_verify_stream.cuh"
#include "ssd/sm90/drafts.h"

namespace attnops::ssd::sm90 {

bool launch_verify(const LinearVerify& params, CUstream_st* stream) {
  using attnops::sm90::launch_verify_stream;
  return launch_verify_stream<128, 64, false>("ssd_verify", params, stream) ||
         launch_verify_stream<128, 128, false>("ssd_verify", params, stream);
}

}  // namespace attnops::ssd::sm90
