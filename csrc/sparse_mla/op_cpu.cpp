#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstring>
#include <unordered_map>
#include <vector>

#include "cpu/split_kv_plan.h"
#include "sparse_mla/op.h"

namespace attnops::sparse_mla {
namespace {

void sparse_mla_plan_cpu(const Tensor& tile_scheduler_metadata, const Tensor& num_splits,
                         const OptionalTensor& topk_length, const OptionalTensor& extra_topk_length, int64_t topk,
                         int64_t extra_topk, int64_t seqlen_q, int64_t num_q_heads, int64_t fixed_split_tokens) {
  const PlanParams p = checked_plan(tile_scheduler_metadata, num_splits, topk_length, extra_topk_length, topk,
                                    extra_topk, seqlen_q, num_q_heads, fixed_split_tokens);
  std::vector<int32_t> keys;
  for (int token = 0; token < p.geometry.num_requests; ++token) {
    keys.push_back(ListKeys(p.selected, p.extra, token).end);
  }
  attnops::cpu::SplitKvPlanner(p.geometry, keys.data()).write(p.tile_scheduler_metadata, p.num_splits);
}

void decode_on_cpu(const Params& params, const Tensor&) { run_cpu(params); }

// A group of heads after the other, each with what it sees of the lists.
void run_head_groups(const Params& params) {
  const HeadMasks masks(params);
  const int heads = masks.of_group, topk = params.selected.count, tokens = params.batch_size;
  const size_t per_head = static_cast<size_t>(tokens) * static_cast<size_t>(heads);
  std::vector<int32_t> lists(static_cast<size_t>(tokens) * static_cast<size_t>(topk));
  std::vector<float> lse(per_head), tops(per_head);
  for (int group = 0; group * heads < params.num_q_heads; ++group) {
    Params p = params;
    for (int64_t t = 0; t < tokens; ++t) {
      const int32_t* list = p.selected.list(static_cast<int>(t));
      const uint8_t* bits = masks.bits + t * masks.stride;
      for (int i = 0; i < topk; ++i) {
        lists[static_cast<size_t>(t * topk + i)] = bits[i] >> group & 1 ? list[i] : -1;
      }
    }
    const auto behind = [&](const void* rows, int64_t stride_head) {
      return static_cast<const char*>(rows) + group * heads * stride_head * size_of(p.dtype);
    };
    p.num_q_heads = heads;
    p.division = work_division(1, heads, 1);
    p.selected.indices = lists.data();
    p.selected.stride_list = topk;
    p.q = behind(p.q, p.q_stride_head);
    if (p.q_pe != nullptr) p.q_pe = behind(p.q_pe, p.q_pe_stride_head);
    p.out = static_cast<char*>(p.out) + group * heads * p.out_stride_head * size_of(p.dtype);
    if (p.sinks != nullptr) p.sinks += group * heads;
    p.lse = lse.data();
    p.max_logits = tops.data();
    p.tree_mask = nullptr;
    p.tree_keys = 0;
    run_unplanned_on_cpu(p);
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t to = t * params.num_q_heads + group * heads;
      const size_t bytes = static_cast<size_t>(heads) * sizeof(float);
      if (params.lse != nullptr) std::memcpy(params.lse + to, lse.data() + t * heads, bytes);
      if (params.max_logits != nullptr) std::memcpy(params.max_logits + to, tops.data() + t * heads, bytes);
    }
  }
}

void prefill_on_cpu(const Params& params, const Scratch&, const Tensor&) {
  HeadMasks(params).bits != nullptr ? run_head_groups(params) : run_unplanned_on_cpu(params);
}

// Rows in the order in which tokens name them first. A row counts as often as a token names it, so lists that name one
// twice stand one behind the other.
void share_group(const ShareParams& p, int64_t group) {
  int32_t* const shared = p.shared + group * p.stride_shared;
  uint8_t* const masks = p.masks + group * p.stride_masks;
  std::unordered_map<int32_t, int> places;
  int count = 0;
  bool twice = false;
  const auto for_each = [&](const auto& run) {
    count = 0;
    for (int token = 0; token < p.together; ++token) {
      const int64_t at = group * p.together + token;
      for (int i = 0; i < p.length(at); ++i) {
        const int32_t row = p.indices[at * p.stride_list + i];
        if (row >= 0) run(row, static_cast<uint8_t>(1u << token));
      }
    }
  };
  const auto append = [&](int32_t row, uint8_t bit) {
    shared[count] = row;
    masks[count++] = bit;
  };
  for_each([&](int32_t row, uint8_t bit) {
    const auto [place, is_new] = places.try_emplace(row, count);
    if (is_new) return append(row, bit);
    uint8_t& mask = masks[place->second];
    if ((mask & bit) != 0) twice = true;
    mask = static_cast<uint8_t>(mask | bit);
  });
  if (twice) for_each(append);
  p.shared_lengths[group] = count;
}

void share_lists_cpu(const Tensor& shared, const Tensor& masks, const Tensor& shared_length, const Tensor& indices,
                     const OptionalTensor& topk_length, int64_t together) {
  const ShareParams p = checked_share(shared, masks, shared_length, indices, topk_length, together);
  torch::stable::parallel_for(0, p.groups, 16, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) share_group(p, group);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CPU, m) {
  m.impl("sparse_mla_plan", TORCH_BOX(&sparse_mla_plan_cpu));
  m.impl("sparse_mla_decode", TORCH_BOX(&sparse_mla_decode<&decode_on_cpu>));
  m.impl("share_lists", TORCH_BOX(&share_lists_cpu));
  m.impl("sparse_mla_prefill", TORCH_BOX(&sparse_mla_prefill<&prefill_on_cpu>));
}

}  // namespace attnops::sparse_mla
