#pragma once
#include "device/sm80/cp_async.cuh"
#include "xqa_decode/cuda/pieces.cuh"

namespace attnops::xqa_decode {

// One warp's chunks of keys and values, gathered through the page table into its ring, piece after piece without a
// break. Lane l looks up the page of the chunk's key l, one chunk ahead of the copies that need it.
template <class Tr>
class KeyStream {
 public:
  __device__ KeyStream(const Params& p, const Shape& shape, const SplitKvEntry& entry, int warp, int lane)
      : p_(p), shape_(shape), walk_(p, shape, entry), warp_(warp), lane_(lane) {
    group_first_warp_ = warp / shape.row_groups * shape.row_groups;
    if (!walk_.done()) enter_piece();
    look_up();
  }

  // Starts the copies of the next chunk, if there is one, to `stage`. One group of copies in any case.
  __device__ void issue(uint32_t stage) {
    if (!walk_.done()) {
      copy(stage);
      ++round_;
      look_up();
    }
    cp_async_commit();
  }

 private:
  __device__ void enter_piece() {
    round_ = 0;
    const int chunks = num_chunks<Tr>(walk_);
    rounds_ = num_rounds<Tr>(chunks, group_first_warp_);
    first_token_ = walk_.first_token();
    end_token_ = walk_.end_token();
    row_ = p_.page_table.row(walk_.request());
  }

  __device__ void look_up() {
    while (!walk_.done() && round_ >= rounds_) {
      walk_.next();
      if (!walk_.done()) enter_piece();
    }
    if (walk_.done()) return;
    const int token = first_token_ + (round_ * Tr::kWarps + warp_) * Tr::kChunk + lane_;
    // Cells and pages of keys that no row sees are not read: they may hold anything.
    wanted_ = token >= walk_.keys().begin && token < end_token_ && lane_ < Tr::kChunk;
    const int page_size = p_.page_table.page_size;
    cell_ = shape_.page_shift >= 0 ? token >> shape_.page_shift : token / page_size;
    offset_ = token - cell_ * page_size;
    if (wanted_) page_ = __ldg(row_ + cell_);
  }

  __device__ void copy(uint32_t stage) {
    if (p_.report && wanted_ && !page_is_good()) wanted_ = false;
    const int64_t page = wanted_ ? page_ : 0;
    const int64_t offset = wanted_ ? offset_ : 0;
    constexpr int kSize = Tr::kFp8 ? 1 : 2;
    const int64_t head = walk_.kv_head();
    const int64_t k = (page * p_.k_stride_page + offset * p_.k_stride_token + head * p_.k_stride_head) * kSize;
    const int64_t v = (page * p_.v_stride_page + offset * p_.v_stride_token + head * p_.v_stride_head) * kSize;
    const unsigned wanted = __ballot_sync(~0u, wanted_);
    if (!shape_.vector_keys) return copy_elements(p_, stage, k, v, wanted, lane_);

    const int column = lane_ % Tr::kVecsPerKey;
    const bool inside = column * Tr::kVec < p_.head_dim;
    const char* k_column = static_cast<const char*>(p_.k_pages) + (inside ? column * 16 : 0);
    const char* v_column = static_cast<const char*>(p_.v_pages) + (inside ? column * 16 : 0);
#pragma unroll
    for (int i = 0; i < Tr::kChunk / Tr::kKeysPerCopy; ++i) {
      const int key = i * Tr::kKeysPerCopy + lane_ / Tr::kVecsPerKey;
      const bool take = inside && (wanted >> key & 1);
      const uint32_t destination = stage + key * Tr::kKeyBytes + ((column ^ Tr::swizzle(key)) << 4);
      cp_async_16(destination, k_column + __shfl_sync(~0u, k, key), take);
      cp_async_16(destination + Tr::kChunk * Tr::kKeyBytes, v_column + __shfl_sync(~0u, v, key), take);
    }
  }

  // Rows of any alignment, element by element: right, not fast.
  __device__ __noinline__ static void copy_elements(const Params& p, uint32_t stage, int64_t k, int64_t v,
                                                    unsigned wanted, int lane) {
    using Element = std::conditional_t<Tr::kFp8, uint8_t, uint16_t>;
    for (int key = 0; key < Tr::kChunk; ++key) {
      const auto* k_row = reinterpret_cast<const Element*>(static_cast<const char*>(p.k_pages) + __shfl_sync(~0u, k, key));
      const auto* v_row = reinterpret_cast<const Element*>(static_cast<const char*>(p.v_pages) + __shfl_sync(~0u, v, key));
      for (int d = lane; d < Tr::kHeadDim; d += 32) {
        const bool take = d < p.head_dim && (wanted >> key & 1);
        const uint32_t place = stage + key * Tr::kKeyBytes + (((d / Tr::kVec) ^ Tr::swizzle(key)) << 4) +
                               d % Tr::kVec * sizeof(Element);
        auto* to = static_cast<Element*>(__cvta_shared_to_generic(place));
        to[0] = take ? k_row[d] : Element{0};
        to[Tr::kChunk * Tr::kHeadDim] = take ? v_row[d] : Element{0};
      }
    }
  }

  __device__ bool page_is_good() const {
    if (page_ >= 0 && page_ < p_.page_table.num_pages) return true;
    record_fault(p_.report, {ReportOp::kXqaDecode, ReportKind::kPageIndex, walk_.request(), cell_, page_,
                             p_.page_table.num_pages});
    return false;
  }

  const Params& p_;
  const Shape& shape_;
  PieceWalk walk_;
  int warp_, lane_, group_first_warp_;
  int round_ = 0, rounds_ = 0, first_token_ = 0, end_token_ = 0;
  const int32_t* row_ = nullptr;
  bool wanted_ = false;
  int cell_ = 0, offset_ = 0, page_ = 0;
};

}  // namespace attnops::xqa_decode
