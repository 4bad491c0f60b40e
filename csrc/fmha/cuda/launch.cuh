#pragma once
#include "device/common/capability.h"
#include "device/common/launch_dependent.cuh"
#include "device/common/vec.h"
#include "fmha/cuda/kernel.cuh"
#include "fmha/cuda/launch.h"

namespace attnops::fmha {

inline Rows make_rows(const Params& p) {
  Rows rows{};
  const int size = size_of(p.dtype), kv_size = size_of(p.kv_dtype);
  const auto copy = [](bool aligned, Copy aligned_copy) { return aligned ? aligned_copy : Copy::kElements; };
  rows.queries = copy(rows_aligned(p.q, size, 16, p.q_stride_token, p.q_stride_head), Copy::kPieces);
  rows.out = copy(rows_aligned(p.out, size, 16, p.out_stride_token, p.out_stride_head), Copy::kPieces);
  const int piece = min_of(8 * kv_size, 16);
  rows.keys = copy(rows_aligned(p.k, kv_size, piece, p.k_stride_page, p.k_stride_token, p.k_stride_head) &&
                       rows_aligned(p.v, kv_size, piece, p.v_stride_page, p.v_stride_token, p.v_stride_head),
                   kv_size == 1 ? Copy::kRawPieces : Copy::kPieces);
  rows.page_size = p.paged ? p.page_table.page_size : 0;
  rows.pages = static_cast<unsigned>(p.paged ? min_of(p.page_table.num_pages, int64_t{INT32_MAX}) : 1);
  rows.k = {kv_size * p.k_stride_page, kv_size * p.k_stride_token, kv_size * p.k_stride_head};
  rows.v = {kv_size * p.v_stride_page, kv_size * p.v_stride_token, kv_size * p.v_stride_head};
  const auto in_units = [](const Strides& strides) {
    return Units{static_cast<uint32_t>(strides.page / 16), static_cast<uint32_t>(strides.token / 16),
                 static_cast<uint32_t>(strides.head / 16)};
  };
  rows.k_units = in_units(rows.k), rows.v_units = in_units(rows.v);
  return rows;
}

// Whether a pool's pieces of 16 bytes have numbers of 32 bits.
inline bool has_units(const Params& p, const Strides& strides) {
  constexpr int64_t kMost = int64_t{1} << 36;
  const int64_t pages = p.paged ? p.page_table.num_pages : 1,
                tokens = p.paged ? p.page_table.page_size : p.num_k_tokens;
  return strides.page <= kMost / max_of(pages, int64_t{1}) / 4 &&
         strides.token <= kMost / max_of(tokens, int64_t{1}) / 4 &&
         strides.head <= kMost / max_of(p.num_kv_heads, 1) / 4;
}

// CTAs that share an SM's memory with so many stages.
template <class Tr>
int ctas_per_sm(int stages, bool raw) {
  constexpr int kReserved = 1024;  // of each CTA (CUDA programming guide, compute capabilities 8.0 and later)
  return min_of(device_shared_bytes("fmha") / (SharedLayout<Tr>::bytes(stages, raw) + kReserved), Tr::kCtasPerSm);
}

template <class Tr, Source kSource, int kStages>
void launch_rows(const Params& p, const Schedule& s, const Rows& rows, cudaStream_t stream) {
  const bool raw = rows.keys == Copy::kRawPieces;
  const int bytes = SharedLayout<Tr>::bytes(kStages, raw), most = SharedLayout<Tr>::bytes(kStages, kStages == 1);
  if (s.max_pieces == 0) {
    launch_dependent<&fmha_mma_kernel<Tr, kSource, kStages>>(
        "fmha", {max_of(s.num_works, 1), Tr::kThreads, bytes, most}, stream, p, s, rows);
    return;
  }
  const int ctas = min_of(s.num_works, ctas_per_sm<Tr>(kStages, raw) * device_sms("fmha"));
  launch_dependent<&fmha_mma_cut_kernel<Tr, kSource, kStages>>("fmha", {max_of(ctas, 1), Tr::kThreads, bytes, most},
                                                               stream, p, s, rows);
}

template <class Tr>
void launch_traits(const Params& p, cudaStream_t stream) {
  if (p.num_q_tokens == 0) return;
  const int pack = sm90::heads_per_tile(p.num_q_heads / p.num_kv_heads, p.tile_q, Tr::kRows);
  Schedule s = sm90::schedule_of(p, Tr::kRows, pack);
  const Rows rows = make_rows(p);
  // Else SMs are busy, and the kernel that may cut is slower. The merge stores four elements at a time.
  if (s.num_works <= device_sms("fmha") && rows.out == Copy::kPieces) {
    s.max_pieces = sm90::max_pieces_of<Tr>(p, s.works_per_tile);
    s.num_works += s.max_pieces * s.works_per_tile;
  }
  if (rows.keys != Copy::kPieces) {
    launch_rows<Tr, Source::kAny, 1>(p, s, rows, stream);
    return;
  }
  const bool in_row = p.tree_mask == nullptr && (!p.paged || p.page_table.page_size % Tr::kKeys == 0) &&
                      has_units(p, rows.k) && has_units(p, rows.v);
  const auto launch = [&]<int kStages>(std::integral_constant<int, kStages>) {
    if (in_row) {
      launch_rows<Tr, Source::kInRow, kStages>(p, s, rows, stream);
    } else {
      launch_rows<Tr, Source::kGathered, kStages>(p, s, rows, stream);
    }
  };
  if (Tr::kMostStages == 1 || ctas_per_sm<Tr>(2, false) < ctas_per_sm<Tr>(1, false)) {
    launch(std::integral_constant<int, 1>{});
  } else {
    launch(std::integral_constant<int, Tr::kMostStages>{});
  }
}

}  // namespace attnops::fmha
