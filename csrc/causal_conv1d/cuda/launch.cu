#include "causal_conv1d/cuda/kernel.cuh"
#include "causal_conv1d/cuda/launch.h"
#include "core/impl_table.h"
#include "core/math.h"
#include "device/common/launch_dependent.cuh"

namespace attnops::causal_conv1d {
namespace {

constexpr int kMostTile = 32;         // tokens that a thread walks: each CTA reads the width - 1 before them, too
constexpr int64_t kBusyBlocks = 528;  // four for each SM of a large GPU

template <typename T, int kVec, int kWidth>
void launch_width(const Params& p, CUstream_st* stream) {
  const int64_t across = ceil_div<int64_t>(p.channels, int64_t{kVec} * kThreads);
  int64_t tile = p.num_tokens * across / kBusyBlocks;
  tile = min_of<int64_t>(max_of<int64_t>(tile, 1), kMostTile);
  const LaunchShape shape{.blocks = static_cast<int>(ceil_div(p.num_tokens, tile)),
                          .threads = kThreads,
                          .shared_bytes = 0,
                          .max_shared_bytes = 0,
                          .blocks_y = static_cast<int>(across)};
  launch_dependent<&conv_kernel<T, kVec, kWidth>>("conv_kernel", shape, stream, p, static_cast<int>(tile));
}

template <typename T, int kVec>
void launch_conv(const Params& p, CUstream_st* stream) {
  if (p.width == 2) return launch_width<T, kVec, 2>(p, stream);
  if (p.width == 3) return launch_width<T, kVec, 3>(p, stream);
  launch_width<T, kVec, 4>(p, stream);
}

struct Impl {
  const char* name;
  DType dtype;
  int vec;  // elements of an access
  void (*launch)(const Params&, CUstream_st*);

  std::string reject(const Params& p) const {
    if (p.dtype != dtype) return std::string("takes ") + name_of(dtype) + ", got " + name_of(p.dtype);
    const int size = size_of(p.dtype);
    const bool fits = p.channels % vec == 0 && rows_aligned(p.x, size, vec * size, p.stride_x) &&
                      rows_aligned(p.out, size, vec * size, p.stride_out);
    return fits ? "" : "rows must start on 16-byte boundaries";
  }
};

constexpr Impl kImpls[] = {
    {"bf16_vec", DType::kBFloat16, 8, &launch_conv<__nv_bfloat16, 8>},
    {"fp16_vec", DType::kFloat16, 8, &launch_conv<__half, 8>},
    {"fp32_vec", DType::kFloat32, 4, &launch_conv<float, 4>},
    {"bf16_any", DType::kBFloat16, 1, &launch_conv<__nv_bfloat16, 1>},
    {"fp16_any", DType::kFloat16, 1, &launch_conv<__half, 1>},
    {"fp32_any", DType::kFloat32, 1, &launch_conv<float, 1>},
};

}  // namespace

void launch(const Params& params, CUstream_st* stream) {
  if (params.num_tokens == 0 || params.channels == 0) return;  // a grid of zero CTAs is a launch error
  select_impl("causal_conv1d", kImpls, params).launch(params, stream);
}

}  // namespace attnops::causal_conv1d
