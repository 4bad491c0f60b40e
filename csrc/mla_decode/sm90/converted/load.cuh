#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/report.h"
#include "device/sm90/barrier.cuh"
#include "device/sm90/copy.cuh"
#include "device/sm90/wgmma.cuh"
#include "mla_decode/sm90/converted/layout.h"
#include "mla_decode/sm90/first_loads.cuh"
#include "mla_decode/sm90/fp8_fragments/convert.cuh"
#include "mla_decode/sm90/modes.h"
#include "mla_decode/sm90/pieces.cuh"

// What the loading warpgroup does where rows of 656 bytes are converted. Each of its four warps has 16 rows of every
// tile, which no other warp needs to know of. Their e4m3 bytes are copied into the place of the tile itself, where they
// take half of it, and become fp16 from there, times their scales.
//
// A tile comes in two halves of its columns, each of two units of 128 columns, which have a scale a row. A unit is two
// tiles of 64 columns. Bytes of both units of a half lie where the second one's fp16 will: so the first is converted
// into a place that is free, and the second through registers.
namespace attnops::mla_decode::sm90::converted {

using attnops::sm90::mbarrier_wait;

// 16 bytes that stay as they are while the kernel runs, without a place in L1; zeros unless `valid`.
__device__ inline uint4 read_row(const uint8_t* at, bool valid) {
  uint4 x;
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.ne.b32 valid, %5, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "mov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n"
      "@valid ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
      : "l"(at), "r"(static_cast<int>(valid)));
  return x;
}

__device__ inline uint4 read_shared(uint32_t place) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(place)
               : "memory");
  return x;
}

__device__ inline void write_shared(uint32_t place, const uint4& x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(place), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

class Loader {
 public:
  __device__ Loader(const Params& p, const Maps& maps, const Modes& modes, const SplitKvEntry& entry, uint8_t* base,
                    uint32_t shared)
      : p_(p),
        maps_(maps),
        modes_(modes),
        entry_(entry),
        base_(base),
        shared_(kept(shared)),
        warp_(threadIdx.x % kGroupThreads / 32),
        lane_(threadIdx.x % 32) {
    const uint32_t rows = shared_ + kKv + warp_ * kRows * 128;
    const int row = lane_ / 8, chunk = lane_ % 8;
    copied_ = kept(rows + byte_place(row, chunk));
    rope_ = kept(rows + kRopeTile * kTileBytes + attnops::sm90::swizzled(row, chunk));
    // Of a step of a unit, four lanes have 16 columns each of a row of one tile, the next four the same of the row
    // below, and the next eight the same of the other tile.
    step_row_ = lane_ / 16 * 2 + lane_ / 4 % 2;
    const int tile = lane_ / 8 % 2, columns = lane_ % 4;
    read_ = kept(rows + byte_place(step_row_, 4 * tile + columns));
    written_ = kept(rows + tile * kTileBytes + attnops::sm90::swizzled(step_row_, 2 * columns));
  }

  __device__ void run() {
    PieceWalkFor<Options::kConverted> walk(entry_);
    Piece piece;
    for (int count = 0; walk.next(p_, piece); ++count) {
      if (p_.report && warp_ + lane_ == 0) check_list_lengths(p_, piece);
      // Given back ahead of the place of the piece's first tile, as the rope part's is ahead of that of the second.
      if (warp_ == 3 && lane_ == 0) {
        mbarrier_wait(shared_ + kQueriesEmpty, (count & 1) ^ 1);
        copy_latent_queries(maps_, shared_, piece.request, piece.first_row);
      }
      __syncwarp();
      load_tiles(piece, count);
    }
  }

 private:
  static constexpr int kRows = 16;     // of a tile, by each warp
  static constexpr int kStepRows = 4;  // of a unit, by a load of 16 bytes a lane
  static constexpr int kSteps = kRows / kStepRows;
  static constexpr int kUnitColumns = 128;

  // Known only at run time, so that it is computed once.
  __device__ static uint32_t kept(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
  }

  // Where the warp's rows of a tile are. A lane knows row lane % kRows.
  struct Source {
    const uint8_t* pages;
    uint32_t unit, place;  // bytes, and how many of them from the pool on
    uint32_t there;        // which rows are keys, as bits

    __device__ const uint8_t* row(const uint8_t* first, uint32_t at) const {
      uint64_t offset;
      asm("mul.wide.u32 %0, %1, %2;" : "=l"(offset) : "r"(at), "r"(unit));
      return first + offset;
    }
    // Of what the lane copies of a row, the place in the first row.
    __device__ const uint8_t* columns(int at, int lane) const {
      const uint8_t* first = pages + (at + lane % 8 * 16);
      asm volatile("" : "+l"(first));  // in a pair of registers, where a row's place is added in one instruction
      return first;
    }
    __device__ bool has(int row) const { return there >> row & 1; }
  };

  // Of buffer b, half b comes first: it is given back first.
  __device__ void load_tiles(const Piece& piece, int count) {
    const ListKeys keys(p_.selected, p_.extra, piece.request);
    Source from = source_of(piece, keys, 0, listed_row(piece, keys, 0));
    uint4 scales = read_scales(from);
    int next = listed_row(piece, keys, 1);
#pragma unroll 1
    for (int t = 0; t < piece.num_tiles; ++t) {
      const int buffer = t & 1, first = buffer, second = buffer ^ 1;
      wait_empty(buffer, kPartRope);
      copy_rope(from, buffer);
      float factor;
      uint32_t pairs[kScales];
      pair_scales(scales, pairs, factor);
      wait_empty(buffer, kPartLeft + first);
      copy_half(from, buffer, first);
      // The keys' bits are read by the group that gives this half back.
      tell(from, buffer, factor);
      // The other half is asked for as soon as its place is free.
      bool both = is_empty(buffer, kPartLeft + second);
      if (both) {
        copy_half(from, buffer, second);
        asm volatile("cp.async.wait_group 1;" ::: "memory");
      } else {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        both = is_empty(buffer, kPartLeft + second);
        if (both) copy_half(from, buffer, second);
      }
      __syncwarp();
      if (!fit_all(factor)) divide_rope(buffer, factor);
      convert_half(pairs, buffer, first);
      attnops::sm90::fence_async_proxy();
      hand_over(buffer, kRope);
      hand_over_half(buffer, first);
      if (!both) {
        wait_empty(buffer, kPartLeft + second);
        copy_half(from, buffer, second);
      }
      asm volatile("cp.async.wait_group 0;" ::: "memory");
      __syncwarp();
      convert_half(pairs, buffer, second);
      attnops::sm90::fence_async_proxy();
      hand_over_half(buffer, second);
      empty_parity_ ^= 1u << buffer;
      if (t == 0) load_rope_queries(piece, count);
      // Behind the fences, which wait for what has been asked for.
      from = source_of(piece, keys, t + 1, next);
      scales = read_scales(from);
      next = listed_row(piece, keys, t + 2);
    }
  }

  __device__ void load_rope_queries(const Piece& piece, int count) const {
    if (warp_ == 3 && lane_ == 0) {
      mbarrier_wait(shared_ + kQueriesRopeEmpty, (count & 1) ^ 1);
      copy_rope_queries(p_, maps_, shared_, piece.request, piece.first_row);
    }
    __syncwarp();
  }

  __device__ uint4 read_scales(const Source& from) const {
    return read_row(from.row(from.pages, from.place) + kScalesAt, from.has(lane_ % kRows));
  }

  // The lane's row of a tile as the list has it; -1 behind its end. Nobody waits for it here.
  __device__ int listed_row(const Piece& piece, const ListKeys& keys, int t) const {
    const int first_key = (piece.first_tile + t) * kPlanTileTokens, key = first_key + warp_ * kRows + lane_ % kRows;
    const bool extra = keys.is_extra(first_key);
    const int32_t* list = extra ? p_.extra.list(piece.request) : p_.selected.list(piece.request);
    return t < piece.num_tiles && key < keys.end_of(extra) ? list[key - keys.begin_of(extra)] : -1;
  }

  __device__ Source source_of(const Piece& piece, const ListKeys& keys, int t, int row) const {
    const int first_key = (piece.first_tile + t) * kPlanTileTokens;
    const bool extra = keys.is_extra(first_key);
    const int64_t num_rows = extra ? p_.extra.num_rows : p_.selected.num_rows;
    if (p_.report && lane_ < kRows && row >= num_rows) {
      const int key = first_key + warp_ * kRows + lane_;
      record_fault(p_.report, {p_.report_op, extra ? kReportExtraRowIndex : kReportRowIndex, piece.request,
                               key - keys.begin_of(extra), row, num_rows});
    }
    const bool valid = row >= 0 && row < num_rows;
    if (!valid) row = 0;
    const RowUnits& units = extra ? modes_.extra_units : modes_.units;
    const int page_size = extra ? p_.extra.page_size : p_.selected.page_size;
    const int page = extra ? modes_.by_extra_size.divide(row) : modes_.by_page_size.divide(row);
    return {.pages = static_cast<const uint8_t*>(extra ? p_.extra.pages : p_.selected.pages),
            .unit = units.bytes,
            .place = page * units.per_page + (row - page * page_size) * units.per_token,
            .there = __ballot_sync(0xffffffffu, valid)};
  }

  // Bytes of a unit lie in rows of 128, every second row with its halves swapped: what is then read at once, and
  // written, is on different banks.
  __device__ static int byte_place(int row, int chunk) { return row * 128 + ((chunk ^ (row % 2 * 4)) << 4); }

  // From a place in the first of the warp's rows to that of row kStepRows * i on, in swizzled rows.
  __device__ static uint32_t step_place(uint32_t first, int i) { return (first ^ (i % 2 * 64)) + i * kStepRows * 128; }

  __device__ static int bytes_of_half(int buffer, int half) { return buffer * kOperandBytes + half * 4 * kTileBytes; }

  // A half of the warp's rows, in flight.
  __device__ void copy_half(const Source& from, int buffer, int half) const {
    const uint8_t* first = from.columns(half * 2 * kUnitColumns, lane_);
    const uint32_t place = copied_ + bytes_of_half(buffer, half);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int row = kStepRows * i + lane_ / 8;
      const uint8_t* begin = from.row(first, __shfl_sync(0xffffffffu, from.place, row));
#pragma unroll
      for (int unit = 0; unit < 2; ++unit) {
        attnops::sm90::copy16(place + (2 + unit) * kTileBytes + i * kStepRows * 128, begin + unit * kUnitColumns,
                              from.has(row));
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  __device__ void copy_rope(const Source& from, int buffer) const {
    const uint8_t* first = from.columns(kRopeAt, lane_);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int row = kStepRows * i + lane_ / 8;
      attnops::sm90::copy16(step_place(rope_ + buffer * kOperandBytes, i),
                            from.row(first, __shfl_sync(0xffffffffu, from.place, row)), from.has(row));
    }
  }

  __device__ void convert_half(const uint32_t (&pairs)[kScales], int buffer, int half) const {
    const int offset = bytes_of_half(buffer, half);
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) {
      const uint32_t bytes = read_ + offset + (2 + unit) * kTileBytes;
      uint4 raw[kSteps];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) raw[i] = read_shared(bytes + i * kStepRows * 128);
      __syncwarp();  // bytes that others read may lie where this lane writes
      const uint32_t pair = half ? pairs[2 + unit] : pairs[unit];
      const uint32_t first = written_ + offset, second = first ^ 16;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const uint32_t scale = __shfl_sync(0xffffffffu, pair, kStepRows * i + step_row_);
        convert(raw[i], scale, step_place(first, i) + 2 * unit * kTileBytes,
                step_place(second, i) + 2 * unit * kTileBytes);
      }
    }
  }

  // 16 columns of a row, eight to each place.
  __device__ static void convert(const uint4& raw, uint32_t scale, uint32_t first, uint32_t second) {
    const uint32_t bytes[4] = {raw.x, raw.y, raw.z, raw.w};
    uint32_t x[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) fp8_fragments::convert4(bytes[i], x[2 * i], x[2 * i + 1]);
#pragma unroll
    for (int i = 0; i < 8; ++i) asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(x[i]) : "r"(scale));
    write_shared(first, {x[0], x[1], x[2], x[3]});
    write_shared(second, {x[4], x[5], x[6], x[7]});
  }

  // The scales of the lane's row in fp16, twice each, where fp16 holds them; else they are divided by `factor` before.
  __device__ static void pair_scales(const uint4& bits, uint32_t (&pairs)[kScales], float& factor) {
    auto scales = reinterpret_cast<const float4&>(bits);
    factor = 1.f;
    if (!(fits(scales.x) && fits(scales.y) && fits(scales.z) && fits(scales.w))) {
      const int exponent = exponent_of(scales);
      const float inverse = power_of_two(-exponent);
      factor = power_of_two(exponent);
      scales.x *= inverse, scales.y *= inverse, scales.z *= inverse, scales.w *= inverse;
    }
    pairs[0] = attnops::sm90::pack_pair<__half>(scales.x, scales.x);
    pairs[1] = attnops::sm90::pack_pair<__half>(scales.y, scales.y);
    pairs[2] = attnops::sm90::pack_pair<__half>(scales.z, scales.z);
    pairs[3] = attnops::sm90::pack_pair<__half>(scales.w, scales.w);
  }

  __device__ static bool fit_all(float factor) { return __all_sync(0xffffffffu, factor == 1.f); }

  // The rope part of rows whose scales have been divided.
  __device__ void divide_rope(int buffer, float factor) const {
    const float inverse = __fdividef(1.f, factor);
    const uint32_t own = attnops::sm90::pack_pair<__nv_bfloat16>(inverse, inverse);
#pragma unroll 1
    for (int i = 0; i < kSteps; ++i) {
      const int row = kStepRows * i + lane_ / 8;
      const uint32_t scale = __shfl_sync(0xffffffffu, own, row), place = step_place(rope_ + buffer * kOperandBytes, i);
      uint4 x = read_shared(place);
      for (uint32_t* pair : {&x.x, &x.y, &x.z, &x.w}) asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(*pair) : "r"(scale));
      write_shared(place, x);
    }
  }

  // For the softmax: which keys there are, and what they have been divided by.
  __device__ void tell(const Source& from, int buffer, float factor) const {
    const bool odd = !fit_all(factor);
    if (lane_ < kRows) {
      reinterpret_cast<volatile float*>(base_ + kFactors)[buffer * kPlanTileTokens + warp_ * kRows + lane_] = factor;
    }
    if (lane_ != 0) return;
    reinterpret_cast<volatile uint16_t*>(base_ + kKeyMasks)[4 * buffer + warp_] = static_cast<uint16_t>(from.there);
    reinterpret_cast<volatile uint8_t*>(base_ + kOdd)[4 * buffer + warp_] = odd;
  }

  __device__ uint32_t empty_parity(int buffer) const { return (empty_parity_ >> buffer & 1) ^ 1; }
  __device__ void wait_empty(int buffer, int part) const {
    mbarrier_wait(shared_ + barrier_empty(buffer, part), empty_parity(buffer));
  }
  __device__ bool is_empty(int buffer, int part) const {
    const bool empty = attnops::sm90::mbarrier_test(shared_ + barrier_empty(buffer, part), empty_parity(buffer));
    return __all_sync(0xffffffffu, empty);
  }

  __device__ void hand_over(int buffer, int unit) const {
    attnops::sm90::mbarrier_arrive(shared_ + barrier_full(buffer, unit));
  }
  __device__ void hand_over_half(int buffer, int half) const {
    hand_over(buffer, kLeft0 + 2 * half);
    hand_over(buffer, kLeft1 + 2 * half);
  }

  const Params& p_;
  const Maps& maps_;
  const Modes& modes_;
  const SplitKvEntry& entry_;
  uint8_t* const base_;
  const uint32_t shared_;
  const int warp_, lane_;
  uint32_t copied_, rope_, read_, written_;  // the lane's places in the first rows of a tile, of each access
  int step_row_;
  uint32_t empty_parity_ = 0;  // bit of the buffer: of the next phase
};

}  // namespace attnops::mla_decode::sm90::converted
