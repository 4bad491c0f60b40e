#include <torch/csrc/stable/library.h>

#include <initializer_list>
#include <string>

#include "core/impl_table.h"
#include "device/common/capability.h"
#include "device/common/vec.h"
#include "mla_decode/cuda/lists.h"
#include "mla_decode/cuda/plan.h"
#include "mla_decode/impls.h"
#include "mla_decode/sm90/few_rows/launch.h"
#include "mla_decode/sm90/fp8_fragments/launch.h"
#include "mla_decode/sm90/launch.h"
#include "sparse_mla/cuda/share_lists.h"
#include "sparse_mla/op.h"
#include "sparse_mla/sm90/convert_rows.h"
#include "torch_bindings/stream.h"

namespace attnops::sparse_mla {
namespace {

constexpr int kFewHeads = sm90::few_rows::kMaxRows;
constexpr DType kBf16 = DType::kBFloat16, kFp16 = DType::kFloat16, kRows = DType::kUInt8;

// Kernels that take lists of rows.
struct ListImpl {
  const char* name;
  Arch arch;       // that one, or the first of all later ones
  DType dtype;     // of q
  DType kv_dtype;  // of the pool; of a portable row, also uint8
  bool portable;   // rows of every kind, of any alignment
  Launch launch;
  bool shared = false;  // rows of 584 bytes
  int max_heads = 0;    // 0: any number
  bool masks = false;   // groups of heads that see parts of a list

  std::string reject_device() const {
    const int sm = usable_sm("sparse_mla"), own = static_cast<int>(arch);
    if (portable ? sm >= own : sm == own) return "";
    return "runs on sm_" + std::to_string(own) + (portable ? " and later" : "") + ", this device is sm_" +
           std::to_string(sm);
  }

  std::string reject(const Params& p) const {
    if (p.dtype != dtype) return std::string("takes q of ") + name_of(dtype) + ", got " + name_of(p.dtype);
    if (HeadMasks(p).bits != nullptr && (!masks || p.num_q_heads > kPlanRows)) {
      return masks ? "takes at most 64 heads with head_masks, got " + std::to_string(p.num_q_heads)
                   : "takes no head_masks";
    }
    if (!portable) {
      if (p.kv_dtype != kv_dtype) {
        return std::string("takes rows of ") + name_of(kv_dtype) + ", got " + name_of(p.kv_dtype);
      }
      if (kv_dtype == kRows && p.shared_rows != shared)
        return shared ? "takes rows of 584 bytes" : "takes rows of 656 bytes";
      if (p.max_logits && kv_dtype == kRows) return "gives no max_logits";
      if (max_heads > 0 && p.num_q_heads > max_heads) {
        return "takes at most " + std::to_string(max_heads) + " heads, got " + std::to_string(p.num_q_heads);
      }
    }
    return portable ? reject_shared_memory(p) : reject_alignment(p);
  }

  std::string reject_alignment(const Params& p) const {
    const int size = size_of(dtype);
    if (!rows_aligned(p.q, size, 16, p.q_stride_request, p.q_stride_head)) {
      return "rows of q must start on 16-byte boundaries";
    }
    if (max_heads > 0 && !rows_aligned(p.out, size, 4, p.out_stride_request, p.out_stride_head)) {
      return "rows of out must start on 4-byte boundaries";
    }
    if (p.q_pe && !rows_aligned(p.q_pe, size, 16, p.q_pe_stride_request, p.q_pe_stride_head)) {
      return "rows of q_pe must start on 16-byte boundaries";
    }
    for (const SelectedRows* rows : {&p.selected, &p.extra}) {
      // Within a page, rows of 584 bytes lie 576 apart.
      const int64_t stride_token = shared ? kSharedDataBytes : rows->stride_token;
      if (rows->count > 0 && !rows_aligned(rows->pages, size_of(p.kv_dtype), 16, rows->stride_page, stride_token)) {
        return "rows of the pool must start on 16-byte boundaries";
      }
    }
    return reject_device();
  }

  std::string reject_shared_memory(const Params& p) const {
    constexpr int kReserved = 1024;  // of each CTA
    const int needed = lists_shared_bytes(p.num_q_heads) + kReserved, there = device_shared_bytes("sparse_mla");
    if (needed > there) {
      return "needs " + std::to_string(needed) + " bytes of shared memory, this device has " + std::to_string(there);
    }
    return reject_device();
  }
};

constexpr std::initializer_list<ListImpl> kListImpls = {
#if defined(ATTNOPS_HAS_SM90)
    {"sm90_list_rows_bf16", Arch::kSm90, kBf16, kRows, false, &sm90::fp8_fragments::launch_selected_bf16},
    {"sm90_list_rows_fp16", Arch::kSm90, kFp16, kRows, false, &sm90::fp8_fragments::launch_selected_fp16},
    {"sm90_list_shared_bf16", Arch::kSm90, kBf16, kRows, false, &sm90::fp8_fragments::launch_shared_bf16, true},
    {"sm90_list_shared_fp16", Arch::kSm90, kFp16, kRows, false, &sm90::fp8_fragments::launch_shared_fp16, true},
    {"sm90_list_few_bf16", Arch::kSm90, kBf16, kBf16, false, &sm90::few_rows::launch_selected_bf16, false, kFewHeads},
    {"sm90_list_few_fp16", Arch::kSm90, kFp16, kFp16, false, &sm90::few_rows::launch_selected_fp16, false, kFewHeads},
    {"sm90_list_bf16", Arch::kSm90, kBf16, kBf16, false, &sm90::launch_selected_bf16, false, 0, true},
    {"sm90_list_fp16", Arch::kSm90, kFp16, kFp16, false, &sm90::launch_selected_fp16, false, 0, true},
#endif
    {"mma_lists_bf16", Arch::kSm80, kBf16, kBf16, true, &launch_lists_bf16},
    {"mma_lists_fp16", Arch::kSm80, kFp16, kFp16, true, &launch_lists_fp16},
};

void sparse_mla_plan_cuda(const Tensor& tile_scheduler_metadata, const Tensor& num_splits,
                          const OptionalTensor& topk_length, const OptionalTensor& extra_topk_length, int64_t topk,
                          int64_t extra_topk, int64_t seqlen_q, int64_t num_q_heads, int64_t fixed_split_tokens) {
  const PlanParams p = checked_plan(tile_scheduler_metadata, num_splits, topk_length, extra_topk_length, topk,
                                    extra_topk, seqlen_q, num_q_heads, fixed_split_tokens);
  const OnDevice guard(tile_scheduler_metadata);
  launch_list_plan(p.geometry, p.selected, p.extra, p.tile_scheduler_metadata, p.num_splits,
                   current_stream(tile_scheduler_metadata));
}

void run_on_cuda(const Params& params, const Tensor& q) {
  const OnDevice guard(q);
  select_impl("sparse_mla", kListImpls, params).launch(params, current_stream(q));
}

void prefill_on_cuda(const Params& params, const Scratch& scratch, const Tensor& q) {
  const OnDevice guard(q);
  const ListImpl& chosen = select_impl("sparse_mla", kListImpls, params);
#if defined(ATTNOPS_HAS_SM90)
  const bool converts = scratch.bytes > 0 && params.num_q_heads > kMostHeadsOfPool;
  if (converts && chosen.launch == &sm90::fp8_fragments::launch_selected_bf16) {
    const ConvertedCall call = launch_convert_rows(params, scratch.data, scratch.bytes, current_stream(q));
    chosen.launch(call.pool, current_stream(q));
    return sm90::launch_selected_bf16(call.converted, current_stream(q));
  }
#endif
  chosen.launch(params, current_stream(q));
}

void share_lists_cuda(const Tensor& shared, const Tensor& masks, const Tensor& shared_length, const Tensor& indices,
                      const OptionalTensor& topk_length, int64_t together) {
  const ShareParams p = checked_share(shared, masks, shared_length, indices, topk_length, together);
  check_range(kShare, "together * topk", int64_t{p.together} * p.topk, 0, kMostSharedKeys);
  const OnDevice guard(indices);
  launch_share_lists(p, current_stream(indices));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CUDA, m) {
  m.impl("sparse_mla_plan", TORCH_BOX(&sparse_mla_plan_cuda));
  m.impl("sparse_mla_decode", TORCH_BOX(&sparse_mla_decode<&run_on_cuda>));
  m.impl("share_lists", TORCH_BOX(&share_lists_cuda));
  m.impl("sparse_mla_prefill", TORCH_BOX(&sparse_mla_prefill<&prefill_on_cuda>));
}

}  // namespace attnops::sparse_mla
