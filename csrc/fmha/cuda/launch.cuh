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

// Two stages of keys where as many CTAs then share an SM as with one.
template <class Tr>
int key_stages(bool raw) {
  constexpr int kReserved = 1024;  // of each CTA (CUDA programming guide, compute capabilities 8.0 and later)
  const int most = device_shared_bytes("fmha");
  const auto ctas = [most, raw](int stages) {
    return min_of(most / (SharedLayout<Tr>::bytes(stages, raw) + kReserved), Tr::kCtasPerSm);
  };
  return ctas(2) >= ctas(1) ? 2 : 1;
}

template <class Tr>
void launch_traits(const Params& p, cudaStream_t stream) {
  if (p.num_q_tokens == 0) return;
  const int pack = sm90::heads_per_tile(p.num_q_heads / p.num_kv_heads, p.tile_q, Tr::kRows);
  const Schedule s = sm90::schedule_of(p, Tr::kRows, pack);
  Rows rows = make_rows(p);
  const bool raw = rows.keys == Copy::kRawPieces;
  rows.k_stages = key_stages<Tr>(raw);
  using Layout = SharedLayout<Tr>;
  launch_dependent<&fmha_mma_kernel<Tr>>(
      "fmha", {max_of(s.num_works, 1), Tr::kThreads, Layout::bytes(rows.k_stages, raw), Layout::bytes(2, true)}, stream,
      p, s, rows);
}

}  // namespace attnops::fmha
