#pragma once
#include <cstdint>

#include "core/block_report.h"
#include "core/index_report.h"
#include "core/math.h"
#include "core/page_table.h"

namespace attnops::block_lists {

// Double sparsity: a key's score is the largest product of its label, some channels of it, with those of the queries of
// its KV head's group.
struct ScoreParams {
  int num_requests, num_q_heads, num_kv_heads, num_channels;
  const void* q;  // [B, H_q, n], of `dtype`
  int64_t q_stride_request, q_stride_head;
  const void* labels;  // [P, page_size, H_kv, n], of `dtype`
  int64_t label_stride_page, label_stride_token, label_stride_head;
  PageTable page_table;
  const int32_t* cache_seqlens;  // [B]
  float* scores;                 // [B, H_kv, columns]; those past a length are left as they are
  int64_t score_stride_request, score_stride_head, columns;
  DType dtype;
  int32_t* report;  // core/report.h, or null

  ATTNOPS_HOST_DEVICE int group() const { return num_q_heads / num_kv_heads; }
};

ATTNOPS_HOST_DEVICE inline int64_t scored_keys(const ScoreParams& p, int request) {
  const int64_t length = min_of(p.cache_seqlens[request], p.page_table.num_tokens(request));
  return min_of(max_of<int64_t>(length, 0), p.columns);
}

// To be called once per request where there is a report.
ATTNOPS_HOST_DEVICE inline void report_columns(const ScoreParams& p, int request) {
  const int length = p.cache_seqlens[request];
  if (length <= p.columns) return;
  record_fault(p.report, {kReportLabelScores, kReportRowLength, request, 0, length, p.columns + 1});
}

// Where the label of a request's key begins, in elements; -1: its page is none of the pool.
ATTNOPS_HOST_DEVICE inline int64_t label_place(const ScoreParams& p, int request, int head, int key) {
  const int cell = key / p.page_table.page_size, page = p.page_table.row(request)[cell];
  if (!p.page_table.has_page(page)) {
    if (p.report != nullptr) {
      record_fault(p.report, {kReportLabelScores, ReportKind::kPageIndex, request, cell, page, p.page_table.num_pages});
    }
    return -1;
  }
  return page * p.label_stride_page + (key - cell * p.page_table.page_size) * p.label_stride_token +
         head * p.label_stride_head;
}

}  // namespace attnops::block_lists
