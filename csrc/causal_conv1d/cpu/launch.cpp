#include "causal_conv1d/cpu/launch.h"

#include "causal_conv1d/cpu/reference.h"

namespace attnops::causal_conv1d::cpu {
namespace {

template <typename T>
void run_blocks(const Params& p, int64_t request, int64_t begin) {
  for (int64_t c = begin; c < p.channels; c += kBlock) run_block<T>(p, request, c);
}

}  // namespace

void run_channels(const Params& given, int64_t request, int64_t begin, int64_t end) {
  Params p = given;
  p.channels = end;
  if (p.dtype == DType::kFloat32) return run_blocks<float>(p, request, begin);
  if (p.dtype == DType::kFloat16) return run_blocks<attnops::cpu::Float16>(p, request, begin);
  run_blocks<attnops::cpu::BFloat16>(p, request, begin);
}

}  // namespace attnops::causal_conv1d::cpu
