#include "delta_rule/impls.h"

#include "core/impl_table.h"
#include "delta_rule/cuda/chunks.h"
#include "delta_rule/cuda/launch.h"
#include "delta_rule/sm90/chunks.h"
#include "delta_rule/sm90/decode.h"
#include "device/common/linear_prefill_impl.h"
#include "device/common/linear_step_impl.h"

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

LaunchDecode select_decode(const LinearStep& params) {
  return select_impl("delta_decode", kDecodeImpls, params).launch;
}

LaunchPrefill select_prefill(const LinearPrefill& params) {
  return select_impl("delta_prefill", impls(), params).launch;
}

}  // namespace attnops::delta_rule
