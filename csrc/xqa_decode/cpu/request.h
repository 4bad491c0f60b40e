#pragma once
#include <cmath>

#include "core/math.h"
#include "core/report.h"
#include "core/tree_window.h"
#include "scheduler/split_kv.h"
#include "xqa_decode/cpu/tile.h"
#include "xqa_decode/params.h"

namespace attnops::xqa_decode::cpu {

inline uint64_t low_bits(int64_t count) {
  return count >= 64 ? ~uint64_t{0} : count <= 0 ? 0 : (uint64_t{1} << count) - 1;
}

// The tokens of one tile of one request: the addresses of KV head 0.
struct TileAddresses {
  const char* k[kTileTokens];
  const char* v[kTileTokens];
  int first;          // position of token 0
  int count;          // tokens in the tile
  uint64_t readable;  // bit t: k[t] and v[t] are addresses; all of them but for bad page indices
};

// Where the seqlen_q tokens of a request lie in q, out and lse. A request of a ragged batch may have fewer, the last of
// them: those before `first` are nobody's.
struct RequestTokens {
  RequestTokens(const Params& p, int request) {
    if (!p.ragged) {
      q = request * p.q_stride_request, out = request * p.out_stride_request;
      lse = static_cast<int64_t>(request) * p.seqlen_q;
      return;
    }
    const int begin = p.cu_seqlens_q[request], end = p.cu_seqlens_q[request + 1];
    first = p.seqlen_q - (end - begin);
    lse = int64_t{end} - p.seqlen_q;
    q = lse * p.q_stride_token, out = lse * p.out_stride_token;
    least = static_cast<int>(max_of<int64_t>(-lse, 0));
  }

  int64_t query_offset(const Params& p, int token) const { return q + max_of(token, least) * p.q_stride_token; }

  int64_t q, out, lse;  // of token 0: elements, and tokens
  int first = 0;
  int least = 0;  // tokens before it lie before q
};

// Which tokens of a request's cache are visited, where they are, and which of them each new token sees. Lengths and
// page indices are always checked: on a CPU that costs one comparison per page.
class RequestKeys {
 public:
  RequestKeys(const Params& params, int request, bool report_faults)
      : p_(params),
        request_(request),
        length_(max_of(params.cache_seqlens[request], 0)),
        keys_(visible_keys(length_, params.seqlen_q, params.window_left)),
        cells_(params.page_table.row(request)),
        report_(report_faults ? params.report : nullptr) {
    const int64_t capacity = p_.page_table.num_cells(request) * p_.page_table.page_size;
    if (length_ > capacity) fault(ReportKind::kLength, 0, length_, capacity + 1);
    keys_.end = static_cast<int>(min_of<int64_t>(keys_.end, capacity));
    if (RequestTokens(params, request).first == params.seqlen_q) keys_.end = 0;  // nobody asks
  }

  // Tiles of the plan, from its first one on, that hold keys; a length beyond the table has others.
  int end_tile() const {
    const int first = visible_keys(length_, p_.seqlen_q, p_.window_left).begin / kTileTokens;
    return max_of(ceil_div(keys_.end, kTileTokens) - first, 0);
  }

  void locate(int tile, TileAddresses& to) const {
    const int64_t tile_begin =
        (visible_keys(length_, p_.seqlen_q, p_.window_left).begin / kTileTokens + int64_t{tile}) * kTileTokens;
    const int64_t begin = max_of<int64_t>(tile_begin, keys_.begin);
    const int64_t end = min_of<int64_t>(tile_begin + kTileTokens, keys_.end);
    to.first = static_cast<int>(begin);
    to.count = static_cast<int>(max_of<int64_t>(end - begin, 0));
    to.readable = ~uint64_t{0};
    if (to.count == 0) return;

    const int page_size = p_.page_table.page_size;
    const int64_t element = size_of(p_.kv_dtype);
    const int64_t k_step = p_.k_stride_token * element, v_step = p_.v_stride_token * element;
    int64_t cell = begin / page_size;
    int64_t offset = begin % page_size;
    for (int t = 0; t < to.count;) {
      const int64_t page = cells_[cell];
      const int run = static_cast<int>(min_of<int64_t>(page_size - offset, to.count - t));
      if (page < 0 || page >= p_.page_table.num_pages) {
        fault(ReportKind::kPageIndex, cell, page, p_.page_table.num_pages);
        to.readable &= ~(low_bits(run) << t);
        for (int i = 0; i < run; ++i) to.k[t + i] = to.v[t + i] = nullptr;
      } else {
        const char* k = static_cast<const char*>(p_.k_pages) + page * p_.k_stride_page * element + offset * k_step;
        const char* v = static_cast<const char*>(p_.v_pages) + page * p_.v_stride_page * element + offset * v_step;
        for (int i = 0; i < run; ++i) {
          to.k[t + i] = k + i * k_step;
          to.v[t + i] = v + i * v_step;
        }
      }
      t += run;
      offset = 0;
      ++cell;
    }
  }

  // Bit t: new token `i` sees token t of the tile.
  uint64_t visible_bits(int i, const TileAddresses& tile) const {
    const int64_t new_begin = int64_t{length_} - p_.seqlen_q;  // position of new token 0; may be negative
    const int64_t position = new_begin + i;
    const int64_t first_draft = int64_t{length_} - p_.tree_keys;
    const uint8_t* mask =
        p_.tree_mask ? p_.tree_mask + request_ * p_.tree_mask_stride_request + i * p_.tree_mask_stride_token : nullptr;
    const int64_t low = p_.window_left < 0 ? 0
                        : mask             ? tree_window_begin(mask, p_.tree_keys, first_draft, p_.window_left)
                                           : position - p_.window_left;
    const int64_t high = p_.causal && !mask ? position + 1 : int64_t{length_};
    uint64_t bits = low_bits(high - tile.first) & ~low_bits(low - tile.first);
    if (mask) {
      for (int64_t t = max_of<int64_t>(first_draft - tile.first, 0); t < tile.count; ++t) {
        const int64_t draft = tile.first + t - first_draft;
        if ((mask[draft / 8] >> (draft % 8) & 1) == 0) bits &= ~(uint64_t{1} << t);
      }
    }
    return bits & low_bits(tile.count);
  }

 private:
  void fault(ReportKind kind, int64_t position, int64_t value, int64_t limit) const {
    if (report_) record_fault(report_, {ReportOp::kXqaDecode, kind, request_, position, value, limit});
  }

  const Params& p_;
  int request_, length_;
  KvRange keys_;
  const int32_t* cells_;
  int32_t* report_;
};

// Where row `row` of work (request, kv_head) is written, if it is somebody's.
struct OutputRow {
  OutputRow(const Params& p, int request, int kv_head, int row) {
    const RequestTokens tokens(p, request);
    const int group = p.num_q_heads / p.num_kv_heads;
    const int token = row / group, head = kv_head * group + row % group;
    exists = token >= tokens.first;
    const int64_t offset = tokens.out + token * p.out_stride_token + head * p.out_stride_head;
    out = static_cast<char*>(p.out) + offset * size_of(p.dtype);
    lse = p.lse && exists ? p.lse + (tokens.lse + token) * p.num_q_heads + head : nullptr;
    sink = p.sinks ? p.sinks[head] : -INFINITY;
  }

  // The share of the softmax that a sink leaves to the keys: sigmoid(lse - sink).
  float sink_factor(float lse_of_keys) const {
    return sink == -INFINITY ? 1.f : 1.f / (1.f + expf(sink - lse_of_keys));
  }

  bool exists;
  void* out;
  float* lse;
  float sink;
};

}  // namespace attnops::xqa_decode::cpu
