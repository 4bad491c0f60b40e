#include "delta_rule/impls.h"

#include "core/impl_table.h"
#include "delta_rule/cuda/chunks.h"
#include "delta_rule/sm90/chunks.h"
#include "device/common/linear_prefill_impl.h"

namespace attnops::delta_rule {
namespace {

// Not constexpr: what shared memory the kernels need is known to their own files.
const auto& impls() {
  static const LinearPrefillImpl kImpls[] = {
#if defined(ATTNOPS_HAS_SM90)
      {"sm90_chunks_64", 90, 64, true, false, sm90::Chunks<64, false>::kSharedBytes, &sm90::Chunks<64, false>::launch},
      {"sm90_channels_64", 90, 64, true, true, sm90::Chunks<64, true>::kSharedBytes, &sm90::Chunks<64, true>::launch},
      {"sm90_chunks_128", 90, 128, true, false, sm90::Chunks<128, false>::kSharedBytes,
       &sm90::Chunks<128, false>::launch},
      {"sm90_channels_128", 90, 128, true, true, sm90::Chunks<128, true>::kSharedBytes,
       &sm90::Chunks<128, true>::launch},
#endif
      {"chunks_64", 80, 64, true, false, Chunks<64, false>::kSharedBytes, &Chunks<64, false>::launch},
      {"channels_64", 80, 64, true, true, Chunks<64, true>::kSharedBytes, &Chunks<64, true>::launch},
      {"chunks_128", 80, 128, true, false, Chunks<128, false>::kSharedBytes, &Chunks<128, false>::launch},
      {"channels_128", 80, 128, true, true, Chunks<128, true>::kSharedBytes, &Chunks<128, true>::launch},
      {"chunks_256", 80, 256, true, false, Chunks<256, false>::kSharedBytes, &Chunks<256, false>::launch},
      {"tokens_64", 80, 64, false, false, 0, &Tokens<64>::launch},
      {"tokens_128", 80, 128, false, false, 0, &Tokens<128>::launch},
      {"tokens_256", 80, 256, false, false, 0, &Tokens<256>::launch},
  };
  return kImpls;
}

}  // namespace

LaunchPrefill select_prefill(const LinearPrefill& params) {
  return select_impl("delta_prefill", impls(), params).launch;
}

}  // namespace attnops::delta_rule
