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
  rows.k = {kv_size * p.k_stride_page, kv_size * p.k_stride_token, kv_size * p.k_stride_head};
  rows.v = {kv_size * p.v_stride_page, kv_size * p.v_stride_token, kv_size * p.v_stride_head};
  return rows;
}

// CTAs that share an SM's memory with so many stages of keys.
template <class Tr>
int ctas_per_sm(int k_stages, bool raw) {
  constexpr int kReserved = 1024;  // of each CTA (CUDA programming guide, compute capabilities 8.0 and later)
  return min_of(device_shared_bytes("fmha") / (SharedLayout<Tr>::bytes(k_stages, raw) + kReserved), Tr::kCtasPerSm);
}

template <class Tr, bool kInRow>
void launch_rows(const Params& p, const Schedule& s, const Rows& rows, cudaStream_t stream) {
  const bool raw = rows.keys == Copy::kRawPieces;
  const int bytes = SharedLayout<Tr>::bytes(rows.k_stages, raw), most = SharedLayout<Tr>::bytes(2, true);
  if (s.max_pieces == 0) {
    launch_dependent<&fmha_mma_kernel<Tr, kInRow>>("fmha", {max_of(s.num_works, 1), Tr::kThreads, bytes, most}, stream,
                                                   p, s, rows);
    return;
  }
  const int ctas = min_of(s.num_works, ctas_per_sm<Tr>(rows.k_stages, raw) * device_sms("fmha"));
  launch_dependent<&fmha_mma_cut_kernel<Tr, kInRow>>("fmha", {max_of(ctas, 1), Tr::kThreads, bytes, most}, stream, p, s,
                                                     rows);
}

template <class Tr>
void launch_traits(const Params& p, cudaStream_t stream) {
  if (p.num_q_tokens == 0) return;
  const int pack = sm90::heads_per_tile(p.num_q_heads / p.num_kv_heads, p.tile_q, Tr::kRows);
  Schedule s = sm90::schedule_of(p, Tr::kRows, pack);
  Rows rows = make_rows(p);
  // The rows of every tile follow each other, by their token strides.
  const bool in_row =
      rows.keys != Copy::kElements && p.tree_mask == nullptr && (!p.paged || p.page_table.page_size % Tr::kKeys == 0);
  const bool raw = rows.keys == Copy::kRawPieces;
  rows.k_stages = ctas_per_sm<Tr>(2, raw) >= ctas_per_sm<Tr>(1, raw) ? 2 : 1;
  // Else SMs are busy, and the kernel that may cut is slower. The merge stores four elements at a time.
  if (s.num_works <= device_sms("fmha") && rows.out == Copy::kPieces) {
    s.max_pieces = sm90::max_pieces_of<Tr>(p, s.works_per_tile);
    s.num_works += s.max_pieces * s.works_per_tile;
  }
  if (in_row) {
    launch_rows<Tr, true>(p, s, rows, stream);
  } else {
    launch_rows<Tr, false>(p, s, rows, stream);
  }
}

}  // namespace attnops::fmha
