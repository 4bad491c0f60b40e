#pragma once
#include "device/common/tree_rows.cuh"
#include "device/sm80/cp_async.cuh"
#include "xqa_decode/cuda/pieces.cuh"

namespace attnops::xqa_decode {

// One warp's chunks of keys and values, gathered through the page table into its ring, piece after piece without a
// break. Page indices are read well ahead of the copies that need them. Where a chunk never leaves its page, lane l
// holds the page of the l-th chunk from here, and the 32 chunks after those are on their way; else lane l holds the
// page of key l of the next chunk. `Walk` is PieceWalk, or another class that gives pieces.
template <class Tr, class Walk = PieceWalk>
class KeyStream {
 public:
  // `piece` is the part's first.
  __device__ KeyStream(const Params& p, const Shape& shape, const Walk& piece, int warp, int lane, uint8_t* smem)
      : p_(p),
        shape_(shape),
        walk_(piece),
        warp_(warp),
        lane_(lane),
        group_first_warp_(warp & ~(shape.row_groups - 1)),
        ring_(smem_address(smem) + SharedLayout<Tr>::kRing + warp * Tr::kRingBytes),
        good_keys_(reinterpret_cast<uint32_t*>(smem + SharedLayout<Tr>::kGoodKeys) + warp * Tr::kStages),
        runs_(shape.page_shift >= Tr::kChunkShift && shape.vector_keys && shape.same_strides) {
    walk_.walk_runs(kStep);
    const int column = lane % Tr::kVecsPerKey, key = lane / Tr::kVecsPerKey;
    destination_ = key * Tr::kKeyBytes + ((column ^ Tr::swizzle(key)) << 4);
    inside_ = column * Tr::kVec < p.head_dim;
  }

  // Enters the first piece before the first call of `issue`, for a caller who has read its first pages already: lane l
  // brings the page of the warp's l-th chunk, where chunks stay within a page.
  __device__ void start(int pages) {
    entered_ = true;
    enter_piece(&pages);
  }
  __device__ void start() {
    entered_ = true;
    enter_piece();
  }

  // Starts the copies of the next chunk, if there is one, to stage `index`: one group of copies in any case. The first
  // call only finds the first chunk.
  __device__ void issue(int index) {
    if (rounds_left_ > 0) {
      if (runs_) {
        copy_run(index);
      } else {
        copy_gathered(index);
      }
      --rounds_left_;
      token_ += kStep;
      look_up();
    }
    cp_async_commit();
    while (rounds_left_ == 0 && more_) {
      if (entered_) more_ = walk_.next();
      entered_ = true;
      if (more_) enter_piece();
    }
  }

 private:
  static constexpr int kStep = Tr::kWarps * Tr::kChunk;  // tokens from a warp's chunk to its next
  static constexpr int kSize = Tr::kFp8 ? 1 : 2;         // bytes of an element

  __device__ void enter_piece(const int* first_pages = nullptr) {
    rounds_left_ = num_rounds<Tr>(num_chunks<Tr>(walk_), group_first_warp_);
    token_ = walk_.first_token() + warp_ * Tr::kChunk;
    begin_token_ = walk_.keys().begin;
    end_token_ = walk_.end_token();
    row_ = p_.page_table.row(walk_.request());
    const int64_t head = walk_.kv_head();
    k_head_ = static_cast<const char*>(p_.k_pages) + head * p_.k_stride_head * kSize;
    v_head_ = static_cast<const char*>(p_.v_pages) + head * p_.v_stride_head * kSize;
    if (runs_) {
      const int column = lane_ % Tr::kVecsPerKey, key = lane_ / Tr::kVecsPerKey;
      const int64_t in_chunk = key * shape_.k_token + column * 16;
      k_head_ += in_chunk;
      v_head_ += in_chunk;
      pages_ = first_pages ? *first_pages : look_up_run(token_);
      pages_ahead_ = look_up_run(token_ + 32 * kStep);
      held_ = 0;
    } else {
      look_up_keys();
    }
  }

  __device__ void look_up() {
    if (!runs_) {
      look_up_keys();
    } else if (++held_ == 32) {
      pages_ = pages_ahead_;
      pages_ahead_ = look_up_run(token_ + 32 * kStep);
      held_ = 0;
    }
  }

  // The page of the chunk that this lane keeps, of those from `token` on. Cells of keys that no row sees are not read:
  // they may hold anything.
  __device__ int look_up_run(int token) const {
    token += lane_ * kStep;
    const bool wanted = token < end_token_ && token + Tr::kChunk > begin_token_;
    return wanted ? __ldg(row_ + (token >> shape_.page_shift)) : 0;
  }

  __device__ void look_up_keys() {
    const int token = token_ + lane_;
    cell_ = shape_.page_shift >= 0 ? token >> shape_.page_shift : shape_.by_page_size.divide(token);
    wanted_ = token >= begin_token_ && token < end_token_ && lane_ < Tr::kChunk;
    pages_ = wanted_ ? __ldg(row_ + cell_) : 0;
  }

  // A chunk within one page.
  __device__ void copy_run(int index) {
    const int page_index = __shfl_sync(~0u, pages_, held_);
    unsigned wanted = bits_between(begin_token_ - token_, end_token_ - token_);
    if (!p_.page_table.has_page(page_index)) {
      if (p_.report && wanted != 0) record_bad_page(p_, walk_.request(), token_ >> shape_.page_shift, page_index);
      wanted = 0;
    }
    if (p_.report && lane_ == 0) good_keys_[index] = wanted;
    if (p_.tree_mask) wanted &= shown_keys();
    const uint32_t page = wanted != 0 ? page_index : 0;
    const uint32_t offset = token_ & (p_.page_table.page_size - 1);
    const int64_t at = page * shape_.k_page + offset * shape_.k_token;
    const char* k = k_head_ + at;
    const char* v = v_head_ + at;
    const int64_t step = Tr::kKeysPerCopy * shape_.k_token;
    const uint32_t to = ring_ + index * Tr::kStageBytes + destination_;
    if (wanted == kAllKeys && p_.head_dim == Tr::kHeadDim) {
#pragma unroll
      for (int i = 0; i < Tr::kChunk / Tr::kKeysPerCopy; ++i, k += step, v += step) copy_key(to, i, k, v, ~0u);
      return;
    }
    wanted = inside_ ? wanted >> (lane_ / Tr::kVecsPerKey) : 0;
#pragma unroll
    for (int i = 0; i < Tr::kChunk / Tr::kKeysPerCopy; ++i, k += step, v += step) copy_key(to, i, k, v, wanted);
  }

  // A chunk of any keys.
  __device__ void copy_gathered(int index) {
    if (wanted_ && !p_.page_table.has_page(pages_)) {
      if (p_.report) record_bad_page(p_, walk_.request(), cell_, pages_);
      wanted_ = false;
    }
    unsigned wanted = __ballot_sync(~0u, wanted_);
    if (p_.report && lane_ == 0) good_keys_[index] = wanted;
    if (p_.tree_mask) wanted &= shown_keys();
    const uint32_t page = wanted_ ? pages_ : 0;
    const uint32_t offset = wanted_ ? token_ + lane_ - cell_ * p_.page_table.page_size : 0;
    const int64_t k = page * shape_.k_page + offset * shape_.k_token;
    const int64_t v = page * shape_.v_page + offset * shape_.v_token;
    const uint32_t stage = ring_ + index * Tr::kStageBytes;
    if (!shape_.vector_keys) return copy_elements(p_.head_dim, stage, k_head_ + k, v_head_ + v, wanted, lane_);

    const int column = lane_ % Tr::kVecsPerKey, lane_key = lane_ / Tr::kVecsPerKey;
    const char* k_column = k_head_ + column * 16;
    const char* v_column = v_head_ + column * 16;
    wanted = inside_ ? wanted >> lane_key : 0;
#pragma unroll
    for (int i = 0; i < Tr::kChunk / Tr::kKeysPerCopy; ++i) {
      const int64_t k_key = __shfl_sync(~0u, k, i * Tr::kKeysPerCopy + lane_key);
      const int64_t v_key = shape_.same_strides ? k_key : __shfl_sync(~0u, v, i * Tr::kKeysPerCopy + lane_key);
      copy_key(stage + destination_, i, k_column + k_key, v_column + v_key, wanted);
    }
  }

  // Copy i of a chunk; bit i * kKeysPerCopy of `wanted`: this lane's key of it is seen by some row.
  __device__ static void copy_key(uint32_t to, int i, const char* k, const char* v, unsigned wanted) {
    const bool take = wanted >> (i * Tr::kKeysPerCopy) & 1;
    const uint32_t row = (to ^ (Tr::swizzle(i * Tr::kKeysPerCopy) << 4)) + i * Tr::kKeysPerCopy * Tr::kKeyBytes;
    cp_async_16(row, k, take);
    cp_async_16(row + Tr::kChunk * Tr::kKeyBytes, v, take);
  }

  // Which keys of a chunk lie in [begin, end).
  static constexpr unsigned kAllKeys = Tr::kChunk == 32 ? ~0u : (1u << Tr::kChunk) - 1;
  __device__ static unsigned bits_between(int begin, int end) {
    const unsigned below_end = end >= Tr::kChunk ? kAllKeys : (1u << max_of(end, 0)) - 1;
    return begin <= 0 ? below_end : begin >= 32 ? 0u : below_end & (~0u << begin);
  }

  // Rows of any alignment, element by element: right, not fast.
  __device__ __noinline__ static void copy_elements(int head_dim, uint32_t stage, const char* k, const char* v,
                                                    unsigned wanted, int lane) {
    using Element = std::conditional_t<Tr::kFp8, uint8_t, uint16_t>;
    for (int key = 0; key < Tr::kChunk; ++key) {
      const auto* k_row = reinterpret_cast<const Element*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(k), key));
      const auto* v_row = reinterpret_cast<const Element*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(v), key));
      for (int d = lane; d < Tr::kHeadDim; d += 32) {
        const bool take = d < head_dim && (wanted >> key & 1);
        const uint32_t place =
            stage + key * Tr::kKeyBytes + (((d / Tr::kVec) ^ Tr::swizzle(key)) << 4) + d % Tr::kVec * sizeof(Element);
        auto* to = static_cast<Element*>(__cvta_shared_to_generic(place));
        to[0] = take ? k_row[d] : Element{0};
        to[Tr::kChunk * Tr::kHeadDim] = take ? v_row[d] : Element{0};
      }
    }
  }

  // Of a tree: the keys from `token` on that are no drafts, or that some row sees.
  __device__ __noinline__ static unsigned shown_keys(TreeRules rules, int request, int token, int end,
                                                     int first_draft) {
    token += static_cast<int>(threadIdx.x % 32);
    return __ballot_sync(~0u,
                         token >= end || token < first_draft || some_row_sees(rules, request, token - first_draft));
  }
  __device__ unsigned shown_keys() const {
    return shown_keys(TreeRules(p_), walk_.request(), token_, end_token_, walk_.length() - p_.tree_keys);
  }

  __device__ __noinline__ static void record_bad_page(const Params& p, int request, int cell, int page) {
    record_fault(p.report, {ReportOp::kXqaDecode, ReportKind::kPageIndex, request, cell, page, p.page_table.num_pages});
  }

  const Params& p_;
  const Shape& shape_;
  Walk walk_;
  int warp_, lane_, group_first_warp_;
  uint32_t ring_;
  uint32_t* good_keys_;
  bool runs_, inside_;
  uint32_t destination_;  // of this lane's first copy, in a stage
  bool more_ = true, entered_ = false;
  int rounds_left_ = 0;  // chunks of the current piece still to be copied
  int token_ = 0;        // the first of the next chunk
  int begin_token_ = 0, end_token_ = 0;
  const char* k_head_ = nullptr;
  const char* v_head_ = nullptr;
  const int32_t* row_ = nullptr;
  int pages_ = 0, pages_ahead_ = 0, held_ = 0;  // the next chunk's page is that of lane `held_`
  bool wanted_ = false;                         // lane by lane, where chunks may leave their pages
  int cell_ = 0;
};

}  // namespace attnops::xqa_decode
