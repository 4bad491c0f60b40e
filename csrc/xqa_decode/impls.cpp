#include "xqa_decode/impls.h"

#include <string>

#include "core/impl_table.h"
#include "core/tree_window.h"
#include "xqa_decode/cuda/launch.h"
#include "xqa_decode/sm90/cluster_wgmma/launch.h"
#include "xqa_decode/sm90/cluster_wgmma/limits.h"
#include "xqa_decode/sm90/fp8/launch.h"
#include "xqa_decode/sm90/launch.h"
#include "xqa_decode/sm90/limits.h"

namespace attnops::xqa_decode {
namespace {

// Kernels multiply in the type of q; FP8 pages are multiplied in fp16, which holds every value of theirs, for either
// type.
struct Impl {
  const char* name;
  DType dtype;  // of q, when the pages have it too
  DType kv_dtype;
  int max_head_dim;
  Launch launch;
  std::string (*reject_more)(const Params&) = nullptr;  // limits of one architecture's kernels
  bool ragged = false;                                  // for ragged batches alone, which the others do not know

  bool takes(const Params& p) const {
    if (p.ragged != ragged || p.head_dim > max_head_dim) return false;
    if (dtype == DType::kFloat32) return p.dtype == dtype;
    return p.kv_dtype == kv_dtype && (kv_dtype == dtype ? p.dtype == dtype : p.dtype != DType::kFloat32);
  }

  std::string reject(const Params& p) const {
    if (p.ragged != ragged) return ragged ? "takes ragged batches, got no cu_seqlens_q" : "takes no cu_seqlens_q";
    const bool fp8 = size_of(p.kv_dtype) == 1, q_is_wide = p.dtype == DType::kFloat32;
    if (dtype == DType::kFloat32) {
      if (!q_is_wide) return std::string("takes q of float32, got ") + name_of(p.dtype);
    } else if (p.kv_dtype != kv_dtype) {
      return std::string("takes pages of ") + name_of(kv_dtype) + ", got " + name_of(p.kv_dtype);
    } else if (fp8 ? q_is_wide : p.dtype != dtype) {
      return std::string("takes q of ") + (fp8 ? "bfloat16 or float16" : name_of(dtype)) + ", got " + name_of(p.dtype);
    }
    if (p.head_dim > max_head_dim) {
      return "takes head_dim up to " + std::to_string(max_head_dim) + ", got " + std::to_string(p.head_dim);
    }
    return reject_more ? reject_more(p) : "";
  }
};

// A head dim is served by the smallest kernels that hold it, short calls by clusters.
constexpr Impl kImpls[] = {
#if defined(ATTNOPS_HAS_SM90)
    {"sm90_ragged_bf16_hd64", DType::kBFloat16, DType::kBFloat16, 64, &sm90::launch_ragged_bf16_hd64,
     &sm90::reject_ragged, true},
    {"sm90_ragged_gather_bf16_hd64", DType::kBFloat16, DType::kBFloat16, 64, &sm90::launch_ragged_gather_bf16_hd64,
     &sm90::reject_ragged_gather, true},
    {"sm90_ragged_fp16_hd64", DType::kFloat16, DType::kFloat16, 64, &sm90::launch_ragged_fp16_hd64,
     &sm90::reject_ragged, true},
    {"sm90_ragged_gather_fp16_hd64", DType::kFloat16, DType::kFloat16, 64, &sm90::launch_ragged_gather_fp16_hd64,
     &sm90::reject_ragged_gather, true},
    {"sm90_ragged_fp8_hd64", DType::kFloat16, DType::kFloat8E4M3, 64, &sm90::launch_ragged_fp8_hd64,
     &sm90::reject_ragged, true},
    {"sm90_ragged_gather_fp8_hd64", DType::kFloat16, DType::kFloat8E4M3, 64, &sm90::launch_ragged_gather_fp8_hd64,
     &sm90::reject_ragged_gather, true},
    {"sm90_ragged_bf16_hd128", DType::kBFloat16, DType::kBFloat16, 128, &sm90::launch_ragged_bf16_hd128,
     &sm90::reject_ragged, true},
    {"sm90_ragged_gather_bf16_hd128", DType::kBFloat16, DType::kBFloat16, 128, &sm90::launch_ragged_gather_bf16_hd128,
     &sm90::reject_ragged_gather, true},
    {"sm90_ragged_fp16_hd128", DType::kFloat16, DType::kFloat16, 128, &sm90::launch_ragged_fp16_hd128,
     &sm90::reject_ragged, true},
    {"sm90_ragged_gather_fp16_hd128", DType::kFloat16, DType::kFloat16, 128, &sm90::launch_ragged_gather_fp16_hd128,
     &sm90::reject_ragged_gather, true},
    {"sm90_ragged_fp8_hd128", DType::kFloat16, DType::kFloat8E4M3, 128, &sm90::launch_ragged_fp8_hd128,
     &sm90::reject_ragged, true},
    {"sm90_ragged_gather_fp8_hd128", DType::kFloat16, DType::kFloat8E4M3, 128, &sm90::launch_ragged_gather_fp8_hd128,
     &sm90::reject_ragged_gather, true},
    {"sm90_ragged_bf16_hd192", DType::kBFloat16, DType::kBFloat16, 192, &sm90::launch_ragged_bf16_hd192,
     &sm90::reject_ragged, true},
    {"sm90_ragged_fp16_hd192", DType::kFloat16, DType::kFloat16, 192, &sm90::launch_ragged_fp16_hd192,
     &sm90::reject_ragged, true},
    {"sm90_ragged_bf16_hd256", DType::kBFloat16, DType::kBFloat16, 256, &sm90::launch_ragged_bf16_hd256,
     &sm90::reject_ragged, true},
    {"sm90_ragged_gather_bf16_hd256", DType::kBFloat16, DType::kBFloat16, 256, &sm90::launch_ragged_gather_bf16_hd256,
     &sm90::reject_ragged_gather, true},
    {"sm90_ragged_fp16_hd256", DType::kFloat16, DType::kFloat16, 256, &sm90::launch_ragged_fp16_hd256,
     &sm90::reject_ragged, true},
    {"sm90_ragged_gather_fp16_hd256", DType::kFloat16, DType::kFloat16, 256, &sm90::launch_ragged_gather_fp16_hd256,
     &sm90::reject_ragged_gather, true},
    {"sm90_ragged_fp8_hd256", DType::kFloat16, DType::kFloat8E4M3, 256, &sm90::launch_ragged_fp8_hd256,
     &sm90::reject_ragged, true},
    {"sm90_ragged_gather_fp8_hd256", DType::kFloat16, DType::kFloat8E4M3, 256, &sm90::launch_ragged_gather_fp8_hd256,
     &sm90::reject_ragged_gather, true},
    {"sm90_cluster_wgmma_bf16_hd64", DType::kBFloat16, DType::kBFloat16, 64, &sm90::launch_cluster_wgmma_bf16_hd64,
     &sm90::reject_balanced_cluster},
    {"sm90_cluster_gather_bf16_hd64", DType::kBFloat16, DType::kBFloat16, 64, &sm90::launch_cluster_gather_bf16_hd64,
     &sm90::reject_balanced_cluster_gather},
    {"sm90_cluster_wgmma_fp8_hd64", DType::kFloat16, DType::kFloat8E4M3, 64, &sm90::launch_cluster_wgmma_fp8_hd64,
     &sm90::reject_balanced_cluster},
    {"sm90_cluster_gather_fp8_hd64", DType::kFloat16, DType::kFloat8E4M3, 64, &sm90::launch_cluster_gather_fp8_hd64,
     &sm90::reject_balanced_cluster_gather},
    {"sm90_bf16_hd64", DType::kBFloat16, DType::kBFloat16, 64, &sm90::launch_bf16_hd64, &sm90::reject},
    {"sm90_gather_bf16_hd64", DType::kBFloat16, DType::kBFloat16, 64, &sm90::launch_gather_bf16_hd64,
     &sm90::reject_gather},
    {"sm90_fp16_hd64", DType::kFloat16, DType::kFloat16, 64, &sm90::launch_fp16_hd64, &sm90::reject},
    {"sm90_gather_fp16_hd64", DType::kFloat16, DType::kFloat16, 64, &sm90::launch_gather_fp16_hd64,
     &sm90::reject_gather},
    {"sm90_fp8_hd64", DType::kFloat16, DType::kFloat8E4M3, 64, &sm90::launch_fp8_hd64, &sm90::reject},
    {"sm90_gather_fp8_hd64", DType::kFloat16, DType::kFloat8E4M3, 64, &sm90::launch_gather_fp8_hd64,
     &sm90::reject_gather},
#endif
    {"bf16_hd64", DType::kBFloat16, DType::kBFloat16, 64, &launch_bf16_hd64},
    {"fp16_hd64", DType::kFloat16, DType::kFloat16, 64, &launch_fp16_hd64},
    {"fp8_hd64", DType::kFloat16, DType::kFloat8E4M3, 64, &launch_fp8_hd64},
    {"e5m2_hd64", DType::kFloat16, DType::kFloat8E5M2, 64, &launch_e5m2_hd64},
#if defined(ATTNOPS_HAS_SM90)
    {"sm90_cluster_blocks_bf16_hd128", DType::kBFloat16, DType::kBFloat16, 128, &sm90::launch_cluster_blocks_bf16_hd128,
     &sm90::reject_cluster_blocks},
    {"sm90_cluster_blocks_gather_bf16_hd128", DType::kBFloat16, DType::kBFloat16, 128,
     &sm90::launch_cluster_blocks_gather_bf16_hd128, &sm90::reject_cluster_blocks_gather},
    {"sm90_cluster_wgmma_bf16_hd128", DType::kBFloat16, DType::kBFloat16, 128, &sm90::launch_cluster_wgmma_bf16_hd128,
     &sm90::reject_cluster_wgmma},
    {"sm90_cluster_wgmma_fp16_hd128", DType::kFloat16, DType::kFloat16, 128, &sm90::launch_cluster_wgmma_fp16_hd128,
     &sm90::reject_cluster_wgmma},
    {"sm90_cluster_gather_bf16_hd128", DType::kBFloat16, DType::kBFloat16, 128, &sm90::launch_cluster_gather_bf16_hd128,
     &sm90::reject_cluster_gather},
    {"sm90_cluster_gather_fp16_hd128", DType::kFloat16, DType::kFloat16, 128, &sm90::launch_cluster_gather_fp16_hd128,
     &sm90::reject_cluster_gather},
    {"sm90_cluster_wgmma_fp8_hd128", DType::kFloat16, DType::kFloat8E4M3, 128, &sm90::launch_cluster_wgmma_fp8_hd128,
     &sm90::reject_cluster_wgmma},
    {"sm90_cluster_gather_fp8_hd128", DType::kFloat16, DType::kFloat8E4M3, 128, &sm90::launch_cluster_gather_fp8_hd128,
     &sm90::reject_balanced_cluster_gather},
    {"sm90_cluster_blocks_fp8_hd128", DType::kFloat16, DType::kFloat8E4M3, 128, &sm90::launch_cluster_blocks_fp8_hd128,
     &sm90::reject_cluster_blocks},
    {"sm90_cluster_blocks_gather_fp8_hd128", DType::kFloat16, DType::kFloat8E4M3, 128,
     &sm90::launch_cluster_blocks_gather_fp8_hd128, &sm90::reject_cluster_blocks_gather},
    {"sm90_fp8_hd128", DType::kFloat16, DType::kFloat8E4M3, 128, &sm90::fp8::launch_hd128, &sm90::reject_fp8},
    {"sm90_gather_fp8_hd128", DType::kFloat16, DType::kFloat8E4M3, 128, &sm90::fp8::launch_gather_hd128,
     &sm90::reject_fp8_gather},
    {"sm90_fp8_rows_hd128", DType::kFloat16, DType::kFloat8E4M3, 128, &sm90::launch_fp8_hd128, &sm90::reject},
    {"sm90_gather_fp8_rows_hd128", DType::kFloat16, DType::kFloat8E4M3, 128, &sm90::launch_gather_fp8_hd128,
     &sm90::reject_gather},
    {"sm90_bf16_hd128", DType::kBFloat16, DType::kBFloat16, 128, &sm90::launch_bf16_hd128, &sm90::reject},
    {"sm90_gather_bf16_hd128", DType::kBFloat16, DType::kBFloat16, 128, &sm90::launch_gather_bf16_hd128,
     &sm90::reject_gather},
    {"sm90_cluster_wgmma_bf16_hd192", DType::kBFloat16, DType::kBFloat16, 192, &sm90::launch_cluster_wgmma_bf16_hd192,
     &sm90::reject_balanced_cluster},
    {"sm90_bf16_hd192", DType::kBFloat16, DType::kBFloat16, 192, &sm90::launch_bf16_hd192, &sm90::reject},
    {"sm90_bf16_hd256", DType::kBFloat16, DType::kBFloat16, 256, &sm90::launch_bf16_hd256, &sm90::reject},
    {"sm90_fp16_hd128", DType::kFloat16, DType::kFloat16, 128, &sm90::launch_fp16_hd128, &sm90::reject},
    {"sm90_gather_fp16_hd128", DType::kFloat16, DType::kFloat16, 128, &sm90::launch_gather_fp16_hd128,
     &sm90::reject_gather},
    {"sm90_gather_bf16_hd256", DType::kBFloat16, DType::kBFloat16, 256, &sm90::launch_gather_bf16_hd256,
     &sm90::reject_gather},
    {"sm90_fp16_hd192", DType::kFloat16, DType::kFloat16, 192, &sm90::launch_fp16_hd192, &sm90::reject},
    {"sm90_fp16_hd256", DType::kFloat16, DType::kFloat16, 256, &sm90::launch_fp16_hd256, &sm90::reject},
    {"sm90_gather_fp16_hd256", DType::kFloat16, DType::kFloat16, 256, &sm90::launch_gather_fp16_hd256,
     &sm90::reject_gather},
    {"sm90_fp8_hd256", DType::kFloat16, DType::kFloat8E4M3, 256, &sm90::launch_fp8_hd256, &sm90::reject},
    {"sm90_gather_fp8_hd256", DType::kFloat16, DType::kFloat8E4M3, 256, &sm90::launch_gather_fp8_hd256,
     &sm90::reject_gather},
#endif
    {"bf16_hd128", DType::kBFloat16, DType::kBFloat16, 128, &launch_bf16_hd128},
    {"bf16_hd256", DType::kBFloat16, DType::kBFloat16, 256, &launch_bf16_hd256},
    {"fp16_hd128", DType::kFloat16, DType::kFloat16, 128, &launch_fp16_hd128},
    {"fp16_hd256", DType::kFloat16, DType::kFloat16, 256, &launch_fp16_hd256},
    {"fp8_hd128", DType::kFloat16, DType::kFloat8E4M3, 128, &launch_fp8_hd128},
    {"fp8_hd256", DType::kFloat16, DType::kFloat8E4M3, 256, &launch_fp8_hd256},
    {"e5m2_hd128", DType::kFloat16, DType::kFloat8E5M2, 128, &launch_e5m2_hd128},
    {"e5m2_hd256", DType::kFloat16, DType::kFloat8E5M2, 256, &launch_e5m2_hd256},
    {"fp32", DType::kFloat32, DType::kFloat32, 256, &launch_fp32},  // FP8 pages, too
};

}  // namespace

Launch select_launch(const Params& params) { return select_impl("xqa_decode", kImpls, params).launch; }

}  // namespace attnops::xqa_decode
