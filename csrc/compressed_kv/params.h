#pragma once
#include <cstdint>

#include "core/compress_report.h"
#include "core/index_key.h"
#include "core/index_report.h"
#include "core/shared_rows.h"
#include "core/slots.h"
#include "core/state_report.h"
#include "core/types.h"

// Every `ratio` tokens of a request are pooled into one entry: DeepSeek-V4's compressed keys. Entry j pools tokens
// [ratio * j, ratio * j + ratio). With `overlap` it pools those of the group before, too, by channels of their own.
namespace attnops::compressed_kv {

inline constexpr int kRopeDim = 64;  // the last values of an entry
inline constexpr int kMaxDim = 512;  // values of an entry
inline constexpr int kMaxRatio = 1024;

// How many entries the tokens of a step complete.
struct PlanParams {
  int32_t* entry_indptr;         // [batch_size + 1]
  const int32_t* cache_seqlens;  // [batch_size], the new tokens included
  const int32_t* cu_seqlens_q;   // [batch_size + 1]
  int64_t batch_size;
  int ratio;
  int32_t* report;
};

enum class RowKind : int8_t {
  kValues,  // `dim` values of row_dtype
  kShared,  // core/shared_rows.h
  kIndex,   // e4m3 keys of a page, then their float32 scales
};

struct Params {
  int dim, ratio;
  bool overlap;
  const void* kv_score;  // [num_tokens, 2 * width]: values, then scores; width is dim, twice that with overlap
  int64_t num_tokens, stride_token;
  DType dtype;  // of kv_score and state
  void* state;  // [num_slots, state_tokens, 2 * width]: token p in row p % state_tokens
  int64_t num_slots, state_tokens, stride_slot;  // rows are dense
  const float* ape;                              // [ratio, width]: added to scores
  const float* norm_weight;                      // [dim]
  const float* cos_sin;                          // [max_positions, kRopeDim]: cosines, then sines
  int64_t max_positions;
  bool interleaved;  // rotation turns values 2i and 2i + 1; else i and i + kRopeDim / 2
  float eps;

  int64_t batch_size;
  const int32_t* state_indices;  // [batch_size]; below 0: padding, nothing is touched
  const int32_t* cache_seqlens;  // [batch_size], the new tokens included
  const int32_t* cu_seqlens_q;   // [batch_size + 1]
  const int32_t* entry_indptr;   // [batch_size + 1], of PlanParams
  const int32_t* page_table;     // [batch_size, max_pages]: pages of entries
  int64_t stride_table, max_pages;

  RowKind kind;
  uint8_t* pages;                              // [num_pages, page_size, row]
  int64_t num_pages, stride_page, stride_row;  // bytes
  int page_size, page_shift;
  DType row_dtype;   // of kValues
  Quantization how;  // of kIndex
  int32_t* report;

  ATTNOPS_HOST_DEVICE int width() const { return overlap ? 2 * dim : dim; }
  ATTNOPS_HOST_DEVICE int reach() const { return overlap ? 2 * ratio : ratio; }  // tokens of an entry
};

}  // namespace attnops::compressed_kv
