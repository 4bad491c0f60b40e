#pragma once
#include <cmath>

#include "core/math.h"
#include "device/sm80/fp8_rows.cuh"
#include "device/sm80/mma.cuh"
#include "device/sm90/barrier.cuh"
#include "xqa_decode/plan.h"
#include "xqa_decode/sm90/tickets.cuh"
#include "xqa_decode/sm90/traits.cuh"

// Short works of the usual kind, a warp each, from global memory to registers and back: a row of keys or values that a
// lane loads is an operand of the matrix instruction as it is. The order of dims within the first product, and that of
// keys within the second, may be any, and so may the places of dims among the results.
namespace attnops::xqa_decode::sm90 {

// Read in place of keys that nobody may read.
static __device__ const uint4 kZeroRow[16] = {};

// Batch-invariant plans: works whose rows see no more tokens than this are such works, in every kernel that may serve
// the call. So who computes them follows from their own lengths, and bits do. Works of more than half as many are two
// halves: of one warp, one after the other, or of two warps, where a CTA has nothing else to do.
inline constexpr int kMostInvariantTokens = 128, kHalfOfInvariant = kMostInvariantTokens / 2;

// Tokens that some row of a request sees.
__device__ __forceinline__ int tokens_seen(const Params& p, int length) {
  const KvRange keys = visible_keys(length, p.seqlen_q, p.window_left);
  return keys.end - keys.begin;
}

// Works that lone warps of a CTA go through, batch-invariant: the short ones of [next, end). `kv_head`: of all of them,
// which are requests then, or -1. Each warp takes whole works; where they are `split`, there is one alone, and a warp
// has one half of its keys for one block of its rows. It lies in shared memory, a copy for each warp.
struct InvariantShare {
  int next, end, kv_head, split;
  int short_works = 0;  // before `next`, of all warps
  int filled = 0;       // units in this warp's queue, those that are done counted
};

// In a lane with g = lane / 4, t = lane % 4, of a group of 16 keys and a block of 8 rows:
//   queries of row g, keys g and g + 8: columns of 16 bytes number t, t + 4, ...;
//   scores of row g: keys 2t, 2t + 1, 2t + 8, 2t + 9; values of these keys: columns of 16 bytes number g, g + 8;
//   results of rows 2t, 2t + 1: the dims of these columns.
// Works of more rows are so many blocks of 8, each of which reads the keys. What the next group needs is on its way
// while a group is computed, over the ends of works: its keys and values, and the pages of the group behind it.
template <class Tr>
class LoneWarp {
 public:
  static constexpr int kMostBlocks = Tr::kRows / 8;
  static constexpr int kParkedBytes = Tr::kFolds ? (Tr::kHeadDim / 4 + 2) * 32 * 4 : 0;  // of the first half's results
  // Shared memory of a warp.
  static constexpr int kQueueBytes = 32 * 32 + (deals_works<Tr>() || Tr::kFolds ? 32 : 0) + kParkedBytes;

  // Whether a call is of this kind: the same for all CTAs.
  __device__ static __forceinline__ bool serves(const Params& p, const Shape& shape, const Boxes& boxes) {
    return boxes.vector_queries && boxes.vector_out && shape.vector_keys && shape.same_strides &&
           p.head_dim % 16 == 0 && !p.tree_mask && !p.report && is_short(shape.k_page) && is_short(shape.k_token);
  }

  // Warp number `warp` of `warps` that share the part, and its shared memory.
  __device__ __forceinline__ LoneWarp(const Params& p, const Shape& shape, const Boxes& boxes, int part, int warp,
                                      int warps, int4* queue, int lane)
      : p_(p), shape_(shape), boxes_(boxes), queue_(queue), part_(part), warp_(warp), warps_(warps) {
    lane_ = __shfl_sync(~0u, lane, lane);  // kept, and not read from its slow register time and again
  }

  // All works of the part that are this warp's.
  __device__ __forceinline__ void run(const SplitKvEntry& entry) {
    take_part(entry);
    attend_all();
  }
  __device__ __forceinline__ void take_part(const SplitKvEntry& entry) {
    if constexpr (deals_works<Tr>()) {
      take({entry.begin_work, warp_, warps_, part_, false}, entry.end_work - entry.begin_work);
    } else {
      begin_work_ = entry.begin_work;
      num_units_ = ((entry.end_work - entry.begin_work) * blocks() - warp_ + warps_ - 1) / warps_;
    }
  }
  // Of works that are dealt out: `works` of their order, behind `before` others; this is warp `number` of `all`.
  __device__ __forceinline__ void take_dealt(int before, int works, int number, int all) {
    take({before, number, all, 0, true}, works);
  }
  // Of a batch-invariant plan. Works that are not short are left to others.
  __device__ __forceinline__ void take_invariant(const InvariantShare& share) {
    static_assert(Tr::kFolds);
    if (lane_ == 0) invariant() = share;
    num_units_ = ~0u;
    __syncwarp();
  }
  // Of the share, whoever computes them, once the warp's own are done.
  __device__ __forceinline__ int short_works() const { return invariant().short_works; }
  __device__ __forceinline__ void attend_all() {
    if (p_.head_dim == kHeadDim) {
      attend<true>();
    } else {
      attend<false>();
    }
  }

 private:
  // kWhole: rows have no empty columns.
  template <bool kWhole>
  __device__ __forceinline__ void attend() {
    if (!enter_unit()) return;
    look_up();
    uint64_t row = row_of_key();
    uint4 keys[2][kKeyLoads];
    Value values[4][kValueLoads];
    load_keys<kWhole>(row, keys);
    if constexpr (kValuesAhead) load_values<kWhole>(row, values);
    bool more = advance();  // whether there is a group behind the one at hand
    uint32_t queries[kQuads][4];
    fetch_queries<kWhole>(0, queries);
#pragma unroll 1
    for (unsigned unit = 0;; ++unit) {
      const int4 place = queue_[unit % kQueue * 2];  // request, KV head, block, length
      const int2 range = reinterpret_cast<const int2*>(queue_)[unit % kQueue * 4 + 2];
      const int request = place.x, kv_head = place.y, end = range.y;
      const int row_number = block_of(place.z) * 8 + g();
      const int token_of_row = min_of(shape_.by_group.divide(row_number), p_.seqlen_q - 1);
      // Keys [row_begin, row_begin + row_keys) are seen by row g.
      const int position = place.w - p_.seqlen_q + token_of_row;
      const int row_begin = p_.window_left < 0 ? 0 : max_of(position - p_.window_left, 0);
      const unsigned row_keys = max_of((p_.causal ? min_of(position + 1, end) : end) - row_begin, 0);
      const float score_scale = place_queries(kv_head, queries);
      float out[kDimTiles][4] = {};
      float row_max = -INFINITY, row_sum = 0.f;
#pragma unroll 1
      for (int token = range.x;; token += 16) {
        float scores[4];
        multiply_keys<kWhole>(keys, queries, scores);
        const bool last = token + 16 >= end, brings = more;
        if constexpr (!kValuesAhead) load_values<kWhole>(row, values);
        if (brings) {
          row = row_of_key();
          load_keys<kWhole>(row, keys);
          more = advance();
          if (last) fetch_queries<kWhole>(unit + 1, queries);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[i] *= score_scale;
        if (p_.logit_cap != 0.f) cap(scores);
        const int first = token - row_begin + t() * 2;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (static_cast<unsigned>(first + (i / 2) * 8 + i % 2) >= row_keys) scores[i] = -INFINITY;
        }
        float top = fmaxf(fmaxf(scores[0], scores[1]), fmaxf(scores[2], scores[3]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        top = fmaxf(top, row_max);
        if (token != range.x && __any_sync(~0u, top > row_max)) {
          const float factor = row_max == -INFINITY ? 0.f : exp2_approx(row_max - top);
          row_sum *= factor;
          rescale(factor, out);
        }
        row_max = top;
        const float base = (top == -INFINITY ? 0.f : top) - kProbShift;
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[i] = exp2_approx(scores[i] - base);
        row_sum += (scores[0] + scores[1]) + (scores[2] + scores[3]);
        multiply_values(values, pack2<T>(scores[0], scores[1]), pack2<T>(scores[2], scores[3]), out);
        if (kValuesAhead && brings) load_values<kWhole>(row, values);
        if (last) break;
      }
      if constexpr (Tr::kFolds) {
        const int half = place.z / kMostBlocks;
        if (half == kFirstHalf) {
          park(row_max, row_sum, out);
          if (invariant().split) meet(place.z);
        } else {
          if (half == kSecondHalf) {
            if (invariant().split) meet(place.z);
            join_parked(row_max, row_sum, out);
          }
          store<kWhole>(request, kv_head, row_number, token_of_row, row_max, row_sum, out);
        }
      } else {
        store<kWhole>(request, kv_head, row_number, token_of_row, row_max, row_sum, out);
      }
      if (unit + 1 >= num_units_) return;
    }
  }

  using T = typename Tr::T;
  static constexpr bool kFp8 = Tr::kFp8;
  static constexpr int kHeadDim = Tr::kHeadDim;
  static constexpr int kRowBytes = kHeadDim * (kFp8 ? 1 : 2);
  static constexpr int kKeyLoads = kRowBytes / 64;
  static constexpr int kQuads = kHeadDim / 32;  // of registers with queries
  static constexpr int kDimTiles = kHeadDim / 16;
  static constexpr int kValueLoads = max_of(kRowBytes / 128, 1);
  using Value = std::conditional_t<kRowBytes >= 128, uint4, uint2>;
  static constexpr int kStores = kHeadDim / 64;  // of 8 dims of a row
  // fp16 probabilities are scaled up by this power of two, so that small ones keep their digits.
  static constexpr float kProbShift = std::is_same_v<T, __half> ? 14.f : 0.f;
  // The next group's values are on their way, too, where registers suffice.
  static constexpr bool kValuesAhead = (!kFp8 || kHeadDim < 128) && !(Tr::kFolds && Tr::kCtasPerSm > 2);
  static constexpr int kQueue = 32;  // units
  static_assert(kHeadDim == 64 || kHeadDim == 128);
  enum Half : int {
    kWholeWork,
    kFirstHalf,
    kSecondHalf
  };  // of keys; a unit's number is kMostBlocks times that + block
  static constexpr int kMeetings = 8;  // barriers of the hardware from there on, one for each block

  __device__ __forceinline__ int g() const { return static_cast<int>(lane_ / 4); }
  __device__ __forceinline__ int t() const { return static_cast<int>(lane_ % 4); }

  __device__ static bool is_short(int64_t stride) { return stride >= 0 && stride < int64_t{1} << 31; }
  __device__ int blocks() const { return kMostBlocks == 2 && shape_.rows > 8 ? 2 : 1; }
  __device__ static int block_of(int number) { return Tr::kFolds ? number % kMostBlocks : number; }

  // Which works are a warp's: number `warp` of `warps` that share them. There and back where they are dealt out, so
  // that each has long and short ones. It lies in shared memory, as registers are short.
  struct Share {
    int begin_work, warp, warps, part;
    bool dealt;

    // Which of a round's units is the warp's.
    __device__ __forceinline__ unsigned own_of_round(unsigned round) const {
      return dealt && round % 2 ? warps - 1 - warp : warp;
    }
  };
  static_assert(sizeof(Share) <= 32);

  __device__ __forceinline__ void take(const Share& share, unsigned works) {
    const unsigned units = works * blocks(), rounds = units / share.warps;
    num_units_ = rounds + (share.own_of_round(rounds) < units - rounds * share.warps);
    if (lane_ == 0) *reinterpret_cast<Share*>(queue_ + 2 * kQueue) = share;
  }
  __device__ __forceinline__ Share share() const {
    if constexpr (deals_works<Tr>()) {
      return *reinterpret_cast<const Share*>(queue_ + 2 * kQueue);
    } else {
      return {begin_work_, warp_, warps_, part_, false};
    }
  }

  // Half the queue: the warp's units from number `first` on, a block of rows of a work each. A lane finds one of them.
  __device__ __forceinline__ void fill_queue(unsigned first) {
    const unsigned number = first + lane_;
    __syncwarp();
    if (lane_ < kQueue / 2 && number < num_units_) {
      const Share share = this->share();
      const int unit = static_cast<int>(share.own_of_round(number) + number * share.warps),
                block = blocks() == 2 ? unit & 1 : 0;
      const int work = share.begin_work + (blocks() == 2 ? unit >> 1 : unit);
      int request = work, kv_head = share.part;
      if (share.dealt) {
        const DealtWork dealt = dealt_work(p_, shape_, work);
        request = dealt.request, kv_head = dealt.kv_head;
      } else if (shape_.heads_side_by_side) {
        kv_head -= shape_.by_kv_heads.divide(share.part) * p_.num_kv_heads;
      } else {
        request = shape_.by_kv_heads.divide(work), kv_head = work - request * p_.num_kv_heads;
      }
      const int length = length_of(__ldg(p_.cache_seqlens + request));
      const KvRange keys = visible_keys(length, p_.seqlen_q, p_.window_left);
      const int tokens = p_.page_table.kv_indptr ? p_.page_table.num_tokens(request) : p_.table_tokens;
      const auto cells = reinterpret_cast<uint64_t>(p_.page_table.row(request));
      queue_[number % kQueue * 2] = make_int4(request, kv_head, block, length);
      queue_[number % kQueue * 2 + 1] =
          make_int4(keys.begin, min_of(keys.end, tokens), static_cast<int>(cells), static_cast<int>(cells >> 32));
    }
    __syncwarp();
  }

  __device__ __forceinline__ InvariantShare& invariant() const {
    static_assert(Tr::kFolds && sizeof(InvariantShare) <= 32);
    return *reinterpret_cast<InvariantShare*>(queue_ + 2 * kQueue);
  }
  __device__ __forceinline__ unsigned filled() const { return invariant().filled; }

  // Batch-invariant: the warp's next units, up to half a queue of them; false when there are none. Sixteen lanes look
  // at a work each; all warps of the CTA count them alike, and number the short ones.
  __device__ __forceinline__ bool find_units() {
    static_assert(kMostBlocks <= 2);
    InvariantShare share = invariant();
    const unsigned before = share.filled;
#pragma unroll 1
    while (static_cast<unsigned>(share.filled) == before && share.next < share.end) {
      const int work = share.next + static_cast<int>(lane_);
      share.next += kQueue / 2;
      const bool looks = lane_ < kQueue / 2 && work < share.end;
      int request = work, kv_head = share.kv_head, length = 0, tokens = 0;
      if (looks) {
        if (kv_head < 0) request = shape_.by_kv_heads.divide(work), kv_head = work - request * p_.num_kv_heads;
        length = length_of(__ldg(p_.cache_seqlens + request));
        tokens = tokens_seen(p_, length);
      }
      const bool is_short = looks && tokens <= kMostInvariantTokens;
      const unsigned below = (1u << lane_) - 1, found = __ballot_sync(~0u, is_short);
      const unsigned number = share.short_works + __popc(found & below);
      share.short_works += __popc(found);
      // Whole works go round; at most four of sixteen are a warp's, where there are five warps or more.
      const bool halves = tokens > kHalfOfInvariant;
      const int split_block = halves ? warp_ / 2 : warp_;
      const bool own =
          is_short && (share.split ? split_block < blocks() : number % warps_ == static_cast<unsigned>(warp_));
      const unsigned owned = __ballot_sync(~0u, own), in_halves = __ballot_sync(~0u, own && halves);
      const int of_owned = share.split ? 1 : blocks(), of_halves = share.split ? 0 : blocks();
      if (own) {
        const KvRange keys = visible_keys(length, p_.seqlen_q, p_.window_left);
        const int tokens_held = p_.page_table.kv_indptr ? p_.page_table.num_tokens(request) : p_.table_tokens;
        const int end = min_of(keys.end, tokens_held), middle = keys.begin + kHalfOfInvariant;
        const auto cells = reinterpret_cast<uint64_t>(p_.page_table.row(request));
        unsigned at = before + of_owned * __popc(owned & below) + of_halves * __popc(in_halves & below);
        const auto put = [&](int block, Half half) {
          const int first = half == kSecondHalf ? middle : keys.begin,
                    last = half == kFirstHalf ? min_of(middle, end) : end;
          queue_[at % kQueue * 2] = make_int4(request, kv_head, half * kMostBlocks + block, length);
          queue_[at % kQueue * 2 + 1] = make_int4(first, last, static_cast<int>(cells), static_cast<int>(cells >> 32));
          ++at;
        };
        if (share.split) {
          put(split_block, !halves ? kWholeWork : warp_ % 2 == 0 ? kFirstHalf : kSecondHalf);
        } else {
#pragma unroll 1
          for (int block = 0; block < blocks(); ++block) {
            put(block, halves ? kFirstHalf : kWholeWork);
            if (halves) put(block, kSecondHalf);
          }
        }
      }
      share.filled += of_owned * __popc(owned) + of_halves * __popc(in_halves);
    }
    __syncwarp();  // all have read what is written now
    if (lane_ == 0) invariant() = share;
    __syncwarp();
    return static_cast<unsigned>(share.filled) != before;
  }

  // Where the first half's results lie: its own warp's place, or that of the warp before.
  __device__ __forceinline__ float* parked(int warps_before) const {
    auto* const queue = reinterpret_cast<uint8_t*>(queue_) - warps_before * kQueueBytes;
    return reinterpret_cast<float*>(queue + kQueueBytes - kParkedBytes) + lane_;
  }
  __device__ __forceinline__ void park(float row_max, float row_sum, const float (&out)[kDimTiles][4]) const {
    float* const at = parked(0);
    at[0] = row_max, at[32] = row_sum;
#pragma unroll
    for (int j = 0; j < kDimTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) at[32 * (2 + 4 * j + i)] = out[j][i];
    }
  }
  __device__ __forceinline__ static void meet(int number) {
    hopper::named_barrier_sync(kMeetings + number % kMostBlocks, 64);
  }

  // Adds the first half to the second. Each operation is rounded by itself, whatever the compiler finds around it.
  __device__ __forceinline__ void join_parked(float& row_max, float& row_sum, float (&out)[kDimTiles][4]) const {
    const float* const at = parked(invariant().split);
    const float first_max = at[0], top = fmaxf(first_max, row_max);
    const float first = first_max == -INFINITY ? 0.f : exp2_approx(__fsub_rn(first_max, top));
    const float second = row_max == -INFINITY ? 0.f : exp2_approx(__fsub_rn(row_max, top));
    row_sum = __fadd_rn(__fmul_rn(first, at[32]), __fmul_rn(second, row_sum)), row_max = top;
    const float firsts[2] = {__shfl_sync(~0u, first, t() * 8), __shfl_sync(~0u, first, t() * 8 + 4)};
    const float seconds[2] = {__shfl_sync(~0u, second, t() * 8), __shfl_sync(~0u, second, t() * 8 + 4)};
#pragma unroll
    for (int j = 0; j < kDimTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float before = __fmul_rn(firsts[i % 2], at[32 * (2 + 4 * j + i)]);
        out[j][i] = __fadd_rn(before, __fmul_rn(seconds[i % 2], out[j][i]));
      }
    }
  }

  // Goes to the next unit, whose keys are to be brought; false when there is none. It stands in the queue until it has
  // been computed: that is never more than two units later.
  __device__ __forceinline__ bool enter_unit() {
    if constexpr (Tr::kFolds) {
      if (entered_ == filled() && !find_units()) {
        num_units_ = entered_;
        return false;
      }
    } else {
      if (entered_ >= num_units_) return false;
      if (entered_ % (kQueue / 2) == 0) fill_queue(entered_);
    }
    const int4 range = queue_[entered_ % kQueue * 2 + 1];
    const int kv_head = reinterpret_cast<const int*>(queue_)[entered_ % kQueue * 8 + 1];
    ++entered_;
    token_ = range.x, end_token_ = range.y;
    cells_ = reinterpret_cast<const int32_t*>(static_cast<uint32_t>(range.z) |
                                              static_cast<uint64_t>(static_cast<uint32_t>(range.w)) << 32);
    const char* const pages = static_cast<const char*>(lane_ < 16 ? p_.k_pages : p_.v_pages);
    const int64_t stride = lane_ < 16 ? p_.k_stride_head : p_.v_stride_head;
    pages_ = pages + kv_head * stride * (kFp8 ? 1 : 2);
    return true;
  }

  // Asks for the page of this lane's key of the group at `token_`: lanes 0 to 15 are for its keys, 16 to 31 for values.
  __device__ __forceinline__ void look_up() {
    const int token = token_ + static_cast<int>(lane_ % 16);
    const int cell = shape_.page_shift >= 0 ? token >> shape_.page_shift : shape_.by_page_size.divide(token);
    in_page_ = token - cell * p_.page_table.page_size;
    page_ = token < end_token_ ? __ldg(cells_ + cell) : -1;
  }

  // Where the row lies for which `look_up` asked. A page that is none is not read.
  __device__ __forceinline__ uint64_t row_of_key() const {
    const char* const row =
        pages_ + static_cast<uint64_t>(static_cast<uint32_t>(page_)) * static_cast<uint32_t>(shape_.k_page) +
        static_cast<uint64_t>(static_cast<uint32_t>(in_page_)) * static_cast<uint32_t>(shape_.k_token);
    return p_.page_table.has_page(page_) ? reinterpret_cast<uint64_t>(row) : reinterpret_cast<uint64_t>(kZeroRow);
  }

  // To the group behind, if there is one.
  __device__ __forceinline__ bool advance() {
    token_ += 16;
    if (token_ >= end_token_ && !enter_unit()) return false;
    look_up();
    return true;
  }

  template <bool kWhole>
  __device__ __forceinline__ void load_keys(uint64_t row, uint4 (&keys)[2][kKeyLoads]) const {
    const int t = this->t();
    const char* rows[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      rows[h] = reinterpret_cast<const char*>(__shfl_sync(~0u, row, h * 8 + g()));
    }
#pragma unroll
    for (int b = 0; b < kKeyLoads; ++b) {
      int column = b * 64 + t * 16;
      bool inside = true;
      if constexpr (!kWhole && kFp8) {
        // What lies behind the last column is multiplied by zeros, and e4m3 knows no infinity: any of the row will do.
        if (column >= p_.head_dim) column = 0;
      } else if constexpr (!kWhole) {
        if (b * 32 >= p_.head_dim) break;
        inside = b * 32 + t * 8 < p_.head_dim;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const char* const from = inside ? rows[h] + column : reinterpret_cast<const char*>(kZeroRow);
        keys[h][b] = __ldg(reinterpret_cast<const uint4*>(from));
      }
    }
  }

  template <bool kWhole>
  __device__ __forceinline__ void load_values(uint64_t row, Value (&values)[4][kValueLoads]) const {
    const int g = this->g();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const auto* const value = reinterpret_cast<const char*>(__shfl_sync(~0u, row, 16 + k / 2 * 8 + t() * 2 + k % 2));
#pragma unroll
      for (int c = 0; c < kValueLoads; ++c) {
        int column = c * 128 + g * static_cast<int>(sizeof(Value));
        // What lies behind the last column belongs to no result.
        if (!kWhole && column >= p_.head_dim * (kFp8 ? 1 : 2)) column = 0;
        values[k][c] = __ldg(reinterpret_cast<const Value*>(value + column));
      }
    }
  }

  // Asks for the queries of a unit that has been entered.
  template <bool kWhole>
  __device__ __forceinline__ void fetch_queries(unsigned unit, uint32_t (&queries)[kQuads][4]) const {
    const int4 place = queue_[unit % kQueue * 2];
    const int row = block_of(place.z) * 8 + g(), t = this->t();
    const int token = shape_.by_group.divide(row);
    const int head = place.y * shape_.group + row - token * shape_.group;
    const auto* const zeros = reinterpret_cast<const uint16_t*>(kZeroRow);
    const auto* q = static_cast<const uint16_t*>(p_.q) + place.x * p_.q_stride_request +
                    (token * boxes_.q_token + head * boxes_.q_head);
    if (row >= shape_.rows) q = zeros;
    q += t * (kFp8 ? 16 : 8);
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int d = kFp8 ? i / 2 * 64 + i % 2 * 8 : i * 32;
      const bool inside = kWhole || d + t * (kFp8 ? 16 : 8) < p_.head_dim;
      const uint4 quad = __ldg(reinterpret_cast<const uint4*>(inside ? q + d : zeros));
      queries[i][0] = quad.x, queries[i][1] = quad.y, queries[i][2] = quad.z, queries[i][3] = quad.w;
    }
  }

  // Makes operands of them. Returns what row g's scores are to be multiplied by, in units of log2. Over e4m3 pages bf16
  // becomes fp16, whose range is smaller: rows are scaled by a power of two, as in QueryRow.
  __device__ __forceinline__ float place_queries(int kv_head, uint32_t (&queries)[kQuads][4]) const {
    float scale = p_.softmax_scale * kLog2e;
    if (p_.k_scale) scale *= __ldg(p_.k_scale + kv_head * p_.k_scale_stride);
    const uint32_t nothing = threadIdx.y;  // 0, which the compiler does not know: else it moves them at every product
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const uint32_t second = queries[i][1];
      queries[i][1] = queries[i][2] | nothing, queries[i][2] = second | nothing;
    }
    if constexpr (kFp8) {
      if (p_.dtype == DType::kBFloat16) {
        uint32_t top = 0;
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
#pragma unroll
          for (int k = 0; k < 4; ++k) top = __vmaxu2(top, queries[i][k] & 0x7fff7fffu);
        }
        top = max_of(top & 0xffffu, top >> 16);
        top = max_of(top, __shfl_xor_sync(~0u, top, 1));
        top = max_of(top, __shfl_xor_sync(~0u, top, 2));
        int shift = min_of(max_of(14 - (static_cast<int>(top >> 7) - 127), -100), 100);
        if (top == 0 || top >= 0x7f80u) shift = 0;
        const float up = __uint_as_float(static_cast<uint32_t>(127 + shift) << 23);
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const uint32_t pair = queries[i][k];
            queries[i][k] = pack2<T>(__uint_as_float(pair << 16) * up, __uint_as_float(pair & 0xffff0000u) * up);
          }
        }
        scale *= __uint_as_float(static_cast<uint32_t>(127 - shift) << 23);
      }
    }
    return scale;
  }

  // Queries are the M of this product. A quad of them holds two steps of 16 dims, one in rows 0 to 7 and one in rows 8
  // to 15: each step has sums of its own, of which the other half means nothing.
  template <bool kWhole>
  __device__ __forceinline__ void multiply_keys(const uint4 (&keys)[2][kKeyLoads], const uint32_t (&queries)[kQuads][4],
                                                float (&scores)[4]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float even[4] = {}, odd[4] = {};
#pragma unroll
      for (int b = 0; b < kKeyLoads; ++b) {
        if (!kWhole && !kFp8 && b * 32 >= p_.head_dim) break;
        const uint4 key = keys[h][b];
        if constexpr (kFp8) {
          uint32_t k[8];
          fp8x4_to_half<__nv_fp8_e4m3>(key.x, k[0], k[1]);
          fp8x4_to_half<__nv_fp8_e4m3>(key.y, k[2], k[3]);
          fp8x4_to_half<__nv_fp8_e4m3>(key.z, k[4], k[5]);
          fp8x4_to_half<__nv_fp8_e4m3>(key.w, k[6], k[7]);
          mma_m16n8k16<T>(even, queries[2 * b], k[0], k[1]);
          mma_m16n8k16<T>(odd, queries[2 * b], k[2], k[3]);
          mma_m16n8k16<T>(even, queries[2 * b + 1], k[4], k[5]);
          mma_m16n8k16<T>(odd, queries[2 * b + 1], k[6], k[7]);
        } else {
          mma_m16n8k16<T>(even, queries[b], key.x, key.y);
          mma_m16n8k16<T>(odd, queries[b], key.z, key.w);
        }
      }
      scores[2 * h] = even[0] + odd[2], scores[2 * h + 1] = even[1] + odd[3];
      // Two registers from here on, and not the eight of the sums that they are added up from, where registers are
      // short.
      if constexpr (!kValuesAhead) asm volatile("" : "+f"(scores[2 * h]), "+f"(scores[2 * h + 1]));
    }
  }

  __device__ __forceinline__ void cap(float (&scores)[4]) const {
    const float to_cap = 2.f / p_.logit_cap;  // tanh(x) = 1 - 2 / (1 + e^2x), and the scores are in log2 already
    const float from_cap = p_.logit_cap * kLog2e;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[i] = from_cap * (1.f - __fdividef(2.f, 1.f + exp2_approx(scores[i] * to_cap)));
    }
  }

  // Multiplies the results of rows 2t, 2t + 1 by the factors of these rows, of which a lane knows row g's.
  __device__ __forceinline__ void rescale(float factor, float (&out)[kDimTiles][4]) const {
    const float factors[2] = {__shfl_sync(~0u, factor, t() * 8), __shfl_sync(~0u, factor, t() * 8 + 4)};
#pragma unroll
    for (int j = 0; j < kDimTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[j][i] *= factors[i % 2];
    }
  }

  // out += values^T x probabilities. Tile j has the dims number 2j and 2j + 1 of a lane.
  __device__ __forceinline__ void multiply_values(const Value (&values)[4][kValueLoads], uint32_t low, uint32_t high,
                                                  float (&out)[kDimTiles][4]) const {
    constexpr int kWords = sizeof(Value) / 4;
#pragma unroll
    for (int c = 0; c < kValueLoads; ++c) {
      uint32_t words[4][kWords];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        words[k][0] = values[k][c].x, words[k][1] = values[k][c].y;
        if constexpr (kWords == 4) words[k][2] = values[k][c].z, words[k][3] = values[k][c].w;
      }
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        uint32_t a[4];
        if constexpr (kFp8) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int bytes = i ? 0x7362 : 0x5140;
            fp8x4_to_half<__nv_fp8_e4m3>(__byte_perm(words[0][w], words[1][w], bytes), a[0], a[1]);
            fp8x4_to_half<__nv_fp8_e4m3>(__byte_perm(words[2][w], words[3][w], bytes), a[2], a[3]);
            mma_m16n8k16<T>(out[2 * w + i], a, low, high);
          }
        } else {
          a[0] = __byte_perm(words[0][w], words[1][w], 0x5410), a[1] = __byte_perm(words[0][w], words[1][w], 0x7632);
          a[2] = __byte_perm(words[2][w], words[3][w], 0x5410), a[3] = __byte_perm(words[2][w], words[3][w], 0x7632);
          mma_m16n8k16<T>(out[c * 4 + w], a, low, high);
        }
      }
    }
  }

  // Divides by the sums, and stores; `row` and `token` are row g's.
  template <bool kWhole>
  __device__ __forceinline__ void store(int request, int kv_head, int row, int token, float row_max, float row_sum,
                                        float (&out)[kDimTiles][4]) const {
    row_sum += __shfl_xor_sync(~0u, row_sum, 1);
    row_sum += __shfl_xor_sync(~0u, row_sum, 2);
    const int g = this->g(), t = this->t();
    const bool empty = row_sum == 0.f;
    const int head = kv_head * shape_.group + row - token * shape_.group;
    const bool is_row = row < shape_.rows;
    float factor = empty ? 0.f : reciprocal(row_sum);
    if (p_.v_scale) factor *= __ldg(p_.v_scale + kv_head * p_.v_scale_stride);
    if (p_.lse || p_.sinks) {
      const float lse = empty ? -INFINITY : (row_max - kProbShift + __log2f(row_sum)) * kLn2;
      if (p_.lse && is_row && t == 0) {
        p_.lse[static_cast<int64_t>(request) * (p_.seqlen_q * p_.num_q_heads) + (token * p_.num_q_heads + head)] = lse;
      }
      if (p_.sinks && is_row && !empty) factor = __fdividef(factor, 1.f + __expf(__ldg(p_.sinks + head) - lse));
    }
    rescale(factor, out);
    const int place = is_row ? token * boxes_.out_token + head * boxes_.out_head : 0;
    auto* const base = static_cast<uint16_t*>(p_.out) + request * p_.out_stride_request;
    const int first_row = row - g + 2 * t;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint16_t* const to = base + __shfl_sync(~0u, place, t * 8 + i * 4);
#pragma unroll
      for (int s = 0; s < kStores; ++s) {
        const int d = kFp8 ? g * (kHeadDim / 8) + s * 8 : s * 64 + g * 8;
        uint32_t words[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) words[w] = round_pair(out[s * 4 + w][i], out[s * 4 + w][i + 2]);
        if (first_row + i < shape_.rows && (kWhole || d < p_.head_dim)) {
          asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"l"(to + d), "r"(words[0]), "r"(words[1]),
                       "r"(words[2]), "r"(words[3])
                       : "memory");
        }
      }
    }
  }

  // Of a number that is not tiny: one instruction.
  __device__ static __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
  }

  __device__ __forceinline__ uint32_t round_pair(float a, float b) const {
    if constexpr (!kFp8) return pack2<T>(a, b);
    return p_.dtype == DType::kBFloat16 ? pack2<__nv_bfloat16>(a, b) : pack2<__half>(a, b);
  }

  const Params& p_;
  const Shape& shape_;
  const Boxes& boxes_;
  int4* const queue_;
  uint32_t lane_;
  const int part_, warp_, warps_;
  int begin_work_ = 0;
  unsigned num_units_ = 0, entered_ = 0;  // of this warp
  int token_ = 0, end_token_ = 0;         // of the group that `look_up` asked for, and of its unit
  const int32_t* cells_ = nullptr;
  const char* pages_ = nullptr;
  int page_ = 0, in_page_ = 0;
};

}  // namespace attnops::xqa_decode::sm90
