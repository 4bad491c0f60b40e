#include "fmha/cpu/work.h"

#include <cmath>

namespace attnops::fmha::cpu {

bool gather_rows(const Params& p, const Request& r, int kv_head, int begin, int end, const void** k_rows,
                 const void** v_rows) {
  const int element = size_of(p.kv_dtype);
  const char* k_head = static_cast<const char*>(p.k) + kv_head * p.k_stride_head * element;
  const char* v_head = static_cast<const char*>(p.v) + kv_head * p.v_stride_head * element;
  bool faulty = false;
  for (int key = begin; key < end;) {
    int64_t page = 0, token = r.first_k_token + key;
    int run = end - key;  // keys of one page
    bool exists = true;
    if (p.paged) {
      const int cell = key / p.page_table.page_size;
      page = p.page_table.row(r.index)[cell];
      token = key % p.page_table.page_size;
      run = min_of(run, p.page_table.page_size - static_cast<int>(token));
      if (page < 0 || page >= p.page_table.num_pages) {
        exists = false;
        faulty = true;
        if (kv_head == 0) {
          record_fault(p.report,
                       {ReportOp::kFmhaPaged, ReportKind::kPageIndex, r.index, cell, page, p.page_table.num_pages});
        }
      }
    }
    if (!exists) page = token = 0;  // no address is made of a bad page: it may lie outside all memory
    const char* k = k_head + (page * p.k_stride_page + token * p.k_stride_token) * element;
    const char* v = v_head + (page * p.v_stride_page + token * p.v_stride_token) * element;
    for (int i = 0; i < run; ++i) {
      *k_rows++ = exists ? k + i * p.k_stride_token * element : nullptr;
      *v_rows++ = exists ? v + i * p.v_stride_token * element : nullptr;
    }
    key += run;
  }
  return faulty;
}

float finish_row(const Params& p, const Work& w, int row, float largest, float sum) {
  const bool empty = sum == 0.f;  // NaN is not empty: it must show
  const float lse = empty ? -INFINITY : largest + std::log(sum);
  const int head = w.q_head(row);
  if (p.lse) p.lse[(w.request.first_q_token + w.token(row)) * p.num_q_heads + head] = lse;
  if (empty) return 0.f;
  const float sink_share = p.sinks ? 1.f / (1.f + std::exp(p.sinks[head] - lse)) : 1.f;
  return sink_share * scale_of(p.v_scale, p.v_scale_stride, w.kv_head) / sum;
}

}  // namespace attnops::fmha::cpu
