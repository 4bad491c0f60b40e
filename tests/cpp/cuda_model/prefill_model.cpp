// The CUDA kernels of linear prefill and drafts on the model of a CTA, as ops of `attnops_model` with the schemas of
// `attnops`.
// clang-format off: the model's own headers come before the kernels
#include "device/sm80/mma.cuh"
#include "warps.h"
// clang-format on
#include <torch/csrc/stable/library.h>

#include <cmath>

#include "causal_conv1d/cuda/kernel.cuh"
#include "conv_step/checks.h"
#include "conv_step/sm90/step.cuh"
#include "delta_rule/checks.h"
#include "device/common/linear_commit.cuh"
#include "device/common/linear_recurrence.cuh"
#include "device/common/linear_verify.cuh"
#include "device/common/request_order.cuh"
#include "device/sm80/linear_chunk_channels.cuh"
#include "device/sm80/linear_chunk_local.cuh"
#include "device/sm80/linear_chunk_pass.cuh"
#include "device/sm80/linear_verify_tiles.cuh"
#include "device/sm90/linear_chunk_ahead.cuh"
#include "device/sm90/linear_chunk_join.cuh"
#include "device/sm90/linear_chunk_multiply.cuh"
#include "device/sm90/linear_chunk_ring.cuh"
#include "ssd/checks.h"
#include "ssd/sm90/ring.cuh"

namespace attnops {
namespace {

using cuda_model::run_grid;

template <int kKeys, bool kDelta, bool kChannels>
void tokens(const LinearPrefill& p) {
  const int row_blocks = ceil_div(p.step.value_dim, WalkShared<kKeys, kChannels>::kRows);
  run_grid((int64_t{p.step.batch_size} + 1) * p.step.num_heads * row_blocks, kStepThreads,
           [&] { linear_recurrence_kernel<kKeys, kDelta, kChannels>(p, row_blocks); });
}

template <class Pass>
void pass(const LinearPrefill& p) {
  if (sizeof(typename Pass::Shared) > sizeof(memory)) std::abort();
  const int row_blocks = ceil_div(p.step.value_dim, Pass::kRows);
  run_grid((int64_t{p.step.batch_size} + 1) * p.step.num_heads * row_blocks, Pass::kThreads,
           [&] { chunk_pass_kernel<Pass>(p, row_blocks); });
}

template <class Ring>
void ring(const LinearPrefill& p, int ctas, bool marked = false) {
  if (sizeof(typename Ring::Shared) > sizeof(memory)) std::abort();
  const int row_blocks = ceil_div(p.step.value_dim, Ring::kRows),
            works = p.step.batch_size * p.step.num_heads * row_blocks;
  sm90::RingMaps maps = sm90::make_ring_maps(p);
  if (ctas % 2 == 0) maps.there = maps.out_there = false;
  run_grid(std::max(std::min(works, ctas), 1), Ring::kThreads,
           [&] { sm90::chunk_ring_kernel<Ring>(p, maps, works, row_blocks, marked); });
}

template <class Ring>
void ssd_ring(const LinearPrefill& p, const sm90::ChunkCuts& cuts, int works, int ctas, bool boxes) {
  if (sizeof(typename Ring::Shared) > sizeof(memory)) std::abort();
  sm90::RingMaps maps = sm90::make_ring_maps(p);
  maps.there = maps.there && boxes;
  run_grid(std::max(std::min(works, ctas), 1), Ring::kThreads,
           [&] { sm90::ssd_ring_kernel<Ring>(p, maps, cuts, works, ceil_div(p.step.value_dim, Ring::kRows)); });
}

template <int kKeys>
void ahead(const LinearPrefill& p) {
  constexpr ChunkScratch kLayout{.panels = kKeys / 64, .delta = true, .channels = false};
  if (sm90::kAheadWorkers * sizeof(LocalShared<kKeys>) > sizeof(memory)) std::abort();
  const int groups = p.step.num_heads / p.step.heads_per_group, parts = ceil_div(p.step.heads_per_group, kLocalHeads);
  const int64_t chunks = chunk_places(p.num_tokens, p.step.batch_size) * p.step.num_heads;
  run_grid(ceil_div(chunks, int64_t{256}), 256,
           [&] { sm90::clear_marks_kernel(p.scratch, chunks, kLayout.bytes(), kLayout.mark_at()); });
  run_grid(3, sm90::kAheadWorkers * kLocalThreads, [&] { sm90::chunk_ahead_kernel<kKeys>(p, groups, parts); });
}

template <class Ring>
void cut_ring(const LinearPrefill& p, const sm90::ChunkCuts& cuts, bool boxes) {
  if (sizeof(typename Ring::Shared) > sizeof(memory)) std::abort();
  const int works = sm90::cut_works<Ring>(p, cuts);
  sm90::RingMaps maps = sm90::make_ring_maps(p);
  maps.there = maps.there && boxes;
  run_grid(works, Ring::kThreads,
           [&] { sm90::chunk_cut_kernel<Ring>(p, maps, cuts, works, ceil_div(p.step.value_dim, Ring::kRows)); });
}

// Segments of few chunks, as many as there is room for.
template <int kKeys, bool kDelta, bool kChannels>
void cut(const LinearPrefill& p) {
  static int turn = 0;
  const int64_t batch = p.step.batch_size, room = segment_room(p.num_tokens, batch, p.step.num_heads);
  int most = kLeastSegmentChunks + turn % 3;
  while (segment_places(p.num_tokens, batch, most) > room) ++most;
  const ChunkScratch layout{.panels = kKeys / 64, .delta = kDelta, .channels = kChannels};
  const sm90::ChunkCuts cuts = sm90::place_cuts(p, most, kKeys, layout);
  const bool boxes = turn++ % 2 == 0;
  cut_ring<sm90::ChunkRing<kKeys, kDelta, kChannels, 1, sm90::Part::kEnds>>(p, cuts, boxes);
  const int blocks = sm90::join_blocks<kKeys, kDelta>(p);
  run_grid(p.step.batch_size * p.step.num_heads * blocks, sm90::kJoinThreads, [&] {
    if constexpr (kDelta) {
      sm90::chunk_join_kernel<kKeys>(p, cuts, blocks);
    } else {
      sm90::chunk_join_decays_kernel<kKeys>(p, cuts, blocks);
    }
  });
  if constexpr (kDelta) {
    cut_ring<sm90::ChunkRing<kKeys, kDelta, kChannels, 1, sm90::Part::kCut>>(p, cuts, boxes);
  } else {
    using Segments = sm90::SsdRing<kKeys, 1, sm90::Part::kCut>;
    const int works = sm90::cut_works<Segments>(p, cuts);
    ssd_ring<Segments>(p, cuts, works, works, boxes);
  }
}

template <int kKeys, bool kDelta, bool kChannels>
void chunks(const LinearPrefill& p) {
  static int turn = 0;
  const bool cuts =
      kKeys <= 128 && p.cut && segment_room(p.num_tokens, p.step.batch_size, p.step.num_heads) > p.step.batch_size;
  if constexpr (kKeys <= 128 && !kChannels && !kDelta) {
    if (!cuts && std::getenv("ATTNOPS_CUDA_MODEL_RING") != nullptr) {
      const int ctas = 1 + turn++ / 2 % 5, row_blocks = ceil_div(p.step.value_dim, 64);
      return ssd_ring<sm90::SsdRing<kKeys, 1>>(p, {}, p.step.batch_size * p.step.num_heads * row_blocks, ctas,
                                               ctas % 2 == 1);
    }
  }
  if constexpr (kKeys <= 128 && !kChannels && kDelta) {
    if (!cuts && std::getenv("ATTNOPS_CUDA_MODEL_RING") != nullptr && turn % 3 == 0) {
      ahead<kKeys>(p);
      return ring<sm90::ChunkRing<kKeys, kDelta, kChannels, 1>>(p, 1 + turn++ / 3 % 5, true);
    }
  }
  const int64_t places = chunk_places(p.num_tokens, p.step.batch_size);
  if constexpr (kChannels) {
    run_grid(places * p.step.num_heads, kLocalThreads, [&] { chunk_channels_kernel<kKeys>(p); });
  } else {
    const int groups = p.step.num_heads / p.step.heads_per_group;
    const int parts = ceil_div(p.step.heads_per_group, kLocalHeads);
    using Meet = std::conditional_t<kKeys <= 128 && kDelta, sm90::MeetGroup, MeetCta>;
    const bool makes = kKeys <= 128 && (!cuts || !kDelta) && std::getenv("ATTNOPS_CUDA_MODEL_RING") != nullptr;
    run_grid(places * groups * parts, kLocalThreads, [&] {
      if constexpr (kKeys <= 128) {
        if (makes) return chunk_local_kernel<kKeys, kDelta, Meet, false>(p, groups, parts);
      }
      chunk_local_kernel<kKeys, kDelta, Meet, true>(p, groups, parts);
    });
  }
  if constexpr (kKeys <= 128) {
    if (cuts) return cut<kKeys, kDelta, kChannels>(p);
  }
  if constexpr (kKeys <= 128 && kDelta) {
    if (std::getenv("ATTNOPS_CUDA_MODEL_RING") != nullptr) {
      if constexpr (!kChannels) {
        constexpr sm90::Part kWhole = sm90::Part::kWhole;
        const int ctas = 1 + turn++ / 2 % 5;
        return turn % 2 == 1 ? ring<sm90::ChunkRing<kKeys, kDelta, kChannels, 2, kWhole, true>>(p, ctas)
                             : ring<sm90::ChunkRing<kKeys, kDelta, kChannels, 1, kWhole, true>>(p, ctas);
      } else {
        const int ctas = 1 + turn++ / 2 % 5;
        return turn % 2 == 1 ? ring<sm90::ChunkRing<kKeys, kDelta, kChannels, 2>>(p, ctas)
                             : ring<sm90::ChunkRing<kKeys, kDelta, kChannels, 1>>(p, ctas);
      }
    }
  }
  switch (turn++ % 3) {  // every width in turn: no bit depends on it
    case 0: return pass<ChunkPass<kKeys, kDelta, kChannels, 2>>(p);
    case 1: return pass<ChunkPass<kKeys, kDelta, kChannels, 4>>(p);
    default: return pass<ChunkPass<kKeys, kDelta, kChannels, 8>>(p);
  }
}

template <bool kDelta>
void prefill(const LinearPrefill& p) {
  const LinearStep& s = p.step;
  if (p.num_tokens * s.num_heads == 0) return;
  const bool in_chunks = s.dtype == DType::kBFloat16 && s.key_dim % 8 == 0 && s.value_dim % 8 == 0 && p.scratch;
  const int keys = s.key_dim;
  if constexpr (kDelta) {
    if (s.gate_per_channel) {
      if (in_chunks && keys <= 128) return keys <= 64 ? chunks<64, true, true>(p) : chunks<128, true, true>(p);
      return keys <= 64    ? tokens<64, true, true>(p)
             : keys <= 128 ? tokens<128, true, true>(p)
                           : tokens<256, true, true>(p);
    }
  }
  if (in_chunks) {
    return keys <= 64    ? chunks<64, kDelta, false>(p)
           : keys <= 128 ? chunks<128, kDelta, false>(p)
                         : chunks<256, kDelta, false>(p);
  }
  keys <= 64    ? tokens<64, kDelta, false>(p)
  : keys <= 128 ? tokens<128, kDelta, false>(p)
                : tokens<256, kDelta, false>(p);
}

template <typename State, int kKeys, bool kDelta, bool kChannels, int kRows>
void verify_rows(const LinearVerify& p) {
  constexpr int kCtaRows = kVerifyCtaRows<kKeys, kRows>;
  const int row_blocks = ceil_div(p.step.value_dim, kCtaRows);
  const VerifyLayout at{.drafts = p.drafts,
                        .keys = kKeys,
                        .cta_rows = kCtaRows,
                        .rows_before = p.rings.rows - p.drafts,
                        .channels = kChannels};
  if (4 * at.floats() > static_cast<int>(sizeof(memory))) std::abort();
  run_grid(int64_t{p.step.batch_size} * p.step.num_heads * row_blocks, kVerifyThreads,
           [&] { linear_verify_kernel<State, kKeys, kDelta, kChannels, false, kRows>(p, row_blocks); });
}

// Heads in any order: each has what the others of its group read.
template <typename State, bool kDelta, bool kChannels, int kBlocks, class Params>
void run_blocks(const Params& given) {
  const LinearVerify& p = verification(given);
  const VerifyTileLayout at = attnops::verify_tiles<State, kDelta, kChannels, kBlocks>(p);
  if (4 * at.floats() > static_cast<int>(sizeof(memory))) std::abort();
  const int heads = p.step.num_heads;
  for (int request = 0; request < p.step.batch_size; ++request) {
    const int first = cuda_model::drawn(heads), step = cuda_model::drawn(2) == 0 ? 1 : heads - 1;
    for (int turn = 0; turn < heads; ++turn) {
      blockIdx.y = (first + turn * step) % heads, blockIdx.z = request;
      run_grid(ceil_div(p.step.value_dim, at.cta_rows), kTileThreads<kDelta>,
               [&] { linear_verify_tile_kernel<State, kDelta, kChannels, kBlocks, Params>(given, 0); });
    }
  }
}

template <typename State, bool kDelta, bool kChannels, class Params>
void run_tiles(const Params& given) {
  if constexpr (kDelta) {
    if (verification(given).drafts > kBlockDrafts<kDelta>) return run_blocks<State, kDelta, kChannels, 2>(given);
  }
  run_blocks<State, kDelta, kChannels, 1>(given);
}

template <typename State, int kKeys, bool kDelta, bool kChannels>
void verify_of(const LinearVerify& p) {
  static int turn = 0;
  if constexpr (kKeys == kTileKeys) {
    if (verify_tiles_take<State>(p)) return run_tiles<State, kDelta, kChannels>(p);
  }
  if (kKeys == 128 && turn++ % 2 == 0) return verify_rows<State, kKeys, kDelta, kChannels, 4>(p);
  verify_rows<State, kKeys, kDelta, kChannels, 2>(p);
}

template <bool kDelta, bool kChannels>
void verify(const LinearVerify& p) {
  if (int64_t{p.step.batch_size} * p.step.num_heads == 0) return;
  const int keys = p.step.key_dim;
  if (p.step.state_dtype == DType::kBFloat16) return verify_of<__nv_bfloat16, 128, kDelta, kChannels>(p);
  keys <= 64    ? verify_of<float, 64, kDelta, kChannels>(p)
  : keys <= 128 ? verify_of<float, 128, kDelta, kChannels>(p)
                : verify_of<float, 256, kDelta, kChannels>(p);
}

template <typename State, int kKeys>
void commit_of(const LinearCommit& p, ReportOp op) {
  static int turn = 0;
  const LinearStep& step = p.step;
  const int ctas = 1 + turn++ % 5;
  const auto run = [&](auto which) {
    run_grid(ctas, kCommitThreads, [&] { linear_commit_kernel<State, kKeys, decltype(which)::value>(p, op); });
  };
  const bool vectors =
      step.key_dim * sizeof(State) % 16 == 0 &&
      rows_aligned(step.states, sizeof(State), 16, step.stride_slot, step.stride_head, step.stride_row);
  const bool any = turn % 4 == 0 && kKeys != kTileKeys;  // with keys of a tile folds have the bits of steps
  if (any || !vectors) {
    run(std::integral_constant<FoldCase, FoldCase::kAny>{});
  } else if (p.rings.per_channel || step.key_dim != kKeys || step.value_dim % 4 != 0 ||
             !rows_aligned(p.rings.u, 4, 16) || !rows_aligned(p.rings.k, 4, 16)) {
    run(std::integral_constant<FoldCase, FoldCase::kVectors>{});
  } else {
    run(std::integral_constant<FoldCase, FoldCase::kHeads>{});
  }
  run_grid(1, kCommitThreads, [&] { move_cursors_kernel(p); });
}

void commit(const LinearCommit& p, ReportOp op) {
  if (p.step.state_dtype == DType::kBFloat16) return commit_of<__nv_bfloat16, 128>(p, op);
  p.step.key_dim <= 64    ? commit_of<float, 64>(p, op)
  : p.step.key_dim <= 128 ? commit_of<float, 128>(p, op)
                          : commit_of<float, 256>(p, op);
}

// In one launch where a kernel takes both.
template <bool kDelta, bool kChannels>
void draft_step(const LinearDraftStep& p, ReportOp op) {
  if (int64_t{p.verify.step.batch_size} * p.verify.step.num_heads == 0) return;
  if (p.semaphores != nullptr && p.verify.step.key_dim == kTileKeys) {
    const bool narrow = p.verify.step.state_dtype == DType::kBFloat16;
    if (!narrow && draft_tiles_take<float, kDelta>(p)) return run_tiles<float, kDelta, kChannels>(p);
    if (narrow && draft_tiles_take<__nv_bfloat16, kDelta>(p)) return run_tiles<__nv_bfloat16, kDelta, kChannels>(p);
  }
  commit(p.commit(), op);
  verify<kDelta, kChannels>(p.verify);
}

// A cluster's CTAs run one after another, the first one last: it alone writes what the others read.
template <typename State, int kKeys, bool kChannels>
void run_conv_step(const conv_step::ConvDecode& p) {
  const int row_blocks = ceil_div(p.step.value_dim, kStepThreads / (kKeys / kLaneElements) * kStepRows);
  const unsigned blocks = p.step.batch_size * p.step.num_heads * row_blocks;
  gridDim.x = blocks;
  for (unsigned i = blocks; i > 0; --i) {
    blockIdx.x = i - 1;
    cuda_model::run_cta(
        kStepThreads, [&] { conv_step::sm90::conv_step_kernel<State, kKeys, kChannels>(p.conv, p.step, row_blocks); });
  }
}

void delta_conv_decode_model(const Tensor& out, const Tensor& states, const Tensor& conv_states, const Tensor& x,
                             const Tensor& weight, const OptionalTensor& bias, const Tensor& a, const Tensor& b,
                             const OptionalTensor& a_log, const OptionalTensor& dt_bias, const Tensor& state_indices,
                             int64_t num_k_heads, bool silu, double scale, double lower_bound, bool qk_l2norm,
                             const OptionalTensor& /*mixed*/, const OptionalTensor& report) {
  const OptionalTensor elsewhere;
  const conv_step::ConvDecode p = conv_step::checked_delta(
      out, {out, conv_states, x, weight, bias, state_indices, silu, report},
      {x, states, a, b, "x", a_log, dt_bias, state_indices, elsewhere, scale, lower_bound, qk_l2norm, report},
      num_k_heads);
  const bool channels = p.step.gate_per_channel;
  if (p.step.key_dim <= 64) return channels ? run_conv_step<float, 64, true>(p) : run_conv_step<float, 64, false>(p);
  channels ? run_conv_step<float, 128, true>(p) : run_conv_step<float, 128, false>(p);
}

// Drafts alone. The layouts of states and windows are told apart where they are dense; others go element by element.
template <typename T, int kVec, int kWidth>
void conv_drafts(const causal_conv1d::DraftParams& p) {
  using causal_conv1d::StateLayout;
  constexpr int kDrafts = 2, kThreads = 64;
  const auto layout = [](int64_t channel, int64_t time) {
    return channel == kWidth - 1 && time == 1 ? StateLayout::kChannels
           : channel == 1 && time % kVec == 0 ? StateLayout::kTimes
                                              : StateLayout::kAny;
  };
  const int across = static_cast<int>(ceil_div<int64_t>(p.conv.channels, kVec * kThreads)),
            groups = ceil_div(p.drafts, kDrafts);
  run_grid(p.conv.batch_size * groups * across, kThreads, [&] {
    causal_conv1d::drafts_kernel<T, kVec, kWidth, kDrafts, kThreads, 1>(
        p, layout(p.conv.stride_channel, p.conv.stride_time), layout(p.stride_channel, p.stride_time), groups, across);
  });
}

template <typename T, int kVec>
void conv_drafts_of(const causal_conv1d::DraftParams& p) {
  if (p.conv.channels % kVec != 0) return conv_drafts_of<T, 1>(p);
  p.conv.width == 2   ? conv_drafts<T, kVec, 2>(p)
  : p.conv.width == 3 ? conv_drafts<T, kVec, 3>(p)
                      : conv_drafts<T, kVec, 4>(p);
}

void causal_conv1d_update_model(const Tensor& out, const Tensor& conv_states, const Tensor& x, const Tensor& weight,
                                const OptionalTensor& bias, const Tensor& state_indices, bool silu,
                                const OptionalTensor& report, const OptionalTensor& windows,
                                const OptionalTensor& tree_mask) {
  const causal_conv1d::DraftParams p = causal_conv1d::checked_drafts(
      {out, conv_states, x, weight, bias, state_indices, silu, report}, *windows, tree_mask);
  if (p.conv.num_tokens == 0 || p.conv.channels == 0) return;
  if (p.conv.dtype == DType::kFloat32) return conv_drafts_of<float, 4>(p);
  p.conv.dtype == DType::kFloat16 ? conv_drafts_of<__half, 8>(p) : conv_drafts_of<__nv_bfloat16, 8>(p);
}

void delta_prefill_model(const Tensor& out, const Tensor& states, const Tensor& q, const Tensor& k, const Tensor& v,
                         const Tensor& a, const Tensor& b, const OptionalTensor& a_log, const OptionalTensor& dt_bias,
                         const Tensor& cu_seqlens, const Tensor& prefix_lens, const Tensor& state_indices,
                         const OptionalTensor& checkpoint_slots, const OptionalTensor& plan,
                         const OptionalTensor& scratch, double scale, double lower_bound, bool qk_l2norm,
                         const OptionalTensor& report, bool cut_prompts) {
  const OptionalTensor elsewhere;
  prefill<true>(delta_rule::checked_prefill(
      {out, states, q, k, v, a, b, a_log, dt_bias, state_indices, elsewhere, scale, lower_bound, qk_l2norm, report},
      {cu_seqlens, prefix_lens, checkpoint_slots, plan, scratch, cut_prompts}));
}

void ssd_prefill_model(const Tensor& out, const Tensor& states, const Tensor& x, const OptionalTensor& dt,
                       const Tensor& a, const Tensor& b, const Tensor& c, const OptionalTensor& d,
                       const OptionalTensor& dt_bias, const OptionalTensor& z, const Tensor& cu_seqlens,
                       const Tensor& prefix_lens, const Tensor& state_indices, const OptionalTensor& checkpoint_slots,
                       const OptionalTensor& plan, const OptionalTensor& scratch, double scale, bool dt_softplus,
                       const OptionalTensor& report, bool cut_prompts) {
  const OptionalTensor elsewhere;
  prefill<false>(ssd::checked_prefill(
      {out, states, x, dt, a, b, c, d, dt_bias, z, state_indices, elsewhere, scale, dt_softplus, report},
      {cu_seqlens, prefix_lens, checkpoint_slots, plan, scratch, cut_prompts}));
}

void delta_plan_model(const Tensor& plan, const Tensor& cu_seqlens) {
  const RequestOrder p = checked_plan("delta_plan", plan, cu_seqlens);
  run_grid(ceil_div(p.batch_size, kOrderThreads), kOrderThreads, [&] { order_requests_kernel(p); });
}

void delta_verify_model(const Tensor& out, const Tensor& ring_u, const Tensor& ring_k, const Tensor& ring_decay,
                        const Tensor& states, const Tensor& ring_len, const Tensor& q, const Tensor& k, const Tensor& v,
                        const Tensor& a, const Tensor& b, const OptionalTensor& a_log, const OptionalTensor& dt_bias,
                        const Tensor& state_indices, const OptionalTensor& tree_mask, double scale, double lower_bound,
                        bool qk_l2norm, const OptionalTensor& report) {
  const OptionalTensor elsewhere;
  const LinearVerify p = delta_rule::checked_verify(
      "delta_verify",
      {out, states, q, k, v, a, b, a_log, dt_bias, state_indices, elsewhere, scale, lower_bound, qk_l2norm, report},
      {ring_u, ring_k, ring_decay, ring_len}, tree_mask);
  p.step.gate_per_channel ? verify<true, true>(p) : verify<true, false>(p);
}

void ssd_verify_model(const Tensor& out, const Tensor& ring_u, const Tensor& ring_k, const Tensor& ring_decay,
                      const Tensor& states, const Tensor& ring_len, const Tensor& x, const OptionalTensor& dt,
                      const Tensor& a, const Tensor& b, const Tensor& c, const OptionalTensor& d,
                      const OptionalTensor& dt_bias, const OptionalTensor& z, const Tensor& state_indices,
                      const OptionalTensor& tree_mask, double scale, bool dt_softplus, const OptionalTensor& report) {
  const OptionalTensor elsewhere;
  verify<false, false>(ssd::checked_verify(
      "ssd_verify", {out, states, x, dt, a, b, c, d, dt_bias, z, state_indices, elsewhere, scale, dt_softplus, report},
      {ring_u, ring_k, ring_decay, ring_len}, tree_mask));
}

void delta_commit_model(const Tensor& states, const Tensor& ring_u, const Tensor& ring_k, const Tensor& ring_decay,
                        const Tensor& ring_len, const Tensor& state_indices, const Tensor& accepted_path,
                        const Tensor& accepted_len, bool fold, const OptionalTensor& report) {
  const LinearCommit p = checked_commit(
      "delta_commit",
      {states, {ring_u, ring_k, ring_decay, ring_len}, state_indices, accepted_path, accepted_len, fold, report});
  if (int64_t{p.step.batch_size} * p.step.num_heads == 0) return;
  commit(p, kReportDeltaCommit);
}

void delta_draft_step_model(const Tensor& out, const Tensor& ring_u, const Tensor& ring_k, const Tensor& ring_decay,
                            const Tensor& states, const Tensor& ring_len, const Tensor& q, const Tensor& k,
                            const Tensor& v, const Tensor& a, const Tensor& b, const OptionalTensor& a_log,
                            const OptionalTensor& dt_bias, const Tensor& state_indices, const Tensor& accepted_path,
                            const Tensor& accepted_len, const OptionalTensor& tree_mask, double scale,
                            double lower_bound, bool qk_l2norm, const OptionalTensor& semaphores,
                            const OptionalTensor& report) {
  const OptionalTensor elsewhere;
  const LinearDraftStep p = delta_rule::checked_draft_step(
      {out, states, q, k, v, a, b, a_log, dt_bias, state_indices, elsewhere, scale, lower_bound, qk_l2norm, report},
      {ring_u, ring_k, ring_decay, ring_len}, tree_mask, {accepted_path, accepted_len, semaphores});
  p.verify.step.gate_per_channel ? draft_step<true, true>(p, kReportDeltaDraftStep)
                                 : draft_step<true, false>(p, kReportDeltaDraftStep);
}

void ssd_draft_step_model(const Tensor& out, const Tensor& ring_u, const Tensor& ring_k, const Tensor& ring_decay,
                          const Tensor& states, const Tensor& ring_len, const Tensor& x, const OptionalTensor& dt,
                          const Tensor& a, const Tensor& b, const Tensor& c, const OptionalTensor& d,
                          const OptionalTensor& dt_bias, const OptionalTensor& z, const Tensor& state_indices,
                          const Tensor& accepted_path, const Tensor& accepted_len, const OptionalTensor& tree_mask,
                          double scale, bool dt_softplus, const OptionalTensor& semaphores,
                          const OptionalTensor& report) {
  const OptionalTensor elsewhere;
  draft_step<false, false>(
      ssd::checked_draft_step(
          {out, states, x, dt, a, b, c, d, dt_bias, z, state_indices, elsewhere, scale, dt_softplus, report},
          {ring_u, ring_k, ring_decay, ring_len}, tree_mask, {accepted_path, accepted_len, semaphores}),
      kReportSsdDraftStep);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops_model, CPU, m) {
  m.impl("delta_prefill", TORCH_BOX(&delta_prefill_model));
  m.impl("ssd_prefill", TORCH_BOX(&ssd_prefill_model));
  m.impl("delta_plan", TORCH_BOX(&delta_plan_model));
  m.impl("delta_verify", TORCH_BOX(&delta_verify_model));
  m.impl("ssd_verify", TORCH_BOX(&ssd_verify_model));
  m.impl("delta_commit", TORCH_BOX(&delta_commit_model));
  m.impl("delta_draft_step", TORCH_BOX(&delta_draft_step_model));
  m.impl("ssd_draft_step", TORCH_BOX(&ssd_draft_step_model));
  m.impl("causal_conv1d_update", TORCH_BOX(&causal_conv1d_update_model));
  m.impl("delta_conv_decode", TORCH_BOX(&delta_conv_decode_model));
}

}  // namespace attnops
