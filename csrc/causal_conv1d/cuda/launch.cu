#include "causal_conv1d/cuda/kernel.cuh"
#include "causal_conv1d/cuda/launch.h"
#include "core/impl_table.h"
#include "core/math.h"
#include "device/common/launch_dependent.cuh"
#include "device/common/vec.h"

namespace attnops::causal_conv1d {
namespace {

constexpr int kAhead = 4;
constexpr int kThreads = 128;
constexpr int kCopies = 4, kBlocks = 4;  // of a CTA's ring, and CTAs of an SM: 128 registers a thread, 128 KB
constexpr int kBlocksWithout = 3;        // of CTAs without a ring, as copies are of 4 bytes or more: 170 registers
constexpr int kMostTile = 32;            // tokens that a thread walks: each CTA reads the width - 1 before them, too
constexpr int64_t kBusyBlocks = 528;     // four for each SM of a large GPU
constexpr int kUpdateThreads = 64;
constexpr int64_t kUpdateTokens = 16;  // more of a request are shared out among CTAs

constexpr int64_t kFewBlocks = 132;     // of one token each: an SM has one
constexpr int64_t kMostAcross = 65535;  // blocks in the grid's second dimension

constexpr int kDraftsEach = 2;   // of a thread
constexpr int kDraftBlocks = 8;  // of an SM: 128 registers a thread

// `slots`: whether each begins where an access may.
StateLayout layout_of(bool slots, int64_t stride_channel, int64_t stride_time, int history, int vec) {
  if (slots && stride_channel == history && (history == 1 || stride_time == 1)) return StateLayout::kChannels;
  if (slots && stride_channel == 1 && stride_time % vec == 0) return StateLayout::kTimes;
  return StateLayout::kAny;
}

StateLayout layout_of(const Params& p, int vec) {
  const int size = size_of(p.dtype);
  return layout_of(rows_aligned(p.states, size, vec * size, p.stride_slot), p.stride_channel, p.stride_time,
                   p.width - 1, vec);
}

StateLayout layout_of(const DraftParams& p, int vec) {
  const int size = size_of(p.conv.dtype);
  return layout_of(rows_aligned(p.windows, size, vec * size, p.stride_request, p.stride_draft), p.stride_channel,
                   p.stride_time, p.conv.width - 1, vec);
}

LaunchShape shape_of(int64_t blocks, int threads) {
  if (blocks > INT32_MAX) throw std::runtime_error("causal_conv1d: more than 2^31 blocks of tokens and channels");
  return {.blocks = static_cast<int>(blocks), .threads = threads, .shared_bytes = 0, .max_shared_bytes = 0};
}

template <typename T, int kVec, int kWidth>
void launch_tokens(const Params& p, CUstream_st* stream) {
  LaunchShape shape = shape_of(ceil_div<int64_t>(p.channels, int64_t{kVec} * kUpdateThreads), kUpdateThreads);
  shape.blocks_y = static_cast<int>(p.batch_size);
  launch_dependent<&token_kernel<T, kVec, kWidth, kUpdateThreads>>("token_kernel", shape, stream, p,
                                                                   layout_of(p, kVec));
}

template <typename T, int kVec, int kWidth>
void launch_width(const Params& p, CUstream_st* stream) {
  // Few channels in all are shared out among more threads: each has less to do in a row.
  const bool few = p.batch_size * p.channels < int64_t{kVec} * kUpdateThreads * kFewBlocks;
  if (p.cu_seqlens == nullptr && p.tokens_per_request == 1 && few && p.batch_size <= kMostAcross) {
    return launch_tokens<T, min_of(kVec, static_cast<int>(4 / sizeof(T))), kWidth>(p, stream);
  }
  const StateLayout layout = layout_of(p, kVec);
  const auto blocks_across = [&](int threads) { return ceil_div<int64_t>(p.channels, int64_t{kVec} * threads); };
  if (p.cu_seqlens == nullptr && p.tokens_per_request <= kUpdateTokens) {
    const int64_t across = blocks_across(kUpdateThreads);
    launch_dependent<&update_kernel<T, kVec, kWidth, kAhead, kUpdateThreads>>(
        "update_kernel", shape_of(p.batch_size * across, kUpdateThreads), stream, p, layout, static_cast<int>(across));
    return;
  }
  const int64_t across = blocks_across(kThreads);
  const int64_t tile =
      min_of<int64_t>(max_of<int64_t>(p.num_tokens * across / kBusyBlocks / kAhead, 1) * kAhead, kMostTile);
  constexpr bool kRing = kVec * sizeof(T) == 16;
  launch_dependent<
      &conv_kernel<T, kVec, kWidth, kAhead, kRing ? kCopies : 0, kThreads, kRing ? kBlocks : kBlocksWithout>>(
      "conv_kernel", shape_of(ceil_div(p.num_tokens, tile) * across, kThreads), stream, p, layout,
      static_cast<int>(tile), static_cast<int>(across));
}

template <typename T, int kVec>
void launch_conv(const Params& p, CUstream_st* stream) {
  if (p.width == 2) return launch_width<T, kVec, 2>(p, stream);
  if (p.width == 3) return launch_width<T, kVec, 3>(p, stream);
  launch_width<T, kVec, 4>(p, stream);
}

template <typename T, int kVec, int kWidth>
void launch_draft_width(const DraftParams& p, CUstream_st* stream) {
  const int64_t across = ceil_div<int64_t>(p.conv.channels, int64_t{kVec} * kUpdateThreads);
  const int groups = ceil_div(p.drafts, kDraftsEach);
  launch_dependent<&drafts_kernel<T, kVec, kWidth, kDraftsEach, kUpdateThreads, kDraftBlocks>>(
      "drafts_kernel", shape_of(p.conv.batch_size * groups * across, kUpdateThreads), stream, p,
      layout_of(p.conv, kVec), layout_of(p, kVec), groups, static_cast<int>(across));
}

template <typename T, int kVec>
void launch_conv_drafts(const DraftParams& p, CUstream_st* stream) {
  if (p.conv.width == 2) return launch_draft_width<T, kVec, 2>(p, stream);
  if (p.conv.width == 3) return launch_draft_width<T, kVec, 3>(p, stream);
  launch_draft_width<T, kVec, 4>(p, stream);
}

struct Impl {
  const char* name;
  DType dtype;
  int vec;  // elements of an access
  void (*launch)(const Params&, CUstream_st*);
  void (*launch_drafts)(const DraftParams&, CUstream_st*);

  std::string reject(const Params& p) const {
    if (p.dtype != dtype) return std::string("takes ") + name_of(dtype) + ", got " + name_of(p.dtype);
    const int size = size_of(p.dtype), bytes = vec * size;
    const bool fits = p.channels % vec == 0 && rows_aligned(p.x, size, bytes, p.stride_x) &&
                      rows_aligned(p.out, size, bytes, p.stride_out) && rows_aligned(p.weight, size, bytes) &&
                      rows_aligned(p.bias, size, bytes);
    return fits ? "" : "rows, weights and bias must start on " + std::to_string(bytes) + "-byte boundaries";
  }
};

template <typename T, int kVec>
constexpr Impl impl_of(const char* name, DType dtype) {
  return {name, dtype, kVec, &launch_conv<T, kVec>, &launch_conv_drafts<T, kVec>};
}

constexpr Impl kImpls[] = {
    impl_of<__nv_bfloat16, 8>("bf16_vec", DType::kBFloat16), impl_of<__half, 8>("fp16_vec", DType::kFloat16),
    impl_of<float, 4>("fp32_vec", DType::kFloat32),          impl_of<__nv_bfloat16, 1>("bf16_any", DType::kBFloat16),
    impl_of<__half, 1>("fp16_any", DType::kFloat16),         impl_of<float, 1>("fp32_any", DType::kFloat32),
};

}  // namespace

void launch(const Params& params, CUstream_st* stream) {
  if (params.num_tokens == 0 || params.channels == 0) return;  // a grid of zero CTAs is a launch error
  select_impl("causal_conv1d", kImpls, params).launch(params, stream);
}

void launch_drafts(const DraftParams& params, CUstream_st* stream) {
  if (params.conv.num_tokens == 0 || params.conv.channels == 0) return;
  select_impl("causal_conv1d", kImpls, params.conv).launch_drafts(params, stream);
}

}  // namespace attnops::causal_conv1d
