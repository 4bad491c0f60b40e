#include "xqa_decode/sm90/fp8/launch.h"
#include "xqa_decode/sm90/fp8/lone_works.cuh"
#include "xqa_decode/sm90/launch.cuh"

namespace attnops::xqa_decode::sm90::fp8 {

bool launch_lone_works(const Params& p, cudaStream_t stream) {
  if (p.fixed_split_tokens != 0 || int64_t{p.batch_size} * p.num_kv_heads < kFewestShortWorks * p.num_sm_parts) {
    return false;
  }
  const Shape shape = make_shape(p, LoneWorks::kRows, 1);
  const Boxes boxes = make_row_boxes(p);
  if (!LoneWarp<LoneWorks>::serves(p, shape, boxes)) return false;
  launch_dependent<&xqa_lone_works_kernel<LoneWorks>>(
      "xqa_decode (short works)", {p.num_sm_parts, LoneWorks::kWarps * 32, 0, 0}, stream, p, shape, boxes);
  return true;
}

}  // namespace attnops::xqa_decode::sm90::fp8
