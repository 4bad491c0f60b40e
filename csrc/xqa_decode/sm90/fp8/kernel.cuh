#pragma once
#include "device/sm80/cp_async.cuh"
#include "device/sm90/shared_words.cuh"
#include "xqa_decode/cuda/query_row.cuh"
#include "xqa_decode/sm90/fp8/epilogue.cuh"
#include "xqa_decode/sm90/fp8/tile_loop.cuh"
#include "xqa_decode/sm90/kernel.cuh"

namespace attnops::xqa_decode::sm90::fp8 {

// What the two groups that multiply do with the part's pieces.
template <class Tr>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const Params& p, const Shape& shape, const Boxes& boxes, uint8_t* smem)
      : p_(p), shape_(shape), boxes_(boxes), smem_(smem) {
    if (own_thread<Tr>() == 0) *at<TilePlace>(Shared::kPlace) = {0, 0, 0};
  }

  using Pieces = PiecesOf<Tr>;

  __device__ __forceinline__ void run(Pieces& piece) {
    fetch_queries(piece);
    bool more = true;
#pragma unroll 1
    while (more) {
      WorkPlace place{piece.work(), piece.request(), piece.kv_head()};
      if (piece.overflows()) {
        if (piece.starts_work() && piece.last_row_block()) {
          store_nan(p_, shape_, place, piece.splits(), Tr::kThreads, own_thread<Tr>());
        }
        more = piece.next();
        if (more) fetch_queries(piece);
        continue;
      }
      RowBlock<Tr> block;
      open(piece, place, block);
      {
        const int tiles = num_tiles(piece);
        const TileRange plain = plain_tiles(piece);
        put_away(piece);
        const TilePlace next = TileLoop<Tr>(p_, shape_, smem_).run(tiles, plain, block);
        block.combine(at<float>(Shared::kSwap), at<float>(Shared::kExchange), at<float>(Shared::kReferences));
        if (own_thread<Tr>() == 0) *at<TilePlace>(Shared::kPlace) = next;
      }
      take_back(piece);
      place = {piece.work(), piece.request(), piece.kv_head()};
      const int first_row = piece.row_block() * Tr::kRows;
      const Splits splits = piece.splits();
      const bool merge = splits.count > 1 && splits.arrivals > 0 && piece.last_row_block(), last = piece.is_last();
      more = piece.next();
      if (more) fetch_queries(piece);  // nobody has to wait for them before these results are stored
      if (splits.count == 1) {
        store_rows(p_, shape_, place, block, first_row);
      } else {
        store_partials(p_, shape_, block, first_row, splits.slot(splits.index));
      }
      if (!merge) continue;
      sync_head<Tr>();  // the partial results are written, and the walk's state is read
      put_away(piece);
      // Few splits at a time: more would spill what lives on.
      merge_items_after_sync<MergingHead<Tr>, 8, false>(p_, shape_, place, splits, last, at<MergeFlag>(Shared::kFlag),
                                                        at<float>(Shared::kSwap));
      take_back(piece);
    }
  }

 private:
  using Shared = SharedLayout<Tr>;
  static constexpr int kRowsPerWarp = Tr::kRows * 32 / Tr::kThreads;

  // Starts the copies of the next piece's queries, as they are, to where `open` finds them: every warp those of its own
  // rows. Registers would be spilled, and then wait for them.
  __device__ __forceinline__ void fetch_queries(const Pieces& piece) {
    const WorkPlace place{piece.work(), piece.request(), piece.kv_head()};
    const int warp = own_thread<Tr>() / 32, lane = threadIdx.x % 32;
    const int first_row = piece.row_block() * Tr::kRows + warp * kRowsPerWarp;
    uint8_t* rows = at<uint8_t>(Shared::kNextQueries) + warp * kRowsPerWarp * (Tr::kHeadDim * 2);
    if (!boxes_.vector_queries) {
#pragma unroll 1
      for (int k = 0; k < kRowsPerWarp; ++k) {
        QueryRow<Tr> row;
        row.fetch(p_, shape_, place, first_row + k, lane);
#pragma unroll
        for (int i = 0; i < QueryRow<Tr>::kPairs; ++i) {
          reinterpret_cast<uint32_t*>(rows)[k * (Tr::kHeadDim / 2) + i * 32 + lane] = row.pairs[i];
        }
      }
      return;
    }
    constexpr int kLanes = Tr::kHeadDim / 8;  // of a row, sixteen bytes each
    if (lane >= kRowsPerWarp * kLanes) return;
    const int row = first_row + lane / kLanes, d = lane % kLanes * 8;
    const int token = shape_.by_group.divide(row), head = place.kv_head * shape_.group + row - token * shape_.group;
    const uint16_t* from = static_cast<const uint16_t*>(p_.q) + place.request * p_.q_stride_request +
                           token * p_.q_stride_token + head * p_.q_stride_head + d;
    const bool take = row < shape_.rows && d < p_.head_dim;
    cp_async_16(hopper::smem_address(rows) + lane * 16, take ? from : p_.q, take);
  }

  // Queries, scales and edges into shared memory.
  __device__ __forceinline__ void open(const Pieces& piece, const WorkPlace& place, RowBlock<Tr>& block) {
    const float k_scale = p_.k_scale ? __ldg(p_.k_scale + place.kv_head * p_.k_scale_stride) : 1.f;
    const float to_log2 = p_.softmax_scale * k_scale * kLog2e;
    // A positive scale alone waits for the exponent's subtraction: both are one instruction there.
    const bool joined = p_.logit_cap == 0.f && to_log2 > 0.f;
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kRowsPerWarp; ++k) {
      const int row = own_thread<Tr>() / 32 * kRowsPerWarp + k;
      QueryRow<Tr> query;
      query.bf16 = p_.dtype == DType::kBFloat16;
#pragma unroll
      for (int i = 0; i < QueryRow<Tr>::kPairs; ++i) {
        query.pairs[i] = at<uint32_t>(Shared::kNextQueries)[row * (Tr::kHeadDim / 2) + i * 32 + threadIdx.x % 32];
      }
      float* scales = at<float>(Shared::kRowScale);
      query.place(at<__half>(Shared::kQueries), scales, row, threadIdx.x % 32);
      if (threadIdx.x % 32 != 0) continue;
      scales[row] *= to_log2;
      at<float>(Shared::kScale)[row] = joined ? scales[row] : 1.f;
    }
    if (own_thread<Tr>() == 0) {
      *at<Edges>(Shared::kEdges) = {piece.request(), piece.length(), piece.first_token(), piece.row_block() * Tr::kRows,
                                    piece.keys(),    joined};
    }
    hopper::fence_async_proxy();
    sync_head<Tr>();
    block.clear();
  }

  // Tiles of the piece that need neither a mask nor a soft cap, nor scales that do not join the exponent.
  __device__ __forceinline__ TileRange plain_tiles(const Pieces& piece) const {
    if (!at<Edges>(Shared::kEdges)->joined_) return {0, 0};
    const KvRange keys = piece.keys();
    // Keys [begin, end) are seen by every row. A tree may hide even the first new token.
    const int new_tokens = piece.length() - (p_.tree_mask ? p_.tree_keys : p_.seqlen_q - 1);
    const int end = p_.causal || p_.tree_mask ? min_of(new_tokens, keys.end) : keys.end;
    const int begin = p_.window_left < 0 ? keys.begin : max_of(piece.length() - 1 - p_.window_left, keys.begin);
    const int first = ceil_div(max_of(begin - piece.first_token(), 0), Tr::kTileTokens);
    return {first, max_of(max_of(end - piece.first_token(), 0) / Tr::kTileTokens - first, 0)};
  }

  // The walk's state lies in shared memory while tiles are multiplied: that needs the registers. One thread writes it,
  // when all have read the last, and all read it after a barrier.
  __device__ __forceinline__ void put_away(Pieces& piece) const {
    if (own_thread<Tr>() != 0) return;
    uint32_t place = hopper::smem_address(smem_) + Shared::kPiece;
    piece.visit_state([&](int word) {
      hopper::store_word(place, word);
      place += 4;
    });
  }
  __device__ __forceinline__ void take_back(Pieces& piece) const {
    uint32_t place = hopper::smem_address(smem_) + Shared::kPiece;
    piece.visit_state([&](int& word) {
      hopper::load_word(word, place);
      place += 4;
    });
  }

  template <typename T>
  __device__ __forceinline__ T* at(int offset) const {
    return reinterpret_cast<T*>(smem_ + offset);
  }

  const Params& p_;
  const Shape& shape_;
  const Boxes& boxes_;
  uint8_t* const smem_;
};

template <class Tr>
__global__ void __launch_bounds__(Tr::kAllThreads, Tr::kCtasPerSm)
    xqa_decode_sm90_fp8_kernel(const __grid_constant__ Params p, const __grid_constant__ Shape shape,
                               const __grid_constant__ Boxes boxes, const __grid_constant__ CUtensorMap key_map,
                               const __grid_constant__ CUtensorMap value_map) {
  extern __shared__ __align__(1024) uint8_t smem[];
  run_parts<Tr, Consumer<Tr>>(p, shape, boxes, key_map, value_map, smem);
}

}  // namespace attnops::xqa_decode::sm90::fp8
