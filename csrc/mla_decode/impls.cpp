#include "mla_decode/impls.h"

#include <initializer_list>
#include <string>

#include "core/impl_table.h"
#include "core/tree_window.h"
#include "device/common/capability.h"
#include "device/common/vec.h"
#include "mla_decode/sm90/few_rows/launch.h"
#include "mla_decode/sm90/fp8_fragments/launch.h"
#include "mla_decode/sm90/fp8_products/launch.h"
#include "mla_decode/sm90/launch.h"
#include "mla_decode/sm90/ring/limits.h"

namespace attnops::mla_decode {
namespace {

struct Impl {
  const char* name;
  Arch arch;
  DType dtype;     // of q
  DType kv_dtype;  // of the pages
  int max_rows;    // query rows (token, head) of a request; 0: any number
  Launch launch;
  bool fp8_products = false;                         // rounds q and probabilities to e4m3
  const char* (*unsuited)(const Params&) = nullptr;  // limits of one kernel

  bool takes(const Params& p) const {
    return p.dtype == dtype && p.kv_dtype == kv_dtype && (unsuited == nullptr || unsuited(p) == nullptr);
  }

  std::string reject(const Params& p) const {
    if (p.dtype != dtype) return std::string("takes q of ") + name_of(dtype) + ", got " + name_of(p.dtype);
    if (p.kv_dtype != kv_dtype) {
      return std::string("takes kv_pages of ") + name_of(kv_dtype) + ", got " + name_of(p.kv_dtype);
    }
    if (fp8_products && !p.fp8_products) return "rounds q and probabilities to e4m3, which needs fp8_products=True";
    const int rows = p.seqlen_q * p.num_q_heads;
    if (max_rows > 0 && rows > max_rows) {
      return "takes at most " + std::to_string(max_rows) + " query rows (token, head) of a request, got " +
             std::to_string(rows);
    }
    const int size = size_of(dtype);
    if (!rows_aligned(p.q, size, 16, p.q_stride_request, p.q_stride_token, p.q_stride_head)) {
      return "rows of q must start on 16-byte boundaries";
    }
    const bool pairs = max_rows > 0 && kv_dtype == dtype;  // of columns of out are written at once
    if (pairs && !rows_aligned(p.out, size, 4, p.out_stride_request, p.out_stride_token, p.out_stride_head)) {
      return "rows of out must start on 4-byte boundaries";
    }
    if (p.q_pe && !rows_aligned(p.q_pe, size, 16, p.q_pe_stride_request, p.q_pe_stride_token, p.q_pe_stride_head)) {
      return "rows of q_pe must start on 16-byte boundaries";
    }
    if (!rows_aligned(p.kv_pages, size_of(kv_dtype), 16, p.kv_stride_page, p.kv_stride_token)) {
      return "rows of kv_pages must start on 16-byte boundaries";
    }
    if (unsuited != nullptr && unsuited(p) != nullptr) return unsuited(p);
    const int sm = usable_sm("mla_decode");
    if (sm != static_cast<int>(arch)) {
      return "runs on sm_" + std::to_string(static_cast<int>(arch)) + ", this device is sm_" + std::to_string(sm);
    }
    return "";
  }
};

constexpr int kFewFp8Rows = sm90::fp8_fragments::kFewRows;
constexpr DType kBf16 = DType::kBFloat16, kFp16 = DType::kFloat16, kE4m3 = DType::kFloat8E4M3, kRows = DType::kUInt8;

// A row is a kernel. What it has as template parameters (shapes of the rows of q, options, how tiles are loaded) its
// launch chooses.
constexpr std::initializer_list<Impl> kImpls = {
#if defined(ATTNOPS_HAS_SM90)
    {"sm90_few_rows_bf16", Arch::kSm90, kBf16, kBf16, sm90::few_rows::kMaxRows, &sm90::few_rows::launch_bf16},
    {"sm90_few_rows_fp16", Arch::kSm90, kFp16, kFp16, sm90::few_rows::kMaxRows, &sm90::few_rows::launch_fp16},
    {"sm90_ring_bf16", Arch::kSm90, kBf16, kBf16, 0, &sm90::launch_ring_bf16, false, &sm90::ring::unsuited},
    {"sm90_ring_fp16", Arch::kSm90, kFp16, kFp16, 0, &sm90::launch_ring_fp16, false, &sm90::ring::unsuited},
    {"sm90_bf16", Arch::kSm90, kBf16, kBf16, 0, &sm90::launch_bf16},
    {"sm90_fp16", Arch::kSm90, kFp16, kFp16, 0, &sm90::launch_fp16},
    {"sm90_few_rows_e4m3_bf16", Arch::kSm90, kBf16, kE4m3, kFewFp8Rows, &sm90::fp8_fragments::launch_few_dense_bf16},
    {"sm90_few_rows_e4m3_fp16", Arch::kSm90, kFp16, kE4m3, kFewFp8Rows, &sm90::fp8_fragments::launch_few_dense_fp16},
    {"sm90_few_rows_656_bf16", Arch::kSm90, kBf16, kRows, kFewFp8Rows, &sm90::fp8_fragments::launch_few_rows_bf16},
    {"sm90_few_rows_656_fp16", Arch::kSm90, kFp16, kRows, kFewFp8Rows, &sm90::fp8_fragments::launch_few_rows_fp16},
    {"sm90_e4m3_rounded", Arch::kSm90, kBf16, kE4m3, 0, &sm90::fp8_products::launch_bf16_rounded, true},
    {"sm90_e4m3_bf16", Arch::kSm90, kBf16, kE4m3, 0, &sm90::fp8_fragments::launch_dense_bf16},
    {"sm90_e4m3_fp16", Arch::kSm90, kFp16, kE4m3, 0, &sm90::fp8_fragments::launch_dense_fp16},
    {"sm90_rows_bf16", Arch::kSm90, kBf16, kRows, 0, &sm90::fp8_fragments::launch_rows_bf16},
    {"sm90_rows_fp16", Arch::kSm90, kFp16, kRows, 0, &sm90::fp8_fragments::launch_rows_fp16},
#endif
};

}  // namespace

Launch select_launch(const Params& params) { return select_impl("mla_decode", kImpls, params).launch; }

}  // namespace attnops::mla_decode
