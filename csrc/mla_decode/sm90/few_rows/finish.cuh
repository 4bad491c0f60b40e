#pragma once
#include "core/report.h"
#include "device/common/split_tickets.cuh"
#include "mla_decode/sm90/few_rows/epilogue.cuh"
#include "mla_decode/sm90/few_rows/exchange.cuh"
#include "mla_decode/sm90/few_rows/layout.h"

// Merges the partial results of requests that several parts share. Few splits: whoever comes last merges them, of two
// splits one from its registers. More: those who have nothing else to do wait until all are there, and every split's
// CTA merges a share. In batch-invariant mode a kernel of its own does it.
//
// The order of summation is a function of the number of splits alone, so that a request's bits depend on nothing else.
namespace attnops::mla_decode::sm90::few_rows {

inline constexpr int kFinishWarps = kConsumerThreads / 32;
inline constexpr int kFewSplits = 4;
inline constexpr float kLowReference = -1e30f;  // under all that occur but that of empty rows

__device__ inline float weight_of(float reference, float common) { return exp2_fast(reference - common); }

// Adds a split to an accumulator. Of two splits it does not matter which is added to which. `block(m, j)` and `rows(j)`
// read what the other split has.
template <class At, class Block, class Rows>
__device__ inline void add_split(RowState (&rows)[At::kQueries], float (&o)[4][At::kRows / 2], const Block& block_of,
                                 const Rows& rows_of) {
  // All reads of 16 rows at once, of 32 rows in two turns: there are registers for so many.
  constexpr int kTurns = At::kRows / 16, kColumns = 4 / kTurns;
  float mine[At::kQueries], theirs[At::kQueries];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    float4 other[kColumns][At::kRowBlocks];
#pragma unroll
    for (int m = 0; m < kColumns; ++m) {
#pragma unroll
      for (int j = 0; j < At::kRowBlocks; ++j) other[m][j] = block_of(turn * kColumns + m, j);
    }
    if (turn == 0) {
#pragma unroll
      for (int j = 0; j < At::kRowBlocks; ++j) {
        const float4 state = rows_of(j);
        const RowState other_rows[2] = {{state.x, state.y}, {state.z, state.w}};
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = 2 * j + e;
          const float common = fmaxf(fmaxf(rows[i].reference, other_rows[e].reference), kLowReference);
          mine[i] = weight_of(rows[i].reference, common);
          theirs[i] = weight_of(other_rows[e].reference, common);
          rows[i] = {common, __fadd_rn(__fmul_rn(mine[i], rows[i].sum), __fmul_rn(theirs[i], other_rows[e].sum))};
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kColumns; ++m) {
#pragma unroll
      for (int j = 0; j < At::kRowBlocks; ++j) {
        const float values[4] = {other[m][j].x, other[m][j].y, other[m][j].z, other[m][j].w};
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          float& own = o[turn * kColumns + m][4 * j + x];
          own = __fadd_rn(__fmul_rn(mine[2 * j + x % 2], own), __fmul_rn(theirs[2 * j + x % 2], values[x]));
        }
      }
    }
  }
}

// A lane's part of a block, summed up over splits.
struct BlockSum {
  RowState rows[2] = {{kLowReference, 0.f}, {kLowReference, 0.f}};
  float values[4] = {};

  __device__ void move_reference(int e, float to) {
    const float weight = weight_of(rows[e].reference, to);
    rows[e] = {to, rows[e].sum * weight};
    values[e] *= weight;
    values[2 + e] *= weight;
  }

  __device__ void add(const float4& state, const float4& x) {
    const RowState other[2] = {{state.x, state.y}, {state.z, state.w}};
    const float in[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float weight = weight_of(other[e].reference, rows[e].reference);
      rows[e].sum = fmaf(weight, other[e].sum, rows[e].sum);
      values[e] = fmaf(weight, in[e], values[e]);
      values[2 + e] = fmaf(weight, in[2 + e], values[2 + e]);
    }
  }
};

// Splits first, first + step, ... of a block.
template <class At>
__device__ inline BlockSum sum_block(const Params& p, const RequestSplits& splits, int block, int first, int step) {
  constexpr int kBatch = 8;  // loads in flight: every dependent one costs most of a microsecond
  const int lane = threadIdx.x % 32, row_pair = block % At::kRowBlocks * 4 + lane % 4;
  BlockSum sum;
#pragma unroll 1
  for (int begin = first; begin < splits.count; begin += kBatch * step) {
    float4 state[kBatch], x[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int i = begin + k * step;
      state[k] = make_float4(-INFINITY, 0.f, -INFINITY, 0.f);
      x[k] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (i >= splits.count) continue;
      const int slot = splits.slot(i);
      state[k] = __ldcg(reinterpret_cast<const float4*>(partial_rows<At>(p, slot)) + row_pair);
      x[k] = __ldcg(partial_blocks(p, slot) + block * 32 + lane);
    }
    float most[2] = {sum.rows[0].reference, sum.rows[1].reference};
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      most[0] = fmaxf(most[0], state[k].x);
      most[1] = fmaxf(most[1], state[k].z);
    }
    sum.move_reference(0, most[0]);
    sum.move_reference(1, most[1]);
#pragma unroll
    for (int k = 0; k < kBatch; ++k) sum.add(state[k], x[k]);
  }
  return sum;
}

template <typename T, class At>
__device__ inline void write_block(const RowOutput<T>& output, int block, const BlockSum& sum) {
  const int lane = threadIdx.x % 32, first_row = block % At::kRowBlocks * 8, column = column_of_block<At>(block);
  float values[4];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int row = first_row + 2 * (lane % 4) + e;
    const float factor = output.factor(row, sum.rows[e]);
    values[e] = sum.values[e] * factor;
    values[2 + e] = sum.values[2 + e] * factor;
    if (output.p.lse && column == 0 && lane < 4) output.store_lse(row, sum.rows[e]);
  }
  const int row = first_row + lane / 4;
  store_block<T>(output.begin(row) + column + 2 * (lane % 4), output.valid(row), values);
}

// A merge in units: as many blocks as the CTA's warps can take at a time.
template <class At>
struct MergeShape {
  static constexpr int kBlocks = 32 * At::kRowBlocks;
  int warps, blocks, units;  // per block, per unit; a function of the number of splits alone

  __device__ explicit MergeShape(int splits)
      : warps(splits <= 8    ? 1
              : splits <= 16 ? 2
              : splits <= 32 ? 4
                             : 8),
        blocks(kFinishWarps / warps),
        units(kBlocks / blocks) {}
};

// All kConsumerThreads come, unless a warp has its blocks alone.
template <typename T, class At>
__device__ inline void merge_unit(const RowOutput<T>& output, const RequestSplits& splits, const MergeShape<At>& shape,
                                  int unit, float4* scratch) {
  const int warp = threadIdx.x / 32, slice = warp % shape.warps, block = unit * shape.blocks + warp / shape.warps;
  BlockSum sum = sum_block<At>(output.p, splits, block, slice, shape.warps);
  if (shape.warps > 1) {
    const RowState(&rows)[2] = sum.rows;
    scratch[2 * threadIdx.x] = make_float4(rows[0].reference, rows[0].sum, rows[1].reference, rows[1].sum);
    scratch[2 * threadIdx.x + 1] = make_float4(sum.values[0], sum.values[1], sum.values[2], sum.values[3]);
    attnops::sm90::named_barrier_sync(kMerge, kConsumerThreads);
#pragma unroll 1
    for (int i = 1; slice == 0 && i < shape.warps; ++i) {
      const float4 state = scratch[2 * (threadIdx.x + 32 * i)], x = scratch[2 * (threadIdx.x + 32 * i) + 1];
      sum.move_reference(0, fmaxf(sum.rows[0].reference, state.x));
      sum.move_reference(1, fmaxf(sum.rows[1].reference, state.z));
      sum.add(state, x);
    }
    attnops::sm90::named_barrier_sync(kMerge, kConsumerThreads);
  }
  if (slice == 0) write_block<T, At>(output, block, sum);
}

// A piece's accumulator to the output, or to a partial result and, if there is nobody else to do it, to a merge.
template <typename T, class At>
class Finish {
 public:
  using Rows = RowState[At::kQueries];
  using Output = float[4][At::kRows / 2];

  __device__ Finish(const RowOutput<T>& output, const RequestPiece& piece, int group, uint8_t* base, uint32_t shared,
                    bool exchanges)
      : output_(output),
        p_(output.p),
        piece_(piece),
        group_(group),
        base_(base),
        shared_(shared),
        exchanges_(exchanges) {}

  __device__ void run(Output& o) const {
    Rows rows;
#pragma unroll
    for (int i = 0; i < At::kQueries; ++i) rows[i] = row_state<At>(base_, query_of(i));
    clear_empty_rows<At>(rows, o);
    if (exchanges_) {
      const Exchange<At> exchange(shared_);
      if (exchange.rank() != group_) return exchange.send(base_, o);
      exchange.receive();
      add_split<At>(
          rows, o, [&](int m, int j) { return exchange.block(base_, m, j); },
          [&](int j) { return exchange.rows(base_, j); });
    } else if (piece_.partial >= 0) {
      store_partial<At>(p_, piece_.partial, base_, group_, o);
      if (p_.fixed_split_tokens > 0) return;
      if (piece_.splits.count > kFewSplits) return merge_shares();
      if (!comes_last()) return;
      add_splits(rows, o);
    }
    if constexpr (At::kSelects) store_tops();
    store_output<T, At>(output_, group_, rows, o);
  }

 private:
  // Of lists: the largest scores, of unsplit works.
  __device__ void store_tops() const {
    const int row = threadIdx.x;
    if (p_.max_logits == nullptr || row >= piece_.num_rows) return;
    const float* tops = reinterpret_cast<const float*>(base_ + At::kTops) + row;
    const float top = fmaxf(fmaxf(tops[0], tops[At::kRows]), fmaxf(tops[2 * At::kRows], tops[3 * At::kRows]));
    p_.max_logits[static_cast<int64_t>(piece_.request) * p_.num_q_heads + row] = top * kLn2;
  }

  __device__ volatile int* answer() const { return reinterpret_cast<volatile int*>(base_ + At::kShares); }
  __device__ int32_t* semaphore() const { return p_.semaphores + piece_.request; }
  __device__ static void sync() { attnops::sm90::named_barrier_sync(kMerge, kConsumerThreads); }

  __device__ bool comes_last() const {
    sync();
    if (threadIdx.x == 0) answer()[0] = arrive_last(semaphore(), piece_.splits.count);
    sync();
    return answer()[0] != 0;
  }

  __device__ void add_splits(Rows& rows, Output& o) const {
    const RequestSplits& splits = piece_.splits;
    int skipped = splits.index;
    if (splits.count > 2) {
      skipped = -1;
#pragma unroll
      for (RowState& row : rows) row = {kLowReference, 0.f};
#pragma unroll
      for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (float& x : o[m]) x = 0.f;
      }
    }
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
#pragma unroll 1
    for (int i = 0; i < splits.count; ++i) {
      if (i == skipped) continue;
      const float4* const blocks =
          partial_blocks(p_, splits.slot(i)) + block_number<At>(group_, warp, 0, 0) * 32 + lane;
      const float4* const states = reinterpret_cast<const float4*>(partial_rows<At>(p_, splits.slot(i))) + lane % 4;
      add_split<At>(
          rows, o, [&](int m, int j) { return __ldcg(blocks + (m * At::kRowBlocks + j) * 32); },
          [&](int j) { return __ldcg(states + 4 * j); });
    }
  }

  __device__ void merge_shares() const {
    const RequestSplits& splits = piece_.splits;
    sync();
    if (threadIdx.x == 0) {
      const TicketShares mine = arrive_for_share(semaphore(), splits.count, piece_.is_last);
      answer()[0] = mine.early;
      answer()[1] = mine.own;
      answer()[2] = mine.has_own;
    }
    sync();
    const TicketShares own{answer()[0], answer()[1], answer()[2]};
    const MergeShape<At> shape(splits.count);
#pragma unroll 1
    for (int i = 0; i < own.count(); ++i) {
      const int share = own.share(i), end = (share + 1) * shape.units / splits.count;
#pragma unroll 1
      for (int unit = share * shape.units / splits.count; unit < end; ++unit) {
        merge_unit<T, At>(output_, splits, shape, unit, reinterpret_cast<float4*>(base_ + At::kSplitSums));
      }
    }
  }

  const RowOutput<T>& output_;
  const Params& p_;
  const RequestPiece& piece_;
  const int group_;
  uint8_t* const base_;
  const uint32_t shared_;
  const bool exchanges_;
};

// Batch-invariant mode. Grid: (requests, CTAs that share the units of each).
template <typename T, class At>
__global__ void __launch_bounds__(kConsumerThreads) mla_merge_cuts_kernel(const __grid_constant__ Params p) {
  __shared__ float4 scratch[2 * kConsumerThreads];
  attnops::sm90::launch_dependents();
  attnops::sm90::wait_for_prerequisites();
  const int request = blockIdx.x;
  const int tiles = tiles_of(p, max_of(keys_of<At::kOptions>(p, request), 0)).count;
  const int cuts = ceil_div(tiles, p.fixed_split_tokens / kPlanTileTokens), first = p.num_splits[request];
  if (cuts <= 1) return;
  const RowOutput<T> output{p, request, p.seqlen_q * p.num_q_heads};
  const bool overflow = !has_room(p, first, cuts);
  if (overflow && p.report && threadIdx.x == 0 && blockIdx.y == 0) {
    const ReportOp op = At::kSelects ? p.report_op : ReportOp::kMlaDecode;
    record_fault(p.report,
                 {op, ReportKind::kLength, request, 0, static_cast<int64_t>(first) + cuts, p.num_partials + 1});
  }
  const MergeShape<At> shape(cuts);
  for (int unit = blockIdx.y; unit < shape.units; unit += gridDim.y) {
    if (!overflow) {
      merge_unit<T, At>(output, {cuts, 0, first, first + 1, 1}, shape, unit, scratch);
      continue;
    }
    BlockSum nothing;  // a result that nobody can take for an answer
    nothing.rows[0] = nothing.rows[1] = {NAN, NAN};
    const int warp = threadIdx.x / 32;
    if (warp % shape.warps == 0) write_block<T, At>(output, unit * shape.blocks + warp / shape.warps, nothing);
  }
}

}  // namespace attnops::mla_decode::sm90::few_rows
