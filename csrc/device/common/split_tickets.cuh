#pragma once
#include "core/math.h"
#include "device/common/semaphore.cuh"

// How the splits of a work find each other. The low half of the work's semaphore counts the splits that have arrived,
// the high half those that have also come for a share of the merge; it is zero before and after. A split that has
// nothing else to do waits a while for the others before it comes, but never for long: nothing hangs when a part runs
// late, or has not even started. Who comes c-th takes share c; who came before all had arrived leaves his share to the
// last to arrive.
namespace attnops {

inline constexpr unsigned kTicketArrived = 0xffff;
inline constexpr unsigned kTicketCame = 0x10000;
inline constexpr long long kTicketPatienceNanoseconds = 50000;

// Shares of a merge, of as many as there are splits: [0, early) and [own, own + has_own).
struct TicketShares {
  int early, own, has_own;

  __device__ int count() const { return early + has_own; }
  __device__ int share(int i) const { return i < early ? i : own; }
};

// One thread of a CTA whose partial result is written: whether it is the last to arrive, which merges all.
__device__ inline bool arrive_last(int32_t* semaphore, int splits) {
  if (static_cast<int>(add_acq_rel(semaphore, 1)) + 1 != splits) return false;
  *semaphore = 0;
  return true;
}

// The same where every split may merge a share.
__device__ inline TicketShares arrive_for_share(int32_t* semaphore, int splits, bool may_wait) {
  const unsigned all = splits;
  const unsigned before = add_acq_rel(semaphore, may_wait ? 1 : 1 + kTicketCame);
  const bool last = (before & kTicketArrived) + 1 == all;
  unsigned came = before / kTicketCame;
  bool complete = last;
  if (may_wait) {
    const long long give_up = now_nanoseconds() + kTicketPatienceNanoseconds;
    while (!complete && now_nanoseconds() < give_up) complete = (load_acquire(semaphore) & kTicketArrived) == all;
    const unsigned seen = add_acq_rel(semaphore, kTicketCame);
    complete = (seen & kTicketArrived) == all;
    came = seen / kTicketCame;
  }
  if (came + 1 == all) *semaphore = 0;             // nobody comes any more
  if (!complete || came >= all) return {0, 0, 0};  // the latter where somebody else wrote the semaphore
  const int early = last ? min_of(static_cast<int>(before / kTicketCame), splits) : 0;
  return {early, static_cast<int>(came), 1};
}

}  // namespace attnops
