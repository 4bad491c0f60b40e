#pragma once
#include "core/math.h"
#include "device/common/vec.h"
#include "mla_decode/params.h"

// What the host knows of a call, and chooses kernels by.
namespace attnops::mla_decode::sm90 {

// The copy engine reads a KV tile as one run of a page; every other page size is gathered row by row, and so is
// everything in the checked mode, which must look at each index.
inline bool boxes_fit(const Params& p) {
  return p.report == nullptr && p.page_table.page_size % kPlanTileTokens == 0 && p.page_table.num_pages > 0;
}

// Queries come by the copy engine where a request's rows (token, head) lie at equal distances.
inline bool queries_fit(const Params& p) {
  const auto fits = [&](const void* base, int64_t width, int64_t head, int64_t token, int64_t request) {
    return reinterpret_cast<uintptr_t>(base) % 16 == 0 && head % 8 == 0 && head >= width &&
           (p.seqlen_q == 1 || token == head * p.num_q_heads) &&
           (p.batch_size == 1 || (request % 8 == 0 && request > 0));
  };
  return fits(p.q, p.q_pe || p.shared_rows ? kHeadDimV : kHeadDimQk, p.q_stride_head, p.q_stride_token,
              p.q_stride_request) &&
         (!p.q_pe || fits(p.q_pe, kHeadDimRope, p.q_pe_stride_head, p.q_pe_stride_token, p.q_pe_stride_request));
}

// Rows of the output that start on 16-byte boundaries are written in 16-byte vectors, any others by element.
inline bool output_aligned(const Params& p) {
  return rows_aligned(p.out, size_of(p.dtype), 16, p.out_stride_request, p.out_stride_token, p.out_stride_head);
}

// Whether a call asks for nothing that Options::kCommon leaves out, but for a tree mask. `out_aligned`: its rows start
// where the kernel's vectors do.
inline bool is_common_or_tree(const Params& p, bool out_aligned) {
  return queries_fit(p) && out_aligned && p.report == nullptr && p.logit_cap == 0.f && p.softmax_scale > 0.f &&
         p.window_left < 0 && p.sinks == nullptr;
}

inline bool is_common(const Params& p, bool out_aligned) {
  return is_common_or_tree(p, out_aligned) && p.tree_mask == nullptr;
}

}  // namespace attnops::mla_decode::sm90
