#pragma once
#include <cstdint>

#include "core/list_report.h"
#include "core/math.h"

// What lists of rows ask of the kernels, instead of pages: the ops of sparse_mla. There, a request is one query token.
namespace attnops::mla_decode {

// Keys of a list begin at a multiple of this, so that no tile has keys of both.
inline constexpr int kListAlignment = 64;

// Heads of a block of short calls (Params::list_cuts).
inline constexpr int kShortRows = 16;

// Groups of heads that may see different parts of a list: bits of a byte.
inline constexpr int kMostHeadGroups = 8;

// A pool, and the rows that each request's list selects from it. Row i is token i % page_size of page i / page_size.
struct SelectedRows {
  const void* pages;                  // [P, page_size, row]
  int64_t stride_page, stride_token;  // elements of kv_dtype
  int64_t num_rows;                   // P * page_size: what an index must stay below
  int page_size;

  const int32_t* indices;  // [requests, count]; a negative one is no key
  int64_t stride_list;
  const int32_t* lengths;  // [requests], how many of a list count; null: all
  int count;               // 0: there is no such list

  ATTNOPS_HOST_DEVICE int length(int request) const {
    return lengths ? min_of(max_of(lengths[request], 0), count) : count;
  }
  ATTNOPS_HOST_DEVICE const int32_t* list(int request) const { return indices + request * stride_list; }
  ATTNOPS_HOST_DEVICE bool has_row(int index) const { return index >= 0 && index < num_rows; }

  // In elements, of a row that the pool has.
  ATTNOPS_HOST_DEVICE int64_t offset(int index) const {
    return int64_t{index / page_size} * stride_page + int64_t{index % page_size} * stride_token;
  }
};

// Where the keys of a request's lists are: the first list's from 0 on, the second's from `second` on.
struct ListKeys {
  int first, second, end;

  ATTNOPS_HOST_DEVICE ListKeys(const SelectedRows& selected, const SelectedRows& extra, int request)
      : first(selected.length(request)), second(round_up(first, kListAlignment)), end(first) {
    const int more = extra.length(request);
    if (more > 0) end = second + more;
  }

  // Of which list a tile's keys are, by one of them, and where those of that list begin and end.
  ATTNOPS_HOST_DEVICE bool is_extra(int key) const { return key >= second; }
  ATTNOPS_HOST_DEVICE int begin_of(bool extra) const { return extra ? second : 0; }
  ATTNOPS_HOST_DEVICE int end_of(bool extra) const { return extra ? end : first; }
};

}  // namespace attnops::mla_decode
