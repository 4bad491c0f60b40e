#pragma once
#include <cuda_runtime_api.h>

#include <string>

#include "core/linear_step.h"
#include "device/common/capability.h"
#include "device/common/vec.h"

namespace attnops {

inline constexpr int kUnitBytes = 8192;  // of rows that lie densely, for kernels that stream states

// A row of a decode op's table of kernels: one type of states, and keys up to a bound.
struct LinearStepImpl {
  const char* name;
  DType state_dtype;
  int max_keys;
  bool streams;  // sm_90: dense rows of just so many keys, and enough of them for CTAs that stay
  void (*launch)(const LinearStep&, CUstream_st*);

  bool takes(const LinearStep& p) const {  // without texts, which take as long as a third of a launch
    if (p.state_dtype != state_dtype || p.key_dim > max_keys) return false;
    return !streams || (is_dense(p) && num_units(p) >= least_units() && usable_sm(name) == 90);
  }
  std::string reject(const LinearStep& p) const {
    if (takes(p)) return "";
    if (p.state_dtype != state_dtype) {
      return std::string("takes states of ") + name_of(state_dtype) + ", got " + name_of(p.state_dtype);
    }
    if (p.key_dim > max_keys) return "takes keys of at most " + std::to_string(max_keys) + " elements";
    if (!is_dense(p)) return "takes dense rows of " + std::to_string(max_keys) + " keys, in whole units of 8 KB";
    return "takes at least " + std::to_string(least_units()) + " units of 8 KB, on sm_90";
  }

 private:
  bool is_dense(const LinearStep& p) const {
    const int bytes = size_of(state_dtype), row = max_keys * bytes;
    return p.key_dim == max_keys && p.stride_row == max_keys && p.value_dim * row % kUnitBytes == 0 &&
           rows_aligned(p.states, bytes, 16, p.stride_slot, p.stride_head);
  }
  int64_t num_units(const LinearStep& p) const {
    return int64_t{p.batch_size} * p.num_heads * p.value_dim * max_keys * size_of(state_dtype) / kUnitBytes;
  }
  int64_t least_units() const { return int64_t{16} * device_sms(name); }  // eight for each CTA
};

}  // namespace attnops
