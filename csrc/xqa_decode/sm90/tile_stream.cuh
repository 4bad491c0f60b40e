#pragma once
#include "device/sm90/barrier.cuh"
#include "device/sm90/copy.cuh"
#include "xqa_decode/cuda/pieces.cuh"
#include "xqa_decode/sm90/request_rows.cuh"
#include "xqa_decode/sm90/traits.cuh"

namespace attnops::xqa_decode::sm90 {

// How many tiles of keys a piece has.
template <class Piece>
__device__ int num_tiles(const Piece& piece) {
  return piece.overflows() ? 0 : ceil_div(max_of(piece.end_token() - piece.first_token(), 0), 64);
}

// A place in the ring, and the parity of its barriers' phase.
template <class Tr>
struct RingPlace {
  int slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void wait(uint32_t barriers) const { hopper::mbarrier_wait(barriers + slot * 8, parity); }
  __device__ __forceinline__ void advance() {
    if (++slot == Tr::kUnits) slot = 0, parity ^= 1;
  }
};

// Whether every lane that has read a unit says so, and not one for its warp. Ordinary writes that come next are ordered
// only behind the reads of lanes that arrive.
template <class Tr>
constexpr bool arrives_by_lanes() {
  return Tr::kGathers || widens_ahead<Tr>();
}

// KV heads of a CTA, neighbours, each with all of SharedLayout for itself.
template <class Tr>
constexpr int heads_of_cta() {
  if constexpr (requires { Tr::kHeads; }) {
    return Tr::kHeads;
  } else {
    return 1;
  }
}

// From one head's shared memory to the next one's.
template <class Tr>
constexpr uint32_t head_stride() {
  if constexpr (heads_of_cta<Tr>() == 1) {
    return 0;
  } else {
    return SharedLayout<Tr>::kOfHead;
  }
}

// The fifth warp: asks the copy engine for tile after tile of keys and values, piece after piece without a break, each
// as soon as a place in the ring is free. A tile comes in boxes of one page each (or of 64 tokens of a larger page) and
// 128 bytes of columns, a box per lane. Lane l holds the page of the l-th run of box tokens from here on, and the 32
// after those are on their way.
template <class Tr>
class TileStream {
 public:
  __device__ TileStream(const Params& p, const Boxes& boxes, const CUtensorMap* keys, const CUtensorMap* values,
                        const Shape& shape, uint32_t shared, int lane)
      : p_(p),
        boxes_(boxes),
        keys_(keys),
        values_(values),
        page_shift_(shape.page_shift),
        row_blocks_(shape.row_blocks),
        ring_(shared + SharedLayout<Tr>::kRing),
        full_(shared + SharedLayout<Tr>::kFull),
        empty_(shared + SharedLayout<Tr>::kEmpty),
        lane_(lane),
        sub_(lane / (Tr::kColumns * kHeads)),
        column_(lane % Tr::kColumns * (128 / static_cast<int>(sizeof(typename Tr::Element)))),
        head_(kHeads == 1 ? 0 : lane % kHeads),
        offset_(lane % Tr::kColumns * hopper::kTileBytes + sub_ * boxes.tokens * 128) {
    static_assert(kHeads == 1 || Tr::kColumns == 1);
  }

  // All tiles of a piece.
  template <class Piece>
  __device__ __forceinline__ void bring(const Piece& piece) {
    if (num_tiles(piece) == 0) return;
    open(piece);
    bring(piece, look_up(piece.first_token()));
  }

  template <class Piece>
  __device__ __forceinline__ void open(const Piece& piece) {
    row_ = cells_of<Tr>(p_, piece.request());
    see(piece);
  }

  // The same for `prefetch` alone, which looks no page up: before the kernels ahead have ended nothing of theirs may
  // come into L1.
  template <class Piece>
  __device__ __forceinline__ void see(const Piece& piece) {
    begin_token_ = piece.keys().begin;
    end_token_ = piece.end_token();
  }

  // Asks for the first tile of the piece that is open to be in L2: only a guess, the pages may be no pages, and then
  // nothing is read.
  template <class Piece>
  __device__ __forceinline__ void prefetch(const Piece& piece, int pages) const {
    const int own_token = piece.first_token() + sub_ * boxes_.tokens;
    const int page = __shfl_sync(~0u, pages, sub_);
    if (!takes(own_token)) return;
    const int in_page = own_token & (p_.page_table.page_size - 1);
    hopper::prefetch_box(keys_, column_, in_page, piece.kv_head() + head_, page);
    hopper::prefetch_box(values_, column_, in_page, piece.kv_head() + head_, page);
  }

  // All tiles of the piece that is open, lane l holding the page of its l-th run of box tokens. `before_tile` is called
  // with how many are left.
  template <class Piece>
  __device__ __forceinline__ void bring(const Piece& piece, int pages) {
    bring(piece, pages, [](int) {});
  }
  template <class Piece, class BeforeTile>
  __device__ __forceinline__ void bring(const Piece& piece, int pages, const BeforeTile& before_tile) {
    const int tiles = num_tiles(piece);
    bring_from(piece, 0, tiles, pages, policy_of(tiles), before_tile);
  }

  // What the first tile of the piece that is open needs besides its page, for a ring that nothing has been asked for.
  // Found ahead, so that hardly an instruction stands between the page and the request.
  struct FirstTile {
    int tiles, bytes, in_page, takes;
    uint64_t policy;
  };
  template <class Piece>
  __device__ __forceinline__ FirstTile first_tile(const Piece& piece) const {
    const int own_token = piece.first_token() + sub_ * boxes_.tokens, tiles = num_tiles(piece);
    const bool take = takes(own_token);
    FirstTile first{tiles, __popc(__ballot_sync(~0u, take)) * boxes_.bytes / kHeads,
                    own_token & (p_.page_table.page_size - 1), take, policy_of(tiles)};
    // Here, and not where it is used.
    asm volatile("" : "+r"(first.bytes), "+r"(first.in_page), "+r"(first.takes), "+l"(first.policy));
    return first;
  }

  // As `bring`, of a piece whose first tile is known.
  template <class Piece, class BeforeTile>
  __device__ __forceinline__ void bring(const Piece& piece, const FirstTile& first, int pages,
                                        const BeforeTile& before_tile) {
    if (first.tiles == 0) return;
    before_tile(first.tiles);
    const int page = __shfl_sync(~0u, pages, sub_);
    const uint32_t of_head = head_ * head_stride<Tr>();
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) {
      const uint32_t barrier = full_ + unit * 8 + of_head;
      if (lane_ < kHeads) hopper::mbarrier_arrive_expect(barrier, first.bytes);
      __syncwarp();
      if (first.takes) {
        hopper::copy_box(ring_ + unit * Tr::kUnitBytes + offset_ + of_head, unit ? values_ : keys_, barrier, column_,
                         first.in_page, piece.kv_head() + head_, page, first.policy);
      }
      place_.advance();
    }
    if (first.tiles > 1) bring_from(piece, 1, first.tiles, pages, first.policy, before_tile);
  }

 private:
  static constexpr int kHeads = heads_of_cta<Tr>();
  static constexpr int kLongPiece = 4;  // tiles; of longer pieces fewer units are on their way
  // Of a piece that row blocks walk one after the other: as many as L2 holds for all CTAs until the next one comes.
  static constexpr int kTilesInL2 = 128 * 1024 / (2 * Tr::kUnitBytes);

  // Until the unit so many before the next one has been taken out of the ring.
  __device__ __forceinline__ void wait_for_earlier_unit(int before) const {
    const bool wraps = place_.slot < before;
    const int slot = place_.slot - before + (wraps ? Tr::kUnits : 0);
    hopper::mbarrier_wait(empty_ + slot * 8, wraps ? place_.parity ^ 1 : place_.parity);
  }

  __device__ __forceinline__ uint64_t policy_of(int tiles) const {
    const bool read_once = boxes_.row_blocks == 1 && (row_blocks_ == 1 || tiles > kTilesInL2);
    return hopper::l2_policy(read_once);
  }

  // The tiles of a piece from one on, of the first 32 boxes.
  template <class Piece, class BeforeTile>
  __device__ __forceinline__ void bring_from(const Piece& piece, int first, int tiles, int pages, uint64_t policy,
                                             const BeforeTile& before_tile) {
    int token = piece.first_token() + first * Tr::kTileTokens, held = first * boxes_.runs;
    int pages_ahead = look_up(piece.first_token() + 32 * boxes_.tokens);
    const bool is_long = tiles > kLongPiece;
#pragma unroll 1
    for (int tile = first; tile < tiles; ++tile) {
      before_tile(tiles - tile);
      const int own_token = token + sub_ * boxes_.tokens;
      const int page = __shfl_sync(~0u, pages, held + sub_);
      const bool take = takes(own_token);
      const int bytes = __popc(__ballot_sync(~0u, take)) * boxes_.bytes / kHeads;
      const int in_page = own_token & (p_.page_table.page_size - 1);
#pragma unroll
      for (int unit = 0; unit < 2; ++unit) {
        const uint32_t of_head = head_ * head_stride<Tr>();
        const uint32_t barrier = full_ + place_.slot * 8 + of_head;
        hopper::mbarrier_wait(empty_ + place_.slot * 8 + of_head, place_.parity ^ 1);
        if constexpr (Tr::kUnits > Tr::kUnitsOfLong) {
          if (is_long) wait_for_earlier_unit(boxes_.units_of_long);
        }
        if (lane_ < kHeads) hopper::mbarrier_arrive_expect(barrier, bytes);
        __syncwarp();
        if (take) {
          hopper::copy_box(ring_ + place_.slot * Tr::kUnitBytes + offset_ + of_head, unit ? values_ : keys_, barrier,
                           column_, in_page, piece.kv_head() + head_, page, policy);
        }
        place_.advance();
      }
      token += Tr::kTileTokens;
      held += boxes_.runs;
      if (held == 32) {
        pages = pages_ahead;
        pages_ahead = look_up(token + 32 * boxes_.tokens);
        held = 0;
      }
    }
  }

  // Boxes of keys that no row sees are not read: their cells of the table may hold anything.
  __device__ bool takes(int own_token) const {
    return lane_ < boxes_.count && own_token < end_token_ && own_token + boxes_.tokens > begin_token_;
  }

  __device__ int look_up(int token) const {
    token += lane_ * boxes_.tokens;
    const bool wanted = token < end_token_ && token + boxes_.tokens > begin_token_;
    return wanted ? __ldg(row_ + (token >> page_shift_)) : 0;
  }

  const Params& p_;
  const Boxes& boxes_;
  const CUtensorMap* keys_;
  const CUtensorMap* values_;
  const int page_shift_;
  const int row_blocks_;
  const uint32_t ring_, full_, empty_;
  const int lane_, sub_, column_, head_, offset_;
  RingPlace<Tr> place_;
  int begin_token_ = 0, end_token_ = 0;
  const int32_t* row_ = nullptr;
};

}  // namespace attnops::xqa_decode::sm90
