#pragma once
#include <cuda.h>

#include "sparse_indexer/params.h"

struct CUstream_st;

namespace attnops::sparse_indexer::sm90 {

inline constexpr int kMaxBlocks = 8;  // of 64 columns of queries

// How a launch uses shared memory and divides its work; the same on the host and on the device.
struct Memory {
  int stages;  // tiles of keys, and groups' queries, that it holds
  int blocks;  // of queries of a group
  bool wide;   // rows of keys and queries are on 16-byte boundaries; else on 4-byte ones
  int tokens;  // of a group
  int rows_together, groups_together, groups;  // rows that share keys, groups of those, and of all rows
  int box_rows, box_shift;                     // keys of a box, and its logarithm; 0 where rows come one by one
};

// Boxes of keys, and of the queries of a block.
struct Maps {
  CUtensorMap keys, queries;
};

// One function per number of heads, rounded up; each defined by one file.
void launch_heads8(const LogitsParams& params, CUstream_st* stream);
void launch_heads16(const LogitsParams& params, CUstream_st* stream);
void launch_heads32(const LogitsParams& params, CUstream_st* stream);
void launch_heads64(const LogitsParams& params, CUstream_st* stream);

}  // namespace attnops::sparse_indexer::sm90
