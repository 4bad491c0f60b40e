#pragma once
#include "core/report.h"
#include "device/sm90/barrier.cuh"
#include "device/sm90/copy.cuh"
#include "mla_decode/sm90/fp8/convert.cuh"
#include "mla_decode/sm90/fp8/layout.h"
#include "mla_decode/sm90/pieces.cuh"

// The loading warpgroup: reads FP8 rows into registers ahead of time, converts them, and writes each part of a tile as
// soon as the consumers have given its place back. All four warps share every part, so a place is filled in a quarter
// of the time that one warp would take.
namespace attnops::mla_decode::sm90::fp8 {

using attnops::sm90::mbarrier_wait;

// Zeros when `valid` is false, and then nothing is read. A branch around the load would end in a move of its result,
// and wait for it there.
__device__ inline void load16(uint4& v, const uint8_t* global, bool valid) {
  v = {0, 0, 0, 0};
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.ne.b32 valid, %5, 0;\n"
      "@valid ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(global), "r"(static_cast<int>(valid)));
}

__device__ inline void load4(float& v, const void* global, bool valid) {
  v = 0.f;
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.ne.b32 valid, %2, 0;\n"
      "@valid ld.global.nc.f32 %0, [%1];\n"
      "}\n"
      : "+f"(v)
      : "l"(global), "r"(static_cast<int>(valid)));
}

__device__ inline void store16(uint32_t shared, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

template <typename T, Format kFormat>
class Loader {
  using Traits = FormatTraits<kFormat>;

 public:
  __device__ Loader(const Params& p, uint32_t shared)
      : p_(p), shared_(shared), warp_(threadIdx.x % kGroupThreads / 32), lane_(threadIdx.x % 32) {}

  __device__ void run() {
    PieceWalk walk(p_);
    Piece piece;
    for (int count = 0; walk.next(p_, piece); ++count) {
      check_length(piece);
      if (count == 0) load_queries(piece, count);
      load_tiles(piece, count);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

 private:
  static constexpr int kElement = 2;      // of q
  static constexpr int kRowsPerLane = 2;  // of a tile, whose places a lane knows: lane and lane + 32
  static constexpr int kHalfVecs = 8;     // per thread, of half a tile: 64 rows of 256 bytes
  // Of those, what is on its way at a time. What does not fit the registers goes to local memory, and its cache is the
  // rest that shared memory leaves: hardly more than that.
  static constexpr int kAhead = 4;

  // Where the 64 rows of a tile begin, in bytes from the pool; -1: not to be read.
  struct Rows {
    int64_t offset[kRowsPerLane];
  };

  // Part of a tile on its way through registers.
  struct Half {
    uint4 bytes[kAhead];
    float scale[Traits::kScaled ? kAhead : 1];
  };
  static constexpr int kRopeStep = Traits::kRopePerThread / 2;  // the rope part comes in two, beside the halves
  struct Rope {
    uint4 bytes[kRopeStep];
  };

  __device__ void load_tiles(const Piece& piece, int count) {
    const int32_t* cells = p_.page_table.row(piece.request);
    int pages[kRowsPerLane];
    row_pages(piece, cells, 0, pages);
    Rows rows = rows_of(piece, 0, pages);
    row_pages(piece, cells, 1, pages);
    Rope rope;
    Half half;
    read_rope(rows, 0, rope);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) read_half(rows, first_part(0), i, half);
    for (int t = 0; t < piece.num_tiles; ++t) {
      const int buffer = t % 2, first = first_part(t), second = kPartLeft + kPartRight - first;
      const Rows next = rows_of(piece, t + 1, pages);
      row_pages(piece, cells, t + 2, pages);
      wait_empty(buffer, first);
#pragma unroll
      for (int i = 0; i < kHalfVecs; ++i) {
        write_half(buffer, first, i, half);
        read_after(rows, first, rows, second, i, half);
      }
      give(buffer, first);

      wait_empty(buffer, kPartRope);
      write_rope(buffer, 0, rope);
      read_rope(rows, 1, rope);

      wait_empty(buffer, second);
#pragma unroll
      for (int i = 0; i < kHalfVecs; ++i) {
        write_half(buffer, second, i, half);
        read_after(rows, second, next, first_part(t + 1), i, half);
      }
      give(buffer, second);

      write_rope(buffer, 1, rope);
      read_rope(next, 0, rope);
      give(buffer, kPartRope);
      empty_parity_ ^= 1u << buffer;
      rows = next;
      // Later pieces load their queries behind the first tile, whose place is free before that of the queries.
      if (t == 0 && count > 0) load_queries(piece, count);
    }
  }

  // Of a tile's halves, the one that its scores begin with.
  __device__ static int first_part(int t) { return t % 2 == 0 ? kPartLeft : kPartRight; }

  __device__ static bool readable(const Piece& piece, int key) {
    return key >= piece.keys.begin && key < piece.keys.end;
  }

  // Pages of this lane's rows of tile t; -1 where there is nothing to read.
  __device__ void row_pages(const Piece& piece, const int32_t* cells, int t, int (&page)[kRowsPerLane]) const {
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      const int key = (piece.first_tile + t) * kPlanTileTokens + lane_ + 32 * i;
      page[i] = -1;
      if (t < piece.num_tiles && readable(piece, key)) page[i] = cells[key / p_.page_table.page_size];
    }
  }

  __device__ Rows rows_of(const Piece& piece, int t, int (&page)[kRowsPerLane]) const {
    if (p_.report) check_pages(piece, t, page);
    Rows rows;
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      const int key = (piece.first_tile + t) * kPlanTileTokens + lane_ + 32 * i;
      const int64_t token = key % p_.page_table.page_size;
      rows.offset[i] = page[i] < 0 ? -1 : page[i] * p_.kv_stride_page + token * p_.kv_stride_token;
    }
    return rows;
  }

  __device__ const uint8_t* pool() const { return static_cast<const uint8_t*>(p_.kv_pages); }

  // Four lanes read the 64 bytes of a row that become a row of a 64 x 64 tile; the eight lanes of two neighbouring rows
  // then write to different banks.
  __device__ int half_row(int i) const { return 8 * i + 2 * warp_ + lane_ / 4 % 2; }
  __device__ int half_tile() const { return lane_ / 8; }

  // What comes kAhead behind vector i of `part`: of the same part, or of the one that follows.
  __device__ void read_after(const Rows& rows, int part, const Rows& next, int next_part, int i, Half& half) const {
    const int j = i + kAhead;
    if (j < kHalfVecs) {
      read_half(rows, part, j, half);
    } else {
      read_half(next, next_part, j - kHalfVecs, half);
    }
  }

  __device__ void read_half(const Rows& rows, int part, int i, Half& half) const {
    const int row = half_row(i), tile = 4 * (part - 1) + half_tile();
    const int64_t begin = __shfl_sync(0xffffffffu, rows.offset[i / 4], row % 32);
    load16(half.bytes[i % kAhead], pool() + begin + tile * 64 + lane_ % 4 * 16, begin >= 0);
    if constexpr (Traits::kScaled) {
      load4(half.scale[i % kAhead], pool() + begin + kHeadDimV + tile / 2 * sizeof(float), begin >= 0);
    }
  }

  __device__ void write_half(int buffer, int part, int i, const Half& half) const {
    const int tile = 4 * (part - 1) + half_tile();
    write16(kv_tile(buffer, tile), half_row(i), half.bytes[i % kAhead], half.scale[Traits::kScaled ? i % kAhead : 0]);
  }

  __device__ void write16(uint32_t tile, int row, const uint4& bytes, float scale) const {
    uint4 low, high;
    convert16<T, Traits::kScaled>(bytes, scale, low, high);
    const uint32_t place = tile + attnops::sm90::swizzled(row, lane_ % 4 * 2);
    store16(place, low);
    store16(place ^ 16, high);
  }

  __device__ int rope_row(int i) const {
    return 128 / Traits::kRopeVecs * i + threadIdx.x % kGroupThreads / Traits::kRopeVecs;
  }

  __device__ void read_rope(const Rows& rows, int half, Rope& rope) const {
    constexpr int kRowsPerStep = 128 / Traits::kRopeVecs;  // 32, or 16
#pragma unroll
    for (int k = 0; k < kRopeStep; ++k) {
      const int i = half * kRopeStep + k;
      const int64_t begin = __shfl_sync(0xffffffffu, rows.offset[i * kRowsPerStep / 32], rope_row(i) % 32);
      load16(rope.bytes[k], pool() + begin + Traits::kRopeOffset + lane_ % Traits::kRopeVecs * 16, begin >= 0);
    }
  }

  __device__ void write_rope(int buffer, int half, const Rope& rope) const {
    const uint32_t tile = kv_tile(buffer, kRopeTile);
#pragma unroll
    for (int k = 0; k < kRopeStep; ++k) {
      const int i = half * kRopeStep + k;
      if constexpr (Traits::kScaled) {
        store16(tile + attnops::sm90::swizzled(rope_row(i), lane_ % 8), convert_rope<T>(rope.bytes[k]));
      } else {
        write16(tile, rope_row(i), rope.bytes[k], 1.f);
      }
    }
  }

  __device__ uint32_t kv_tile(int buffer, int column) const {
    return shared_ + kKv + buffer * kOperandBytes + column * kTileBytes;
  }

  __device__ void wait_empty(int buffer, int part) const {
    mbarrier_wait(shared_ + barrier_empty(buffer, part), (empty_parity_ >> buffer & 1) ^ 1);
  }

  __device__ void give(int buffer, int part) const {
    attnops::sm90::fence_async_proxy();
    __syncwarp();
    if (lane_ == 0) attnops::sm90::mbarrier_arrive(shared_ + barrier_full(buffer, part));
  }

  __device__ void load_queries(const Piece& piece, int count) const {
    mbarrier_wait(shared_ + kQueriesEmpty, (count & 1) ^ 1);
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      const int row = 16 * warp_ + 4 * i + lane_ / 8, chunk = lane_ % 8;
      const bool valid = row < piece.num_rows;
      const RowPlace at = row_place(p_, piece.first_row + (valid ? row : 0));
      const auto* q =
          static_cast<const uint8_t*>(p_.q) +
          kElement * (piece.request * p_.q_stride_request + at.token * p_.q_stride_token + at.head * p_.q_stride_head);
      const auto* rope = q + kHeadDimV * kElement;
      if (p_.q_pe) {
        rope = static_cast<const uint8_t*>(p_.q_pe) +
               kElement * (piece.request * p_.q_pe_stride_request + at.token * p_.q_pe_stride_token +
                           at.head * p_.q_pe_stride_head);
      }
      const uint32_t place = shared_ + kQ + attnops::sm90::swizzled(row, chunk);
#pragma unroll
      for (int k = 0; k < kTilesV; ++k) {
        attnops::sm90::copy16(place + k * kTileBytes, q + k * 128 + chunk * 16, valid);
      }
      attnops::sm90::copy16(place + kRopeTile * kTileBytes, rope + chunk * 16, valid);
    }
    attnops::sm90::arrive_after_copies(shared_ + kQueriesFull);
  }

  // Checked mode: a row of a page that does not exist is reported, once, and left out.
  __device__ void check_pages(const Piece& piece, int t, int (&page)[kRowsPerLane]) const {
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      const int key = (piece.first_tile + t) * kPlanTileTokens + lane_ + 32 * i;
      if (t >= piece.num_tiles || !readable(piece, key)) continue;
      if (page[i] >= 0 && page[i] < p_.page_table.num_pages) continue;
      const int cell = key / p_.page_table.page_size;
      if (warp_ == 0) report(ReportKind::kPageIndex, piece.request, cell, page[i], p_.page_table.num_pages);
      page[i] = -1;
    }
  }

  __device__ void check_length(const Piece& piece) const {
    if (p_.report == nullptr || warp_ + lane_ != 0) return;
    const int64_t capacity = p_.page_table.num_cells(piece.request) * p_.page_table.page_size;
    if (piece.length > capacity) report(ReportKind::kLength, piece.request, 0, piece.length, capacity + 1);
  }

  __device__ void report(ReportKind kind, int request, int position, int64_t value, int64_t limit) const {
    record_fault(p_.report, {ReportOp::kMlaDecode, kind, request, position, value, limit});
  }

  const Params& p_;
  const uint32_t shared_;
  const int warp_, lane_;
  uint32_t empty_parity_ = 0;  // bit `buffer`: of the next phase
};

}  // namespace attnops::mla_decode::sm90::fp8
