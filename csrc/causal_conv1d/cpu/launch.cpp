#include "causal_conv1d/cpu/launch.h"

#include "causal_conv1d/cpu/reference.h"

namespace attnops::causal_conv1d::cpu {
namespace {

// `run(element)`: with a value of the tokens' type.
template <typename Run>
void with_type(DType dtype, const Run& run) {
  if (dtype == DType::kFloat32) return run(float{});
  if (dtype == DType::kFloat16) return run(attnops::cpu::Float16{});
  run(attnops::cpu::BFloat16{});
}

}  // namespace

void run_channels(const Params& given, int64_t request, int64_t begin, int64_t end) {
  Params p = given;
  p.channels = end;
  with_type(p.dtype, [&](auto element) {
    for (int64_t c = begin; c < end; c += kBlock) run_block<decltype(element)>(p, request, c);
  });
}

void run_drafts(const DraftParams& given, int64_t request, int64_t begin, int64_t end) {
  DraftParams p = given;
  p.conv.channels = end;
  with_type(p.conv.dtype, [&](auto element) {
    for (int64_t c = begin; c < end; c += kBlock) run_draft_block<decltype(element)>(p, request, c);
  });
}

}  // namespace attnops::causal_conv1d::cpu
