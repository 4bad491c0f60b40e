#pragma once
#include "mla_decode/params.h"
#include "sparse_mla/convert_rows.h"

struct CUstream_st;

namespace attnops::sparse_mla {

// A call as two launches, one of which has its turn: over the pool, and over the rows in scratch.
struct ConvertedCall {
  mla_decode::Params pool, converted;
};

// Fewer heads are as fast from rows of 656 bytes (docs/log/sparse_mla_sm90.md).
inline constexpr int kMostHeadsOfPool = 32;

// Marks, numbers and converts the rows that the lists of `p` name, in `bytes` of scratch that hold one row at least.
ConvertedCall launch_convert_rows(const mla_decode::Params& p, uint8_t* scratch, int64_t bytes, CUstream_st* stream);

}  // namespace attnops::sparse_mla
