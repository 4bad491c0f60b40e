#pragma once
#include <string>

#include "core/math.h"
#include "device/common/capability.h"
#include "device/common/vec.h"
#include "xqa_decode/params.h"
#include "xqa_decode/plan.h"

namespace attnops::xqa_decode::sm90 {

// Tokens of a request that its queries may see, at most: by its cells of the page table, or by the window.
inline int64_t most_visible_tokens(const Params& p) {
  const int64_t cells = p.page_table.kv_indptr ? p.page_table.num_indices : p.page_table.max_pages;
  const int64_t held = cells * p.page_table.page_size;
  return p.window_left < 0 ? held : min_of(held, int64_t{p.window_left} + p.seqlen_q + 64);
}

// Whether rows start on 16-byte boundaries.
inline bool rows_are_vectors(const Params& p, const void* base, int64_t page, int64_t token, int64_t head) {
  return rows_aligned(base, size_of(p.kv_dtype), 16, p.page_table.num_pages > 1 ? page : 0,
                      p.page_table.page_size > 1 ? token : 0, p.num_kv_heads > 1 ? head : 0);
}

// Whether the copy engine can walk these strides, in elements: dimensions of one element have none.
inline bool boxes_fit(const Params& p, const void* base, int64_t page, int64_t token, int64_t head) {
  const auto fits = [](int64_t stride, int64_t extent) {
    return extent <= 1 || (stride > 0 && stride < int64_t{1} << 38);
  };
  return fits(page, p.page_table.num_pages) && fits(token, p.page_table.page_size) && fits(head, p.num_kv_heads) &&
         rows_are_vectors(p, base, page, token, head);
}

// Whether a row's place, in units of 16 bytes, is a 32-bit number.
inline bool places_fit(const Params& p, int64_t page, int64_t token) {
  const int64_t size = size_of(p.kv_dtype), pages = p.page_table.num_pages - 1, tokens = p.page_table.page_size - 1;
  if (page < 0 || token < 0 || (pages > 0 && page > (int64_t{1} << 40) / pages)) return false;
  return (pages * page + tokens * token) * size / 16 < 0xffffffff;
}

inline std::string reject_here(const Params& p) {
  if (p.report) return "has no checked mode, got report";
  const int sm = usable_sm("xqa_decode");
  if (sm != 90) return "runs on sm_90, this device is sm_" + std::to_string(sm);
  return "";
}

inline std::string reject_any(const Params& p) {
  return p.page_table.num_pages < 1 ? "takes at least one page, got none" : reject_here(p);
}

// Whether boxes of the copy engine are made of pages of so many tokens.
inline bool pages_suit_boxes(const Params& p) {
  const int page_size = p.page_table.page_size;
  return page_size >= 8 && (page_size & (page_size - 1)) == 0;
}

// Why boxes do not serve these arguments; "" when they do.
inline std::string reject_boxes(const Params& p) {
  if (!pages_suit_boxes(p)) return "takes page_size 8, 16, 32, ..., got " + std::to_string(p.page_table.page_size);
  if (!boxes_fit(p, p.k_pages, p.k_stride_page, p.k_stride_token, p.k_stride_head)) {
    return "takes k_pages whose rows start on 16-byte boundaries, with positive strides";
  }
  if (!boxes_fit(p, p.v_pages, p.v_stride_page, p.v_stride_token, p.v_stride_head)) {
    return "takes v_pages whose rows start on 16-byte boundaries, with positive strides";
  }
  return reject_any(p);
}

// Why rows cannot be copied one by one.
inline std::string reject_gathered_rows(const Params& p) {
  if (p.head_dim * size_of(p.kv_dtype) % 16 != 0) {
    return "takes rows of whole 16 bytes, got head_dim " + std::to_string(p.head_dim);
  }
  if (!rows_are_vectors(p, p.k_pages, p.k_stride_page, p.k_stride_token, p.k_stride_head) ||
      !places_fit(p, p.k_stride_page, p.k_stride_token)) {
    return "takes k_pages of up to 64 GB whose rows start on 16-byte boundaries";
  }
  if (!rows_are_vectors(p, p.v_pages, p.v_stride_page, p.v_stride_token, p.v_stride_head) ||
      !places_fit(p, p.v_stride_page, p.v_stride_token)) {
    return "takes v_pages of up to 64 GB whose rows start on 16-byte boundaries";
  }
  return "";
}

// The same as `reject` of those that copy row by row.
inline std::string reject_gather(const Params& p) {
  const std::string reason = reject_gathered_rows(p);
  return reason.empty() ? reject_any(p) : reason;
}

// Whether few e4m3 rows are better gathered, whatever their pages: measured on an H200. Of rows that are no whole 32
// bytes the copy engine asks for every 16 bytes apart. A row of 80 bytes is then four requests to L2, where one of 128
// bytes is one, and comes no faster. Nearly whole rows (112) lose less than gathers of heads side by side do.
// Batch-invariant kernels fold over boxes alone.
inline bool gathers_suit(const Params& p) {
  const bool torn = size_of(p.kv_dtype) == 1 && p.head_dim % 32 != 0 && (p.head_dim <= 80 || p.head_dim > 128);
  const bool few = p.seqlen_q * (p.num_q_heads / p.num_kv_heads) <= 16;
  return torn && few && p.fixed_split_tokens == 0 && reject_gather(p).empty();
}

// Why the Hopper kernels do not serve these arguments; "" when they do.
inline std::string reject(const Params& p) {
  if (gathers_suit(p)) return "leaves rows of " + std::to_string(p.head_dim) + " bytes to kernels that gather them";
  return reject_boxes(p);
}

// Ragged batches: of few rows, in vectors, by balanced plans.
constexpr int most_ragged_rows(int head_dim) { return head_dim <= 128 ? 64 : 32; }

inline std::string reject_ragged_rows(const Params& p) {
  const int rows = p.seqlen_q * (p.num_q_heads / p.num_kv_heads), most = most_ragged_rows(p.head_dim);
  if (rows > most) return "takes max_seqlen_q * group up to " + std::to_string(most) + ", got " + std::to_string(rows);
  if (p.fixed_split_tokens != 0) return "takes balanced plans, got fixed_split_tokens";
  const bool vectors = p.head_dim % 8 == 0 && rows_aligned(p.q, 2, 16, 0, p.q_stride_token, p.q_stride_head);
  return vectors ? "" : "takes q whose rows start on 16-byte boundaries, of whole 16 bytes";
}

inline std::string reject_ragged(const Params& p) {
  const std::string reason = reject_ragged_rows(p);
  return reason.empty() ? reject(p) : reason;
}

// Where there is no page, none is looked for.
inline std::string reject_ragged_gather(const Params& p) {
  std::string reason = reject_ragged_rows(p);
  if (reason.empty()) reason = reject_gathered_rows(p);
  return reason.empty() ? reject_here(p) : reason;
}

// Two warpgroups for a KV head, over e4m3 pages up to head dim 128 (fp8/). One for each head has registers for short
// works, and takes long ones as fast, but for the calls below: docs/log/xqa_decode.md, "One warpgroup over FP8".
inline constexpr int kFewFp8Rows = 8, kMostFp8Rows = 16;

// Whether a CTA takes two neighbouring KV heads, whose parts walk the same tiles: where there are four works a part or
// more, but not so many that they are dealt out, or rows of two heads are nearly whole lines of memory. Fewer works
// have three CTAs an SM and parts for them (metadata/plan_parts.py).
inline bool heads_pair_up(const Params& p) {
  if (p.seqlen_q * (p.num_q_heads / p.num_kv_heads) > kFewFp8Rows || p.num_kv_heads % 2 != 0) return false;
  if (!heads_side_by_side(p.num_sm_parts, p.num_kv_heads)) return false;
  const int64_t works = int64_t{p.batch_size} * p.num_kv_heads, parts = p.num_sm_parts;
  const bool several = works >= 4 * parts && works <= 8 * parts;
  return several || (p.head_dim <= 96 && p.k_stride_head < p.k_stride_token);
}

inline std::string reject_fp8(const Params& p) {
  const int rows = p.seqlen_q * (p.num_q_heads / p.num_kv_heads);
  if (rows > kMostFp8Rows) return "takes seqlen_q * group up to 16, got " + std::to_string(rows);
  if (p.fixed_split_tokens == 0 && !heads_pair_up(p)) {
    return "takes pairs of KV heads of up to 8 rows, with several works a part or head_dim to 96, got " +
           std::to_string(p.num_kv_heads) + " and " + std::to_string(p.num_sm_parts) + " parts";
  }
  return reject(p);
}

inline std::string reject_fp8_gather(const Params& p) {
  if (pages_suit_boxes(p) && !gathers_suit(p)) {
    return "takes pages that boxes do not suit, got page_size " + std::to_string(p.page_table.page_size);
  }
  const int rows = p.seqlen_q * (p.num_q_heads / p.num_kv_heads), least = p.fixed_split_tokens == 0 ? kFewFp8Rows : 0;
  if (rows <= least || rows > kMostFp8Rows) {
    return "takes seqlen_q * group of 9 to 16, or up to 16 by batch-invariant plans, got " + std::to_string(rows);
  }
  return reject_gather(p);
}

}  // namespace attnops::xqa_decode::sm90
