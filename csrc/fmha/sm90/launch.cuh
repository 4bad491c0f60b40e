#pragma once
#include <numeric>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "device/common/arch.h"
#include "device/common/launch_dependent.cuh"
#include "device/sm90/tensor_map.h"
#include "fmha/sm90/kernel.cuh"
#include "fmha/sm90/launch.h"
#include "fmha/sm90/short.h"

namespace attnops::fmha::sm90 {

// Rows of a box that divides pages and tiles; 0 where that is not a multiple of 8. Ragged requests that are
// short in the mean come in small boxes, as only those are asked for that hold a key of the request.
inline int keys_per_box(const Params& p, int tile_keys) {
  constexpr int kSmallBox = 32, kShort = 40;
  if (!p.paged) {
    const bool is_short = p.num_k_tokens <= int64_t{kShort} * p.batch_size;
    return is_short ? std::gcd(kSmallBox, tile_keys) : tile_keys;
  }
  const int common = std::gcd(p.page_table.page_size, tile_keys);
  return common % 8 == 0 ? common : 0;
}

// Whether rows of e4m3 keys and values start on 16 bytes, as boxes must.
inline bool starts_on_16(const Params& p) {
  const auto bits = reinterpret_cast<uintptr_t>(p.k) | reinterpret_cast<uintptr_t>(p.v);
  const int64_t strides =
      p.k_stride_page | p.k_stride_token | p.k_stride_head | p.v_stride_page | p.v_stride_token | p.v_stride_head;
  return bits % 16 == 0 && strides % 16 == 0;
}

// Rows of a box of these kernels' keys; 0: they come row by row.
template <class Tr>
int box_keys_of(const Params& p) {
  const bool boxes = Tr::kNarrow ? starts_on_16(p) : p.kv_dtype == p.dtype;
  return boxes ? keys_per_box(p, Tr::kKeys) : 0;
}

template <class Tr>
Schedule make_schedule(const Params& p) {
  const bool few_rows = Tr::kShort && has_few_rows(p, Tr::kRows);
  const int group = p.num_q_heads / p.num_kv_heads;
  Schedule s = schedule_of(p, Tr::kRows, few_rows ? group : heads_per_tile(group, p.tile_q, Tr::kRows));
  if (few_rows) s.turns = s.chunks;
  s.max_pieces = max_pieces_of<Tr>(p, s.works_per_tile);
  s.num_works += s.max_pieces * s.works_per_tile;
  s.takes = s.num_works / s.turns;
  s.box_keys = box_keys_of<Tr>(p);
  if (s.box_keys == 0) {
    find_row_units(p, true, s.key_rows);
    find_row_units(p, false, s.value_rows);
  }
  // Bits may depend on the batch where the plan may cut keys. Who takes all chunks of a request asks for its length.
  const bool windows = p.window_left >= 0 && p.tree_mask == nullptr && p.hidden_keys == nullptr;
  if (windows && p.pieces != nullptr && s.turns == 1) {
    const bool any_key = !p.paged || (s.box_keys == 0 && Tr::kShape.plain);
    s.window_step = any_key ? 1 : s.box_keys;
  }
  s.cluster = !Tr::kFp8 && !Tr::kNarrow && s.box_keys > 0 && s.blocks_per_group % 2 == 0 ? 2 : 1;
  s.together = 1;
  return s;
}

inline cuuint64_t extent(int64_t n) { return static_cast<cuuint64_t>(n); }

// The stride of a dimension of one element is free, but the encoder looks at it.
inline cuuint64_t byte_stride(int64_t elements, int64_t size, DType dtype) {
  return size > 1 ? extent(elements * size_of(dtype)) : 16;
}

inline CUtensorMap query_map(const Params& p, const Schedule& s) {
  const cuuint64_t extents[3] = {extent(p.head_dim_qk), extent(p.num_q_heads), extent(p.num_q_tokens)};
  const cuuint64_t strides[2] = {byte_stride(p.q_stride_head, p.num_q_heads, p.dtype),
                                 byte_stride(p.q_stride_token, p.num_q_tokens, p.dtype)};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(128 / size_of(p.dtype)), static_cast<cuuint32_t>(s.pack),
                             static_cast<cuuint32_t>(s.chunk_tokens)};
  return attnops::sm90::encode_tensor_map(p.dtype, p.q, 3, extents, strides, box);
}

// K or V: dims, tokens of a page (or all tokens), heads, pages. A box has a chunk of its rows under the swizzle; e4m3
// rows that are made wide come whole, 64 bytes for each of `chunks`.
template <class Tr>
CUtensorMap key_map(const Params& p, const Schedule& s, const void* base, int head_dim, int chunks,
                    int64_t stride_token, int64_t stride_head, int64_t stride_page) {
  const int64_t tokens = p.paged ? p.page_table.page_size : p.num_k_tokens,
                pages = p.paged ? p.page_table.num_pages : 1;
  if (s.box_keys == 0 || tokens == 0 || pages == 0) return {};
  if constexpr (Tr::kWholeRows) {
    const cuuint64_t extents[5] = {64, extent(tokens), extent(head_dim / 64), extent(p.num_kv_heads), extent(pages)};
    const cuuint64_t strides[4] = {byte_stride(stride_token, tokens, p.kv_dtype), 128,
                                   byte_stride(stride_head, p.num_kv_heads, p.kv_dtype),
                                   byte_stride(stride_page, pages, p.kv_dtype)};
    const cuuint32_t box[5] = {64, static_cast<cuuint32_t>(s.box_keys), static_cast<cuuint32_t>(chunks), 1, 1};
    return attnops::sm90::encode_tensor_map(p.kv_dtype, base, 5, extents, strides, box);
  }
  const cuuint64_t extents[4] = {extent(head_dim), extent(tokens), extent(p.num_kv_heads), extent(pages)};
  const cuuint64_t strides[3] = {byte_stride(stride_token, tokens, p.kv_dtype),
                                 byte_stride(stride_head, p.num_kv_heads, p.kv_dtype),
                                 byte_stride(stride_page, pages, p.kv_dtype)};
  const int columns = Tr::kNarrow ? 64 * chunks : 128 / size_of(p.kv_dtype);
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(columns), static_cast<cuuint32_t>(s.box_keys), 1, 1};
  return attnops::sm90::encode_tensor_map(p.kv_dtype, base, 4, extents, strides, box,
                                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                          Tr::kNarrow ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B);
}

template <class Tr, bool kByRows>
void launch_kernel(const Params& p, const Schedule& s, cudaStream_t stream) {
  const CUtensorMap queries = query_map(p, s);
  const CUtensorMap keys =
      key_map<Tr>(p, s, p.k, p.head_dim_qk, Tr::kQkChunks, p.k_stride_token, p.k_stride_head, p.k_stride_page);
  const CUtensorMap values =
      key_map<Tr>(p, s, p.v, p.head_dim_v, Tr::kVChunks, p.v_stride_token, p.v_stride_head, p.v_stride_page);
  constexpr int kBytes = SharedLayout<Tr>::kAllBytes;
  const int ctas = max_of(min_of(s.takes, Tr::kShape.ctas * device_sms("fmha") / s.cluster * s.cluster), 1);
  launch_dependent<&fmha_sm90_kernel<Tr, kByRows>>("fmha", {ctas, Tr::kThreads, kBytes, kBytes, 1, 1, s.cluster},
                                                   stream, p, s, queries, keys, values);
}

// Whether the form for works of one tile serves a call whose keys come in boxes.
template <class Tr>
bool suits_one_tile(const Params& p) {
  if constexpr (Tr::kHasOneTile) {
    return has_one_tile(p, Tr::kKeys, Tr::kHeadDimV) && is_plain(p);
  }
  return false;
}

// Short calls have a shape of their own: half of the rows and keys, and two CTAs an SM.
template <class Tr, class Short>
bool suits_short(const Params& p) {
  if (!is_short(p)) return false;
  const Schedule own = make_schedule<Tr>(p), small = make_schedule<Short>(p);
  return suits_short(p, {.rows = Short::kRows,
                         .keys = Short::kKeys,
                         .lone = Short::kShape.lone,
                         .one_tile = small.box_keys > 0 && suits_one_tile<Short>(p),
                         .box_keys = small.box_keys,
                         .works_per_tile = small.works_per_tile,
                         .blocks = small.blocks_per_group,
                         .own_blocks = own.blocks_per_group,
                         .own_keys = Tr::kHasPlain && Tr::kWarpgroups == 2 ? Tr::kKeys : INT32_MAX});
}

// Whether boxes of eight keys with whole rows are fewer than boxes of a chunk. Each box takes time of a warp.
template <class Tr>
bool suits_whole_rows(const Params& p) {
  if constexpr (Tr::kHasWholeRows) {
    return p.paged && box_keys_of<Tr>(p) < 8 * Tr::kQkChunks && (p.head_dim_qk | p.head_dim_v) % 64 == 0;
  }
  return false;
}

// Whether requests have few keys by what the host knows. Of e4m3 queries, calls of more are slower without the code
// that they do not run: docs/log/fmha_sm90.md.
inline bool has_few_keys(const Params& p) {
  constexpr int64_t kMost = 2048;
  if (!p.paged) return p.num_k_tokens <= kMost * p.batch_size;
  return p.page_table.kv_indptr == nullptr && p.page_table.max_pages * int64_t{p.page_table.page_size} <= kMost;
}

// The choice among the kernels of an instantiation: of the shape `Tr`, and of `Short` for short calls, where it has
// one.
template <class Tr, class Short = void>
Form form_of(const Params& p) {
  if constexpr (!std::is_void_v<Short>) {
    if (suits_short<Tr, Short>(p)) {
      if (box_keys_of<Short>(p) == 0) return Form::kShortGather;
      return suits_one_tile<Short>(p) ? Form::kShortOneTile : Form::kShort;
    }
  }
  if constexpr (!Tr::kFp8) {
    if (p.kv_dtype != p.dtype) {
      if (box_keys_of<typename Tr::Narrow>(p) == 0) return Form::kFp8KeysGather;
      return Tr::kHasPlainNarrow && has_ranges(p) ? Form::kPlainFp8Keys : Form::kFp8Keys;
    }
  }
  if (box_keys_of<Tr>(p) == 0) {
    return Tr::kHasPlainRows && is_plain(p) ? Form::kPlainGather : Form::kGather;
  }
  if (suits_one_tile<Tr>(p)) return Form::kOneTile;
  if (suits_whole_rows<Tr>(p)) return Form::kWholeRows;
  if constexpr (Tr::kHasPlain) {
    if (Tr::kFp8 ? has_ranges(p) && has_few_keys(p) : is_plain(p)) return Form::kPlain;
  }
  return Form::kBoxes;
}

template <class Tr>
void launch_boxes(const Params& p, cudaStream_t stream) {
  launch_kernel<Tr, false>(p, make_schedule<Tr>(p), stream);
}

template <class Tr>
void launch_gather(const Params& p, cudaStream_t stream) {
  launch_kernel<typename Tr::Rows, true>(p, make_schedule<Tr>(p), stream);
}

template <class Tr>
void launch_one_tile(const Params& p, cudaStream_t stream) {
  using OneTile = typename Tr::OneTile;
  Schedule s = make_schedule<Tr>(p);
  s.together = OneTile::kTogether;
  launch_kernel<OneTile, false>(p, s, stream);
}

template <class Tr>
void launch_whole_rows(const Params& p, cudaStream_t stream) {
  Schedule s = make_schedule<Tr>(p);
  s.box_keys = 8;
  launch_kernel<typename Tr::WholeRows, false>(p, s, stream);
}

// Of a form that `form_of` gives for such a call.
template <class Tr, class Short = void>
void launch_form(Form form, const Params& p, cudaStream_t stream) {
  if (p.num_q_tokens == 0) return;
  if (form == Form::kBoxes) return launch_boxes<Tr>(p, stream);
  if (form == Form::kGather) return launch_gather<Tr>(p, stream);
  if constexpr (Tr::kHasOneTile) {
    if (form == Form::kOneTile) return launch_one_tile<Tr>(p, stream);
  }
  if constexpr (Tr::kHasPlain) {
    if (form == Form::kPlain) return launch_boxes<typename Tr::Plain>(p, stream);
  }
  if constexpr (Tr::kHasPlainRows) {
    if (form == Form::kPlainGather) return launch_gather<typename Tr::Plain>(p, stream);
  }
  if constexpr (Tr::kHasWholeRows) {
    if (form == Form::kWholeRows) return launch_whole_rows<Tr>(p, stream);
  }
  if constexpr (!Tr::kFp8) {
    if (form == Form::kFp8Keys) return launch_boxes<typename Tr::Narrow>(p, stream);
    if constexpr (Tr::kHasPlainNarrow) {
      if (form == Form::kPlainFp8Keys) return launch_boxes<typename Tr::Narrow::Plain>(p, stream);
    }
    if (form == Form::kFp8KeysGather) return launch_gather<typename Tr::Narrow>(p, stream);
  }
  if constexpr (!std::is_void_v<Short>) {
    if (form == Form::kShort) return launch_boxes<Short>(p, stream);
    if (form == Form::kShortGather) return launch_gather<Short>(p, stream);
    if (form == Form::kShortOneTile) return launch_one_tile<Short>(p, stream);
  }
  throw std::logic_error("attnops::fmha: an instantiation has no kernel of form " +
                         std::to_string(static_cast<int>(form)));
}

template <class Tr, class Short = void>
constexpr Kernels kernels_of() {
  return {&form_of<Tr, Short>, &launch_form<Tr, Short>};
}

}  // namespace attnops::fmha::sm90
