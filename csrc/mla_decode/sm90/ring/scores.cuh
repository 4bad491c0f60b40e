#pragma once
#include "mla_decode/sm90/ring/load.cuh"
#include "mla_decode/sm90/ring/products.cuh"
#include "mla_decode/sm90/softmax.cuh"
#include "mla_decode/sm90/tile_products.cuh"

namespace attnops::mla_decode::sm90::ring {

// The third group computes the scores and probabilities of every tile. It holds the piece's 64 queries in registers, as
// the fragments that its products take, but for the rope part and the first step: scores then read shared memory at
// half of what it can give, and a third KV tile lies where queries would.
template <typename T>
class Scores {
 public:
  __device__ Scores(const Params& p, uint8_t* base, uint32_t shared)
      : p_(p),
        base_(base),
        shared_(shared),
        own_(shared + kRopeTile * kTileBytes + fragment()),
        scale_(p.softmax_scale * kLog2e) {}

  __device__ void run() {
    const SplitKvEntry& entry = *reinterpret_cast<const SplitKvEntry*>(base_ + kEntry);
    Walk walk(entry);
    Piece piece;
    int left = count_pieces(entry);
    bool first = true;
    park(walk);
    park(piece);
    park(left);
    park(first);
    uint32_t q[kKeptSteps][4];
#pragma unroll 1
    for (; left > 0; --left) {
      walk.next(p_, piece);
      take_queries(q);
      score_piece(q, piece, left > 1 ? kLastOfPiece : kLastOfPiece | kLastOfAll);
      if (!first) attnops::sm90::named_barrier_sync(kTotalsRead, kThreads);
      first = false;
      give_totals(piece);
    }
  }

 private:
  // References follow the maxima only when these are more than a factor of 2^8 above: exact all the same, and
  // accumulators are hardly ever rescaled.
  static constexpr float kMostProbability = 256.f;
  static constexpr float kLostProbability = 0x1p100f;  // from here on sums and factors might overflow
  static constexpr int kKeptSteps = kTilesV * 4 - 1;   // of 16 columns of q, in registers

  // The values of a tile are multiplied while this group is in the softmax of the next: they may start when the scores
  // of that tile are done.
  __device__ void score_piece(const uint32_t (&q)[kKeptSteps][4], const Piece& piece, int last_flags) {
#pragma unroll
    for (int h = 0; h < kRowsPerThread; ++h) {
      maximum_[h] = -INFINITY;
      sum_[h] = 0.f;
    }
    int flags = kFirst, key = piece.first_tile * kPlanTileTokens;
    const int end = key + piece.num_tiles * kPlanTileTokens;
    bool follows = false;  // a tile whose values are not yet let go
    float s[32];
#pragma unroll 1
    while (key < end) {
      wait_full();
      if (key + kPlanTileTokens > piece.keys.end) clear_tail(piece.keys.end - key);
      compute_scores(q, s);
      if (follows) let_values_go();
      if (key + kPlanTileTokens > piece.keys.end || p_.causal) mask(piece, key, s);
      if (flags & (kFirst | kAgain)) set_references(s, flags);
      // On to tiles that all rows see, without the code for others: instruction fetches are not free.
      const int plain_end = min_of(seen_by_all(piece), end);
      // Counted down: one register less than comparing keys.
      int left = max_of(plain_end / kPlanTileTokens - key / kPlanTileTokens, 1);
      const int stop = key + left * kPlanTileTokens;
      park(key);
#pragma unroll 1
      while (true) {
        bool ready;
        follows = finish_tile(s, flags, ready);
        if (!follows || --left == 0) break;
        if (!ready) wait_full();
        compute_scores(q, s);
        let_values_go();
      }
      key = stop - left * kPlanTileTokens;
    }
    base_[kFlags + before_slot(slot()) * 4 + thread() / 32] |= last_flags;
    attnops::sm90::fence_async_proxy();
    let_values_go();
  }

  __device__ void wait_full() const { attnops::sm90::mbarrier_wait(shared_ + full_slot(slot()), turn_ >= kSlots); }

  // The values of the tile before, whose probabilities are there, may be multiplied.
  __device__ void let_values_go() const { attnops::sm90::named_barrier_arrive(kGo + before_slot(slot()), kThreads); }

  // s = the slot's scores.
  __device__ void compute_scores(const uint32_t (&q)[kKeptSteps][4], float (&s)[32]) const {
    multiply(q, s);
    attnops::sm90::fence_async_proxy();  // of the probabilities of the tile before
    attnops::sm90::wgmma_wait<0>(s);
  }

  // From scores to probabilities in the place of the tile's rope part. Returns false where references are so much too
  // low that the tile must be computed once more. `ready`: the next tile has come.
  __device__ bool finish_tile(float (&s)[32], int& flags, bool& ready) {
    uint32_t a[4][4];
    float sums[kRowsPerThread];
    const bool moves = exponentiate(s, a, sums);
    const int next = turn_ == 2 * kSlots - 1 ? 0 : turn_ + 1;
    ready = mbarrier_test(shared_ + full_slot(next >= kSlots ? next - kSlots : next), next >= kSlots);
    // All of the group must be done with the rope part.
    if (attnops::sm90::named_barrier_any(kScoresRead, kGroupThreads, moves)) {
      if (attnops::sm90::named_barrier_any(kScoresRead, kGroupThreads, exceeds(a, kLostProbability))) {
        flags |= kAgain;
        return false;
      }
      raise(a, sums, flags);
    } else {
      const uint32_t place = own_ + slot() * kOperandBytes;
#pragma unroll
      for (int kk = 0; kk < 4; ++kk) attnops::sm90::store_fragment(a[kk], place ^ kk * 32);
    }
#pragma unroll
    for (int h = 0; h < kRowsPerThread; ++h) sum_[h] += sums[h];
    base_[kFlags + slot() * 4 + thread() / 32] = flags;  // by all lanes
    flags = 0;
    advance();
    return true;
  }

  // Keys before this one are seen by all rows.
  __device__ int seen_by_all(const Piece& piece) const {
    if (!p_.causal) return piece.keys.end;
    const int token = row_place(p_, piece.first_row).token;
    return min_of(piece.keys.end, piece.length - p_.seqlen_q + token + 1);
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
    if (threadIdx.x % 32 == 0) {
      for (int half = 0; half < 2; ++half) attnops::sm90::mbarrier_arrive(shared_ + empty_half(slot(), half));
    }
    advance();
  }

  // Zeros for the keys from `keys` on of the slot's tile: nobody may read them, and 0 x NaN must not happen.
  __device__ void clear_tail(int keys) const {
    const int thread = threadIdx.x % kGroupThreads;
    uint8_t* tile = base_ + slot() * kOperandBytes;
#pragma unroll 1
    for (int i = max_of(keys, 0) * 8 + thread; i < kPlanTileTokens * 8; i += kGroupThreads) {
#pragma unroll 1
      for (int k = 0; k < kTilesQk; ++k) *reinterpret_cast<uint4*>(tile + k * kTileBytes + i * 16) = {};
    }
    attnops::sm90::fence_async_proxy();
    attnops::sm90::named_barrier_sync(kQueriesKept, kGroupThreads);
  }

  // s = the scores of the slot's tile, in flight.
  __device__ void multiply(const uint32_t (&q)[kKeptSteps][4], float (&s)[32]) const {
    __syncwarp();
    const uint64_t keys = uniform(attnops::sm90::operand_descriptor(shared_ + slot() * kOperandBytes));
    const auto key = [&](int step) {
      return keys + step / 4 * (kTileBytes >> 4) + step % 4 * attnops::sm90::kStepKMajor;
    };
    attnops::sm90::wgmma_fence();
#pragma unroll
    for (int step = 1; step <= kKeptSteps; ++step) {
      attnops::sm90::wgmma_n64<T>(s, q[step - 1], key(step), step > 1);
    }
    const uint32_t base = uniform(shared_);
    attnops::sm90::wgmma_n64<T>(s, block_descriptor(base + kFirstQueries), key(0), 1);
    const uint64_t rope = attnops::sm90::operand_descriptor(base + kRopeQueries);
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      attnops::sm90::wgmma_n64<T>(s, rope + kk * attnops::sm90::kStepKMajor, key(kKeptSteps + 1 + kk), 1);
    }
    attnops::sm90::wgmma_commit();
  }

  __device__ static float row_top(const float (&s)[32], int h) {
    float tops[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      tops[j] =
          fmaxf(fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]), fmaxf(s[4 * j + 16 + 2 * h], s[4 * j + 17 + 2 * h]));
    }
    return fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
  }

  // A piece's first tile sets the references, and one whose probabilities have overflowed raises them. They are whole
  // numbers, so that accumulators are rescaled by powers of two.
  __device__ void set_references(const float (&s)[32], int& flags) {
#pragma unroll
    for (int h = 0; h < kRowsPerThread; ++h) {
      const float top = ceilf(quad_max(scale_ * row_top(s, h)));
      if (flags & kFirst) {
        maximum_[h] = top == -INFINITY ? 0.f : top;  // of a row that sees nothing
      } else {
        raise_row(h, static_cast<int>(fminf(fmaxf(top - maximum_[h], 0.f), 127.f)));
        maximum_[h] = fmaxf(maximum_[h], top);
      }
    }
    flags = flags & kFirst ? 0 : kRescales;
  }

  // Rescales what a row has, and tells the values groups to do so.
  __device__ float raise_row(int h, int shift) {
    const uint32_t lane = thread() % 32, row = thread() / 32 * 16 + lane / 4 + 8 * h;
    if (lane % 4 == 0) base_[kShifts + slot() * 64 + row] = shift;
    const float factor = power_of_half(shift);
    sum_[h] *= factor;
    return factor;
  }

  // Turns scores into probabilities under the rows' references, as fragments, and adds them up. Returns whether any is
  // so large that its reference must be raised.
  __device__ bool exponentiate(float (&s)[32], uint32_t (&a)[4][4], float (&sums)[kRowsPerThread]) const {
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
    return exceeds(a, kMostProbability);
  }

  __device__ static bool exceeds(const uint32_t (&a)[4][4], float limit) {
    uint32_t tops[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) tops[i] = max_pair<T>(max_pair<T>(a[0][i], a[1][i]), max_pair<T>(a[2][i], a[3][i]));
    return larger_of_pair<T>(max_pair<T>(max_pair<T>(tops[0], tops[1]), max_pair<T>(tops[2], tops[3]))) >= limit;
  }

  // Raises the references of the warp's rows that need it, and writes the tile's probabilities accordingly.
  __device__ void raise(const uint32_t (&a)[4][4], float (&sums)[kRowsPerThread], int& flags) {
#pragma unroll
    for (int h = 0; h < kRowsPerThread; ++h) {
      uint32_t top = 0;
#pragma unroll
      for (int k = 0; k < 8; ++k) top = max_pair<T>(top, a[k / 2][k % 2 * 2 + h]);
      const float most = quad_max(larger_of_pair<T>(top));
      const int exponent = (__float_as_int(most) >> 23 & 255) - 127;
      const int shift = most >= kMostProbability ? exponent + 1 : 0;
      maximum_[h] += static_cast<float>(shift);
      const float factor = raise_row(h, shift);
      sums[h] *= factor;
      const uint32_t x = thread(), row = x / 32 * 16 + x % 32 / 4 + 8 * h;
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int at = attnops::sm90::swizzled(row, k) + x % 4 * 4;
        uint8_t* place = base_ + slot() * kOperandBytes + kRopeTile * kTileBytes + at;
        *reinterpret_cast<uint32_t*>(place) = scaled_pair<T>(a[k / 2][k % 2 * 2 + h], factor);
      }
    }
    flags |= kRescales;
  }

  // Removes keys behind each row's end.
  __device__ void mask(const Piece& piece, int first_key, float (&s)[32]) const {
    RowState rows;
    rows.template begin<Options::kCommon>(p_, piece);
    mask_end(rows, first_key, s);
  }

  __device__ static void arrive_if(int barrier, bool condition) {
    asm volatile("{\n.reg .pred chosen;\nsetp.ne.b32 chosen, %2, 0;\n@chosen bar.arrive %0, %1;\n}\n" ::"r"(barrier),
                 "r"(kThreads), "r"(static_cast<int>(condition))
                 : "memory");
  }

  __device__ void give_totals(const Piece& piece) {
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
      *reinterpret_cast<StoredPiece*>(base_ + kFinished) = {piece.request, piece.first_row, piece.num_rows,
                                                            piece.partial};
    }
    attnops::sm90::named_barrier_arrive(kTotalsWritten, kThreads);
  }

  const Params& p_;
  uint8_t* const base_;
  const uint32_t shared_;
  const uint32_t own_;  // this lane's part of slot 0's rope part
  const float scale_;   // of scores, in the base-2 logarithm
  int turn_ = 0;
  float maximum_[kRowsPerThread];  // the reference, in the base-2 logarithm
  float sum_[kRowsPerThread];      // of this thread's columns
};

}  // namespace attnops::mla_decode::sm90::ring
