#pragma once
#include "sparse_indexer/params.h"

struct CUstream_st;

namespace attnops::sparse_indexer::sm90 {

inline constexpr int kMaxBlocks = 8;  // of 64 columns of queries

// How a launch uses shared memory.
struct Memory {
  int stages;  // tiles of keys, and groups' queries, that it holds
  int blocks;  // of queries of a group
  bool wide;   // rows of keys and queries are on 16-byte boundaries; else on 4-byte ones
};

// One function per number of heads, rounded up; each defined by one file.
void launch_heads8(const LogitsParams& params, CUstream_st* stream);
void launch_heads16(const LogitsParams& params, CUstream_st* stream);
void launch_heads32(const LogitsParams& params, CUstream_st* stream);
void launch_heads64(const LogitsParams& params, CUstream_st* stream);

}  // namespace attnops::sparse_indexer::sm90
