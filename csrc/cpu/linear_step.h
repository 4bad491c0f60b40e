#pragma once
#include "core/linear_prefill.h"
#include "core/linear_verify.h"
#include "core/state_report.h"

namespace attnops::cpu {

// One head of one request of a LinearStep: gates, norms and conversions are done, the rows of the state remain.
struct HeadStep {
  const float *key, *query, *decay;  // [round_up(key_dim, kStepLanes)], zero behind key_dim
  const float* value;                // [value_dim]
  float* out;                        // [value_dim], before SSD's skip and gate
  const void* from;                  // [value_dim, key_dim] of `dtype`
  void* to;                          // the same shape, may be `from`; null: the new state is not kept
  int64_t stride_row;
  int key_dim, value_dim;
  float coefficient, key_query;
  DType dtype;
  bool delta;
  float* update = nullptr;  // [value_dim], of S += update k^T, if the caller keeps it
};

inline constexpr int kStepLanes = 16;

// The rows of a head, one function per instruction set, each defined by the file that is compiled for it.
void step_rows_scalar(const HeadStep& head);
void avx2_step_rows(const HeadStep& head);
void avx512_step_rows(const HeadStep& head);

// Heads [begin, end) of batch_size * num_heads, with the current instruction set.
void linear_step_heads(const LinearStep& p, bool delta, int64_t begin, int64_t end);

// Heads [begin, end) of (batch_size + 1) * num_heads: the last "request" is the tokens of none, whose output is 0.
// Chunks by the tiles' products (linear_chunk_prefill.h). Few tokens before a chunk's end, extents that no tile has,
// and processors without tiles: token by token, in float32.
void linear_prefill_heads(const LinearPrefill& p, bool delta, int64_t begin, int64_t end);

// Heads [begin, end) of batch_size * num_heads. Each writes its part of the rings.
void linear_verify_heads(const LinearVerify& p, bool delta, int64_t begin, int64_t end);

// The same, of a commit. The rings' lengths are as before.
void linear_commit_heads(const LinearCommit& p, int64_t begin, int64_t end);

// Records slots out of range and slots that two rows write, before anything runs.
void check_step_slots(const LinearStep& p, ReportOp op, int32_t* report);

}  // namespace attnops::cpu
