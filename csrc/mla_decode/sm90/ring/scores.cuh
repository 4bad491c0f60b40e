#pragma once
#include "mla_decode/sm90/ring/load.cuh"
#include "mla_decode/sm90/ring/products.cuh"
#include "mla_decode/sm90/softmax.cuh"
#include "mla_decode/sm90/tile_products.cuh"

namespace attnops::mla_decode::sm90::ring {

// The third group computes the scores and probabilities of every tile. It holds the piece's 64 queries in registers, as
// the fragments that its products take, but for the rope part and the first step: scores then read shared memory at
// half of what it can give, and a third KV tile lies where queries would. kTrees: a tree mask says which of the last
// keys a row sees.
template <typename T, bool kTrees>
class Scores {
 public:
  __device__ Scores(const Params& p, const Shape& shape, uint8_t* base, uint32_t shared)
      : p_(p),
        shape_(shape),
        base_(base),
        shared_(shared),
        own_(shared + kRopeTile * kTileBytes + fragment()),
        scale_(p.softmax_scale * kLog2e) {}

  __device__ void run() {
    __syncthreads();
    if (is_idle(base_)) return;
    uint32_t q[kKeptSteps][4];
    int tiles;
#pragma unroll 1
    do {
      take_queries(q);
      wait_full();  // for its first tile the work is there, for its queries not yet
      if constexpr (kTrees) ask_for_mask();
      tiles = work().tiles;
      int done = 0;
      park(done);
#pragma unroll 1
      while (true) {
        const int left = (tiles < 0 ? -tiles : tiles) - done;
        const int cut = p_.fixed_split_tokens == 0 ? left : min_of(p_.fixed_split_tokens / kPlanTileTokens, left);
        const bool cut_again = cut < left;
        score_piece(q, done, cut, kLastOfPiece | (cut_again ? kSameQueries : tiles > 0 ? 0 : kLastOfAll));
        if (totals_ > 0) attnops::sm90::mbarrier_wait(shared_ + kTotalsRead, totals_ & 1 ^ 1);
        ++totals_;
        give_totals(done);
        if (!cut_again) break;
        done += cut;
      }
      ++works_;
    } while (tiles > 0);
  }

 private:
  static constexpr int kKeptSteps = kTilesV * 4 - 1;  // of 16 columns of q, in registers

  // The values of a tile are multiplied while this group is in the softmax of the next: they may start when the scores
  // of that tile are done.
  __device__ void score_piece(const uint32_t (&q)[kKeptSteps][4], int done, int tiles, int last_flags) {
#pragma unroll
    for (int h = 0; h < kRowsPerThread; ++h) {
      maximum_[h] = -INFINITY;
      sum_[h] = 0.f;
    }
    int flags = 0, key = (work().first_tile + done) * kPlanTileTokens;
    const int end = key + tiles * kPlanTileTokens;
    bool follows = false;  // a tile whose values are not yet let go
    float s[32];
#pragma unroll 1
    while (key < end) {
      wait_full();
      if constexpr (kTrees) {
        if (key + kPlanTileTokens > seen_by_all()) clear_keys(~seen_by_some(key));
      } else {
        if (key + kPlanTileTokens > keys_end()) clear_tail(keys_end() - key);
      }
      compute_scores(q, s, keys_of(slot()), uniform(shared_), follows, flags);
      if (key + kPlanTileTokens > seen_by_all()) mask(key, s);
      if (!follows) {
        set_references(s);
      } else if constexpr (kTrees) {
        set_late_references(s);
      }
      // On to tiles that all rows see, without the code for others: instruction fetches are not free.
      const int plain_end = min_of(seen_by_all(), end);
      // Counted down: one register less than comparing keys.
      int left = max_of(plain_end / kPlanTileTokens - key / kPlanTileTokens, 1);
      key += left * kPlanTileTokens;
      follows = true;
      park(key);
#pragma unroll 1
      while (true) {
        const Ahead ahead = look_ahead();
        const bool ready = finish_tile(s, flags, ahead);
        if (--left == 0) break;
        if (!ready) wait_full();
        compute_scores(q, s, ahead.keys, ahead.base, true, flags);
      }
    }
    tell_values(flags | last_flags);
    attnops::sm90::fence_async_proxy();
    let_values_go();
  }

  __device__ void wait_full() const { attnops::sm90::mbarrier_wait(shared_ + full_slot(slot()), turn_ >= kSlots); }

  // The values of the tile before, whose probabilities are there, may be multiplied.
  __device__ void let_values_go() const { attnops::sm90::named_barrier_arrive(kGo + before_slot(slot()), kThreads); }

  // Of the tile before, by all lanes.
  __device__ void tell_values(int flags) const { base_[kFlags + before_slot(slot()) * 4 + thread() / 32] = flags; }

  // What the end of a tile's softmax and the next tile's products need, found out before.
  struct Ahead {
    uint32_t place;  // of this lane's probabilities
    uint64_t keys;   // descriptor of the next tile
    uint32_t base;   // shared memory
  };

  __device__ uint64_t keys_of(int slot) const {
    return uniform(attnops::sm90::operand_descriptor(shared_ + slot * kOperandBytes));
  }

  __device__ Ahead look_ahead() const {
    Ahead ahead;
    ahead.place = own_ + slot() * kOperandBytes;
    asm volatile("" : "+r"(ahead.place));
    ahead.keys = keys_of(next_slot(slot()));
    ahead.base = uniform(shared_);
    return ahead;
  }

  // s = the slot's scores. Lets the values of the tile before go, if there is one.
  __device__ void compute_scores(const uint32_t (&q)[kKeptSteps][4], float (&s)[32], uint64_t keys, uint32_t base,
                                 bool follows, int& flags) const {
    multiply(q, s, keys, base);
    if (follows) tell_values(flags);
    flags = 0;
    attnops::sm90::fence_async_proxy();  // of the probabilities of the tile before
    // While the last of the products run: the values groups need a while to begin.
    if (follows) let_values_go();
    attnops::sm90::wgmma_wait<0>(s);
    __syncwarp();
    attnops::sm90::mbarrier_arrive_if(shared_ + kScoresRead, thread() % 32 == 0);
  }

  // From scores to probabilities in the place of the tile's rope part. Returns whether the next tile has come.
  __device__ bool finish_tile(float (&s)[32], int& flags, const Ahead& ahead) {
    uint32_t a[4][4];
    float sums[kRowsPerThread];
    if (__any_sync(0xffffffffu, is_high(s))) raise_references(s, flags);
    exponentiate(s, a, sums);
    const bool free = attnops::sm90::mbarrier_test(shared_ + kScoresRead, turn_ & 1);
    const int next = turn_ == 2 * kSlots - 1 ? 0 : turn_ + 1;
    const bool ready =
        attnops::sm90::mbarrier_test(shared_ + full_slot(next >= kSlots ? next - kSlots : next), next >= kSlots);
    if (!free) attnops::sm90::mbarrier_wait(shared_ + kScoresRead, turn_ & 1);
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) attnops::sm90::store_fragment(a[kk], ahead.place ^ kk * 32);
#pragma unroll
    for (int h = 0; h < kRowsPerThread; ++h) sum_[h] += sums[h];
    turn_ = next;
    return ready;
  }

  // Keys before this one are seen by all rows.
  __device__ int seen_by_all() const {
    if constexpr (kTrees) return min_of(keys_end(), work().length - p_.tree_keys);
    if (!p_.causal) return keys_end();
    const int token = row_place(p_, work().first_row).token;
    return min_of(keys_end(), work().length - p_.seqlen_q + token + 1);
  }

  // The part's present work. Read again every time, too.
  __device__ const volatile Work& work() const {
    return reinterpret_cast<const volatile Work*>(base_ + kWorks)[works_ % kWorksAhead];
  }

  // Keys of the request that there are.
  __device__ int keys_end() const { return min_of(work().length, shape_.most_tokens); }

  // The work as functions for all kernels take it, but for its tiles.
  __device__ Piece piece() const {
    const volatile Work& work = this->work();
    Piece piece;
    piece.request = work.request;
    piece.first_row = work.first_row;
    piece.partial = work.partial;
    piece.num_rows = piece.partial == kNoRoom ? 0 : min_of(p_.seqlen_q * p_.num_q_heads - piece.first_row, kPlanRows);
    piece.length = work.length;
    piece.keys = {0, min_of(piece.length, shape_.most_tokens)};
    return piece;
  }

  // Where the ring stands: one register for a slot and the parity of its phase.
  __device__ int slot() const { return turn_ >= kSlots ? turn_ - kSlots : turn_; }
  __device__ void advance() { turn_ = turn_ == 2 * kSlots - 1 ? 0 : turn_ + 1; }

  // Of the group. Read again every time, instead of keeping what follows from it in registers.
  __device__ static uint32_t thread() {
    uint32_t x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x % kGroupThreads;
  }

  // Where this lane's part of a K-major tile lies, first step.
  __device__ static uint32_t fragment() {
    const uint32_t x = thread();
    return attnops::sm90::swizzled(x / 32 * 16 + x % 16, x % 32 / 16);
  }

  __device__ void take_queries(uint32_t (&q)[kKeptSteps][4]) {
    attnops::sm90::mbarrier_wait(shared_ + full_slot(slot()), turn_ >= kSlots);
    const uint32_t at = shared_ + slot() * kOperandBytes, own = fragment();
    uint32_t other[4];
    attnops::sm90::load_fragment(other, at + own);
    const int row = threadIdx.x % kGroupThreads / 32 * 16 + threadIdx.x % 16, chunk = threadIdx.x % 32 / 16;
    attnops::sm90::store_fragment(other, shared_ + kFirstQueries + (row / 8 * 2 + chunk) * 128 + row % 8 * 16);
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      attnops::sm90::load_fragment(other, at + kRopeTile * kTileBytes + (own ^ kk * 32));
      attnops::sm90::store_fragment(other, shared_ + kRopeQueries + (own ^ kk * 32));
    }
#pragma unroll
    for (int step = 1; step <= kKeptSteps; ++step) {
      attnops::sm90::load_fragment(q[step - 1], at + step / 4 * kTileBytes + (own ^ step % 4 * 32));
    }
    attnops::sm90::fence_async_proxy();
    attnops::sm90::named_barrier_sync(kQueriesKept, kGroupThreads);
    for (int half = 0; half < 2; ++half) attnops::sm90::mbarrier_arrive(shared_ + empty_half(slot(), half));
    if (threadIdx.x % 32 == 0) attnops::sm90::mbarrier_arrive(shared_ + kScoresRead);
    advance();
  }

  // Zeros for the keys from `keys` on of the slot's tile: nobody may read them, and 0 x NaN must not happen.
  __device__ void clear_tail(int keys) const {
    const int thread = threadIdx.x % kGroupThreads;
    uint8_t* tile = base_ + slot() * kOperandBytes;
#pragma unroll 1
    for (int i = max_of(keys, 0) * 8 + thread; i < kPlanTileTokens * 8; i += kGroupThreads) {
#pragma unroll
      for (int k = 0; k < kTilesQk; ++k) *reinterpret_cast<uint4*>(tile + k * kTileBytes + i * 16) = {};
    }
    attnops::sm90::fence_async_proxy();
    attnops::sm90::named_barrier_sync(kQueriesKept, kGroupThreads);
  }

  // Of trees: the request's rows of the mask come near long before its drafts do. Behind boxes a word takes 2 us.
  __device__ void ask_for_mask() const {
    const uint8_t* rows = p_.tree_mask + work().request * p_.tree_mask_stride_request;
#pragma unroll 1
    for (int token = threadIdx.x % 32; token < p_.seqlen_q; token += 32) {
      asm volatile("prefetch.global.L1 [%0];" ::"l"(rows + token * p_.tree_mask_stride_token));
    }
  }

  // Of trees: those of the keys [first_key, first_key + 64) that some row of the request sees.
  __device__ uint64_t seen_by_some(int first_key) const {
    const Piece piece = this->piece();
    const uint64_t inside = bits_below(piece.keys.end - first_key);
    if (first_key + kPlanTileTokens <= piece.length - p_.tree_keys) return inside;  // it ends with the page table
    uint64_t seen = 0;
#pragma unroll 1
    for (int token = threadIdx.x % 32; token < p_.seqlen_q; token += 32) {
      seen |= ~hidden_by_tree(p_, piece, token, first_key);
    }
    const uint32_t low = __reduce_or_sync(0xffffffffu, static_cast<uint32_t>(seen));
    const uint32_t high = __reduce_or_sync(0xffffffffu, static_cast<uint32_t>(seen >> 32));
    return (uint64_t{high} << 32 | low) & inside;
  }

  // Zeros for these keys of the slot's tile.
  __device__ void clear_keys(uint64_t keys) const {
    const int thread = threadIdx.x % kGroupThreads;
    uint8_t* tile = base_ + slot() * kOperandBytes;
#pragma unroll 1
    for (int i = thread; i < kPlanTileTokens * 8; i += kGroupThreads) {
      if (!(keys >> i / 8 & 1)) continue;
#pragma unroll
      for (int k = 0; k < kTilesQk; ++k) *reinterpret_cast<uint4*>(tile + k * kTileBytes + i * 16) = {};
    }
    attnops::sm90::fence_async_proxy();
    attnops::sm90::named_barrier_sync(kQueriesKept, kGroupThreads);
  }

  // s = the scores of the slot's tile, in flight.
  __device__ void multiply(const uint32_t (&q)[kKeptSteps][4], float (&s)[32], uint64_t keys, uint32_t base) const {
    __syncwarp();
    const auto key = [&](int step) {
      return keys + step / 4 * (kTileBytes >> 4) + step % 4 * attnops::sm90::kStepKMajor;
    };
    attnops::sm90::wgmma_fence();
#pragma unroll
    for (int step = 1; step <= kKeptSteps; ++step) {
      attnops::sm90::wgmma_n64<T>(s, q[step - 1], key(step), step > 1);
    }
    attnops::sm90::wgmma_n64<T>(s, block_descriptor(base + kFirstQueries), key(0), 1);
    const uint64_t rope = attnops::sm90::operand_descriptor(base + kRopeQueries);
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      attnops::sm90::wgmma_n64<T>(s, rope + kk * attnops::sm90::kStepKMajor, key(kKeptSteps + 1 + kk), 1);
    }
    attnops::sm90::wgmma_commit();
  }

  // A piece's first tile sets the references: the rows' own maxima, so that the largest probability is 1 and rounds to
  // itself. A row of few keys has nothing that its roundings could average with.
  __device__ void set_references(const float (&s)[32]) {
#pragma unroll
    for (int h = 0; h < kRowsPerThread; ++h) {
      const float top = quad_max(scale_ * row_top(s, h));
      maximum_[h] = top == -INFINITY ? 0.f : top;  // of a row that sees nothing
    }
  }

  // Of trees: a row that the tile before hid every key from has added up nothing, and its reference is of no key. What
  // it sees now may be far below that.
  __device__ void set_late_references(const float (&s)[32]) {
#pragma unroll
    for (int h = 0; h < kRowsPerThread; ++h) {
      const float top = quad_max(scale_ * row_top(s, h));
      if (quad_sum(sum_[h]) == 0.f && top != -INFINITY) maximum_[h] = top;
    }
  }

  // Whether this thread has a score that is too high for its reference.
  __device__ bool is_high(const float (&s)[32]) const {
    bool high = false;
#pragma unroll
    for (int h = 0; h < kRowsPerThread; ++h) high |= fmaf(row_top(s, h), scale_, -maximum_[h]) >= kSlack;
    return high;
  }

  // Raises the references of the warp's rows that need it, by whole numbers, so that what there is is rescaled by
  // powers of two: their sums here, what the values groups have by them.
  __device__ void raise_references(const float (&s)[32], int& flags) {
    const uint32_t lane = thread() % 32, row = thread() / 32 * 16 + lane / 4;
#pragma unroll
    for (int h = 0; h < kRowsPerThread; ++h) {
      const float rise = ceilf(quad_max(scale_ * row_top(s, h)) - maximum_[h]);
      const int shift = rise >= kSlack ? static_cast<int>(fminf(rise, 127.f)) : 0;
      if (lane % 4 == 0) base_[kShifts + slot() * 64 + row + 8 * h] = shift;
      sum_[h] *= power_of_half(shift);
      if (shift != 0) maximum_[h] += rise;
    }
    flags |= kRescales;
  }

  // Turns scores into probabilities under the rows' references, as fragments, and adds them up.
  __device__ void exponentiate(float (&s)[32], uint32_t (&a)[4][4], float (&sums)[kRowsPerThread]) const {
    float parts[kRowsPerThread][2] = {};
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (2 * kk + i / 2) + 2 * (i % 2);
        const float low = exp2_fast(fmaf(s[at], scale_, -maximum_[i % 2]));
        const float high = exp2_fast(fmaf(s[at + 1], scale_, -maximum_[i % 2]));
        parts[i % 2][0] += low;
        parts[i % 2][1] += high;
        a[kk][i] = round_pair<T>(low, high);
      }
    }
#pragma unroll
    for (int h = 0; h < kRowsPerThread; ++h) sums[h] = parts[h][0] + parts[h][1];
  }

  // Removes keys behind each row's end, and those that its tree hides.
  __device__ void mask(int first_key, float (&s)[32]) const {
    const Piece piece = this->piece();
    RowState rows;
    if constexpr (kTrees) {
      if (piece.num_rows == 0) return;  // a cut without room for its results, whose rows would lie before the mask
      rows.begin(p_, piece);
      mask_tile(p_, piece, rows, first_key, s);
    } else {
      rows.template begin<Options::kCommon>(p_, piece);
      mask_end(rows, first_key, s);
    }
  }

  // Of the piece that begins `done` tiles into the part's share of the work.
  __device__ void give_totals(int done) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % kGroupThreads / 32 * 16 + lane / 4;
    float* totals = reinterpret_cast<float*>(base_ + kTotals) + row;
#pragma unroll
    for (int h = 0; h < kRowsPerThread; ++h) {
      const float sum = quad_sum(sum_[h]);
      if (lane % 4 == 0) {
        totals[8 * h] = sum;
        totals[64 + 8 * h] = maximum_[h];
      }
    }
    if (threadIdx.x % kGroupThreads == 0) {
      const Piece piece = this->piece();
      const int cut = p_.fixed_split_tokens == 0 ? 0 : done / (p_.fixed_split_tokens / kPlanTileTokens);
      *reinterpret_cast<StoredPiece*>(base_ + kFinished) = {piece.request, piece.first_row, piece.num_rows,
                                                            piece.partial < 0 ? -1 : piece.partial + cut};
    }
    attnops::sm90::named_barrier_arrive(kTotalsWritten, kThreads);
  }

  const Params& p_;
  const Shape& shape_;
  uint8_t* const base_;
  const uint32_t shared_;
  const uint32_t own_;  // this lane's part of slot 0's rope part
  const float scale_;   // of scores, in the base-2 logarithm
  int turn_ = 0;
  int works_ = 0, totals_ = 0;     // done, given
  float maximum_[kRowsPerThread];  // the reference, in the base-2 logarithm
  float sum_[kRowsPerThread];      // of this thread's columns
};

}  // namespace attnops::mla_decode::sm90::ring
