#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "speculation/tree.h"

// The definition of right, and the production kernels too: trees are small. Each function does a range of requests.
namespace attnops::speculation::cpu {

inline void build_draft_tree(const BuildTreeParams& p, int64_t begin, int64_t end) {
  std::vector<int64_t> selected(p.num_tokens);
  std::vector<int> parents(p.num_tokens);
  for (int b = static_cast<int>(begin); b < end; ++b) {
    for (int i = 1; i < p.num_tokens; ++i) selected[i - 1] = p.top_scores_index.at(b, i - 1);
    for (int i = 1; i < p.num_tokens; ++i) parents[i] = parent_of(p, b, i, selected);
    for (int i = 0; i < p.num_tokens; ++i) write_node(p, b, i, parents);
  }
}

// The tree where it stands.
struct Links {
  const VerifyParams& p;
  int b;

  int64_t candidate(int node) const { return p.candidates.at(b, node); }
  int64_t retrieve_index(int node) const { return p.retrieve_index.at(b, node); }
  int64_t next_token(int node) const { return p.next_token.at(b, node); }
  int64_t next_sibling(int node) const { return p.next_sibling.at(b, node); }
};

// Calls verify(take) -> Accepted, then writes what no node of the path has written.
template <class Verify>
Accepted write_path(const VerifyParams& p, int b, const Verify& verify) {
  int32_t* path = p.accept_index + static_cast<int64_t>(b) * p.path_length;
  std::fill_n(p.predicts + static_cast<int64_t>(b) * p.num_tokens, p.num_tokens, 0);
  const Accepted accepted = verify([&](int64_t row, int place, int) { path[place] = clamp_to_int32(row); });
  std::fill_n(path + accepted.count + 1, p.path_length - accepted.count - 1, -1);
  p.accept_token_num[b] = accepted.count;
  return accepted;
}

inline void verify_tree_greedy(const VerifyParams& p, int64_t begin, int64_t end) {
  for (int b = static_cast<int>(begin); b < end; ++b) {
    const Links links{p, b};
    Walk walk(p, kReportVerifyTreeGreedy, b, links);
    int64_t at = 0;  // row of the node whose children are looked at
    write_path(p, b, [&](const auto& take) {
      return walk_tree(
          p, walk, b, [&](int, int child) { return links.candidate(child) == p.target_predict[at]; },
          [&](int64_t row, int place, int node) {
            at = row;
            p.predicts[row] = clamp_to_int32(p.target_predict[row]);
            take(row, place, node);
          });
    });
  }
}

// The token at `coin` of what is left of the target's probabilities; where nothing is left, the most likely one.
template <class Sampler>
int64_t draw(const VerifyParams& p, const Sampler& sampler, bool full_path, float coin) {
  double total = 0.0, sum = 0.0;
  for (int64_t token = 0; token < p.vocabulary; ++token) total += sampler.rest(token, full_path);
  int64_t last = -1, most = 0;
  for (int64_t token = 0; token < p.vocabulary; ++token) {
    const double rest = sampler.rest(token, full_path);
    if (rest > 0.0) last = token;
    sum += rest;
    if (rest > 0.0 && sum > coin * total) return token;
    if (sampler.probability(token) > sampler.probability(most)) most = token;
  }
  return last >= 0 ? last : most;
}

inline void verify_tree_sampling(const VerifyParams& p, int64_t begin, int64_t end) {
  std::vector<int> rejected(p.num_tokens);
  for (int b = static_cast<int>(begin); b < end; ++b) {
    const Links links{p, b};
    Walk walk(p, kReportVerifyTreeSampling, b, links);
    Sampler sampler(p, walk, links, b, rejected.data());
    int64_t at = -1;
    const Accepted accepted = write_path(p, b, [&](const auto& take) {
      return walk_tree(
          p, walk, b, [&](int node, int child) { return sampler.accepts(node, child); },
          [&](int64_t row, int place, int node) {
            if (place > 0) p.predicts[at] = clamp_to_int32(links.candidate(node));
            at = row;
            take(row, place, node);
          });
    });
    sampler.go_to(accepted.node);
    const bool full_path = accepted.count + 1 == p.path_length;
    p.predicts[at] = clamp_to_int32(draw(p, sampler, full_path, p.uniform_final[b]));
  }
}

// Moves the rows of a range of requests, token after token.
template <class Moves>
void move_rows(const Moves& moves, const Buffers& buffers, int64_t begin, int64_t end) {
  for (int b = static_cast<int>(begin); b < end; ++b) {
    for (int group = 0; group < moves.groups(); ++group) {
      for (int64_t i = 0; i < moves.count(b, group); ++i) {
        const Pair slots = moves.pair(b, group, i);
        for (int buffer = 0; buffer < buffers.count; ++buffer) {
          const Rows& rows = buffers.rows[buffer];
          const int64_t from = slot_in(buffers, buffer, slots.from), to = slot_in(buffers, buffer, slots.to);
          if (from < 0 || to < 0 || from == to) continue;
          const int64_t source = offset_of(buffers, rows, from), target = offset_of(buffers, rows, to);
          for (int64_t head = 0; head < rows.heads; ++head) {
            std::memcpy(rows.pages + target + head * rows.stride_head, rows.pages + source + head * rows.stride_head,
                        static_cast<size_t>(rows.head_bytes));
          }
        }
      }
    }
  }
}

// Once per call: cells and the report.
template <class Moves>
void finish_moves(const Moves& moves, const Buffers& buffers, int64_t begin, int64_t end) {
  for (int b = static_cast<int>(begin); b < end; ++b) {
    moves.begin(b);
    for (int group = 0; group < moves.groups(); ++group) {
      for (int64_t i = 0; i < moves.count(b, group); ++i) moves.finish(buffers, b, group, i);
    }
  }
}

inline void draft_kv_indices(const DraftIndicesParams& p) {
  const DraftRequests& r = p.requests;
  for (int b = 0; b < r.batch_size; ++b) report_drafts(r, kReportDraftKvIndices, b);
  for (int64_t step = 0; step < p.num_steps; ++step) {
    int32_t* indptr = p.kv_indptr + step * p.indptr_stride;
    int32_t* indices = p.kv_indices + step * p.indices_stride;
    int64_t total = 0;
    for (int b = 0; b < r.batch_size; ++b) {
      const int64_t keys = num_draft_keys(r, b, step);
      for (int64_t k = 0; k < r.topk; ++k) {
        *indptr++ = clamp_to_int32(total);
        for (int64_t i = 0; i < keys && total + i < p.num_indices; ++i) indices[total + i] = draft_slot(r, b, k, i);
        total += keys;
      }
    }
    *indptr = clamp_to_int32(total);
  }
}

inline void pack_tree_mask(const PackMaskParams& p, int64_t begin, int64_t end) {
  const int n = p.num_tokens, bytes = (n + 7) / 8;
  for (int b = static_cast<int>(begin); b < end; ++b) {
    const MaskRows rows = mask_rows(p, b);
    if (rows.tree == nullptr) report_bounds(p, b);
    for (int i = 0; i < n; ++i) {
      uint8_t* out = p.tree_mask + (static_cast<int64_t>(b) * n + i) * bytes;
      for (int byte = 0; byte < bytes; ++byte) out[byte] = packed_byte(p, rows, i, byte);
      for (int64_t key = 0; key < rows.prefix && p.report != nullptr; ++key) report_hidden(p, rows, b, i, key);
    }
  }
}

}  // namespace attnops::speculation::cpu
