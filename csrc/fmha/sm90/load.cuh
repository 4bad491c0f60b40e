#pragma once
#include "core/math.h"
#include "device/sm80/cp_async.cuh"
#include "device/sm90/barrier.cuh"
#include "device/sm90/cluster.cuh"
#include "device/sm90/copy.cuh"
#include "device/sm90/wgmma.cuh"
#include "fmha/sm90/partial.cuh"
#include "fmha/sm90/traits.h"
#include "fmha/sm90/work.cuh"

namespace attnops::fmha::sm90 {

namespace hopper = attnops::sm90;

struct Maps {
  const CUtensorMap *q, *k, *v;
};

// Which stage of a ring comes next, and the parity of its barriers' phase.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Brings to L1 what a CTA's first work is decoded from, by a warp: else the reads wait for each other. The lengths of
// up to 256 requests, and where rows of the page table begin, of up to 32. Addresses are known before the kernels ahead
// are done.
class FirstReads {
 public:
  __device__ __forceinline__ FirstReads(const Params& p, const Schedule& s) {
    const int lane = static_cast<int>(threadIdx.x) % 32, request = lane % 8 * 32;
    if (p.num_tiles == 0) return;
    if (lane < 16 && request < p.batch_size) {
      lengths_ = (lane < 8 ? p.cu_seqlens_q : p.paged ? p.cache_seqlens : p.cu_seqlens_k) + request;
    } else if (lane == 16) {
      const int row = s.by_works_per_tile.divide(index_in_turn(s, static_cast<int>(blockIdx.x), 0));
      lengths_ = p.tile_order + 2 * min_of(row, p.num_tiles - 1);
    }
    const bool has_rows = p.paged && p.page_table.kv_indptr == nullptr && p.page_table.max_pages > 0;
    if (has_rows && lane < p.batch_size) pages_ = p.page_table.row(lane);
    asm volatile("" : "+l"(lengths_), "+l"(pages_));  // not later
  }
  __device__ __forceinline__ void prefetch() const {
    if (lengths_ != nullptr) asm volatile("prefetch.global.L1 [%0];\n" ::"l"(lengths_) : "memory");
    if (pages_ != nullptr) asm volatile("prefetch.global.L1 [%0];\n" ::"l"(pages_) : "memory");
  }

 private:
  const int32_t *lengths_ = nullptr, *pages_ = nullptr;
};

// What both kinds of producers share. A producer is the warpgroup that brings queries, keys and values.
template <class Tr>
class ProducerBase {
 public:
  using Layout = SharedLayout<Tr>;

 protected:
  __device__ __forceinline__ ProducerBase(const Params& p, const Schedule& s, const Maps& maps, char* base)
      : p_(p),
        s_(s),
        maps_(maps),
        base_(base),
        shared_(hopper::smem_address(base)),
        tid_(static_cast<int>(threadIdx.x)),
        rank_(s.cluster > 1 ? static_cast<int>(blockIdx.x) % 2 : 0),
        cuts_(cuts_of(p, s)) {}

  __device__ __forceinline__ Work* work_slot() const {
    return reinterpret_cast<Work*>(base_ + Layout::kWorks + work_ring_.stage * Layout::kWorkBytes);
  }
  __device__ __forceinline__ uint32_t work_known() const { return shared_ + Layout::kWorkKnown + 8 * work_ring_.stage; }
  __device__ __forceinline__ uint32_t work_done() const { return shared_ + Layout::kWorkDone + 8 * work_ring_.stage; }

  // Writes a work where all will read it, by the one thread that knows it.
  __device__ __forceinline__ void tell(const Work& w) {
    hopper::mbarrier_wait(work_done(), work_ring_.phase ^ 1);
    *work_slot() = w;
  }

  static constexpr bool kAsksAhead = Tr::kShort || Tr::kNarrow;  // of the counter, and waits when it needs the answer

  // By one thread. Without tokens: no work is left. kLate: the caller takes the work behind this one.
  template <bool kLate = false, bool kAhead = kAsksAhead>
  __device__ __forceinline__ Work next_work() {
    Work w;
    w.num_tokens = 0;
    while (w.num_tokens == 0) {
      if (awaits_index_) receive_index<kAhead>();
      int index = next_index_;
      if constexpr (Tr::kShort) index = index_in_turn(s_, index, turn_);
      if (index >= s_.num_works || !decode_work<Tr::kKeys, Tr::kPlainWorks>(p_, s_, cuts_, index, w)) {
        w.num_tokens = -1;
        w.slab = cuts_.pieces;
      } else {
        // Whoever merges waits for all pieces, and those that cannot be among them.
        if (w.num_tokens == 0 && index < cuts_.pieces * s_.works_per_tile) count_piece(p_, 4 * Tr::kWarpgroups);
        if constexpr (Tr::kShort) turn_ = turn_ + 1 == s_.turns || ends_request(s_, w) ? 0 : turn_ + 1;
        if (!kLate || w.num_tokens == 0) take_index<kAhead>();
      }
    }
    return w;
  }

  // CTAs take works in their order, whoever is free the next: costs differ, and SMs do not run alike.
  template <bool kAhead = kAsksAhead>
  __device__ __forceinline__ void take_index() {
    if (Tr::kShort && turn_ > 0) return;
    const int ctas = static_cast<int>(gridDim.x);
    if ((Tr::kShort || !Tr::kNarrow) && ctas >= s_.takes) {  // each CTA has had its own
      next_index_ = s_.num_works;
    } else if (p_.semaphores == nullptr) {
      next_index_ += ctas;
    } else if (rank_ > 0) {
      awaits_index_ = true;
    } else if (kAhead && s_.cluster == 1) {
      // An addition is summed up over a warp, whose lanes wait for the answer at once. An increment up to a bound is
      // not: nobody waits until the number is needed.
      asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;\n"
                   : "=r"(next_index_)
                   : "l"(p_.semaphores)
                   : "memory");
      awaits_index_ = true;
    } else {
      next_index_ = behind_first(atomicAdd(p_.semaphores, 1));
      if (s_.cluster > 1) send_index();
    }
  }

  // Whatever the counter holds, no more works than there are.
  __device__ __forceinline__ int behind_first(int counted) const {
    const auto taken = static_cast<uint32_t>(counted);
    return static_cast<int>(gridDim.x) +
           s_.cluster * static_cast<int>(min_of(taken, static_cast<uint32_t>(s_.num_works)));
  }

  // CTA 0 of a pair takes works for both. CTA 1 has the one behind.
  __device__ __forceinline__ void send_index() {
    hopper::mbarrier_wait_cluster(shared_ + Layout::kMailEmpty, mail_phase_ ^ 1);
    mail_phase_ ^= 1;
    hopper::store_async(hopper::address_in(shared_ + Layout::kMail, 1), next_index_ + 1,
                        hopper::address_in(shared_ + Layout::kMailFull, 1));
  }
  template <bool kAhead = kAsksAhead>
  __device__ __forceinline__ void receive_index() {
    awaits_index_ = false;
    if (kAhead && s_.cluster == 1) {
      next_index_ = behind_first(next_index_);
      return;
    }
    hopper::mbarrier_arrive_expect(shared_ + Layout::kMailFull, 4);
    hopper::mbarrier_wait_cluster(shared_ + Layout::kMailFull, mail_phase_);
    mail_phase_ ^= 1;
    next_index_ = *reinterpret_cast<const volatile int*>(base_ + Layout::kMail);
    hopper::mbarrier_arrive_remote_if(hopper::address_in(shared_ + Layout::kMailEmpty, 0), true);
  }

  // Whether the last work has left the place of queries.
  __device__ __forceinline__ bool have_queries_place() const {
    return hopper::mbarrier_test(shared_ + Layout::kQEmpty + 8 * q_ring_.stage, q_ring_.phase ^ 1);
  }

  // A work's queries, by the thread that told of it. When no work is left, only who waits for them is told.
  __device__ __forceinline__ void bring_queries(const Work& w) {
    const uint32_t full = shared_ + Layout::kQFull + 8 * q_ring_.stage;
    hopper::mbarrier_wait(shared_ + Layout::kQEmpty + 8 * q_ring_.stage, q_ring_.phase ^ 1);
    if (w.num_tokens < 0) {
      hopper::mbarrier_arrive(full);
      if (cuts_.pieces == 0) leave(p_);  // else whoever has merged them does
      return;
    }
    const uint32_t destination = shared_ + Layout::kQ + q_ring_.stage * Tr::kQBytes;
    hopper::mbarrier_arrive_expect(full, Tr::kQkChunks * s_.chunk_tokens * s_.pack * 128);
#pragma unroll
    for (int c = 0; c < Tr::kQkChunks; ++c) {
      hopper::copy_box(destination + c * Tr::kRows * 128, maps_.q, full, Tr::kChunk * c, w.q_head,
                       w.first_q_token + w.first_token);
    }
    q_ring_.advance();
  }

  // Works differ in cost: whoever takes the next one long before it is free may hold what another CTA waits for. So it
  // is taken with the last keys of a long work. Those of two tiles have both stages as soon as they are known.
  static __device__ __forceinline__ bool is_long(const Work& w) { return w.tile_end - w.tile_begin > 2; }

  // A thread that does nothing else knows works before the others need them, and asks for their queries. kLate: it
  // takes the next one when it has told of the last, so that nobody waits for the counter before the first.
  template <bool kLate>
  __device__ __forceinline__ void tell_works() {
    uint32_t last_keys_phase = 0;
    for (;;) {
      const Work w = next_work<kLate>();  // while the others are busy with the last one
      tell(w);
      hopper::mbarrier_arrive(work_known());
      bring_queries(w);
      if (w.num_tokens < 0) return;
      work_ring_.advance();
      if constexpr (kLate) {
        if (!Tr::kShort && is_long(w)) {
          hopper::mbarrier_wait(shared_ + Layout::kLastKeys, last_keys_phase);
          last_keys_phase ^= 1;
        }
        take_index();
      }
    }
  }

  // Which request a work is of; that of a piece is not looked up. Negative: the plan has no such work.
  __device__ __forceinline__ int request_of_work(int index) const {
    if (index >= s_.num_works) return -1;
    const int row = s_.by_works_per_tile.divide(index) - cuts_.pieces;
    if (row < 0) return 0;
    return row < p_.num_tiles ? p_.tile_order[2 * static_cast<int64_t>(row)] : -1;
  }

  // The same by a warp: works of few tiles are soon done, and their decoding would bind. So lanes take and decode
  // several of them at once. Then one after another tells of its own. Near the end of the plan they are taken one by
  // one.
  __device__ __forceinline__ void tell_works_together() {
    const int lane = tid_ % 32, ctas = static_cast<int>(gridDim.x);
    int first = next_index_, count = 1;
    uint32_t last_keys_phase = 0;
    for (;;) {
      Work w;
      w.num_tokens = 0;
      if (lane < count) {
        const int index = first + s_.cluster * lane;
        if (index >= s_.num_works || !decode_work<Tr::kKeys, Tr::kPlainWorks>(p_, s_, cuts_, index, w)) {
          w.num_tokens = -1;
          w.slab = cuts_.pieces;
        } else if (w.num_tokens == 0 && index < cuts_.pieces * s_.works_per_tile) {
          count_piece(p_, 4 * Tr::kWarpgroups);
        }
      }
      // Plans may have room for far more works than they have. Both CTAs of a pair ask for the same, behind the works.
      const int ahead = request_of_work(first - rank_ + (lane == 0 ? 2 * Tr::kTogether : Tr::kTogether) * ctas);
      bool short_works = true;
      for (unsigned left = __ballot_sync(0xffffffffu, w.num_tokens != 0); left != 0; left &= left - 1) {
        const int teller = __ffs(static_cast<int>(left)) - 1;
        if (lane == teller) {
          tell(w);
          hopper::mbarrier_arrive(work_known());
          bring_queries(w);
        } else {
          q_ring_.advance();
        }
        if (__shfl_sync(0xffffffffu, w.num_tokens, teller) < 0) return;
        work_ring_.advance();
        short_works = __shfl_sync(0xffffffffu, is_long(w) ? 0 : 1, teller) != 0;
        if (!short_works) {
          hopper::mbarrier_wait(shared_ + Layout::kLastKeys, last_keys_phase);
          last_keys_phase ^= 1;
        }
      }
      const unsigned exist = __ballot_sync(0xffffffffu, ahead >= 0);
      count = !short_works || s_.together == 1 ? 1 : (exist & 1) != 0 ? Tr::kTogether : (exist & 2) != 0 ? 2 : 1;
      if (p_.semaphores == nullptr || ctas >= s_.takes) {
        first += ctas;
        count = 1;
        continue;
      }
      if (lane == 0) {
        if (rank_ > 0) {
          receive_index();
        } else {
          next_index_ = behind_first(atomicAdd(p_.semaphores, count));
          if (s_.cluster > 1) send_index();
        }
      }
      first = __shfl_sync(0xffffffffu, next_index_, 0);
    }
  }

  // The boxes of a tile that hold keys of [begin, end), when the stage is empty, by one warp. All that can be known
  // before is: what comes between the wait and the first box is added to the time that each stage stays unused.
  template <int kChunks>
  __device__ __forceinline__ void bring_boxes(const Work& w, int tile, int lane_page, const CUtensorMap* map,
                                              uint32_t destination, uint32_t empty, uint32_t phase, uint32_t full,
                                              int begin, int end) {
    constexpr int kAcross = Tr::kWholeRows ? 1 : kChunks;         // boxes of the same keys
    constexpr int kMost = ceil_div(Tr::kKeys / 8 * kAcross, 32);  // boxes of a lane
    const int lane = tid_ % 32, first_key = w.place_of(tile) * Tr::kKeys;
    int page[kMost], token[kMost], row[kMost];
    unsigned wanted[kMost];
    int boxes = 0;
#pragma unroll
    for (int n = 0; n < kMost; ++n) {
      const int box = (lane + 32 * n) / kAcross, key = first_key + box * s_.box_keys;
      row[n] = box * s_.box_keys;
      token[n] = w.first_k_token + key;
      if (p_.paged) token[n] -= s_.page_size.divide(token[n]) * p_.page_table.page_size;
      page[n] = __shfl_sync(0xffffffffu, lane_page, box % 32);
      wanted[n] = __ballot_sync(0xffffffffu, row[n] < Tr::kKeys && key < end && key + s_.box_keys > begin);
      boxes += __popc(wanted[n]);
    }
    hopper::mbarrier_wait(empty, phase);
    if (lane == 0) hopper::mbarrier_arrive_expect(full, boxes * s_.box_keys * (kChunks / kAcross * 128));
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kMost; ++n) {
      if (!(wanted[n] >> lane & 1)) continue;
      if constexpr (Tr::kWholeRows) {
        const uint32_t to = destination + row[n] * (kChunks * 128);
        if (s_.cluster == 1) {
          hopper::copy_box(to, map, full, 0, token[n], 0, w.kv_head, page[n]);
        } else if (lane % 2 == rank_) {
          hopper::copy_box_to_ctas(to, map, full, 0, token[n], 0, w.kv_head, page[n], 3);
        }
        continue;
      }
      const int c = (lane + 32 * n) % kChunks;
      const uint32_t to = destination + c * Tr::kKeys * 128 + row[n] * 128;
      if (s_.cluster == 1) {
        hopper::copy_box(to, map, full, Tr::kChunk * c, token[n], w.kv_head, page[n]);
      } else if (lane % 2 == rank_) {  // a half of the boxes, for both CTAs
        hopper::copy_box_to_ctas(to, map, full, Tr::kChunk * c, token[n], w.kv_head, page[n], 3);
      }
    }
  }

  // The page of this lane's box of a tile; 0 where it is not needed. One outside the pool is a box outside the tensor:
  // zeros.
  __device__ __forceinline__ int page_of_box(const Work& w, int tile) const {
    static_assert(Tr::kKeys / 8 <= 32, "a lane for each box");
    if (!p_.paged || tile >= w.tile_end) return 0;
    const int lane = tid_ % 32, key = w.place_of(tile) * Tr::kKeys + lane * s_.box_keys;
    const bool wanted = lane * s_.box_keys < Tr::kKeys && key + s_.box_keys > w.known_begin && key < w.seqlen_k;
    return wanted ? page_at(w, s_.page_size.divide(w.first_k_token + key)) : 0;
  }

  __device__ __forceinline__ int page_at(const Work& w, int cell) const {
    const int page = p_.page_table.row(w.request)[cell];
    check_page(w, cell, page);
    return page;
  }

  __device__ __forceinline__ void check_page(const Work& w, int cell, int page) const {
    if (p_.report != nullptr && (page < 0 || page >= p_.page_table.num_pages)) {
      record_fault(p_.report,
                   {ReportOp::kFmhaPaged, ReportKind::kPageIndex, w.request, cell, page, p_.page_table.num_pages});
    }
  }

  // Brings to L1, by a warp, which keys are hidden from a work's tokens, before who computes reads it; and those of the
  // first and last tokens of the tiles before it, of which one is likely the next that is taken.
  __device__ __forceinline__ void prefetch_hidden(const Work& w) const {
    if (!hides_keys<Tr::kPlainWorks>(p_)) return;
    const auto prefetch = [&](int token) {
      asm volatile("prefetch.global.L1 [%0];\n" ::"l"(p_.hidden_keys + 2 * (int64_t{w.first_q_token} + token))
                   : "memory");
    };
    constexpr int kTokens = 4;  // of a sector
    const int lane = tid_ % 32, ahead = w.first_token - (lane / 2 + 1) * s_.chunk_tokens;
    for (int i = lane * kTokens; i < w.num_tokens + kTokens - 1; i += 32 * kTokens) {
      prefetch(w.first_token + min_of(i, w.num_tokens - 1));
    }
    if (lane < 16 && ahead >= 0) prefetch(ahead + (lane % 2 == 0 ? 0 : s_.chunk_tokens - 1));
  }

  // Whether a tree mask leaves a key to some row of the tile.
  __device__ __forceinline__ bool is_seen(const Work& w, int key) const {
    if constexpr (Tr::kPlainWorks) return true;
    return sm90::is_seen(p_, w, key);
  }

  // Zeros in place of a tile's values that no row sees, which may be NaN, by every `count`th of its rows.
  __device__ __forceinline__ void clear_unseen(const Work& w, int tile, uint32_t values, int first, int count,
                                               int rows = Tr::kKeys) const {
    for (int row = first; row < rows; row += count) {
      const int key = w.place_of(tile) * Tr::kKeys + row;
      if (key >= w.key_begin && key < w.key_end && is_seen(w, key)) continue;
#pragma unroll
      for (int i = 0; i < Tr::kVChunks * 8; ++i) {
        const int at = hopper::swizzled(row, i % 8) + row / 8 * (Tr::kVGroupBytes - 1024);
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(values + i / 8 * Tr::kChunkRows * 128 + at),
                     "r"(0)
                     : "memory");
      }
    }
  }

  // One lane arrives for a warp: 128 arrivals a tile kept the barriers' unit so busy that products waited.
  __device__ __forceinline__ void arrive(uint32_t barrier) const {
    __syncwarp();
    hopper::mbarrier_arrive_if(barrier, tid_ % 32 == 0);
  }

  const Params& p_;
  const Schedule& s_;
  const Maps& maps_;
  char* base_;
  uint32_t shared_;
  int tid_, rank_;  // of the CTA in its pair
  int next_index_ = static_cast<int>(blockIdx.x);
  int turn_ = 0;
  uint32_t mail_phase_ = 0;
  bool awaits_index_ = false;
  Cuts cuts_;
  Ring<Tr::kWorkStages> work_ring_;
  Ring<Tr::kQStages> q_ring_;  // of the thread that brings them
};

inline constexpr int kProducerBarrier = 1;

}  // namespace attnops::fmha::sm90
