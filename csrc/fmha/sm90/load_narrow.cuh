#pragma once
#include "device/sm80/mma.cuh"
#include "fmha/sm90/load.cuh"
#include "fmha/sm90/rows.cuh"

namespace attnops::fmha::sm90 {

// e4m3 keys and values of 16-bit queries. They land as they are, rows of 64 bytes for each chunk of the wide tile, and
// warps 2 and 3 make them fp16 where the products read. So a place is free as soon as it has been read. A thread of
// warp 1 tells of works.
//
// Boxes are asked for by warp 0, and the warps that widen fence what they store. Rows of other pages are copied by the
// lanes that will widen them, which wait for nobody. A fence of theirs would wait for the next copies, so warp 0 does.
//
// Tiles come in the order in which they are multiplied: the keys of a tile, then the values of the tile before.
template <class Tr>
class NarrowProducer : ProducerBase<Tr> {
  using Base = ProducerBase<Tr>;
  using Layout = typename Base::Layout;
  using Base::check_page, Base::is_seen, Base::maps_, Base::p_, Base::page_of_box, Base::q_ring_, Base::s_,
      Base::shared_, Base::tid_, Base::work_done, Base::work_known, Base::work_ring_, Base::work_slot;

 public:
  static constexpr int kWideners = 2;  // warps

  __device__ __forceinline__ NarrowProducer(const Params& p, const Schedule& s, const Maps& maps, char* base)
      : Base(p, s, maps, base), lane_(static_cast<int>(threadIdx.x) % 32) {
    asm volatile("" : "+r"(lane_));  // not read again for each tile
  }

  // Arrivals for a wide tile: of who has fenced it. For one as it comes: of who asks for boxes; else who widened it.
  static __device__ __forceinline__ int arrivals(const Schedule& s) { return s.box_keys > 0 ? kWideners : 1; }
  static __device__ __forceinline__ int arrivals_of_raw(const Schedule& s) { return s.box_keys > 0 ? 1 : kWideners; }

  __device__ __forceinline__ void run() {
    const int warp = tid_ / 32;
    if (warp == 1) {
      if (lane_ == 0) this->template tell_works<Tr::kTakesLate>();
    } else if (s_.box_keys > 0) {
      warp == 0 ? each_work([&](const Work& w) { ask(w); }) : widen_works<kBoxes>();
    } else if (warp == 0) {
      each_work([&](const Work& w) { fence(w); });
    } else if (s_.starts_on_16) {
      widen_works<kRowsOn16>();
    } else {
      widen_works<kRowsOn8>();
    }
  }

 private:
  enum Way { kBoxes, kRowsOn16, kRowsOn8 };
  // With one place of queries, those of a work come when the last work is nearly done: its first keys are made wide
  // before them.
  static constexpr bool kQueriesLate = Tr::kConverts && Tr::kQStages == 1;

  template <class Do>
  __device__ __forceinline__ void each_work(const Do& with) {
#pragma unroll 1
    for (;;) {
      hopper::mbarrier_wait(work_known(), work_ring_.phase);
      const Work& w = *work_slot();
      const bool has_tiles = w.num_tokens >= 0 && w.tile_begin < w.tile_end;
      if (Tr::kConverts && tid_ / 32 >= 2 && !(kQueriesLate && has_tiles)) convert_queries(w);
      if (w.num_tokens < 0) return;
      const uint32_t done = work_done();
      work_ring_.advance();
      with(w);
      hopper::mbarrier_arrive(done);
    }
  }

  // One lane for its warp.
  __device__ __forceinline__ void arrive(uint32_t barrier) const {
    __syncwarp();
    hopper::mbarrier_arrive_if(barrier, lane_ == 0);
  }

  __device__ __forceinline__ uint32_t raw_place(int stage) const {
    return shared_ + Layout::kRaw + stage * Tr::kRawBytes;
  }
  __device__ __forceinline__ uint32_t raw_full() const { return shared_ + Layout::kRawFull + 8 * raw_.stage; }
  __device__ __forceinline__ uint32_t raw_empty() const { return shared_ + Layout::kRawEmpty + 8 * raw_.stage; }

  // Works differ in cost: the next one is taken with the last keys of a long one.
  __device__ __forceinline__ void tell_of_last_keys(const Work& w, int tile) const {
    if (Tr::kTakesLate && tile + 1 == w.tile_end && Base::is_long(w)) arrive(shared_ + Layout::kLastKeys);
  }

  __device__ __forceinline__ void ask(const Work& w) {
    int page = 0, next_page = page_of_box(w, w.tile_begin);
#pragma unroll 1
    for (int tile = w.tile_begin, end = w.tile_end; tile <= end && w.tile_begin < end; ++tile) {
      const int page_before = page;
      if (tile < end) {
        page = next_page;
        next_page = page_of_box(w, tile + 1);  // ahead, so that the table's latency is not the tiles'
        tell_of_last_keys(w, tile);
        ask_for<Tr::kQkChunks>(w, tile, page, maps_.k, w.key_begin, w.key_end);
        if (Tr::kShape.prefetch && tile + 1 < end) prefetch(w, tile + 1, next_page, maps_.k);
      }
      if (tile > w.tile_begin) {
        const bool edge = is_edge<Tr::kKeys>(w, tile - 1);
        ask_for<Tr::kVChunks>(w, tile - 1, page_before, maps_.v, edge ? w.key_begin : 0, edge ? w.key_end : INT32_MAX);
        if (Tr::kShape.prefetch && tile < end) prefetch(w, tile, page, maps_.v);
      }
    }
  }

  __device__ __forceinline__ void prefetch(const Work& w, int tile, int page, const CUtensorMap* map) const {
    const int row = lane_ * s_.box_keys, key = w.place_of(tile) * Tr::kKeys + row;
    int token = w.first_k_token + key;
    if (p_.paged) token = key - s_.page_size.divide(key) * p_.page_table.page_size;
    if (row < Tr::kKeys && key < w.key_end) hopper::prefetch_box(map, 0, token, w.kv_head, page);
  }

  // The boxes of a tile that hold keys of [begin, end): a lane has at most one.
  template <int kChunks>
  __device__ __forceinline__ void ask_for(const Work& w, int tile, int page, const CUtensorMap* map, int begin,
                                          int end) {
    constexpr int kRowBytes = 64 * kChunks;
    const int row = lane_ * s_.box_keys, key = w.place_of(tile) * Tr::kKeys + row;
    int token = w.first_k_token + key;
    if (p_.paged) token = key - s_.page_size.divide(key) * p_.page_table.page_size;
    const bool wanted = row < Tr::kKeys && key < end && key + s_.box_keys > begin;
    const int boxes = __popc(__ballot_sync(0xffffffffu, wanted)), kv_head = w.kv_head;
    hopper::mbarrier_wait(raw_empty(), raw_.phase ^ 1);
    if (lane_ == 0) hopper::mbarrier_arrive_expect(raw_full(), boxes * s_.box_keys * kRowBytes);
    __syncwarp();
    if (wanted) {
      hopper::copy_box(raw_place(raw_.stage) + row * kRowBytes, map, raw_full(), 0, token, kv_head, page);
    }
    raw_.advance();
  }

  // Where rows are copied, two barriers of a place as it comes count who has stored a stage of keys, or of values.
  static_assert(Tr::kRawStages >= Tr::kStages);
  __device__ __forceinline__ uint32_t stored(bool keys) const {
    return shared_ + (keys ? Layout::kRawFull + 8 * k_ring_.stage : Layout::kRawEmpty + 8 * v_ring_.stage);
  }

  __device__ __forceinline__ void fence(const Work& w) {
    const int tiles = 2 * (w.tile_end - w.tile_begin);
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      const bool keys = is_keys(i, tiles);
      Ring<Tr::kStages>& ring = keys ? k_ring_ : v_ring_;
      hopper::mbarrier_wait(stored(keys), ring.phase);
      hopper::fence_async_proxy();  // the matrix units read through another proxy
      arrive(shared_ + (keys ? Layout::kKFull : Layout::kVFull) + 8 * ring.stage);
      ring.advance();
    }
  }

  // Of `tiles` in their order: keys of the first, then in turns keys of the next and values of the last.
  static __device__ __forceinline__ bool is_keys(int i, int tiles) { return i == 0 || (i % 2 == 1 && i + 1 < tiles); }
  static __device__ __forceinline__ int tile_of(const Work& w, int i, int tiles) {
    return w.tile_begin + (is_keys(i, tiles) ? (i + 1) / 2 : i + 1 == tiles ? tiles / 2 - 1 : i / 2 - 1);
  }

  // bfloat16 queries become fp16 in their place, before the first keys of their work. Four lanes have a row, and scale
  // it by the power of two that brings its largest value below 2^16: all values above 2^-30 of that one stay exact.
  // Scores are multiplied by the inverse. Who computes learns from here that no work is left, too.
  __device__ __forceinline__ void convert_queries(const Work& w) {
    const uint32_t offset = 8 * q_ring_.stage, queries = shared_ + Layout::kQ + q_ring_.stage * Tr::kQBytes;
    auto* const factors = reinterpret_cast<float*>(this->base_ + Layout::kRowFactors) + q_ring_.stage * Tr::kRows;
    const int rows = w.num_tokens < 0 ? 0 : min_of(round_up(w.num_tokens * s_.pack, 64), Tr::kRows);
    hopper::mbarrier_wait(shared_ + Layout::kQFull + offset, q_ring_.phase);
#pragma unroll 1
    for (int row = tid_ / 32 % kWideners * 8 + lane_ / 4; row < rows; row += 8 * kWideners) {
      const float factor = convert_row(queries + row * 128, row);
      if (lane_ % 4 == 0) factors[row] = factor;
    }
    hopper::fence_async_proxy();  // the matrix units read through another proxy
    arrive(shared_ + Layout::kQConverted + offset);
    q_ring_.advance();
  }

  __device__ __forceinline__ float convert_row(uint32_t queries, int row) const {
    constexpr int kPieces = Tr::kQkChunks * 2;
    uint32_t values[kPieces][4], largest = 0;
    const uint32_t first = queries + ((lane_ % 4 * 2 ^ row % 8) << 4);
    const auto at = [&](int i) { return (i % 2 ? first ^ 16 : first) + i / 2 * Tr::kRows * 128; };
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(values[i][0]), "=r"(values[i][1]), "=r"(values[i][2]), "=r"(values[i][3])
                   : "r"(at(i))
                   : "memory");
    }
#pragma unroll
    for (int i = 0; i < kPieces * 4; ++i) largest = __vmaxu2(largest, values[i / 4][i % 4] & 0x7fff7fffu);
    largest = __vmaxu2(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = __vmaxu2(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    const int exponent = static_cast<int>(max_of(largest >> 16, largest & 0xffffu) >> 7);  // biased by 127
    const int power = min_of(127 + 15 + 127 - exponent, 227);                              // likewise
    const float scale = __int_as_float(power << 23);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      uint32_t pairs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        pairs[j] = hopper::pack_pair<__half>(__uint_as_float(values[i][j] << 16) * scale,
                                             __uint_as_float(values[i][j] & 0xffff0000u) * scale);
      }
      store(at(i), pairs);
    }
    return __int_as_float((254 - power) << 23);
  }

  // What a lane makes wide of a tile with kChunks chunks: sixteen values of a row at a time, four lanes a chunk. Eight
  // neighbours have two rows, the first of an even number: so their stores, two pieces of a row each, meet no bank
  // twice under the swizzle. Where chunks are even in number the two rows have different ones, and their loads meet no
  // bank twice either; else the rows are an odd number of 64 bytes long, which does the same.
  template <int kChunks>
  struct Part {
    static constexpr bool kPairs = kChunks % 2 == 0;
    static constexpr int kRowBytes = 64 * kChunks;
    static constexpr int kRows = kPairs ? 4 : 8;                                  // of a warp's group
    static constexpr int kOfGroup = kPairs ? kChunks / 2 : kChunks;               // pieces of a lane in a group
    static constexpr int kStep = kWideners * kRows, kGroups = Tr::kKeys / kStep;  // of a warp
    static constexpr int kPieces = kGroups * kOfGroup;
    static constexpr int kLookUps = ceil_div(kGroups * kRows, 32);  // rows that a lane looks up
    static_assert(Tr::kKeys % kStep == 0 && kStep % 8 == 0);

    int warp, row, column;  // of the first piece
    uint32_t from, to;      // its bytes in a tile as it comes, and in a wide one

    __device__ __forceinline__ explicit Part(int lane) {
      const int chunk = kPairs ? (lane / 4 ^ lane / 8) % 2 : 0;
      warp = static_cast<int>(threadIdx.x) / 32 % kWideners;
      row = warp * kRows + row_of_group(lane);
      column = 64 * chunk + lane % 4 * 16;
      from = row * kRowBytes + column;
      to = chunk * Tr::kKeys * 128 + hopper::swizzled(row, lane % 4 * 2);
    }

    static __device__ __forceinline__ int row_of_group(int lane) {
      return kPairs ? lane / 16 * 2 + lane / 4 % 2 : lane / 4;
    }
    static constexpr int kColumnStep = kPairs ? 128 : 64;
    // Bytes from the first piece.
    static constexpr int source_of(int piece) {
      return piece / kOfGroup * kStep * kRowBytes + piece % kOfGroup * kColumnStep;
    }
    static constexpr int target_of(int piece) {
      return piece / kOfGroup * kStep * 128 + piece % kOfGroup * (kPairs ? 2 : 1) * Tr::kKeys * 128;
    }
  };
  using KPart = Part<Tr::kQkChunks>;
  using VPart = Part<Tr::kVChunks>;

  template <Way kWay>
  __device__ __forceinline__ void widen_works() {
    const KPart k_part(lane_);
    const VPart v_part(lane_);
    each_work([&](const Work& w) {
      if constexpr (kWay == kBoxes) {
        widen_boxes(w, k_part, v_part);
      } else {
        widen_rows<kWay == kRowsOn16>(w, k_part, v_part);
      }
    });
  }

  __device__ __forceinline__ void widen_boxes(const Work& w, const KPart& k_part, const VPart& v_part) {
    const int begin = w.tile_begin, end = w.tile_end;
#pragma unroll 1
    for (int tile = begin; tile <= end && begin < end; ++tile) {
      if (tile < end) widen<kBoxes, true, false>(k_part, 0);
      if (kQueriesLate && tile == begin) convert_queries(w);
      if (tile == begin) continue;
      if (is_edge<Tr::kKeys>(w, tile - 1)) {
        widen<kBoxes, false, true>(v_part, unseen(v_part, w, tile - 1));
      } else {
        widen<kBoxes, false, false>(v_part, 0);
      }
    }
  }

  // Copies are as many tiles ahead as there are places.
  template <bool k16>
  __device__ __forceinline__ void widen_rows(const Work& w, const KPart& k_part, const VPart& v_part) {
    constexpr int kAhead = Tr::kRawStages;
    const int tiles = 2 * (w.tile_end - w.tile_begin);
    int copied = raw_.stage;  // the next place
    Pages<Tr::kQkChunks> k_pages;
    Pages<Tr::kVChunks> v_pages;
    look_up(w, w.tile_begin, k_part, k_pages);
    look_up(w, w.tile_begin, v_part, v_pages);
#pragma unroll 1
    for (int i = 0; i < tiles + kAhead && tiles > 0; ++i) {
      if (i >= kAhead) {
        cp_async_wait<kAhead - 1>();
        if (is_keys(i - kAhead, tiles)) {
          widen<kRowsOn16, true, false>(k_part, 0);
        } else {
          widen<kRowsOn16, false, false>(v_part, 0);
        }
        if (kQueriesLate && i == kAhead) convert_queries(w);
      }
      if (i < tiles) {
        const int tile = tile_of(w, i, tiles);
        if (is_keys(i, tiles)) {
          if (k_part.warp == 0) tell_of_last_keys(w, tile);
          copy<k16, true>(w, tile, k_part, k_pages, p_.k, p_.k_stride_page, p_.k_stride_token, p_.k_stride_head,
                          p_.head_dim_qk, raw_place(copied));
        } else {
          copy<k16, false>(w, tile, v_part, v_pages, p_.v, p_.v_stride_page, p_.v_stride_token, p_.v_stride_head,
                           p_.head_dim_v, raw_place(copied));
        }
        copied = copied + 1 == Tr::kRawStages ? 0 : copied + 1;
      }
      cp_async_commit();  // of nothing at the end, so that as many are newer
    }
  }

  // Pages of the rows of a tile that a lane looks up: some of its warp's.
  template <int kChunks>
  struct Pages {
    int of[Part<kChunks>::kLookUps];
  };

  template <class P>
  __device__ __forceinline__ int looked_up_row(const P& part, int j) const {
    const int n = 32 * j + lane_;
    return n / P::kRows * P::kStep + part.warp * P::kRows + n % P::kRows;
  }

  // Asked for a tile ahead, so that the table's latency is not the tile's.
  template <int kChunks>
  __device__ __forceinline__ void look_up(const Work& w, int tile, const Part<kChunks>& part,
                                          Pages<kChunks>& pages) const {
#pragma unroll
    for (int j = 0; j < Part<kChunks>::kLookUps; ++j) {
      const int row = looked_up_row(part, j), key = w.place_of(tile) * Tr::kKeys + row;
      pages.of[j] = 0;
      if (!p_.paged || tile >= w.tile_end || row >= Tr::kKeys || key < w.key_begin || key >= w.key_end) continue;
      pages.of[j] = p_.page_table.row(w.request)[s_.page_size.divide(key)];
    }
  }

  // Begins to copy what this lane will make wide of a tile, and asks for the pages of the next one. Rows of pages
  // outside the pool are as if nobody saw them.
  template <bool k16, bool kKeys, int kChunks>
  __device__ __forceinline__ void copy(const Work& w, int tile, const Part<kChunks>& part, Pages<kChunks>& pages,
                                       const void* pool, int64_t stride_page, int64_t stride_token, int64_t stride_head,
                                       int head_dim, uint32_t place) {
    using P = Part<kChunks>;
    int64_t offsets[P::kLookUps];
#pragma unroll
    for (int j = 0; j < P::kLookUps; ++j) {
      const int row = looked_up_row(part, j), key = w.place_of(tile) * Tr::kKeys + row, page = pages.of[j];
      offsets[j] = kNobody;
      if (row >= Tr::kKeys || key < w.key_begin || key >= w.key_end || !is_seen(w, key)) continue;
      int token = w.first_k_token + key;
      if (p_.paged) {
        const int cell = s_.page_size.divide(key);
        if (kKeys) check_page(w, cell, page);
        if (page < 0 || page >= p_.page_table.num_pages) continue;
        token = key - cell * p_.page_table.page_size;
      }
      offsets[j] = page * stride_page + token * stride_token + w.kv_head * stride_head;
    }
    look_up(w, tile + 1, part, pages);
    const uint32_t own = place + part.from;
    const char* const source = static_cast<const char*>(pool) + part.column;
#pragma unroll
    for (int g = 0; g < P::kGroups; ++g) {
      const int lane = g * P::kRows % 32 + P::row_of_group(lane_);
      const int64_t offset = __shfl_sync(0xffffffffu, offsets[g * P::kRows / 32], lane);
      const char* const row = source + offset;  // not read where no row is
#pragma unroll
      for (int c = 0; c < P::kOfGroup; ++c) {
        const int bytes = offset < 0 ? 0 : head_dim - part.column - c * P::kColumnStep;
        const uint32_t to = own + P::source_of(g * P::kOfGroup + c);
        const char* const piece = row + c * P::kColumnStep;
        if constexpr (k16) {
          hopper::copy16_of(to, piece, min_of(max_of(bytes, 0), 16));
        } else {
          hopper::copy8(to, piece, bytes > 0);
          hopper::copy8(to + 8, piece + 8, bytes > 8);
        }
      }
    }
  }

  // Groups whose key no row of the work sees, a bit each: its value may be NaN.
  template <int kChunks>
  __device__ __forceinline__ uint32_t unseen(const Part<kChunks>& part, const Work& w, int tile) const {
    uint32_t groups = 0;
    int key = w.place_of(tile) * Tr::kKeys + part.row;
#pragma unroll 1
    for (int i = 0; i < Part<kChunks>::kGroups; ++i, key += Part<kChunks>::kStep) {
      if (key < w.key_begin || key >= w.key_end || !is_seen(w, key)) groups |= 1u << i;
    }
    return groups;
  }

  // This warp's part of a tile. Pieces are loaded some ahead of the one that is stored, the first of them before the
  // wide place is free: a lane would wait for each.
  template <Way kWay, bool kKeys, bool kClears, int kChunks>
  __device__ __forceinline__ void widen(const Part<kChunks>& part, uint32_t unseen) {
    using P = Part<kChunks>;
    constexpr int kAhead = min_of(Tr::kShape.ahead, P::kPieces);
    Ring<Tr::kStages>& ring = kKeys ? k_ring_ : v_ring_;
    const uint32_t from = raw_place(raw_.stage) + part.from, full = raw_full(), empty = raw_empty();
    const uint32_t to =
        shared_ + (kKeys ? Layout::kK + ring.stage * Tr::kKBytes : Layout::kV + ring.stage * Tr::kVBytes) + part.to;
    uint32_t raw[kAhead][4];
    const auto load = [&](int n) {
      uint32_t(&r)[4] = raw[n % kAhead];
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                   : "r"(from + P::source_of(n))
                   : "memory");
    };
    if constexpr (kWay == kBoxes) hopper::mbarrier_wait(full, raw_.phase);
#pragma unroll
    for (int n = 0; n < kAhead; ++n) load(n);
    hopper::mbarrier_wait(shared_ + (kKeys ? Layout::kKEmpty : Layout::kVEmpty) + 8 * ring.stage, ring.phase ^ 1);
#pragma unroll
    for (int n = 0; n < P::kPieces; ++n) {
      uint32_t(&r)[4] = raw[n % kAhead], values[8];
      if (kClears && unseen >> n / P::kOfGroup & 1) r[0] = r[1] = r[2] = r[3] = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) e4m3x4_to_half(r[i], values[2 * i], values[2 * i + 1]);
      if (n + kAhead < P::kPieces) load(n + kAhead);
      store(to + P::target_of(n), values);
      store((to ^ 16) + P::target_of(n), values + 4);
    }
    if constexpr (kWay == kBoxes) {
      arrive(empty);
      hopper::fence_async_proxy();  // the matrix units read through another proxy
      arrive(shared_ + (kKeys ? Layout::kKFull : Layout::kVFull) + 8 * ring.stage);
    } else {
      arrive(stored(kKeys));
    }
    raw_.advance();
    ring.advance();
  }

  static __device__ __forceinline__ void store(uint32_t to, const uint32_t* v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
  }

  int lane_;
  Ring<Tr::kRawStages> raw_;
  Ring<Tr::kStages> k_ring_, v_ring_;
};

}  // namespace attnops::fmha::sm90
