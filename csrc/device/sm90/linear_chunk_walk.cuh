#pragma once
#include "device/sm80/linear_chunk_pass.cuh"
#include "device/sm90/barrier.cuh"
#include "device/sm90/copy.cuh"
#include "device/sm90/linear_chunk_cuts.h"
#include "device/sm90/tensor_map.h"

// How the chunks of prompts come to CTAs that stay, whose warpgroups share the work (linear_chunk_consume.cuh).
namespace attnops::sm90 {

// Tokens as boxes of 64 columns of one head and 64 tokens. Without `there` strides are none that a map takes.
struct RingMaps {
  CUtensorMap q, k, v;
  bool there;
  CUtensorMap out;
  bool out_there;
};

inline RingMaps ring_maps_of(const LinearPrefill& p) {
  const LinearStep& step = p.step;
  RingMaps maps{};
  maps.there = step.key_dim > 0 && step.value_dim > 0;
  for (const StepRows* rows : {&step.q, &step.k, &step.v}) {
    maps.there = maps.there && rows->stride_request > 0 && rows->stride_head > 0;
  }
  if (!maps.there) return maps;
  const auto map_of = [&](const StepRows& rows, int columns, int heads) {
    return make_tensor_map(
        {.dtype = DType::kBFloat16,
         .base = rows.data,
         .extents = {static_cast<uint64_t>(columns), static_cast<uint64_t>(p.num_tokens), static_cast<uint64_t>(heads)},
         .strides = {static_cast<uint64_t>(2 * rows.stride_request), static_cast<uint64_t>(2 * rows.stride_head)},
         .box_rows = kChunk});
  };
  const int groups = step.num_heads / step.heads_per_group;
  maps.q = map_of(step.q, step.key_dim, groups);
  maps.k = map_of(step.k, step.key_dim, groups);
  maps.v = map_of(step.v, step.value_dim, step.num_heads);
  maps.out_there = step.out_stride_request > 0 && step.out_stride_head > 0;
  if (maps.out_there) {
    const StepRows out{
        .data = step.out, .stride_request = step.out_stride_request, .stride_head = step.out_stride_head};
    maps.out = map_of(out, step.value_dim, step.num_heads);
  }
  return maps;
}

// What a stage holds.
struct ChunkNote {
  int64_t begin;             // of its first token
  int size;                  // of tokens; 0: no work is left
  int head, first_row;       // of the work
  int start, kept, written;  // slots: read before the chunk, written after it; below 0: none
  bool first;                // of its request's chunks
  bool boxes = false;        // whether the copy engine brings all of its rows, so that no fence is needed
};

// The chunks of a CTA's works, one after another: of requests, heads and blocks of kRows rows one of gridDim.x each
// time. Long requests come first, so of a delta rule the CTAs take theirs from either end by turns. By a warpgroup,
// whose threads all ask for the next one.
template <bool kDelta, int kRows>
class ChunkWalk {
 public:
  __device__ ChunkWalk(const LinearPrefill& prefill, int works, int row_blocks)
      : prefill_(prefill), works_(works), row_blocks_(row_blocks) {}

  // To the next one. False: none is left.
  __device__ bool advance() {
    while (chunk_ == count_) {
      const int ctas = static_cast<int>(gridDim.x), own = static_cast<int>(blockIdx.x);
      work_ = dealt_ + (kDelta && backwards_ ? ctas - 1 - own : own);
      dealt_ += ctas, backwards_ = !backwards_;
      if (work_ >= works_) return false;
      begin_work();
    }
    ++chunk_;
    return true;
  }

  // The last chunk.
  __device__ void describe(ChunkNote& note) const {
    const int64_t c = chunk_ - 1;
    note = {chunks_.begin(c), chunks_.size(c), head_, first_row_, -1, -1, -1, c == 0};
    if (c == 0 && prefix_ != 0) note.start = slot_;
    if (c == count_ - 1) note.written = slot_;
    note.kept = static_cast<int>(prefill_.checkpoint(request_, prefix_ + note.begin + note.size - chunks_.first));
  }

  // Of the last chunk: its work, its number there, its place in scratch, and how many follow of its request.
  __device__ int work() const { return work_; }
  __device__ int64_t chunk() const { return chunk_ - 1; }
  __device__ int64_t place() const { return chunks_.place + chunk_ - 1; }
  __device__ int64_t left() const { return count_ - chunk_; }

  // Zeros for tokens of no request, when none is left.
  __device__ void clear_rest() const {
    for (int i = blockIdx.x; i < row_blocks_ * prefill_.step.num_heads; i += gridDim.x) {
      const int head = i / row_blocks_, first_row = i % row_blocks_ * kRows;
      clear(head, 0, prefill_.first_token(0), first_row);
      clear(head, prefill_.first_token(prefill_.step.batch_size), prefill_.num_tokens, first_row);
    }
  }

 private:
  __device__ void begin_work() {
    const LinearStep& p = prefill_.step;
    const int row_block = work_ % row_blocks_, place = work_ / row_blocks_ / p.num_heads;
    head_ = work_ / row_blocks_ % p.num_heads, first_row_ = row_block * kRows;
    chunk_ = count_ = 0;
    if (p.report != nullptr && row_block == 0 && head_ == 0 && threadIdx.x % 128 == 0) {
      prefill_.check(kDelta ? kReportDeltaPrefill : kReportSsdPrefill, place, p.report);
    }
    request_ = prefill_.plan != nullptr ? prefill_.plan[place] : place;
    if (request_ < 0 || request_ >= p.batch_size) return;
    chunks_ = RequestChunks(prefill_, request_);
    slot_ = p.state_indices[request_];
    if (!prefill_.in_pool(slot_)) return clear(head_, chunks_.first, chunks_.first + chunks_.tokens, first_row_);
    prefix_ = prefill_.prefix(request_), count_ = chunks_.count();
  }

  __device__ void clear(int head, int64_t begin, int64_t end, int first_row) const {
    clear_tokens(prefill_.step, head, begin, end, first_row, kRows, threadIdx.x % 128, 128);
  }

  const LinearPrefill& prefill_;
  int works_, row_blocks_, work_ = 0, dealt_ = 0, request_ = 0, head_ = 0, first_row_ = 0, slot_ = 0;
  bool backwards_ = false;
  int64_t prefix_ = 0, chunk_ = 0, count_ = 0;
  RequestChunks chunks_;
};

// What a pass takes: whole prompts; of segments the ends alone, without outputs; or all segments, each from the end of
// the one before.
enum class Part { kWhole, kEnds, kCut };

struct SegmentNote : ChunkNote {
  int from, copy, to;  // places of ends: read before the chunk; where that goes, too; written after it; below 0: none
  bool map;            // the rows are those of the identity, without values
};

// The same of segments. In kEnds a head's blocks of rows have those of the identity behind them.
template <bool kDelta, int kRows, int kKeys, bool kEnds>
class SegmentWalk {
 public:
  __device__ SegmentWalk(const LinearPrefill& prefill, const ChunkCuts& cuts, int works, int row_blocks)
      : prefill_(prefill),
        cuts_(cuts),
        works_(works),
        row_blocks_(row_blocks),
        blocks_(row_blocks + (kEnds && kDelta ? kKeys / kRows : 0)),
        work_(blockIdx.x - gridDim.x) {}

  __device__ bool advance() {
    while (chunk_ == end_) {
      work_ += static_cast<int>(gridDim.x);
      if (work_ >= works_) return false;
      begin_work();
    }
    ++chunk_;
    return true;
  }

  __device__ void describe(SegmentNote& note) const {
    const int c = chunk_ - 1;
    note.begin = chunks_.begin(c), note.size = chunks_.size(c), note.head = head_, note.first_row = first_row_;
    note.start = note.kept = note.written = note.from = note.copy = note.to = -1;
    note.first = c == begin_, note.map = map_;
    if (note.first) note.start = start_, note.from = from_, note.copy = copy_;
    if constexpr (kEnds) {
      if (c == end_ - 1) note.to = to_;
    } else {
      if (c == count_ - 1) note.written = slot_;
      note.kept = static_cast<int>(prefill_.checkpoint(request_, prefix_ + note.begin + note.size - chunks_.first));
    }
  }

  __device__ int64_t place() const { return chunks_.place + chunk_ - 1; }

  __device__ void clear_rest() const {
    const LinearStep& p = prefill_.step;
    for (int i = blockIdx.x; i < row_blocks_ * p.num_heads; i += gridDim.x) {
      const int head = i / row_blocks_, first_row = i % row_blocks_ * kRows;
      clear(head, 0, prefill_.first_token(0), first_row);
      clear(head, prefill_.first_token(p.batch_size), prefill_.num_tokens, first_row);
    }
    if (p.report == nullptr || threadIdx.x % 128 != 0) return;
    for (int i = blockIdx.x; i < p.batch_size; i += gridDim.x) {
      prefill_.check(kDelta ? kReportDeltaPrefill : kReportSsdPrefill, i, p.report);
    }
  }

 private:
  __device__ void begin_work() {
    const LinearStep& p = prefill_.step;
    const int block = work_ % blocks_, place = work_ / blocks_ / p.num_heads;
    map_ = block >= row_blocks_;
    head_ = work_ / blocks_ % p.num_heads, first_row_ = (map_ ? block - row_blocks_ : block) * kRows;
    chunk_ = end_ = 0;
    int low = 0, high = p.batch_size;  // the last request whose segments begin at or before the place
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      const RequestChunks chunks(prefill_, middle);
      (RequestSegments(chunks, middle, cuts_.most).place <= place ? low : high) = middle;
    }
    request_ = low, chunks_ = RequestChunks(prefill_, low), slot_ = p.state_indices[low];
    const RequestSegments segments(chunks_, low, cuts_.most);
    const int64_t segment = place - segments.place;
    if (segment < 0 || segment >= segments.count) return;
    if (!prefill_.in_pool(slot_)) {
      if (!kEnds && segment == 0) clear(head_, chunks_.first, chunks_.first + chunks_.tokens, first_row_);
      return;
    }
    if (kEnds && (segment + 1 == segments.count || (map_ && segment == 0))) return;
    prefix_ = prefill_.prefix(low), count_ = static_cast<int>(segments.chunks);
    begin_ = chunk_ = static_cast<int>(segments.first_chunk(segment));
    end_ = static_cast<int>(segments.first_chunk(segment + 1));
    const auto end_of = [&](int64_t of) { return static_cast<int>((segments.place + of) * p.num_heads + head_); };
    // The state itself is overwritten while the first segment waits for its turn. So it is read from the last
    // segment's end, which nobody needs.
    start_ = from_ = copy_ = -1, to_ = end_of(segment);
    if (segment == 0) {
      const int last = end_of(segments.count - 1);
      if (prefix_ == 0) return;
      if (kEnds || segments.count == 1) start_ = slot_;
      if (segments.count > 1) (kEnds ? copy_ : from_) = last;
    } else if (!kEnds) {
      from_ = end_of(segment - 1);
    }
  }

  __device__ void clear(int head, int64_t begin, int64_t end, int first_row) const {
    clear_tokens(prefill_.step, head, begin, end, first_row, kRows, threadIdx.x % 128, 128);
  }

  const LinearPrefill& prefill_;
  const ChunkCuts& cuts_;
  int works_, row_blocks_, blocks_, work_, request_ = 0, head_ = 0, first_row_ = 0, slot_ = 0;
  int start_ = -1, from_ = -1, copy_ = -1, to_ = -1;
  int begin_ = 0, chunk_ = 0, end_ = 0, count_ = 0;
  bool map_ = false;
  int64_t prefix_ = 0;
  RequestChunks chunks_;
};

// kBoxes neighbours of a chunk's tokens, from a column on.
template <int kBoxes>
__device__ __forceinline__ void copy_boxes(uint32_t to, const CUtensorMap& map, uint32_t barrier, int column,
                                           const ChunkNote& note, int plane) {
#pragma unroll
  for (int i = 0; i < kBoxes; ++i) {
    copy_box(to + i * kPanelBytes, &map, barrier, column + 64 * i, static_cast<int>(note.begin), plane);
  }
}

}  // namespace attnops::sm90
