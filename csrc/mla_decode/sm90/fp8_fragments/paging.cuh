#pragma once
#include "core/divisor.h"

namespace attnops::mla_decode::sm90::fp8_fragments {

// What the host has found out about the arguments.
struct Modes {
  bool use_boxes;                       // whole tiles come by the copy engine
  Divisor by_page_size, by_extra_size;  // the latter of a second pool
};

// Where a token is. A division is the better part of what is to be computed before the first load.
class Paging {
 public:
  __device__ Paging(int page_size, const Divisor& by_page_size) : size_(page_size), by_size_(by_page_size) {}

  __device__ int cell(int key) const { return by_size_.divide(key); }
  __device__ int offset(int key) const { return key - cell(key) * size_; }

 private:
  const int size_;
  const Divisor by_size_;
};

}  // namespace attnops::mla_decode::sm90::fp8_fragments
