#pragma once
#include <cstdint>

#include "core/linear_prefill.h"
#include "cpu/linear_chunk.h"
#include "cpu/tile/rows.h"
#include "cpu/tile/softmax.h"

// Rows of a chunk on Vec, which the including file has chosen. Internal linkage: see vec_avx512.h.
namespace attnops::cpu {
namespace {

inline Vec::F positive_part(Vec::F x) { return Vec::max(x, Vec::zero()); }

// exp(x) for x up to 0.
inline Vec::F exp_of(Vec::F x) { return exp2_of<true>(Vec::mul(x, Vec::set(kLog2OfE))); }

// exp(min(x, 0)) / (1 + exp(-|x|)).
inline Vec::F sigmoid_of(Vec::F x) {
  const Vec::F negative = Vec::sub(Vec::zero(), positive_part(Vec::sub(Vec::zero(), x)));
  const Vec::F small = exp_of(Vec::sub(Vec::zero(), Vec::abs(x)));
  return Vec::div(exp_of(negative), Vec::add(Vec::set(1.f), small));
}

// max(x, 0) + log1p(e) with e = exp(-|x|); log1p(e) = 2 atanh(s), s = e / (2 + e) <= 1/3, by its series to 1e-8.
inline Vec::F softplus_of(Vec::F x) {
  const Vec::F e = exp_of(Vec::sub(Vec::zero(), Vec::abs(x)));
  const Vec::F s = Vec::div(e, Vec::add(Vec::set(2.f), e)), square = Vec::mul(s, s);
  Vec::F series = Vec::set(2.f / 15);
  for (int odd = 13; odd > 0; odd -= 2) series = Vec::fma(series, square, Vec::set(2.f / static_cast<float>(odd)));
  return Vec::fma(s, series, positive_part(x));
}

void find_chunk_decays(const ChunkGates& g) {
  for (int i = 0; i < g.n; i += Vec::kWidth) {
    Vec::F x = Vec::load(g.x + i);
    if (g.bias != nullptr) x = Vec::add(x, Vec::load(g.bias + i));
    if (g.has_rate && g.lower_bound < 0.f) {
      x = Vec::mul(Vec::set(g.lower_bound), sigmoid_of(Vec::mul(Vec::set(g.rate), x)));
    } else if (g.has_rate) {
      x = g.rate == 0.f ? Vec::zero() : Vec::mul(Vec::set(-g.rate), softplus_of(x));
    }
    Vec::store(g.x + i, exp_of(x));
  }
}

void sigmoid_all(float* x, int n) {
  for (int i = 0; i < n; i += Vec::kWidth) Vec::store(x + i, sigmoid_of(Vec::load(x + i)));
}

void softplus_all(float* x, int n) {
  for (int i = 0; i < n; i += Vec::kWidth) Vec::store(x + i, softplus_of(Vec::load(x + i)));
}

// Sums of the lanes of kChunkBlock vectors.
inline void sum_of_lanes(const float* vectors, float* to) {
  constexpr int kWidth = Vec::kWidth;
  for (int i = 0; i < kChunkBlock; i += kWidth) {
    Vec::F cells[kWidth];
#pragma GCC unroll 16
    for (int j = 0; j < kWidth; ++j) cells[j] = Vec::load(vectors + (i + j) * kWidth);
    Vec::transpose(cells);
#pragma GCC unroll 16
    for (int width = kWidth / 2; width > 0; width /= 2) {
#pragma GCC unroll 8
      for (int j = 0; j < width; ++j) cells[j] = Vec::add(cells[j], cells[j + width]);
    }
    Vec::store(to + i, cells[0]);
  }
}

// What token `t` says to those from `first` on up to itself, whose decays come one after another: all in float.
inline void dots_in_block(const ChunkChannels& c, int first, int t) {
  constexpr int kWidth = Vec::kWidth, kVecs = 256 / kWidth;
  alignas(64) float key_sums[kChunkBlock * kWidth], query_sums[kChunkBlock * kWidth];
  Vec::F key[kVecs], query[kVecs];
  const int vecs = c.num_keys / kWidth;
  for (int i = 0; i < vecs; ++i) {
    key[i] = Vec::load(c.keys + t * c.num_keys + i * kWidth);
    query[i] = Vec::load(c.queries + t * c.num_keys + i * kWidth);
  }
  for (int j = kChunkBlock - 1; j >= 0; --j) {
    Vec::F by_key = Vec::zero(), by_query = Vec::zero();
    if (first + j <= t) {
      const float *other = c.keys + (first + j) * c.num_keys, *decay = c.decay + (first + j) * c.num_keys;
      for (int i = 0; i < vecs; ++i) {
        const Vec::F x = Vec::load(other + i * kWidth), d = Vec::load(decay + i * kWidth);
        by_key = Vec::fma(key[i], x, by_key);
        by_query = Vec::fma(query[i], x, by_query);
        key[i] = Vec::mul(key[i], d);
        query[i] = Vec::mul(query[i], d);
      }
    }
    Vec::store(key_sums + j * kWidth, by_key);
    Vec::store(query_sums + j * kWidth, by_query);
  }
  sum_of_lanes(key_sums, c.dots + t * c.n + first);
  sum_of_lanes(query_sums, c.query_dots + t * c.n + first);
}

void spread_chunk_block(const ChunkChannels& c, int first) {
  const int64_t ld = c.num_keys;
  const int end = first + kChunkBlock;
  for (int i = 0; i < c.num_keys; i += Vec::kWidth) {
    Vec::F in_block = Vec::set(1.f), in_chunk = Vec::load(c.fade + i);
    for (int t = first; t < end; ++t) {
      const int64_t at = t * ld + i;
      const Vec::F decay = Vec::load(c.decay + at), key = Vec::load(c.keys + at), query = Vec::load(c.queries + at);
      in_block = Vec::mul(in_block, decay);
      in_chunk = Vec::mul(in_chunk, decay);
      Vec::store(c.by_block + at, Vec::mul(key, in_block));
      Vec::store(c.queries_by_block + at, Vec::mul(query, in_block));
      Vec::store(c.by_chunk + at, Vec::mul(key, in_chunk));
      Vec::store(c.queries_by_chunk + at, Vec::mul(query, in_chunk));
    }
    Vec::store(c.fade + i, in_chunk);
    Vec::F behind = Vec::set(1.f);
    for (int t = end - 1; t >= first; --t) {
      Vec::store(c.ahead + t * ld + i, Vec::mul(Vec::load(c.keys + t * ld + i), behind));
      behind = Vec::mul(behind, Vec::load(c.decay + t * ld + i));
    }
    for (int t = 0; t < first; ++t) {
      Vec::store(c.ahead + t * ld + i, Vec::mul(Vec::load(c.ahead + t * ld + i), behind));
    }
  }
}

void meet_in_chunk_block(const ChunkChannels& c, int first) {
  for (int t = first; t < first + kChunkBlock; ++t) dots_in_block(c, first, t);
}

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
template <int kVecs, bool kWritten>
inline void solve_columns(const ChunkSolve& c, int at) {
  constexpr int kWidth = Vec::kWidth;
  for (int t = 0; t < c.count; ++t) {
    float* row = c.u + static_cast<int64_t>(t) * c.n + at;
    const float* ks = c.ks + static_cast<int64_t>(t) * c.n + at;
    const float* l = c.l + t * c.ld;
    alignas(64) float l_of_written[kChunk];
    if constexpr (kWritten) {
      for (int s = 0; s < t; s += kWidth) {
        Vec::store(l_of_written + s, Vec::mul(Vec::load(l + s), Vec::load(c.unwritten + s)));
      }
      l = l_of_written;
    }
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
    for (int i = 0; i < kVecs; ++i) {
      if constexpr (kWritten) acc[i] = Vec::to_bf16(Vec::mul(acc[i], Vec::set(c.written[t])));
      Vec::store(row + i * kWidth, acc[i]);
    }
  }
}

template <bool kWritten>
void solve_all_columns(const ChunkSolve& c) {
  constexpr int kVecs = 8;
  int at = 0;
  for (; at + kVecs * Vec::kWidth <= c.n; at += kVecs * Vec::kWidth) solve_columns<kVecs, kWritten>(c, at);
  for (; at + 4 * Vec::kWidth <= c.n; at += 4 * Vec::kWidth) solve_columns<4, kWritten>(c, at);
  for (; at < c.n; at += Vec::kWidth) solve_columns<1, kWritten>(c, at);
}

void solve_chunk(const ChunkSolve& c) {
  c.written == nullptr ? solve_all_columns<false>(c) : solve_all_columns<true>(c);
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
        const Vec::F z = Vec::load_as<kType>(c.z[t], i, Vec::kWidth);
        x = Vec::mul(x, Vec::mul(z, sigmoid_of(z)));
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
                                        .find_decays = &find_chunk_decays,
                                        .sigmoid = &sigmoid_all,
                                        .softplus = &softplus_all,
                                        .spread_block = &spread_chunk_block,
                                        .meet_in_block = &meet_in_chunk_block,
                                        .weigh = &weigh_chunk,
                                        .solve = &solve_chunk,
                                        .scale_rows = &scale_chunk_rows,
                                        .finish = &finish_chunk};

}  // namespace
}  // namespace attnops::cpu
