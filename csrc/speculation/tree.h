#pragma once
#include <initializer_list>

#include "core/tree_report.h"
#include "speculation/params.h"

// What a kernel asks about one node of one request's tree, on the CPU and on the GPU. Whatever the links are, nothing
// is read or written outside an array.
namespace attnops::speculation {

// ---- building

// The node that node i >= 1 hangs on; -1, and recorded, where that is none of those before it.
template <class Selected>
ATTNOPS_HOST_DEVICE inline int parent_of(const BuildTreeParams& p, int b, int i, const Selected& selected) {
  const int64_t mine = selected[i - 1], group = mine < 0 ? -1 : mine / p.topk;
  if (group == 0) return 0;
  int64_t candidate = -1;
  int parent = p.num_tokens;
  if (group > 0 && group < p.parent_list.columns) {
    candidate = p.parent_list.at(b, group);
    for (parent = 1; parent < p.num_tokens && selected[parent - 1] != candidate;) ++parent;
  }
  if (parent < i) return parent;
  if (p.report != nullptr) {
    record_fault(p.report,
                 {kReportBuildDraftTree, kReportTreeParent, b, i, parent < p.num_tokens ? parent : int64_t{-1}, i});
  }
  return -1;
}

// Writes node i of request b, whose parents are known. `parents[0]` is not looked at.
template <class Parents>
ATTNOPS_HOST_DEVICE inline void write_node(const BuildTreeParams& p, int b, int i, const Parents& parents) {
  const int n = p.num_tokens, bytes = (n + 7) / 8;
  const int64_t node = static_cast<int64_t>(b) * n + i;
  int depth = 0;
  for (int at = i; at > 0; at = parents[at]) ++depth;
  uint8_t* row = p.tree_mask + node * bytes;
  for (int word = 0; word * 64 < n; ++word) {
    uint64_t bits = 0;
    for (int at = i; at >= 0; at = at == 0 ? -1 : parents[at]) {
      if (at / 64 == word) bits |= uint64_t{1} << (at % 64);
    }
    for (int byte = 0; byte < 8 && word * 8 + byte < bytes; ++byte) {
      row[word * 8 + byte] = static_cast<uint8_t>(bits >> (8 * byte));
    }
  }
  int child = i + 1, sibling = i + 1;
  while (child < n && parents[child] != i) ++child;
  if (i == 0 || parents[i] < 0) sibling = n;
  while (sibling < n && parents[sibling] != parents[i]) ++sibling;
  p.positions[node] = max_of<int64_t>(p.cache_seqlens[b], 0) + depth;
  p.retrieve_index[node] = node;
  p.next_token[node] = child < n ? child : -1;
  p.next_sibling[node] = sibling < n ? sibling : -1;
  if (p.tokens != nullptr) p.tokens[node] = i == 0 ? p.bonus_tokens[b] : p.draft_tokens.at(b, i - 1);
}

// ---- judging

// A tree as it is walked: in shared memory on the GPU, in place on the CPU.
template <class Links>
class Walk {
 public:
  ATTNOPS_HOST_DEVICE Walk(const VerifyParams& p, ReportOp op, int b, const Links& links)
      : p_(p), links_(links), op_(op), b_(b) {}

  // The first child of a node, or the next child of its parent; -1 where there is none, or after as many steps as a
  // tree has links.
  ATTNOPS_HOST_DEVICE int child(int node) { return checked_link(node, links_.next_token(node)); }
  ATTNOPS_HOST_DEVICE int sibling(int node) { return checked_link(node, links_.next_sibling(node)); }

  // Row of a node in the batch; -1, and recorded, where that is none of its request.
  ATTNOPS_HOST_DEVICE int64_t row(int node) const {
    const int64_t row = links_.retrieve_index(node), first = static_cast<int64_t>(b_) * p_.num_tokens;
    if (row >= first && row < first + p_.num_tokens) return row;
    record(kReportTreeIndex, node, max_of(row, INT64_MIN + first) - first, p_.num_tokens);
    return -1;
  }

  ATTNOPS_HOST_DEVICE void record(ReportKind kind, int64_t node, int64_t value, int64_t limit) const {
    if (p_.report != nullptr) record_fault(p_.report, {op_, kind, b_, node, value, limit});
  }

 private:
  ATTNOPS_HOST_DEVICE int checked_link(int node, int64_t link) {
    if (link < 0) return -1;
    if (link > 0 && link < p_.num_tokens && ++steps_ < p_.num_tokens) return static_cast<int>(link);
    record(kReportTreeLink, node, link, p_.num_tokens);
    return -1;
  }

  const VerifyParams& p_;
  const Links& links_;
  ReportOp op_;
  int b_, steps_ = 0;
};

// How a walk ended: at which node, and how many drafts were accepted.
struct Accepted {
  int node, count;
};

// Goes down from the root as long as `accepts(node, child)` takes one of the children. `take(row, place, node)` hears
// of every node of the path, the root at place 0. A root without a row of its own has the first of its request.
template <class Links, class Accepts, class Take>
ATTNOPS_HOST_DEVICE inline Accepted walk_tree(const VerifyParams& p, Walk<Links>& walk, int b, const Accepts& accepts,
                                              const Take& take) {
  const int64_t root = walk.row(0);
  take(root < 0 ? static_cast<int64_t>(b) * p.num_tokens : root, 0, 0);
  int node = 0, count = 0;
  while (count + 1 < p.path_length) {
    int child = walk.child(node);
    int64_t row = -1;
    while (child >= 0) {
      row = walk.row(child);
      if (row >= 0 && accepts(node, child)) break;
      child = walk.sibling(child);
    }
    if (child < 0) break;
    node = child;
    take(row, ++count, node);
  }
  return {node, count};
}

// What is none counts as 0.
ATTNOPS_HOST_DEVICE inline bool is_probability(float x) { return x >= 0.f && x < 3.4e38f; }

// Which children of a node are taken: with one number per node, a child is accepted with its own probability, once
// those before it were not. What a rejected child held is left out of what is drawn from afterwards.
template <class Links>
class Sampler {
 public:
  // `rejected` has room for N nodes.
  ATTNOPS_HOST_DEVICE Sampler(const VerifyParams& p, const Walk<Links>& walk, const Links& links, int b, int* rejected)
      : p_(p), walk_(walk), links_(links), b_(b), rejected_(rejected) {}

  ATTNOPS_HOST_DEVICE bool accepts(int node, int child) {
    go_to(node);
    const int64_t token = links_.candidate(child);
    if (token < 0 || token >= p_.vocabulary) {
      walk_.record(kReportTokenIndex, child, token, p_.vocabulary);
      return false;
    }
    if (is_rejected(token)) return false;  // the same token twice
    const float single = probability(token);
    mass_ += single;
    if (p_.uniform[row()] < mass_ / p_.threshold_acc || single >= p_.threshold_single) return true;
    rejected_[count_++] = child;
    return false;
  }

  // Other threads take over where one has ended.
  ATTNOPS_HOST_DEVICE int num_rejected() const { return count_; }
  ATTNOPS_HOST_DEVICE void resume(int node, int num_rejected) {
    node_ = node;
    count_ = num_rejected;
  }

  // Where the walk is.
  ATTNOPS_HOST_DEVICE void go_to(int node) {
    if (node == node_) return;
    node_ = node;
    count_ = 0;
    mass_ = 0.0;
  }

  ATTNOPS_HOST_DEVICE bool is_rejected(int64_t token) const {
    for (int i = 0; i < count_; ++i) {
      if (links_.candidate(rejected_[i]) == token) return true;
    }
    return false;
  }

  ATTNOPS_HOST_DEVICE float probability(int64_t token) const {
    const float value = p_.target_probs[row() * p_.vocabulary + token];
    if (is_probability(value)) return value;
    walk_.record(kReportProbability, node_, token, p_.vocabulary);
    return 0.f;
  }

  // What is left of a token's probability for the last draw. After a path of full length no draft was judged.
  ATTNOPS_HOST_DEVICE double rest(int64_t token, bool full_path) const {
    if (is_rejected(token)) return 0.0;
    double value = probability(token);
    if (p_.draft_probs != nullptr && !full_path) {
      const float draft = p_.draft_probs[row() * p_.vocabulary + token];
      if (is_probability(draft)) value -= draft;
    }
    return max_of(value, 0.0);
  }

 private:
  ATTNOPS_HOST_DEVICE int64_t row() const { return static_cast<int64_t>(b_) * p_.num_tokens + node_; }

  const VerifyParams& p_;
  const Walk<Links>& walk_;
  const Links& links_;
  int b_;
  int* rejected_;
  int node_ = -1, count_ = 0;
  double mass_ = 0.0;
};

// ---- moving rows

// Slot of a row in a buffer, -1: none.
ATTNOPS_HOST_DEVICE inline int64_t slot_in(const Buffers& buffers, int buffer, int64_t slot) {
  if (slot < 0) return -1;
  if (buffer >= buffers.num_full) {
    if (slot >= buffers.slot_map.size) return -1;
    slot = buffers.slot_map[slot];
  }
  return slot >= 0 && slot < buffers.rows[buffer].num_slots ? slot : -1;
}

ATTNOPS_HOST_DEVICE inline int64_t offset_of(const Buffers& buffers, const Rows& rows, int64_t slot) {
  const int64_t page = page_of(slot, buffers.page_size, buffers.page_shift);
  return page * rows.stride_page + (slot - page * buffers.page_size) * rows.stride_token;
}

struct Pair {
  int64_t from, to;  // slots; from is negative where nothing moves
};

// Accepted tokens of a request, in their order: a token never moves backwards over one that is yet to move, since the
// i-th accepted one is at least the i-th of the tree.
struct AcceptedMoves {
  MoveParams p;

  int32_t*& report() { return p.report; }
  ATTNOPS_HOST_DEVICE void begin(int) const {}
  ATTNOPS_HOST_DEVICE int groups() const { return 1; }
  ATTNOPS_HOST_DEVICE int64_t count(int, int) const { return p.path_length; }
  ATTNOPS_HOST_DEVICE bool moves(int b, int64_t i) const {
    const int64_t row = p.accept_index.at(b, i), first = static_cast<int64_t>(b) * p.num_tokens;
    return row >= first + i && row < first + p.num_tokens;
  }
  ATTNOPS_HOST_DEVICE Pair pair(int b, int, int64_t i) const {
    if (!moves(b, i)) return {-1, -1};
    return {p.out_cache_loc[p.accept_index.at(b, i)], p.out_cache_loc[static_cast<int64_t>(b) * p.num_tokens + i]};
  }
  // What is left to do once per accepted token: its cell, and the report.
  ATTNOPS_HOST_DEVICE void finish(const Buffers& buffers, int b, int, int64_t i) const {
    const int64_t accepted = p.accept_index.at(b, i), first = static_cast<int64_t>(b) * p.num_tokens;
    if (accepted < 0) return;
    if (!moves(b, i)) {
      return record(kReportAcceptIndex, b, i, accepted - first, p.num_tokens);
    }
    const Pair slots = pair(b, 0, i);
    for (const int64_t slot : {slots.from, slots.to}) {
      for (int buffer = 0; buffer < buffers.count && slot >= 0 && p.report != nullptr; ++buffer) {
        const int64_t limit = buffer < buffers.num_full ? buffers.rows[buffer].num_slots : buffers.slot_map.size;
        if (slot < limit) continue;
        record(ReportKind::kSlotIndex, b, i, slot, limit);
        break;
      }
    }
    if (p.req_to_token == nullptr || slots.to < 0) return;
    const int64_t row = p.req_pool_indices[b], cell = p.cache_seqlens[b] + i;
    if (row < 0 || row >= p.max_requests) {
      if (i == 0) record(ReportKind::kRequestSlot, b, 0, row, p.max_requests);
    } else if (cell < i || cell >= p.max_context) {
      record(kReportDraftCells, b, i, cell, p.max_context);
    } else {
      p.req_to_token[row * p.req_to_token_stride + cell] = clamp_to_int32(slots.to);
    }
  }

 private:
  ATTNOPS_HOST_DEVICE void record(ReportKind kind, int b, int64_t i, int64_t value, int64_t limit) const {
    if (p.report != nullptr) record_fault(p.report, {kReportMoveKv, kind, b, i, value, limit});
  }
};

// To be called once per request where there is a report: its row, and the cells of its drafts.
ATTNOPS_HOST_DEVICE inline void report_drafts(const DraftRequests& r, ReportOp op, int b) {
  if (!r.has_row(b)) {
    record_fault(r.report, {op, ReportKind::kRequestSlot, b, 0, r.req_pool_indices[b], r.max_requests});
  } else if (r.checked && r.cache_seqlens[b] < 0) {
    record_fault(r.report, {op, ReportKind::kLength, b, 0, r.cache_seqlens[b], r.max_context + 1});
  } else if (const int64_t cells = r.last_cell(r.cache_seqlens[b]); cells > r.max_context) {
    record_fault(r.report, {op, kReportDraftCells, b, 0, cells, r.max_context + 1});
  }
}

// The prefix's partial page in front of the drafts of branch `group` + 1; branch 0 has the page itself.
struct TailMoves {
  DraftRequests r;

  int32_t*& report() { return r.report; }
  // Once per request, before its tokens: what is wrong with all of them.
  ATTNOPS_HOST_DEVICE void begin(int b) const {
    if (r.report != nullptr) report_drafts(r, kReportCopyPageTail, b);
  }
  ATTNOPS_HOST_DEVICE int groups() const { return static_cast<int>(r.page_size == 1 ? 0 : r.topk - 1); }
  ATTNOPS_HOST_DEVICE int64_t count(int b, int) const { return r.prefix(b) % r.page_size; }
  ATTNOPS_HOST_DEVICE Pair pair(int b, int group, int64_t i) const {
    const int64_t length = r.prefix(b), tail = length % r.page_size;
    const int64_t to = r.first_cell(length, group + 1) - tail + i;
    if (to >= r.max_context) return {-1, -1};
    return {r.cells(b)[length - tail + i], r.cells(b)[to]};
  }
  ATTNOPS_HOST_DEVICE void finish(const Buffers& buffers, int b, int group, int64_t i) const {
    if (r.report == nullptr || i >= count(b, group)) return;
    const Pair slots = pair(b, group, i);
    for (int buffer = 0; buffer < buffers.count; ++buffer) {
      const int64_t limit = buffer < buffers.num_full ? buffers.rows[buffer].num_slots : buffers.slot_map.size;
      for (const int64_t slot : {slots.from, slots.to}) {
        if (slot >= 0 && slot < limit) continue;
        return record_fault(r.report, {kReportCopyPageTail, ReportKind::kSlotIndex, b, i, slot, limit});
      }
    }
  }
};

// ---- draft steps

// Keys that a branch sees in step `step`, and the slot of each.
ATTNOPS_HOST_DEVICE inline int64_t num_draft_keys(const DraftRequests& r, int b, int64_t step) {
  return r.has_row(b) ? r.prefix(b) + step + 1 : 0;
}

ATTNOPS_HOST_DEVICE inline int32_t draft_slot(const DraftRequests& r, int b, int64_t k, int64_t i) {
  const int64_t length = r.prefix(b), cell = i < length ? i : r.first_cell(length, k) + i - length;
  return cell < r.max_context ? r.cells(b)[cell] : 0;
}

// ---- masks

struct MaskRows {
  const uint8_t* tree;  // first column of the drafts in row 0; null where the bounds are none
  int64_t stride, prefix;
};

ATTNOPS_HOST_DEVICE inline MaskRows mask_rows(const PackMaskParams& p, int b) {
  const int64_t n = p.num_tokens;
  if (p.mode == MaskMode::kTree) return {p.mask + b * n * n, n, 0};
  if (p.mode == MaskMode::kBits) {
    const int64_t bytes = n > 16 ? 4 : n > 8 ? 2 : 1;
    return {p.mask + b * n * bytes, bytes, 0};
  }
  const int64_t begin = p.mask_indptr[b], end = p.mask_indptr[b + 1];
  if (begin < 0 || end < begin || end > p.num_bytes) return {nullptr, 0, 0};  // first: their difference may overflow
  const int64_t width = (end - begin) / n;
  if (width * n != end - begin || width < n) return {nullptr, 0, 0};
  return {p.mask + begin + width - n, width, width - n};
}

// To be called once per request whose bounds are none.
ATTNOPS_HOST_DEVICE inline void report_bounds(const PackMaskParams& p, int b) {
  if (p.report == nullptr) return;
  const uint64_t begin = p.mask_indptr[b], end = p.mask_indptr[b + 1];
  const int64_t bytes = static_cast<int64_t>(end - begin);  // of any two values: no overflow
  record_fault(p.report, {kReportPackTreeMask, kReportMaskBounds, b, 0, bytes, p.num_tokens});
}

ATTNOPS_HOST_DEVICE inline void report_hidden(const PackMaskParams& p, const MaskRows& rows, int b, int i,
                                              int64_t key) {
  if (rows.tree[i * rows.stride - rows.prefix + key] != 0) return;
  record_fault(p.report, {kReportPackTreeMask, kReportHiddenPrefix, b, i, key, rows.prefix});
}

// Byte `byte` of node i's row. Bits beyond the tree are 0.
ATTNOPS_HOST_DEVICE inline uint8_t packed_byte(const PackMaskParams& p, const MaskRows& rows, int i, int byte) {
  if (rows.tree == nullptr) return 0;
  const uint8_t* row = rows.tree + i * rows.stride;
  const int in_byte = min_of(p.num_tokens - byte * 8, 8);
  if (p.mode == MaskMode::kBits) return static_cast<uint8_t>(row[byte] & ((1 << in_byte) - 1));
  unsigned bits = 0;
  for (int bit = 0; bit < in_byte; ++bit) bits |= (row[byte * 8 + bit] != 0 ? 1u : 0u) << bit;
  return static_cast<uint8_t>(bits);
}

}  // namespace attnops::speculation
