#pragma once
#include <immintrin.h>

#include <cstring>
#include <memory>

#include "sparse_indexer/cpu/select.h"
#include "sparse_indexer/ordered.h"

// Radix selection. All is internal, so that no function compiled for one processor can be taken for another's.
namespace attnops::sparse_indexer::cpu {
namespace {

constexpr int kLanes = 16;
constexpr int kBins = 2048, kPasses = 3, kShifts[kPasses] = {21, 10, 0};
constexpr int kCounters = 4;  // of each bin: equal keys in a row do not wait for each other

// Memory of a thread that stays from row to row.
class Scratch {
 public:
  uint32_t* words(int64_t count) {
    if (count > size_) {
      data_.reset(new uint32_t[static_cast<size_t>(count)]);
      size_ = count;
    }
    return data_.get();
  }

 private:
  std::unique_ptr<uint32_t[]> data_;
  int64_t size_ = 0;
};

float number(float x) { return x; }
float number(uint16_t bfloat16) { return __builtin_bit_cast(float, static_cast<uint32_t>(bfloat16) << 16); }

template <typename T>
void make_keys(const T* logits, int64_t count, uint32_t* keys) {
  for (int64_t i = 0; i < count; ++i) keys[i] = ordered(number(logits[i]));
}

// Bit i: keys[i] is at least `low`.
uint32_t at_least(const uint32_t* keys, uint32_t low) {
#if defined(__AVX512F__)
  return _mm512_cmpge_epu32_mask(_mm512_loadu_si512(keys), _mm512_set1_epi32(static_cast<int>(low)));
#else
  const __m256i bound = _mm256_set1_epi32(static_cast<int>(low));
  uint32_t mask = 0;
  for (int half = 0; half < 2; ++half) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys + 8 * half));
    const __m256i is = _mm256_cmpeq_epi32(_mm256_max_epu32(x, bound), x);
    mask |= static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(is))) << 8 * half;
  }
  return mask;
#endif
}

// Calls run(i) for the keys that are at least `low`, in their order. Behind the keys are kLanes zeros, which are none.
template <class Run>
void for_each_at_least(const uint32_t* keys, int64_t count, uint32_t low, const Run& run) {
  const uint32_t bound = low == 0 ? 1 : low;
  for (int64_t i = 0; i < count; i += kLanes) {
    for (uint32_t mask = at_least(keys + i, bound); mask != 0; mask &= mask - 1) run(i + __builtin_ctz(mask));
  }
}

struct Threshold {
  uint32_t low;   // least key of the bin that the k-th key is in
  int shift;      // bits of a key below those of the bin
  uint32_t rank;  // keys of the bin that are selected
};

// Narrows the bin by 11 bits. True: all its keys are selected.
bool narrow(const uint32_t* keys, int64_t count, int next, Threshold& found) {
  uint32_t bins[kCounters][kBins] = {};
  const uint32_t mask = (1u << (found.shift - next)) - 1;
  int64_t i = 0;
  for (; i + kCounters <= count; i += kCounters) {
    for (int c = 0; c < kCounters; ++c) ++bins[c][keys[i + c] >> next & mask];
  }
  for (; i < count; ++i) ++bins[0][keys[i] >> next & mask];
  for (uint32_t bin = mask;; --bin) {
    const uint32_t in_bin = bins[0][bin] + bins[1][bin] + bins[2][bin] + bins[3][bin];
    if (in_bin >= found.rank) {
      found.low |= bin << next;
      found.shift = next;
      return in_bin == found.rank;
    }
    found.rank -= in_bin;
  }
}

void select_here(const Row& row) {
  thread_local Scratch key_memory, bin_memory;
  uint32_t* const keys = key_memory.words(row.count + kLanes);
  if (row.dtype == DType::kFloat32) {
    make_keys(static_cast<const float*>(row.logits), row.count, keys);
  } else {
    make_keys(static_cast<const uint16_t*>(row.logits), row.count, keys);
  }
  std::memset(keys + row.count, 0, kLanes * sizeof(uint32_t));

  Threshold found{.low = 0, .shift = 32, .rank = static_cast<uint32_t>(row.k)};
  const uint32_t* candidates = keys;
  int64_t count = row.count;
  for (int pass = 0; pass < kPasses; ++pass) {
    if (narrow(candidates, count, kShifts[pass], found) || pass + 1 == kPasses) break;
    uint32_t* const kept = bin_memory.words(row.count + kLanes);  // pass 1 reads where it writes, behind itself
    const uint32_t bin = found.low >> found.shift;
    int64_t size = 0;
    for_each_at_least(candidates, count, found.low, [&](int64_t i) {
      const uint32_t key = candidates[i];
      if (key >> found.shift == bin) kept[size++] = key;
    });
    std::memset(kept + size, 0, kLanes * sizeof(uint32_t));
    candidates = kept;
    count = size;
  }

  const uint32_t bin = found.low >> found.shift;
  uint32_t equal = 0;
  int32_t* out = row.positions;
  for_each_at_least(keys, row.count, found.low, [&](int64_t i) {
    if (keys[i] >> found.shift == bin && equal++ >= found.rank) return;
    *out++ = static_cast<int32_t>(i);
  });
}

}  // namespace
}  // namespace attnops::sparse_indexer::cpu
