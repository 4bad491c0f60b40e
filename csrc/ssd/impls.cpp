#include "ssd/impls.h"

#include "core/impl_table.h"
#include "device/common/linear_prefill_impl.h"
#include "device/common/linear_step_impl.h"
#include "ssd/cuda/chunks.h"
#include "ssd/cuda/launch.h"
#include "ssd/sm90/chunks.h"
#include "ssd/sm90/decode.h"

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

constexpr LinearStepImpl kDecodeImpls[] = {
#if defined(ATTNOPS_HAS_SM90)
    {"sm90_fp32_64", DType::kFloat32, 64, true, &sm90::Stream<DType::kFloat32, 64>::launch},
    {"sm90_fp32_128", DType::kFloat32, 128, true, &sm90::Stream<DType::kFloat32, 128>::launch},
    {"sm90_fp32_256", DType::kFloat32, 256, true, &sm90::Stream<DType::kFloat32, 256>::launch},
    {"sm90_bf16_64", DType::kBFloat16, 64, true, &sm90::Stream<DType::kBFloat16, 64>::launch},
    {"sm90_bf16_128", DType::kBFloat16, 128, true, &sm90::Stream<DType::kBFloat16, 128>::launch},
    {"sm90_bf16_256", DType::kBFloat16, 256, true, &sm90::Stream<DType::kBFloat16, 256>::launch},
    {"sm90_fp16_64", DType::kFloat16, 64, true, &sm90::Stream<DType::kFloat16, 64>::launch},
    {"sm90_fp16_128", DType::kFloat16, 128, true, &sm90::Stream<DType::kFloat16, 128>::launch},
    {"sm90_fp16_256", DType::kFloat16, 256, true, &sm90::Stream<DType::kFloat16, 256>::launch},
#endif
    {"fp32_64", DType::kFloat32, 64, false, &Decode<DType::kFloat32, 64>::launch},
    {"fp32_128", DType::kFloat32, 128, false, &Decode<DType::kFloat32, 128>::launch},
    {"fp32_256", DType::kFloat32, 256, false, &Decode<DType::kFloat32, 256>::launch},
    {"bf16_64", DType::kBFloat16, 64, false, &Decode<DType::kBFloat16, 64>::launch},
    {"bf16_128", DType::kBFloat16, 128, false, &Decode<DType::kBFloat16, 128>::launch},
    {"bf16_256", DType::kBFloat16, 256, false, &Decode<DType::kBFloat16, 256>::launch},
    {"fp16_64", DType::kFloat16, 64, false, &Decode<DType::kFloat16, 64>::launch},
    {"fp16_128", DType::kFloat16, 128, false, &Decode<DType::kFloat16, 128>::launch},
    {"fp16_256", DType::kFloat16, 256, false, &Decode<DType::kFloat16, 256>::launch},
};

}  // namespace

LaunchDecode select_decode(const LinearStep& params) { return select_impl("ssd_decode", kDecodeImpls, params).launch; }

LaunchPrefill select_prefill(const LinearPrefill& params) { return select_impl("ssd_prefill", impls(), params).launch; }

}  // namespace attnops::ssd
