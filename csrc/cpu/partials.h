#pragma once
#include <cstdint>
#include <memory>

namespace attnops::cpu {

// Where the partial results of one decode call are written: the plan's scratch, or memory of the call's own while
// another thread's call has that. So threads may share a plan. The plan's first semaphore, which CPU kernels do not use
// otherwise, says who has it; it is zero between calls, as on a GPU.
class Partials {
 public:
  // Sizes in elements. `semaphore` is null where a plan has none, and then there is no work either.
  Partials(float* out_partial, int64_t out_size, float* lse_partial, int64_t lse_size, int32_t* semaphore)
      : out_(out_partial), lse_(lse_partial), semaphore_(semaphore) {
    if (semaphore == nullptr || __atomic_exchange_n(semaphore, 1, __ATOMIC_ACQUIRE) == 0) return;
    semaphore_ = nullptr;
    own_.reset(new float[out_size + lse_size]);
    out_ = own_.get();
    lse_ = own_.get() + out_size;
  }
  ~Partials() {
    if (semaphore_ != nullptr) __atomic_store_n(semaphore_, 0, __ATOMIC_RELEASE);
  }
  Partials(const Partials&) = delete;
  Partials& operator=(const Partials&) = delete;

  float* out() const { return out_; }
  float* lse() const { return lse_; }

 private:
  float* out_;
  float* lse_;
  int32_t* semaphore_;  // null: another call's
  std::unique_ptr<float[]> own_;
};

}  // namespace attnops::cpu
