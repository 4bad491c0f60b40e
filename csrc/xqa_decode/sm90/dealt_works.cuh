#pragma once
#include "device/sm90/barrier.cuh"
#include "xqa_decode/cuda/pieces.cuh"
#include "xqa_decode/sm90/folds/long_walk.cuh"
#include "xqa_decode/sm90/tickets.cuh"
#include "xqa_decode/sm90/tile_stream.cuh"

namespace attnops::xqa_decode::sm90 {

// The walk over a part's pieces, by whether the kernel may be given a batch-invariant plan.
template <class Tr>
constexpr bool may_cut() {
  if constexpr (requires { Tr::kMayCut; }) {
    return Tr::kMayCut;
  } else {
    return true;
  }
}
template <class Tr>
using Walk = std::conditional_t<Tr::kFolds, LongWalk, PieceWalkOf<may_cut<Tr>()>>;

// The pieces of a CTA by its row of the plan, or works as they are dealt out. The warp that brings keys takes tickets,
// a work ahead of what it brings, and passes works on to all others through shared memory. There are kPlaces for them,
// each full or empty. The words of a row that say nothing of whole works hold what is needed for that: registers are
// short, and what is spilled comes from L2.
template <class Tr, bool kBrings>
class DealtWalk : public Walk<Tr> {
  using Base = Walk<Tr>;

 public:
  // Of a row.
  __device__ __forceinline__ DealtWalk(const Params& p, const Shape& shape, const PartEntry& entry, int part,
                                       int by_ctas, uint32_t box)
      : Base(p, shape, entry, part), shape_(shape), box_(box), works_(by_ctas) {
    int& splits = this->entry_.last_num_splits;
    splits = by_ctas > 0 ? 0 : max_of(splits, 1);
    if (by_ctas > 0) count() = 0;
    if (takes_tickets()) tickets_.ask(p, works_);
  }

  __device__ __forceinline__ bool next() {
    if (is_dealt() && count() > 0) {
      if (next_request() < 0) return false;
      this->start(next_request(), next_kv_head(), this->next_length_);
    } else if (!Base::next()) {
      return false;
    }
    if (is_dealt()) look_up_next();
    return true;
  }

  template <class Visit>
  __device__ __forceinline__ void look_ahead(const Visit& visit) const {
    int request = -1, kv_head = 0;
    if (is_dealt()) {
      request = this->entry_.begin_split, kv_head = this->entry_.first_part;
    } else {
      Base::look_ahead([&](int r, int h, int) { request = r, kv_head = h; });
    }
    if (request >= 0) visit(request, kv_head, 0);
  }

  __device__ static __forceinline__ void init(uint32_t box) {
    for (int i = 0; i < kPlaces; ++i) {
      hopper::mbarrier_init(box + 8 * i, 1);
      hopper::mbarrier_init(box + 8 * (kPlaces + i), kReaders);
    }
  }

 private:
  static constexpr int kPlaces = 4;
  static constexpr int kReaders = Tr::kThreads / 32 + (Tr::kGathers ? 1 : 0);  // warps

  __device__ __forceinline__ bool is_dealt() const { return this->entry_.last_num_splits == 0; }
  __device__ __forceinline__ int& count() { return this->first_part_begins_; }  // of works looked up
  __device__ __forceinline__ int& next_request() { return this->entry_.begin_split; }
  __device__ __forceinline__ int& next_kv_head() { return this->entry_.first_part; }
  __device__ __forceinline__ bool takes_tickets() const { return kBrings && threadIdx.x / 32 == Tr::kThreads / 32; }

  // The work after the one at hand.
  __device__ __forceinline__ void look_up_next() {
    const int place = count() % kPlaces;
    const uint32_t parity = count() / kPlaces % 2;
    const uint32_t full = box_ + 8 * place, empty = full + 8 * kPlaces, at = full + 16 * kPlaces;
    if (takes_tickets()) {
      const int own = static_cast<int>(blockIdx.x) + this->p_.num_sm_parts;
      const int ticket = count() == 0 ? own : tickets_.take(this->p_, works_);
      DealtWork work{-1, 0};
      if (ticket < works_) work = dealt_work(this->p_, shape_, ticket);
      hopper::mbarrier_wait(empty, parity ^ 1);
      if (threadIdx.x % 32 == 0) {
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(work.request), "r"(work.kv_head) : "memory");
        hopper::mbarrier_arrive(full);
      }
      next_request() = work.request, next_kv_head() = work.kv_head;
    } else {
      hopper::mbarrier_wait(full, parity);
      int request = -1, kv_head = 0;
      if (threadIdx.x % 32 == 0) {  // the lane that says that the place is empty
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(request), "=r"(kv_head) : "r"(at) : "memory");
        hopper::mbarrier_arrive(empty);
      }
      next_request() = __shfl_sync(~0u, request, 0), next_kv_head() = __shfl_sync(~0u, kv_head, 0);
    }
    ++count();
    if (next_request() >= 0) this->next_length_ = __ldg(this->p_.cache_seqlens + next_request());
  }

  const Shape& shape_;
  const uint32_t box_;
  const int works_;
  Tickets tickets_;
};

// What multiplies walks over this.
template <class Tr>
using PiecesOf = std::conditional_t<deals_works<Tr>(), DealtWalk<Tr, false>, Walk<Tr>>;

// How works are dealt out, the same for all CTAs: in their order, the first to CTAs, those behind to warps alone, of
// parts from `first_part` on.
struct Deal {
  int by_ctas = 0, by_warps = 0, first_part = 0;

  // `warps_serve`: where there are enough short ones. Works of one length are dealt to CTAs over e4m3 pages; elsewhere
  // rows of the plan are as good.
  template <class Tr>
  __device__ __forceinline__ static Deal of(const Params& p, bool warps_serve) {
    Deal deal;
    int said = __ldg(p.num_splits + p.batch_size);
    const int works = p.batch_size * p.num_kv_heads, parts = p.num_sm_parts;
    if (Tr::kFp8 && said < -1 && works >= kFewestEven * parts) said = -said, warps_serve = false;
    if (said <= 0) return deal;
    const int longer = at_most(said - 1, p.batch_size);
    deal.by_warps = warps_serve ? (p.batch_size - longer) * p.num_kv_heads : 0;
    if (longer > 0 && deal.by_warps < kFewestOfPart * parts) deal.by_warps = 0;
    if (longer > 0) deal.by_ctas = works - deal.by_warps;
    if (deal.by_ctas == 0 || deal.by_warps == 0 || 2 * deal.by_ctas > parts) return deal;
    // A few long works: parts that have one leave short ones to others, if that does not take these longer.
    const int length = __ldg(p.cache_seqlens + at_most(__ldg(p.num_splits), p.batch_size - 1));
    const int64_t tiles = visible_tiles(length, p.seqlen_q, p.window_left, kPlanTileTokens).count;
    constexpr int kEighthsOfShortWork = Tr::kFp8 ? 24 : 12;  // of what a tile of a long work takes a CTA
    const int64_t given_up = int64_t{kEighthsOfShortWork} * deal.by_warps * deal.by_ctas;
    if (given_up < 8 * tiles * parts * (parts - deal.by_ctas)) deal.first_part = deal.by_ctas;
    return deal;
  }
  __device__ __forceinline__ explicit operator bool() const { return by_ctas + by_warps > 0; }

 private:
  static constexpr int kFewestOfPart = 2, kFewestEven = 8;  // works of each part: short ones, and those of one length
};

}  // namespace attnops::xqa_decode::sm90
