#pragma once
#include <cstdint>

#include "core/math.h"

namespace attnops::context_parallel {

// How a sequence is dealt out: token j belongs to rank (j / interleave) % world_size.
struct Share {
  int64_t rank, world_size, interleave;

  // Tokens of the first `length` that belong to the rank.
  ATTNOPS_HOST_DEVICE int64_t tokens(int64_t length) const {
    if (length <= 0) return 0;
    const int64_t round = interleave * world_size, whole = length / round;
    const int64_t rest = length - whole * round - rank * interleave;
    return whole * interleave + max_of<int64_t>(min_of(rest, interleave), 0);
  }

  // Where the rank keeps a token, in a pool that holds every world_size-th run; -1: another rank does, or nobody.
  ATTNOPS_HOST_DEVICE int64_t slot(int64_t global) const {
    if (global < 0) return -1;
    const int64_t run = global / interleave;
    if (run % world_size != rank) return -1;
    return run / world_size * interleave + global % interleave;
  }
};

struct SeqlensParams {
  Share share;
  int64_t batch_size;
  int64_t tokens_per_request;
  const int32_t* seqlens;  // [B]
  int32_t* local_seqlens;  // [B * tokens_per_request]

  // Keys of the rank that the new token of row i sees: its own position is the last one counted.
  ATTNOPS_HOST_DEVICE void run(int64_t i) const {
    const int64_t behind = tokens_per_request - 1 - i % tokens_per_request;
    local_seqlens[i] = static_cast<int32_t>(share.tokens(seqlens[i / tokens_per_request] - behind));
  }
  ATTNOPS_HOST_DEVICE int64_t size() const { return batch_size * tokens_per_request; }
};

struct SlotsParams {
  Share share;
  int64_t num_slots;
  bool wide;          // int64, else int32
  const void* slots;  // [num_slots]
  void* local_slots;  // [num_slots]

  ATTNOPS_HOST_DEVICE void run(int64_t i) const {
    if (wide) {
      static_cast<int64_t*>(local_slots)[i] = share.slot(static_cast<const int64_t*>(slots)[i]);
    } else {
      static_cast<int32_t*>(local_slots)[i] = static_cast<int32_t>(share.slot(static_cast<const int32_t*>(slots)[i]));
    }
  }
  ATTNOPS_HOST_DEVICE int64_t size() const { return num_slots; }
};

}  // namespace attnops::context_parallel
