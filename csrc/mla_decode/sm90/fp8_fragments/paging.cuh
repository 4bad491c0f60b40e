#pragma once

namespace attnops::mla_decode::sm90::fp8_fragments {

// What the host has found out about the arguments.
struct Modes {
  bool use_boxes;  // whole tiles come by the copy engine
  int page_shift;  // of a page size that is a power of two, else -1
};

// Where a token is. Page sizes are mostly powers of two, and a division is the better part of what is to be computed
// before the first load.
class Paging {
 public:
  __device__ Paging(int page_size, int shift) : size_(page_size), shift_(shift) {}

  __device__ int cell(int key) const { return shift_ >= 0 ? key >> shift_ : key / size_; }
  __device__ int offset(int key) const { return shift_ >= 0 ? key & (size_ - 1) : key % size_; }

 private:
  const int size_, shift_;
};

}  // namespace attnops::mla_decode::sm90::fp8_fragments
