#include "ssd/impls.h"

#include "core/impl_table.h"
#include "device/common/linear_prefill_impl.h"
#include "ssd/cuda/chunks.h"
#include "ssd/sm90/chunks.h"

namespace attnops::ssd {
namespace {

// Not constexpr: what shared memory the kernels need is known to their own files.
const auto& impls() {
  static const LinearPrefillImpl kImpls[] = {
#if defined(ATTNOPS_HAS_SM90)
      {"sm90_chunks_64", 90, 64, true, false, sm90::Chunks<64>::kSharedBytes, &sm90::Chunks<64>::launch},
      {"sm90_chunks_128", 90, 128, true, false, sm90::Chunks<128>::kSharedBytes, &sm90::Chunks<128>::launch},
#endif
      {"chunks_64", 80, 64, true, false, Chunks<64>::kSharedBytes, &Chunks<64>::launch},
      {"chunks_128", 80, 128, true, false, Chunks<128>::kSharedBytes, &Chunks<128>::launch},
      {"chunks_256", 80, 256, true, false, Chunks<256>::kSharedBytes, &Chunks<256>::launch},
      {"tokens_64", 80, 64, false, false, 0, &Tokens<64>::launch},
      {"tokens_128", 80, 128, false, false, 0, &Tokens<128>::launch},
      {"tokens_256", 80, 256, false, false, 0, &Tokens<256>::launch},
  };
  return kImpls;
}

}  // namespace

LaunchPrefill select_prefill(const LinearPrefill& params) { return select_impl("ssd_prefill", impls(), params).launch; }

}  // namespace attnops::ssd
