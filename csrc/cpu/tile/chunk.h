#pragma once
#include <cstdint>

#include "cpu/linear_chunk.h"
#include "cpu/tile/rows.h"
#include "cpu/tile/softmax.h"

// Rows of a chunk on Vec, which the including file has chosen. Internal linkage: see vec_avx512.h.
namespace attnops::cpu {
namespace {

// `left` holds the decays from each token to the last one taken: a row of D times the norms of its keys.
void weigh_chunk(const ChunkWeights& w) {
  constexpr int kWidth = Vec::kWidth;
  for (int s = 0; s < w.ld; s += kWidth) Vec::store(w.left + s, Vec::zero());
  for (int t = 0; t < w.count; ++t) {
    const float *keys = w.keys + t * w.ld, *queries = w.queries + t * w.ld;
    const Vec::F decay = Vec::set(w.decay[t]);
    if (w.l != nullptr) {
      const Vec::F factor = Vec::set(w.coefficient[t] * w.key_norm[t]);
      for (int s = 0; s < t; s += kWidth) {
        const Vec::F left = Vec::mul(Vec::load(w.left + s), decay);
        Vec::store(w.left + s, left);
        Vec::store(w.l + t * w.ld + s, Vec::mul(Vec::mul(Vec::load(keys + s), left), factor));
      }
    } else {
      for (int s = 0; s < t; s += kWidth) Vec::store(w.left + s, Vec::mul(Vec::load(w.left + s), decay));
    }
    w.left[t] = w.key_norm[t];
    int s = 0;
    for (; s <= t; s += kWidth) {
      Vec::store(w.p + t * w.ld + s, Vec::mul(Vec::load(queries + s), Vec::load(w.left + s)));
    }
    for (; s < w.ld; s += kWidth) Vec::store(w.p + t * w.ld + s, Vec::zero());
  }
}

// Row by row, kVecs vectors of columns in registers.
template <int kVecs>
inline void solve_columns(const ChunkSolve& c, int at) {
  constexpr int kWidth = Vec::kWidth;
  for (int t = 0; t < c.count; ++t) {
    float* row = c.u + static_cast<int64_t>(t) * c.n + at;
    const float* ks = c.ks + static_cast<int64_t>(t) * c.n + at;
    const float* l = c.l + t * c.ld;
    const Vec::F v_factor = Vec::set(c.v_factor[t]), state_factor = Vec::set(-c.state_factor[t]);
    Vec::F acc[kVecs];
#pragma GCC unroll 8
    for (int i = 0; i < kVecs; ++i) {
      acc[i] = Vec::fma(state_factor, Vec::load(ks + i * kWidth), Vec::mul(v_factor, Vec::load(row + i * kWidth)));
    }
    for (int s = 0; s < t; ++s) {
      const Vec::F x = Vec::set(-l[s]);
      const float* earlier = c.u + static_cast<int64_t>(s) * c.n + at;
#pragma GCC unroll 8
      for (int i = 0; i < kVecs; ++i) acc[i] = Vec::fma(x, Vec::load(earlier + i * kWidth), acc[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kVecs; ++i) Vec::store(row + i * kWidth, acc[i]);
  }
}

void solve_chunk(const ChunkSolve& c) {
  constexpr int kVecs = 8;
  int at = 0;
  for (; at + kVecs * Vec::kWidth <= c.n; at += kVecs * Vec::kWidth) solve_columns<kVecs>(c, at);
  for (; at + 4 * Vec::kWidth <= c.n; at += 4 * Vec::kWidth) solve_columns<4>(c, at);
  for (; at < c.n; at += Vec::kWidth) solve_columns<1>(c, at);
}

void scale_chunk_rows(float* rows, int64_t ld, const float* factors, int m, int n) {
  for (int r = 0; r < m; ++r) scale_row(rows + r * ld, n, factors[r]);
}

template <DType kType>
void finish_chunk_as(const ChunkOut& c) {
  for (int t = 0; t < c.count; ++t) {
    const float* acc = c.acc + static_cast<int64_t>(t) * c.n;
    const Vec::F factor = Vec::set(c.factor[t]);
    for (int i = 0; i < c.n; i += Vec::kWidth) {
      Vec::F x = Vec::mul(factor, Vec::load(acc + i));
      if (c.v != nullptr) x = Vec::fma(Vec::set(c.skip), Vec::load_as<kType>(c.v[t], i, Vec::kWidth), x);
      if (c.z != nullptr) {
        const Vec::F z = Vec::load_as<kType>(c.z[t], i, Vec::kWidth), half = Vec::set(0.5f);
        const Vec::F sigmoid = Vec::fma(half, tanh_of(Vec::mul(half, z)), half);
        x = Vec::mul(x, Vec::mul(z, sigmoid));
      }
      Vec::store_as<kType>(c.rows[t], i, Vec::kWidth, x);
    }
  }
}

void finish_chunk(const ChunkOut& c) {
  if (c.dtype == DType::kFloat32) return finish_chunk_as<DType::kFloat32>(c);
  if (c.dtype == DType::kFloat16) return finish_chunk_as<DType::kFloat16>(c);
  finish_chunk_as<DType::kBFloat16>(c);
}

constexpr ChunkKernels kChunkKernels = {.load_rows = &load_rows<DType::kFloat32>,
                                        .weigh = &weigh_chunk,
                                        .solve = &solve_chunk,
                                        .scale_rows = &scale_chunk_rows,
                                        .finish = &finish_chunk};

}  // namespace
}  // namespace attnops::cpu
