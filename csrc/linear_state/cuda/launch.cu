#include "core/math.h"
#include "device/common/launch_dependent.cuh"
#include "device/common/pdl.cuh"
#include "device/common/vec.h"
#include "linear_state/cuda/launch.h"

namespace attnops::linear_state {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // vectors that a thread has in flight

// A CTA's part of one slot of one layer. A pair's two slots do not overlap unless the caller shares them, which the
// checked mode reports.
template <typename Word>
__global__ void __launch_bounds__(kThreads) move_states_kernel(const __grid_constant__ Params p, int64_t parts) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t i = blockIdx.y, layer = blockIdx.x / parts, part = blockIdx.x % parts;
  if (p.report != nullptr && blockIdx.x == 0 && threadIdx.x == 0) p.check(i, p.report);
  if (!p.moves(i)) return;
  const int64_t words = p.slot_bytes / static_cast<int64_t>(sizeof(Word));
  Word* to = reinterpret_cast<Word*>(p.at(layer, p.dst[i]));
  const Word* from = p.src == nullptr ? nullptr : reinterpret_cast<const Word*>(p.source_at(layer, p.src[i]));
  const int64_t first = part * kThreads * kUnroll + threadIdx.x;
  Word held[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t at = first + u * kThreads;
    held[u] = from != nullptr && at < words ? from[at] : Word{};
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (first + u * kThreads < words) to[first + u * kThreads] = held[u];
  }
}

template <typename Word>
void launch_words(const Params& p, CUstream_st* stream) {
  const int64_t parts = ceil_div<int64_t>(p.slot_bytes / static_cast<int64_t>(sizeof(Word)), kThreads * kUnroll);
  constexpr int64_t kMostPairs = 65535;  // blocks in the grid's second dimension
  for (int64_t begin = 0; begin < p.count; begin += kMostPairs) {
    Params some = p;
    some.dst += begin;
    if (some.src != nullptr) some.src += begin;
    some.count = min_of(kMostPairs, p.count - begin);
    const LaunchShape shape{.blocks = static_cast<int>(p.num_layers * parts),
                            .threads = kThreads,
                            .shared_bytes = 0,
                            .max_shared_bytes = 0,
                            .blocks_y = static_cast<int>(some.count)};
    launch_dependent<&move_states_kernel<Word>>("move_states_kernel", shape, stream, some, parts);
  }
}

}  // namespace

void launch(const Params& p, CUstream_st* stream) {
  if (p.count == 0 || p.num_layers == 0 || p.slot_bytes == 0) return;  // a grid of zero CTAs is a launch error
  const bool vectors = p.slot_bytes % 16 == 0 && rows_aligned(p.states, 1, 16, p.stride_layer, p.stride_slot) &&
                       rows_aligned(p.source, 1, 16, p.source_stride_layer, p.source_stride_slot);
  vectors ? launch_words<uint4>(p, stream) : launch_words<uint16_t>(p, stream);
}

}  // namespace attnops::linear_state
