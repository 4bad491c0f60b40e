#pragma once
#include <cstdint>

#include "core/math.h"

// Lists of neighbouring tokens as one list, each row once, and who has it.
namespace attnops::sparse_mla {

inline constexpr int kMostSharedKeys = 1 << 14;  // of a group's lists, on a GPU

struct ShareParams {
  int groups, together, topk;  // groups of `together` tokens, whose lists have `topk` places
  const int32_t* indices;      // [groups * together, topk]
  int64_t stride_list;
  const int32_t* lengths;  // [groups * together], or null: lists are as long as they are wide
  int32_t* shared;         // [groups, together * topk]
  uint8_t* masks;          // the same: bit t is token t of the group
  int64_t stride_shared, stride_masks;
  int32_t* shared_lengths;  // [groups]

  ATTNOPS_HOST_DEVICE int length(int64_t token) const {
    return lengths != nullptr ? min_of(max_of(lengths[token], 0), topk) : topk;
  }
};

}  // namespace attnops::sparse_mla
