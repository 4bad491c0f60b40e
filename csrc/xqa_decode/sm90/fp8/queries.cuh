#pragma once
#include "device/sm80/cp_async.cuh"
#include "device/sm90/shared_words.cuh"
#include "xqa_decode/cuda/query_row.cuh"
#include "xqa_decode/sm90/fp8/widened_block.cuh"
#include "xqa_decode/sm90/query_copy.cuh"

namespace attnops::xqa_decode::sm90::fp8 {

// Queries of a pass over e4m3 pages: they become fp16 on the way to where products read them, each row with a scale of
// its own. Where they come ahead they lie behind those as they are in q, each warp's own rows.
template <class Tr>
class Queries {
 public:
  __device__ __forceinline__ Queries(const Params& p, const Shape& shape, const Boxes& boxes, uint8_t* smem)
      : p_(p), shape_(shape), boxes_(boxes), smem_(smem), shared_(hopper::smem_address(smem)) {}

  // Starts the copies of a warp's rows as they are. Rows that are no vectors do not come ahead.
  __device__ __forceinline__ void fetch(const WorkPlace& place, int first_row) const {
    if (boxes_.vector_queries) {
      const int lane = threadIdx.x % 32, d = lane % kLanes * 8, first_head = place.kv_head * shape_.group;
      const bool inside = d < p_.head_dim;
      const QueryPlace<is_ragged<Tr>()> request(p_, place.request);
      const auto* q = static_cast<const uint16_t*>(p_.q) + request.at + (inside ? d : 0);
      const int first = first_of_warp();
      const uint32_t to = raw() + raw_place(first, lane);
#pragma unroll
      for (int i = 0; i < kRowsOfWarp; i += kRowsAtATime) {
        const int own = first_row + first % kRowsOfGroup + i + lane / kLanes, row = min_of(own, shape_.rows - 1);
        if (kRowsOfWarp < kRowsAtATime && lane / kLanes >= kRowsOfWarp) break;
        if (kLanes > kVecs && lane % kLanes >= kVecs) break;
        const int token = shape_.by_group.divide(row);
        const int at =
            request.token(token) * boxes_.q_token + (first_head + row - token * shape_.group) * boxes_.q_head;
        cp_async_16(to + i * (Tr::kHeadDim * 2), q + at, inside && own < shape_.rows);
      }
    }
    cp_async_commit();
  }

  // A positive scale alone waits for the exponent's subtraction: both are one instruction there.
  __device__ __forceinline__ bool scale_joins(float to_log2) const { return p_.logit_cap == 0.f && to_log2 > 0.f; }

  // A warp's rows, one after the other. `to_log2`: of raw scores.
  __device__ __forceinline__ void convert(const WorkPlace& place, int first_row, float to_log2, bool are_there) const {
    constexpr int kSome = min_of(kRowsOfWarp, 8);
    const bool joined = scale_joins(to_log2);
    if constexpr (Tr::kFetchesAhead) {
      cp_async_wait<0>();
      __syncwarp();
    }
    if (are_there) return;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int some = 0; some < kRowsOfWarp; some += kSome) {
      const int first = threadIdx.x / 32 * kRowsOfWarp + some;
      QueryRow<Tr> rows[kSome];
#pragma unroll
      for (int i = 0; i < kSome; ++i) take(place, first_row, first + i, lane, rows[i]);
#pragma unroll
      for (int i = 0; i < kSome; ++i) {
        rows[i].place(reinterpret_cast<typename Tr::T*>(smem_ + Shared::kQueries), scales(), first + i, lane);
        if (lane > 0) continue;
        scales()[first + i] *= to_log2;
        scales()[Tr::kRows + first + i] = joined ? scales()[first + i] : 1.f;
      }
    }
  }

  // The same where tiles become fp16 in shared memory: sixteen bytes a lane, in the order of their dims. A warp's
  // scales are there for all its lanes. Rows that do not come ahead come now, to where those before were.
  __device__ __forceinline__ void convert_vectors(const WorkPlace& place, int first_row, float to_log2) const {
    constexpr int kSteps = kRowsOfWarp / kRowsAtATime;
    const int first = first_of_warp(), lane = threadIdx.x % 32;
    const bool joined = scale_joins(to_log2);
    if constexpr (!Tr::kFetchesAhead) fetch(place, first_row);
    cp_async_wait<0>();
    if (!boxes_.vector_queries) {
      copy_odd_rows(p_, shape_, place.request, place.kv_head, first_row + first % kRowsOfGroup,
                    raw() + first * (Tr::kHeadDim * 2));
    }
    __syncwarp();
    if constexpr (Tr::kFetchesAhead) {
#pragma unroll 4
      for (int i = 0; i < kSteps; ++i) {
        uint32_t words[4];
        load_vector(words, first + i * kRowsAtATime, lane);
        place_vector(words, first + i * kRowsAtATime + lane / kLanes, lane % kLanes, to_log2, joined);
      }
    } else {
      uint32_t words[kSteps][4];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) load_vector(words[i], first + i * kRowsAtATime, lane);
      sync_group<Tr>();  // all warps have theirs
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        place_vector(words[i], first + i * kRowsAtATime + lane / kLanes, lane % kLanes, to_log2, joined);
      }
    }
    __syncwarp();
  }

 private:
  using Shared = SharedLayout<Tr>;
  static constexpr int kVecs = Tr::kHeadDim / 8;          // of a row
  static constexpr int kLanes = kVecs > 16 ? 32 : kVecs;  // that share a row
  static constexpr int kWarps = Tr::kWidens ? Tr::kThreads / 32 : Tr::kWarps;
  static constexpr int kRowsOfWarp = Tr::kRows / kWarps, kRowsAtATime = 32 / kLanes;
  static constexpr int kRowsOfGroup = Tr::kWidens ? Tr::kGroupRows : Tr::kRows;

  __device__ __forceinline__ uint32_t raw() const {
    return shared_ + Shared::kQueries + (Tr::kFetchesAhead ? Tr::kQueryBytes : 0);
  }
  // Of the rows of all groups.
  __device__ __forceinline__ static int first_of_warp() { return threadIdx.x / 32 * kRowsOfWarp; }
  __device__ __forceinline__ static int raw_place(int row, int lane) {
    return (row + lane / kLanes) * (Tr::kHeadDim * 2) + lane % kLanes * 16;
  }

  // Eight elements of a row as they lie in q, of the rows from `row` on that warps have at a time.
  __device__ __forceinline__ void load_vector(uint32_t (&words)[4], int row, int lane) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) words[k] = 0;
    if (lane % kLanes >= kVecs) return;
    hopper::load_words(words, raw() + raw_place(row, lane));
  }

  // The same as numbers of fp16, to where products read them.
  __device__ __forceinline__ void place_vector(uint32_t (&words)[4], int row, int vec, float to_log2,
                                               bool joined) const {
    const bool bf16 = p_.dtype == DType::kBFloat16;
    uint32_t top = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) top = __vmaxu2(top, words[k] & 0x7fff7fffu);  // of both halves: ordered as numbers
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) top = __vmaxu2(top, __shfl_xor_sync(~0u, top, step));
    const float scale = range_of_half(unpack(max_of(top >> 16, top & 0xffffu), bf16).x);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float2 pair = unpack(words[k], bf16);
      words[k] = pack2<__half>(pair.x * scale, pair.y * scale);
    }
    const uint32_t group = shared_ + Shared::kQueries + row / kRowsOfGroup * (kRowsOfGroup * Tr::kHeadDim * 2);
    const uint32_t to = group + vec / 8 * (kRowsOfGroup * 128) + hopper::swizzled(row % kRowsOfGroup, vec % 8);
    if (vec < kVecs) hopper::store_words(to, words);
    if (vec > 0) return;
    const float of_scores = __fdividef(to_log2, scale);
    scales()[row] = of_scores;
    scales()[Tr::kRows + row] = joined ? of_scores : 1.f;
  }
  __device__ __forceinline__ float* scales() const { return reinterpret_cast<float*>(smem_ + Shared::kRowScale); }

  // A row that came ahead; or straight from q.
  __device__ __forceinline__ void take(const WorkPlace& place, int first_row, int i, int lane,
                                       QueryRow<Tr>& row) const {
    if constexpr (Tr::kFetchesAhead) {
      if (boxes_.vector_queries) {
        row.bf16 = p_.dtype == DType::kBFloat16;
#pragma unroll
        for (int k = 0; k < QueryRow<Tr>::kPairs; ++k) {
          const uint32_t at = raw() + (i * (Tr::kHeadDim / 2) + k * 32 + lane) * 4;
          hopper::load_word(row.pairs[k], at);
        }
        return;
      }
    }
    row.fetch(p_, shape_, place, first_row + i, lane);
  }

  __device__ __forceinline__ static float2 unpack(uint32_t pair, bool bf16) {
    if (bf16) return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }

  // A warp's rows of q that are no vectors, as they are.
  __device__ __noinline__ static void copy_odd_rows(const Params& p, const Shape& shape, int request, int kv_head,
                                                    int first_row, uint32_t to) {
    const QueryPlace<is_ragged<Tr>()> place(p, request);
    const __half* q = static_cast<const __half*>(p.q) + place.at;
    for (int item = threadIdx.x % 32; item < kRowsOfWarp * kVecs; item += 32) {
      const int row = min_of(first_row + item / kVecs, shape.rows - 1), token = shape.by_group.divide(row);
      const int head = kv_head * shape.group + row - token * shape.group, d = item % kVecs * 8;
      copy_odd_queries(to + item * 16, q + place.token(token) * p.q_stride_token + head * p.q_stride_head + d,
                       first_row + item / kVecs < shape.rows ? p.head_dim - d : 0);
    }
  }

  const Params& p_;
  const Shape& shape_;
  const Boxes& boxes_;
  uint8_t* const smem_;
  const uint32_t shared_;
};

}  // namespace attnops::xqa_decode::sm90::fp8
