#include "fmha/impls.h"

#include <string>

#include "core/impl_table.h"
#include "core/tree_window.h"
#include "device/common/capability.h"
#include "device/common/vec.h"
#include "fmha/cuda/any.h"
#include "fmha/cuda/launch.h"
#include "fmha/sm90/launch.h"
#include "fmha/sm90/row_units.h"

namespace attnops::fmha {
namespace {

using sm90::Form;

bool is_fp8(DType dtype) { return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2; }

// What the copy engine and the gathering warps of Hopper's kernels cannot do.
[[maybe_unused]] std::string reject_sm90(const Params& p) {
  if (p.kv_dtype == DType::kFloat8E5M2) return "takes FP8 keys of float8_e4m3fn, got float8_e5m2";
  if (!rows_aligned(p.q, size_of(p.dtype), 16, p.q_stride_token, p.q_stride_head) ||
      !rows_aligned(p.out, size_of(p.dtype), 16, p.out_stride_token, p.out_stride_head)) {
    return "rows of q and out must start on 16-byte boundaries";
  }
  const int size = size_of(p.kv_dtype), bytes = 8 * size;
  if (!rows_aligned(p.k, size, bytes, p.k_stride_page, p.k_stride_token, p.k_stride_head) ||
      !rows_aligned(p.v, size, bytes, p.v_stride_page, p.v_stride_token, p.v_stride_head)) {
    return "rows of k and v must start on " + std::to_string(bytes) + "-byte boundaries";
  }
  sm90::RowUnits units;
  if (!sm90::find_row_units(p, true, units) || !sm90::find_row_units(p, false, units)) {
    return "strides of k and v leave too many places for a row to count them in 32 bits";
  }
  return "";
}

// 8-bit rows of other sizes than 16 bytes would end in bytes of their neighbours, which may be NaN.
[[maybe_unused]] std::string reject_e4m3(const Params& p) {
  if (p.head_dim_qk % 16 != 0 || p.head_dim_v % 16 != 0) {
    return "takes head dims that are multiples of 16, got " + std::to_string(p.head_dim_qk) + " and " +
           std::to_string(p.head_dim_v);
  }
  if (!rows_aligned(p.q, 1, 16, p.q_stride_token, p.q_stride_head) ||
      !rows_aligned(p.k, 1, 16, p.k_stride_page, p.k_stride_token, p.k_stride_head) ||
      !rows_aligned(p.v, 1, 16, p.v_stride_page, p.v_stride_token, p.v_stride_head) ||
      !rows_aligned(p.out, 2, 16, p.out_stride_token, p.out_stride_head)) {
    return "rows of q, k, v and out must start on 16-byte boundaries";
  }
  sm90::RowUnits units;
  if (!sm90::find_row_units(p, true, units) || !sm90::find_row_units(p, false, units)) {
    return "strides of k and v leave too many places for a row to count them in 32 bits";
  }
  return "";
}

// Beside its tiles there is no room for FP8 rows on devices with 99 KB of shared memory.
std::string reject_fp8(const Params& p) {
  return is_fp8(p.kv_dtype) ? std::string("takes keys of q's dtype, got ") + name_of(p.kv_dtype) : "";
}

// A call, and what many rows ask of it, once for all of them: its device, and which kernel of an instantiation it is
// for.
struct Call {
  const Params& p;
  mutable int sm = 0;
  mutable const sm90::Kernels* kernels = nullptr;
  mutable Form form{};

  int device() const {
    if (sm == 0) sm = usable_sm("fmha");
    return sm;
  }
  Form form_among(const sm90::Kernels* of) const {
    if (kernels != of) {
      kernels = of;
      form = of->form_of(p);
    }
    return form;
  }
};

std::string text_of(Form form) {
  switch (form) {
    case Form::kBoxes: return "keys that come in boxes";
    case Form::kGather: return "keys that come row by row";
    case Form::kOneTile: return "works of one tile of keys";
    case Form::kWholeRows: return "keys that come in boxes of eight whole rows";
    case Form::kPlain: return "plain calls whose keys come in boxes";
    case Form::kPlainGather: return "plain calls whose keys are gathered row by row";
    case Form::kFp8Keys: return "FP8 keys that come in boxes";
    case Form::kPlainFp8Keys: return "plain calls whose FP8 keys come in boxes";
    case Form::kFp8KeysGather: return "FP8 keys that come row by row";
    case Form::kShort: return "short calls whose keys come in boxes";
    case Form::kShortGather: return "short calls whose keys come row by row";
    case Form::kShortOneTile: return "short calls, works of one tile of keys";
  }
  return "";
}

struct Impl {
  using Launch = void (*)(const Params&, CUstream_st*);
  using Reject = std::string (*)(const Params&);

  const char* name;
  DType dtype;
  int head_dim_qk, head_dim_v;  // the largest
  Launch own_launch = nullptr;
  Reject reject_more = nullptr;  // limits of one architecture's kernels
  const sm90::Kernels* kernels = nullptr;
  Form form{};  // of the instantiation's kernels

  constexpr Impl(const char* name, DType dtype, int head_dim_qk, int head_dim_v, Launch launch, Reject more = nullptr)
      : name(name),
        dtype(dtype),
        head_dim_qk(head_dim_qk),
        head_dim_v(head_dim_v),
        own_launch(launch),
        reject_more(more) {}

  constexpr Impl(const char* name, DType dtype, int head_dim_qk, int head_dim_v, const sm90::Kernels& kernels,
                 Form form, Reject more = &reject_sm90)
      : name(name),
        dtype(dtype),
        head_dim_qk(head_dim_qk),
        head_dim_v(head_dim_v),
        reject_more(more),
        kernels(&kernels),
        form(form) {}

  bool takes(const Call& call) const {
    const Params& p = call.p;
    if (p.dtype != dtype || p.head_dim_qk > head_dim_qk || p.head_dim_v > head_dim_v) return false;
    return kernels == nullptr || (call.device() == 90 && call.form_among(kernels) == form);
  }

  std::string reject(const Call& call) const {
    const Params& p = call.p;
    if (p.dtype != dtype) return std::string("takes q of ") + name_of(dtype) + ", got " + name_of(p.dtype);
    if (p.kv_dtype != dtype && !is_fp8(p.kv_dtype)) {
      return std::string("takes keys of ") + name_of(dtype) + " or FP8, got " + name_of(p.kv_dtype);
    }
    if (p.head_dim_qk > head_dim_qk) {
      return "takes head_dim_qk up to " + std::to_string(head_dim_qk) + ", got " + std::to_string(p.head_dim_qk);
    }
    if (p.head_dim_v > head_dim_v) {
      return "takes head_dim_v up to " + std::to_string(head_dim_v) + ", got " + std::to_string(p.head_dim_v);
    }
    if (std::string reason = reject_more ? reject_more(p) : ""; !reason.empty()) return reason;
    if (kernels == nullptr) return "";
    if (call.device() != 90) return "runs on sm_90, this device is sm_" + std::to_string(call.device());
    if (call.form_among(kernels) == form) return "";
    return "is for " + text_of(form) + ", this call has " + text_of(call.form);
  }

  void launch(const Call& call, CUstream_st* stream) const {
    kernels ? kernels->launch(form, call.p, stream) : own_launch(call.p, stream);
  }
};

// A head dim is served by the smallest kernel that holds it; what Hopper's kernels refuse, by those of every device.
constexpr Impl kImpls[] = {
#if defined(ATTNOPS_HAS_SM90)
    {"sm90_bf16_hd64", DType::kBFloat16, 64, 64, sm90::kBf16Hd64, Form::kBoxes},
    {"sm90_gather_bf16_hd64", DType::kBFloat16, 64, 64, sm90::kBf16Hd64, Form::kGather},
    {"sm90_plain_bf16_hd64", DType::kBFloat16, 64, 64, sm90::kBf16Hd64, Form::kPlain},
    {"sm90_plain_gather_bf16_hd64", DType::kBFloat16, 64, 64, sm90::kBf16Hd64, Form::kPlainGather},
    {"sm90_fp8_keys_bf16_hd64", DType::kBFloat16, 64, 64, sm90::kBf16Hd64, Form::kFp8Keys},
    {"sm90_fp8_keys_gather_bf16_hd64", DType::kBFloat16, 64, 64, sm90::kBf16Hd64, Form::kFp8KeysGather},
    {"sm90_short_bf16_hd64", DType::kBFloat16, 64, 64, sm90::kBf16Hd64, Form::kShort},
    {"sm90_short_gather_bf16_hd64", DType::kBFloat16, 64, 64, sm90::kBf16Hd64, Form::kShortGather},
    {"sm90_short_one_tile_bf16_hd64", DType::kBFloat16, 64, 64, sm90::kBf16Hd64, Form::kShortOneTile},
    {"sm90_bf16_hd96", DType::kBFloat16, 96, 96, sm90::kBf16Hd96, Form::kBoxes},
    {"sm90_gather_bf16_hd96", DType::kBFloat16, 96, 96, sm90::kBf16Hd96, Form::kGather},
    {"sm90_one_tile_bf16_hd96", DType::kBFloat16, 96, 96, sm90::kBf16Hd96, Form::kOneTile},
    {"sm90_plain_bf16_hd96", DType::kBFloat16, 96, 96, sm90::kBf16Hd96, Form::kPlain},
    {"sm90_plain_gather_bf16_hd96", DType::kBFloat16, 96, 96, sm90::kBf16Hd96, Form::kPlainGather},
    {"sm90_fp8_keys_bf16_hd96", DType::kBFloat16, 96, 96, sm90::kBf16Hd96, Form::kFp8Keys},
    {"sm90_fp8_keys_gather_bf16_hd96", DType::kBFloat16, 96, 96, sm90::kBf16Hd96, Form::kFp8KeysGather},
    {"sm90_short_bf16_hd96", DType::kBFloat16, 96, 96, sm90::kBf16Hd96, Form::kShort},
    {"sm90_short_gather_bf16_hd96", DType::kBFloat16, 96, 96, sm90::kBf16Hd96, Form::kShortGather},
    {"sm90_short_one_tile_bf16_hd96", DType::kBFloat16, 96, 96, sm90::kBf16Hd96, Form::kShortOneTile},
    {"sm90_bf16_hd128", DType::kBFloat16, 128, 128, sm90::kBf16Hd128, Form::kBoxes},
    {"sm90_gather_bf16_hd128", DType::kBFloat16, 128, 128, sm90::kBf16Hd128, Form::kGather},
    {"sm90_one_tile_bf16_hd128", DType::kBFloat16, 128, 128, sm90::kBf16Hd128, Form::kOneTile},
    {"sm90_whole_rows_bf16_hd128", DType::kBFloat16, 128, 128, sm90::kBf16Hd128, Form::kWholeRows},
    {"sm90_plain_bf16_hd128", DType::kBFloat16, 128, 128, sm90::kBf16Hd128, Form::kPlain},
    {"sm90_plain_gather_bf16_hd128", DType::kBFloat16, 128, 128, sm90::kBf16Hd128, Form::kPlainGather},
    {"sm90_fp8_keys_bf16_hd128", DType::kBFloat16, 128, 128, sm90::kBf16Hd128, Form::kFp8Keys},
    {"sm90_plain_fp8_keys_bf16_hd128", DType::kBFloat16, 128, 128, sm90::kBf16Hd128, Form::kPlainFp8Keys},
    {"sm90_fp8_keys_gather_bf16_hd128", DType::kBFloat16, 128, 128, sm90::kBf16Hd128, Form::kFp8KeysGather},
    {"sm90_short_bf16_hd128", DType::kBFloat16, 128, 128, sm90::kBf16Hd128, Form::kShort},
    {"sm90_short_gather_bf16_hd128", DType::kBFloat16, 128, 128, sm90::kBf16Hd128, Form::kShortGather},
    {"sm90_short_one_tile_bf16_hd128", DType::kBFloat16, 128, 128, sm90::kBf16Hd128, Form::kShortOneTile},
    {"sm90_bf16_hd192x128", DType::kBFloat16, 192, 128, sm90::kBf16Hd192x128, Form::kBoxes},
    {"sm90_gather_bf16_hd192x128", DType::kBFloat16, 192, 128, sm90::kBf16Hd192x128, Form::kGather},
    {"sm90_plain_gather_bf16_hd192x128", DType::kBFloat16, 192, 128, sm90::kBf16Hd192x128, Form::kPlainGather},
    {"sm90_one_tile_bf16_hd192x128", DType::kBFloat16, 192, 128, sm90::kBf16Hd192x128, Form::kOneTile},
    {"sm90_whole_rows_bf16_hd192x128", DType::kBFloat16, 192, 128, sm90::kBf16Hd192x128, Form::kWholeRows},
    {"sm90_fp8_keys_bf16_hd192x128", DType::kBFloat16, 192, 128, sm90::kBf16Hd192x128, Form::kFp8Keys},
    {"sm90_fp8_keys_gather_bf16_hd192x128", DType::kBFloat16, 192, 128, sm90::kBf16Hd192x128, Form::kFp8KeysGather},
    {"sm90_short_bf16_hd192x128", DType::kBFloat16, 192, 128, sm90::kBf16Hd192x128, Form::kShort},
    {"sm90_short_gather_bf16_hd192x128", DType::kBFloat16, 192, 128, sm90::kBf16Hd192x128, Form::kShortGather},
    {"sm90_short_one_tile_bf16_hd192x128", DType::kBFloat16, 192, 128, sm90::kBf16Hd192x128, Form::kShortOneTile},
    {"sm90_bf16_hd192", DType::kBFloat16, 192, 192, sm90::kBf16Hd192, Form::kBoxes},
    {"sm90_gather_bf16_hd192", DType::kBFloat16, 192, 192, sm90::kBf16Hd192, Form::kGather},
    {"sm90_plain_gather_bf16_hd192", DType::kBFloat16, 192, 192, sm90::kBf16Hd192, Form::kPlainGather},
    {"sm90_one_tile_bf16_hd192", DType::kBFloat16, 192, 192, sm90::kBf16Hd192, Form::kOneTile},
    {"sm90_whole_rows_bf16_hd192", DType::kBFloat16, 192, 192, sm90::kBf16Hd192, Form::kWholeRows},
    {"sm90_fp8_keys_bf16_hd192", DType::kBFloat16, 192, 192, sm90::kBf16Hd192, Form::kFp8Keys},
    {"sm90_fp8_keys_gather_bf16_hd192", DType::kBFloat16, 192, 192, sm90::kBf16Hd192, Form::kFp8KeysGather},
    {"sm90_bf16_hd256", DType::kBFloat16, 256, 256, sm90::kBf16Hd256, Form::kBoxes},
    {"sm90_gather_bf16_hd256", DType::kBFloat16, 256, 256, sm90::kBf16Hd256, Form::kGather},
    {"sm90_plain_gather_bf16_hd256", DType::kBFloat16, 256, 256, sm90::kBf16Hd256, Form::kPlainGather},
    {"sm90_one_tile_bf16_hd256", DType::kBFloat16, 256, 256, sm90::kBf16Hd256, Form::kOneTile},
    {"sm90_whole_rows_bf16_hd256", DType::kBFloat16, 256, 256, sm90::kBf16Hd256, Form::kWholeRows},
    {"sm90_fp8_keys_bf16_hd256", DType::kBFloat16, 256, 256, sm90::kBf16Hd256, Form::kFp8Keys},
    {"sm90_fp8_keys_gather_bf16_hd256", DType::kBFloat16, 256, 256, sm90::kBf16Hd256, Form::kFp8KeysGather},
    {"sm90_short_bf16_hd256", DType::kBFloat16, 256, 256, sm90::kBf16Hd256, Form::kShort},
    {"sm90_short_gather_bf16_hd256", DType::kBFloat16, 256, 256, sm90::kBf16Hd256, Form::kShortGather},
    {"sm90_short_one_tile_bf16_hd256", DType::kBFloat16, 256, 256, sm90::kBf16Hd256, Form::kShortOneTile},
    {"sm90_fp16_hd64", DType::kFloat16, 64, 64, sm90::kFp16Hd64, Form::kBoxes},
    {"sm90_gather_fp16_hd64", DType::kFloat16, 64, 64, sm90::kFp16Hd64, Form::kGather},
    {"sm90_plain_fp16_hd64", DType::kFloat16, 64, 64, sm90::kFp16Hd64, Form::kPlain},
    {"sm90_plain_gather_fp16_hd64", DType::kFloat16, 64, 64, sm90::kFp16Hd64, Form::kPlainGather},
    {"sm90_fp8_keys_fp16_hd64", DType::kFloat16, 64, 64, sm90::kFp16Hd64, Form::kFp8Keys},
    {"sm90_fp8_keys_gather_fp16_hd64", DType::kFloat16, 64, 64, sm90::kFp16Hd64, Form::kFp8KeysGather},
    {"sm90_short_fp16_hd64", DType::kFloat16, 64, 64, sm90::kFp16Hd64, Form::kShort},
    {"sm90_short_gather_fp16_hd64", DType::kFloat16, 64, 64, sm90::kFp16Hd64, Form::kShortGather},
    {"sm90_short_one_tile_fp16_hd64", DType::kFloat16, 64, 64, sm90::kFp16Hd64, Form::kShortOneTile},
    {"sm90_fp16_hd96", DType::kFloat16, 96, 96, sm90::kFp16Hd96, Form::kBoxes},
    {"sm90_gather_fp16_hd96", DType::kFloat16, 96, 96, sm90::kFp16Hd96, Form::kGather},
    {"sm90_one_tile_fp16_hd96", DType::kFloat16, 96, 96, sm90::kFp16Hd96, Form::kOneTile},
    {"sm90_plain_fp16_hd96", DType::kFloat16, 96, 96, sm90::kFp16Hd96, Form::kPlain},
    {"sm90_plain_gather_fp16_hd96", DType::kFloat16, 96, 96, sm90::kFp16Hd96, Form::kPlainGather},
    {"sm90_fp8_keys_fp16_hd96", DType::kFloat16, 96, 96, sm90::kFp16Hd96, Form::kFp8Keys},
    {"sm90_fp8_keys_gather_fp16_hd96", DType::kFloat16, 96, 96, sm90::kFp16Hd96, Form::kFp8KeysGather},
    {"sm90_short_fp16_hd96", DType::kFloat16, 96, 96, sm90::kFp16Hd96, Form::kShort},
    {"sm90_short_gather_fp16_hd96", DType::kFloat16, 96, 96, sm90::kFp16Hd96, Form::kShortGather},
    {"sm90_short_one_tile_fp16_hd96", DType::kFloat16, 96, 96, sm90::kFp16Hd96, Form::kShortOneTile},
    {"sm90_fp16_hd128", DType::kFloat16, 128, 128, sm90::kFp16Hd128, Form::kBoxes},
    {"sm90_gather_fp16_hd128", DType::kFloat16, 128, 128, sm90::kFp16Hd128, Form::kGather},
    {"sm90_one_tile_fp16_hd128", DType::kFloat16, 128, 128, sm90::kFp16Hd128, Form::kOneTile},
    {"sm90_whole_rows_fp16_hd128", DType::kFloat16, 128, 128, sm90::kFp16Hd128, Form::kWholeRows},
    {"sm90_plain_fp16_hd128", DType::kFloat16, 128, 128, sm90::kFp16Hd128, Form::kPlain},
    {"sm90_plain_gather_fp16_hd128", DType::kFloat16, 128, 128, sm90::kFp16Hd128, Form::kPlainGather},
    {"sm90_fp8_keys_fp16_hd128", DType::kFloat16, 128, 128, sm90::kFp16Hd128, Form::kFp8Keys},
    {"sm90_plain_fp8_keys_fp16_hd128", DType::kFloat16, 128, 128, sm90::kFp16Hd128, Form::kPlainFp8Keys},
    {"sm90_fp8_keys_gather_fp16_hd128", DType::kFloat16, 128, 128, sm90::kFp16Hd128, Form::kFp8KeysGather},
    {"sm90_short_fp16_hd128", DType::kFloat16, 128, 128, sm90::kFp16Hd128, Form::kShort},
    {"sm90_short_gather_fp16_hd128", DType::kFloat16, 128, 128, sm90::kFp16Hd128, Form::kShortGather},
    {"sm90_short_one_tile_fp16_hd128", DType::kFloat16, 128, 128, sm90::kFp16Hd128, Form::kShortOneTile},
    {"sm90_fp16_hd192x128", DType::kFloat16, 192, 128, sm90::kFp16Hd192x128, Form::kBoxes},
    {"sm90_gather_fp16_hd192x128", DType::kFloat16, 192, 128, sm90::kFp16Hd192x128, Form::kGather},
    {"sm90_plain_gather_fp16_hd192x128", DType::kFloat16, 192, 128, sm90::kFp16Hd192x128, Form::kPlainGather},
    {"sm90_one_tile_fp16_hd192x128", DType::kFloat16, 192, 128, sm90::kFp16Hd192x128, Form::kOneTile},
    {"sm90_whole_rows_fp16_hd192x128", DType::kFloat16, 192, 128, sm90::kFp16Hd192x128, Form::kWholeRows},
    {"sm90_fp8_keys_fp16_hd192x128", DType::kFloat16, 192, 128, sm90::kFp16Hd192x128, Form::kFp8Keys},
    {"sm90_fp8_keys_gather_fp16_hd192x128", DType::kFloat16, 192, 128, sm90::kFp16Hd192x128, Form::kFp8KeysGather},
    {"sm90_short_fp16_hd192x128", DType::kFloat16, 192, 128, sm90::kFp16Hd192x128, Form::kShort},
    {"sm90_short_gather_fp16_hd192x128", DType::kFloat16, 192, 128, sm90::kFp16Hd192x128, Form::kShortGather},
    {"sm90_short_one_tile_fp16_hd192x128", DType::kFloat16, 192, 128, sm90::kFp16Hd192x128, Form::kShortOneTile},
    {"sm90_fp16_hd192", DType::kFloat16, 192, 192, sm90::kFp16Hd192, Form::kBoxes},
    {"sm90_gather_fp16_hd192", DType::kFloat16, 192, 192, sm90::kFp16Hd192, Form::kGather},
    {"sm90_plain_gather_fp16_hd192", DType::kFloat16, 192, 192, sm90::kFp16Hd192, Form::kPlainGather},
    {"sm90_one_tile_fp16_hd192", DType::kFloat16, 192, 192, sm90::kFp16Hd192, Form::kOneTile},
    {"sm90_whole_rows_fp16_hd192", DType::kFloat16, 192, 192, sm90::kFp16Hd192, Form::kWholeRows},
    {"sm90_fp8_keys_fp16_hd192", DType::kFloat16, 192, 192, sm90::kFp16Hd192, Form::kFp8Keys},
    {"sm90_fp8_keys_gather_fp16_hd192", DType::kFloat16, 192, 192, sm90::kFp16Hd192, Form::kFp8KeysGather},
    {"sm90_fp16_hd256", DType::kFloat16, 256, 256, sm90::kFp16Hd256, Form::kBoxes},
    {"sm90_gather_fp16_hd256", DType::kFloat16, 256, 256, sm90::kFp16Hd256, Form::kGather},
    {"sm90_plain_gather_fp16_hd256", DType::kFloat16, 256, 256, sm90::kFp16Hd256, Form::kPlainGather},
    {"sm90_one_tile_fp16_hd256", DType::kFloat16, 256, 256, sm90::kFp16Hd256, Form::kOneTile},
    {"sm90_whole_rows_fp16_hd256", DType::kFloat16, 256, 256, sm90::kFp16Hd256, Form::kWholeRows},
    {"sm90_fp8_keys_fp16_hd256", DType::kFloat16, 256, 256, sm90::kFp16Hd256, Form::kFp8Keys},
    {"sm90_fp8_keys_gather_fp16_hd256", DType::kFloat16, 256, 256, sm90::kFp16Hd256, Form::kFp8KeysGather},
    {"sm90_short_fp16_hd256", DType::kFloat16, 256, 256, sm90::kFp16Hd256, Form::kShort},
    {"sm90_short_gather_fp16_hd256", DType::kFloat16, 256, 256, sm90::kFp16Hd256, Form::kShortGather},
    {"sm90_short_one_tile_fp16_hd256", DType::kFloat16, 256, 256, sm90::kFp16Hd256, Form::kShortOneTile},
    {"sm90_e4m3_hd128", DType::kFloat8E4M3, 128, 128, sm90::kE4m3Hd128, Form::kBoxes, &reject_e4m3},
    {"sm90_gather_e4m3_hd128", DType::kFloat8E4M3, 128, 128, sm90::kE4m3Hd128, Form::kGather, &reject_e4m3},
    {"sm90_plain_e4m3_hd128", DType::kFloat8E4M3, 128, 128, sm90::kE4m3Hd128, Form::kPlain, &reject_e4m3},
    {"sm90_e4m3_hd192", DType::kFloat8E4M3, 192, 192, sm90::kE4m3Hd192, Form::kBoxes, &reject_e4m3},
    {"sm90_gather_e4m3_hd192", DType::kFloat8E4M3, 192, 192, sm90::kE4m3Hd192, Form::kGather, &reject_e4m3},
    {"sm90_e4m3_hd256", DType::kFloat8E4M3, 256, 256, sm90::kE4m3Hd256, Form::kBoxes, &reject_e4m3},
    {"sm90_gather_e4m3_hd256", DType::kFloat8E4M3, 256, 256, sm90::kE4m3Hd256, Form::kGather, &reject_e4m3},
#endif
    {"bf16_hd64", DType::kBFloat16, 64, 64, &launch_bf16_hd64},
    {"bf16_hd96", DType::kBFloat16, 96, 96, &launch_bf16_hd96},
    {"bf16_hd128", DType::kBFloat16, 128, 128, &launch_bf16_hd128},
    {"bf16_hd192x128", DType::kBFloat16, 192, 128, &launch_bf16_hd192x128, &reject_fp8},
    {"bf16_hd256", DType::kBFloat16, 256, 256, &launch_bf16_hd256},
    {"fp16_hd64", DType::kFloat16, 64, 64, &launch_fp16_hd64},
    {"fp16_hd96", DType::kFloat16, 96, 96, &launch_fp16_hd96},
    {"fp16_hd128", DType::kFloat16, 128, 128, &launch_fp16_hd128},
    {"fp16_hd192x128", DType::kFloat16, 192, 128, &launch_fp16_hd192x128, &reject_fp8},
    {"fp16_hd256", DType::kFloat16, 256, 256, &launch_fp16_hd256},
    {"fp32", DType::kFloat32, 256, 256, &launch_fp32},
    {"any_bf16", DType::kBFloat16, kAnyHeadDim, kAnyHeadDim, &launch_any_bf16},
    {"any_fp16", DType::kFloat16, kAnyHeadDim, kAnyHeadDim, &launch_any_fp16},
    {"any_fp32", DType::kFloat32, kAnyHeadDim, kAnyHeadDim, &launch_any_fp32},
};

}  // namespace

void launch(const char* op, const Params& params, CUstream_st* stream) {
  const Call call{params};
  select_impl(op, kImpls, call).launch(call, stream);
}

}  // namespace attnops::fmha
