#pragma once
#include <cmath>

#include "device/common/pdl.cuh"
#include "device/sm80/mma.cuh"
#include "mla_decode/cuda/lists_load.cuh"

// MLA over lists of rows with mma.sync, 32 keys at a time: the definition for GPUs of what other kernels do faster.
// Eight warps: of S = Q K^T, a warp has eight keys and half of the rows; of O += P V, 64 columns and all rows.
namespace attnops::mla_decode::lists {

template <typename T, int kTiles>
class Attention {
  using At = Layout<kTiles>;
  static constexpr int kRowsPerWarp = At::kRows / kWarps;           // of the softmax
  static constexpr int kScoreTiles = kTiles == 1 ? 1 : kTiles / 2;  // of 16 rows, of a warp's scores
  static constexpr int kColumnTiles = kHeadDimV / kWarps / 8;

 public:
  __device__ Attention(const Params& p, uint8_t* base)
      : p_(p),
        q_(reinterpret_cast<T*>(base + At::kQ)),
        k_(reinterpret_cast<T*>(base + At::kK)),
        scores_(reinterpret_cast<float*>(base + At::kScores)),
        factor_(reinterpret_cast<float*>(base + At::kFactor)),
        has_key_(reinterpret_cast<int*>(base + At::kHasKey)),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32) {}

  __device__ void run() {
    const SplitKvEntry entry = sm90::entry_for<sm90::Options::kSelected>(p_, blockIdx.x);
    sm90::PieceWalkFor<sm90::Options::kSelected> walk(entry);
    Piece piece;
    while (walk.next(p_, piece)) {
      report_lengths(piece.request);
      load_queries<T, kTiles>(p_, piece, q_);
      begin();
      const ListKeys keys(p_.selected, p_.extra, piece.request);
      const int end = (piece.first_tile + piece.num_tiles) * kPlanTileTokens;
      for (int key = piece.first_tile * kPlanTileTokens; key < end && key < keys.end; key += kKeys) {
        load_keys(keys, piece.request, key);
        score();
        __syncthreads();
        softmax();
        __syncthreads();
        multiply_values();
        __syncthreads();
      }
      cp_async_wait_all();  // of a piece without keys
      finish(piece);
      __syncthreads();
    }
  }

 private:
  __device__ void begin() {
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) maximum_[i] = -INFINITY, sum_[i] = 0.f;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
        for (float& x : o_[m][n]) x = 0.f;
      }
    }
  }

  __device__ void report_lengths(int request) const {
    if (p_.report == nullptr || threadIdx.x != 0) return;
    const auto check = [&](const SelectedRows& rows, ReportKind kind) {
      if (rows.lengths == nullptr || rows.lengths[request] <= rows.count) return;
      record_fault(p_.report, {p_.report_op, kind, request, 0, rows.lengths[request], int64_t{rows.count} + 1});
    };
    check(p_.selected, kReportListLength);
    check(p_.extra, kReportExtraListLength);
  }

  __device__ void load_keys(const ListKeys& keys, int request, int first) const {
    const int key = threadIdx.x / kLanesPerRow, lane = threadIdx.x % kLanesPerRow;
    const KeyPlace place = place_of_key(p_, keys, request, first + key, lane == 0);
    if (lane == 0) has_key_[key] = place.row != nullptr;
    load_key<T>(p_, place, lane, k_ + key * kRowStride);
    cp_async_wait_all();
    __syncthreads();
  }

  __device__ void score() const {
    if (kTiles == 1 && warp_ >= kKeys / 8) return;
    const int key = warp_ % (kKeys / 8) * 8, first_tile = warp_ / (kKeys / 8) * kScoreTiles;
    const int steps = (p_.shared_rows ? kHeadDimShared : kHeadDimQk) / 32;
    float s[kScoreTiles][4] = {};
    for (int step = 0; step < steps; ++step) {
      uint32_t b[4];
      ldmatrix_x4(b, smem_address(k_ + (key + lane_ % 8) * kRowStride + 32 * step + lane_ / 8 * 8));
#pragma unroll
      for (int m = 0; m < kScoreTiles; ++m) {
        const T* rows = q_ + ((first_tile + m) * 16 + lane_ % 16) * kRowStride + 32 * step + lane_ / 16 * 8;
        uint32_t a[4];
        ldmatrix_x4(a, smem_address(rows));
        mma_m16n8k16<T>(s[m], a, b[0], b[1]);
        ldmatrix_x4(a, smem_address(rows + 16));
        mma_m16n8k16<T>(s[m], a, b[2], b[3]);
      }
    }
#pragma unroll
    for (int m = 0; m < kScoreTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = (first_tile + m) * 16 + lane_ / 4 + 8 * h;
        *reinterpret_cast<float2*>(scores_ + row * kScoreStride + key + lane_ % 4 * 2) = {s[m][2 * h], s[m][2 * h + 1]};
      }
    }
  }

  // A warp's rows, a key per lane. Probabilities take the place of the row's scores.
  __device__ void softmax() {
    const bool has_key = has_key_[lane_];
    const float scale = p_.softmax_scale * kLog2e;
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
      const int row = warp_ * kRowsPerWarp + i;
      float* const scores = scores_ + row * kScoreStride;
      const float x = has_key ? scores[lane_] * scale : -INFINITY;
      float most = x;
#pragma unroll
      for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
      most = fmaxf(most, maximum_[i]);
      const float reference = most == -INFINITY ? 0.f : most;
      const float keep = exp2f(maximum_[i] - reference), probability = exp2f(x - reference);
      maximum_[i] = most;
      sum_[i] = sum_[i] * keep + probability;  // of this lane's keys
      if (lane_ == 0) factor_[row] = keep;
      __syncwarp();
      reinterpret_cast<T*>(scores)[lane_] = static_cast<T>(probability);
    }
  }

  __device__ void multiply_values() {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      const float upper = factor_[16 * m + lane_ / 4], lower = factor_[16 * m + 8 + lane_ / 4];
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        o_[m][n][0] *= upper, o_[m][n][1] *= upper;
        o_[m][n][2] *= lower, o_[m][n][3] *= lower;
      }
    }
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      uint32_t a[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        const T* row = reinterpret_cast<const T*>(scores_ + (16 * m + lane_ % 16) * kScoreStride);
        ldmatrix_x4(a[m], smem_address(row + 16 * step + lane_ / 16 * 8));
      }
#pragma unroll
      for (int n = 0; n < kColumnTiles; n += 2) {
        uint32_t b[4];
        const int column = warp_ * (kHeadDimV / kWarps) + 8 * n + lane_ / 16 * 8;
        ldmatrix_x4_trans(b, smem_address(k_ + (16 * step + lane_ % 16) * kRowStride + column));
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          mma_m16n8k16<T>(o_[m][n], a[m], b[0], b[1]);
          mma_m16n8k16<T>(o_[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // What a row is multiplied by at the end, into factor_; its lse where it belongs.
  __device__ void finish_rows(const Piece& piece) {
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
      const int row = warp_ * kRowsPerWarp + i, head = piece.first_row + row;
      float sum = sum_[i];
#pragma unroll
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (lane_ != 0 || row >= piece.num_rows) continue;
      const float lse = sum == 0.f ? -INFINITY : (maximum_[i] + log2f(sum)) * kLn2;  // a NaN sum goes on: it must show
      float factor = sum == 0.f ? 0.f : 1.f / sum;
      if (piece.partial >= 0) {
        p_.lse_partial[static_cast<int64_t>(piece.partial) * kPlanRows + row] = lse;
      } else {
        const int64_t at = static_cast<int64_t>(piece.request) * p_.num_q_heads + head;
        factor *= sm90::sink_factor(p_, head, lse);
        if (p_.lse) p_.lse[at] = lse;
        if (p_.max_logits) p_.max_logits[at] = maximum_[i] * kLn2;
      }
      factor_[row] = factor;
    }
  }

  __device__ void finish(const Piece& piece) {
    finish_rows(piece);
    __syncthreads();
    const int column = warp_ * (kHeadDimV / kWarps) + lane_ % 4 * 2;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = 16 * m + 8 * h + lane_ / 4;
        if (row >= piece.num_rows) continue;
        const float factor = factor_[row];
        float* const partial = p_.out_partial + (static_cast<int64_t>(piece.partial) * kPlanRows + row) * kHeadDimV;
        T* const out = static_cast<T*>(p_.out) + piece.request * p_.out_stride_request +
                       (piece.first_row + row) * p_.out_stride_head;
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n) {
          const float x = factor == 0.f ? 0.f : o_[m][n][2 * h] * factor;
          const float y = factor == 0.f ? 0.f : o_[m][n][2 * h + 1] * factor;
          if (piece.partial >= 0) {
            *reinterpret_cast<float2*>(partial + column + 8 * n) = {x, y};
          } else {
            out[column + 8 * n] = static_cast<T>(x);
            out[column + 8 * n + 1] = static_cast<T>(y);
          }
        }
      }
    }
  }

  const Params& p_;
  T* const q_;
  T* const k_;
  float* const scores_;
  float* const factor_;
  int* const has_key_;
  const int lane_, warp_;
  float maximum_[kRowsPerWarp], sum_[kRowsPerWarp];  // in the base-2 logarithm; of this lane's keys
  float o_[kTiles][kColumnTiles][4];
};

template <typename T, int kTiles>
__global__ void __launch_bounds__(kThreads, 1) mla_lists_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  wait_for_earlier_kernels();
  Attention<T, kTiles>(p, shared_bytes).run();
  let_next_kernel_start();
}

// Of the rows of one block. Every thread of the CTA gets the same answer.
__device__ inline sm90::Splits find_splits(const Params& p, int request, int block) {
  if (p.fixed_split_tokens > 0) return sm90::splits_of_cuts(p, request, block);
  const int blocks = p.division.blocks, at = request * sm90::blocks_of_request(p) + block;
  const int work = at / blocks;
  __shared__ int count, first_part;
  if (threadIdx.x == 0) count = first_part = 0;
  __syncthreads();
  for (int part = at % blocks + threadIdx.x * blocks; part < p.num_sm_parts; part += kThreads * blocks) {
    const SplitKvEntry entry = sm90::entry_of(p, part);
    const int last_work = sm90::last_work_of(entry);
    if (last_work != work || last_work < entry.begin_work || entry.last_num_splits <= 1) continue;
    if (last_work == entry.begin_work && entry.begin_split != 0) continue;  // the work began in an earlier part
    count = entry.last_num_splits;
    first_part = part;
  }
  __syncthreads();
  // In a plan that no planner made several parts may begin the work, and count and part come from two of them.
  const int most = p.division.groups - p.division.by_blocks.divide(first_part);
  return {min_of(count, most), partial_slot(first_part, false), partial_slot(first_part + blocks, true), 2 * blocks,
          false};
}

// Merges the partial results of eight rows of a token, a warp each, in the order of their splits.
template <typename T>
__global__ void __launch_bounds__(kThreads) mla_lists_merge_kernel(const __grid_constant__ Params p) {
  wait_for_earlier_kernels();
  const int request = blockIdx.x, head = blockIdx.y * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int block = blockIdx.y * kWarps / kPlanRows, row = head - block * kPlanRows;
  const sm90::Splits splits = find_splits(p, request, block);
  if (splits.count <= 1 || head >= p.num_q_heads) return;
  if (splits.overflow && p.report && lane == 0 && row == 0) {
    record_fault(p.report,
                 {p.report_op, ReportKind::kLength, request, 0, splits.first + splits.count, p.num_partials + 1});
  }
  const auto lse_of = [&](int i) {
    return splits.overflow ? NAN : __ldcg(p.lse_partial + splits.slot(i) * kPlanRows + row);
  };
  float most = -INFINITY, sum = 0.f;
  for (int i = 0; i < splits.count; ++i) most = fmaxf(most, lse_of(i));
  const float reference = most == -INFINITY ? 0.f : most;
  float total[kHeadDimV / 32] = {};
  for (int i = 0; i < splits.count; ++i) {
    const float lse = lse_of(i);
    if (lse == -INFINITY) continue;  // an empty split's row
    const float weight = expf(lse - reference);
    sum += weight;
    const float* values = p.out_partial + (splits.slot(splits.overflow ? 0 : i) * kPlanRows + row) * kHeadDimV;
#pragma unroll
    for (int k = 0; k < kHeadDimV / 32; ++k)
      total[k] += weight * (splits.overflow ? NAN : __ldcg(values + 32 * k + lane));
  }
  const float lse = sum == 0.f ? -INFINITY : reference + logf(sum);
  const float factor = sum == 0.f ? 0.f : sm90::sink_factor(p, head, lse) / sum;
  T* const out = static_cast<T*>(p.out) + request * p.out_stride_request + head * p.out_stride_head;
#pragma unroll
  for (int k = 0; k < kHeadDimV / 32; ++k) out[32 * k + lane] = static_cast<T>(total[k] * factor);
  if (p.lse && lane == 0) p.lse[static_cast<int64_t>(request) * p.num_q_heads + head] = lse;
}

}  // namespace attnops::mla_decode::lists
