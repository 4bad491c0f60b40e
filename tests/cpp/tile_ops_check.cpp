// Every table of cpu/tile_ops.h that this processor can run (AMX by its software model when compiled so) against
// plain loops in double. Prints one line per table; a failure says what and exits with 1. See test_tile_ops.py.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "cpu/convert.h"
#include "cpu/isa.h"
#include "cpu/tile_ops.h"

namespace {

using namespace attnops;
using namespace attnops::cpu;

std::mt19937 generator(7);

float uniform(float low, float high) { return std::uniform_real_distribution<float>(low, high)(generator); }

[[noreturn]] void fail(const TileOps& ops, const char* what, double got, double expected) {
  std::printf("%s: %s: got %g, expected %g\n", ops.name, what, got, expected);
  std::exit(1);
}

void expect_close(const TileOps& ops, const char* what, double got, double expected, double tolerance) {
  if (!(std::fabs(got - expected) <= tolerance)) fail(ops, what, got, expected);
}

// A buffer on a 64-byte boundary, filled with NaN, so that cells nobody wrote are noticed.
struct Buffer {
  explicit Buffer(size_t bytes) : storage(bytes + 64, 0xFF) {}
  void* data() { return storage.data() + (64 - reinterpret_cast<uintptr_t>(storage.data()) % 64) % 64; }
  float* floats() { return static_cast<float*>(data()); }
  std::vector<uint8_t> storage;
};

float element(const TileOps& ops, const void* data, int64_t i) {
  if (ops.element_size == 4) return static_cast<const float*>(data)[i];
  return to_float(static_cast<const BFloat16*>(data)[i]);
}

// Rows of random values of one dtype, with a gap between them, and what they are worth.
struct Rows {
  Rows(DType dtype, int n, int k) : storage(static_cast<size_t>(n) * (k + 3) * 4, 0xFF), values(n * k) {
    const int size = size_of(dtype);
    for (int i = 0; i < n; ++i) {
      uint8_t* row = storage.data() + static_cast<size_t>(i) * (k + 3) * size;
      pointers.push_back(row);
      for (int d = 0; d < k; ++d) values[i * k + d] = put(dtype, row + d * size);
    }
  }
  static float put(DType dtype, void* cell) {
    const float x = uniform(-1.f, 1.f);
    if (dtype == DType::kFloat32) return *static_cast<float*>(cell) = x;
    if (dtype == DType::kFloat16) return to_float(*static_cast<Float16*>(cell) = from_float<Float16>(x));
    if (dtype == DType::kBFloat16) return to_float(*static_cast<BFloat16*>(cell) = from_float<BFloat16>(x));
    auto* fp8 = static_cast<Float8E4M3*>(cell);  // every number, the subnormals too
    do {
      fp8->bits = static_cast<uint8_t>(generator());
    } while ((fp8->bits & 0x7F) == 0x7F);
    return to_float(*fp8);
  }
  void drop(int i, int k) {
    pointers[i] = nullptr;
    for (int d = 0; d < k; ++d) values[i * k + d] = 0.f;
  }
  std::vector<uint8_t> storage;
  std::vector<const void*> pointers;
  std::vector<float> values;
};

// c = a b with b packed from rows as keys (b^T) or as values, plain and accumulated on a prefix of k.
void check_products(const TileOps& ops, DType dtype, DType kv_dtype, int m, int n, int d) {
  const int padded = static_cast<int>(round_up_to(d, ops.k_multiple)), wide = static_cast<int>(round_up_to(d, kPanel));
  const int rows_padded = static_cast<int>(round_up_to(m, kRowMultiple));
  Rows q(dtype, m, d), kv(kv_dtype, n, d);
  if (ops.element_size == 2 && kv_dtype == DType::kFloat32) {
    for (float& x : kv.values) x = to_float(from_float<BFloat16>(x));
  }
  kv.drop(n / 2, d);
  Buffer a(static_cast<size_t>(rows_padded) * padded * ops.element_size);
  Buffer panels(static_cast<size_t>(n) * (padded + wide) * ops.element_size);
  Buffer c(static_cast<size_t>(rows_padded) * n * 4), o(static_cast<size_t>(rows_padded) * wide * 4);
  const float scale = 0.5f;
  double peak = 1;
  for (const float x : kv.values) peak = std::fmax(peak, std::fabs(x));
  const double tolerance = 1e-6 * peak * (d + n);

  const TileScope scope(ops);
  ops.load_rows(a.data(), padded, q.pointers.data(), m, d, padded, dtype, scale);
  ops.pack_keys(panels.data(), kv.pointers.data(), n, d, padded, kv_dtype);
  ops.gemm(c.floats(), n, a.data(), padded, panels.data(), padded, m, n, padded, false);
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      double sum = 0;
      for (int x = 0; x < d; ++x) sum += double(q.values[i * d + x]) * scale * kv.values[j * d + x];
      expect_close(ops, "scores", c.floats()[i * n + j], sum, tolerance);
    }
  }

  RowsAhead ahead(kv.pointers.data(), n / 2, d);  // of any bytes, and fewer than there are steps
  Buffer asked(static_cast<size_t>(rows_padded) * n * 4);
  ops.gemm_ahead(asked.floats(), n, a.data(), padded, panels.data(), padded, m, n, padded, ahead);
  for (int i = 0; i < m * n; ++i) expect_close(ops, "scores, asking", asked.floats()[i], c.floats()[i], 0);

  Buffer p(static_cast<size_t>(rows_padded) * n * ops.element_size);
  Rows weights(DType::kBFloat16, m, n);  // exact in both compute types
  ops.load_rows(p.data(), n, weights.pointers.data(), m, n, n, DType::kBFloat16, 1.f);
  ops.pack_values(panels.data(), kv.pointers.data(), n, d, wide, kv_dtype);
  ops.gemm(o.floats(), wide, p.data(), n, panels.data(), n, m, wide, n, false);
  ops.gemm(o.floats(), wide, p.data(), n, panels.data(), n, m, wide, kKeyMultiple, true);
  for (int i = 0; i < m; ++i) {
    for (int x = 0; x < wide; ++x) {
      double sum = 0;
      for (int j = 0; j < n && x < d; ++j) {
        sum += double(weights.values[i * n + j]) * kv.values[j * d + x] * (j < kKeyMultiple ? 2 : 1);
      }
      expect_close(ops, "values", o.floats()[i * wide + x], sum, tolerance);
    }
  }
  if (ops.gemm_rows == nullptr) return;

  // The same by rows that lie apart, added to what there is.
  const int columns = static_cast<int>(round_up_to(d, kKeyMultiple));
  Buffer loaded(static_cast<size_t>(n) * columns * ops.element_size);
  Buffer sums(static_cast<size_t>(rows_padded) * columns * 4);
  ops.load_rows(loaded.data(), columns, kv.pointers.data(), n, d, columns, kv_dtype, 1.f);
  std::vector<const void*> rows(n);
  for (int j = 0; j < n; ++j) {
    rows[j] = static_cast<const uint8_t*>(loaded.data()) + static_cast<size_t>(j) * columns * ops.element_size;
  }
  for (int i = 0; i < rows_padded * columns; ++i) sums.floats()[i] = 0.f;
  ops.gemm_rows(sums.floats(), columns, p.data(), n, rows.data(), m, columns, n, ahead);
  ops.gemm_rows(sums.floats(), columns, p.data(), n, rows.data(), m, columns, kKeyMultiple, ahead);
  for (int i = 0; i < m; ++i) {
    for (int x = 0; x < d; ++x) {
      expect_close(ops, "values by rows", sums.floats()[i * columns + x], o.floats()[i * wide + x], tolerance);
    }
  }
}

// Several tiles of online softmax with masks, a row that sees nothing and one that sees nothing at first.
void check_softmax(const TileOps& ops, float logit_cap, float spread) {
  constexpr int kRows = 7, kTiles = 5, kColumns = 96, kOut = 32, kBits = 2;
  const double tolerance = ops.element_size == 4 ? 3e-6 : 5e-3;
  const float scale = 0.3f;
  Buffer scores(kRows * kColumns * 4), probs(kRows * kColumns * ops.element_size), out(kRows * kOut * 4);
  std::vector<float> row_max(kRows, -INFINITY), row_sum(kRows * kSumLanes, 0.f);
  std::fill_n(out.floats(), kRows * kOut, 0.f);
  std::vector<double> sum(kRows, 0), weighted(kRows, 0);
  for (int tile = 0; tile < kTiles; ++tile) {
    std::vector<uint64_t> bits(kRows * kBits, 0);
    std::vector<double> exact(kRows * kColumns);
    const bool masked =
        tile != 1 || logit_cap > 0;  // tile 1 has no mask, but -inf scores, which must count for nothing
    for (int i = 0; i < kRows * kColumns; ++i) {
      const int r = i / kColumns, j = i % kColumns;
      const bool visible = !masked || (r == 0 ? false : r == 1 ? tile >= 2 : generator() % 3 != 0);
      float s = uniform(-spread, spread) * (1 + tile);
      double x = logit_cap > 0 ? logit_cap * std::tanh(double(s) * scale / logit_cap) : double(s) * scale;
      if (masked && visible) bits[r * kBits + j / 64] |= uint64_t{1} << (j % 64);
      if (masked && !visible) s = NAN;
      if (!masked && r < 2) s = x = -INFINITY;
      scores.floats()[i] = s;
      exact[i] = visible ? std::exp(x) : 0.;
    }
    ops.softmax({.scores = scores.floats(),
                 .ld_scores = kColumns,
                 .probs = probs.data(),
                 .ld_probs = kColumns,
                 .m = kRows,
                 .n = kColumns,
                 .visible = masked ? bits.data() : nullptr,
                 .ld_visible = kBits,
                 .scale = scale,
                 .logit_cap = logit_cap,
                 .row_max = row_max.data(),
                 .row_sum = row_sum.data(),
                 .out = out.floats(),
                 .ld_out = kOut,
                 .n_out = kOut});
    for (int r = 0; r < kRows; ++r) {  // out[r][.] accumulates sum_j p_j * (j % 5), as a gemm would
      double step = 0;
      for (int j = 0; j < kColumns; ++j) {
        step += element(ops, probs.data(), r * kColumns + j) * (j % 5);
        sum[r] += exact[r * kColumns + j];
        weighted[r] += exact[r * kColumns + j] * (j % 5);
      }
      for (int x = 0; x < kOut; ++x) out.floats()[r * kOut + x] += static_cast<float>(step);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    double lanes = 0;
    for (int i = 0; i < kSumLanes; ++i) lanes += row_sum[r * kSumLanes + i];
    if (sum[r] == 0) {
      if (lanes != 0 || row_max[r] != -INFINITY) fail(ops, "row without visible keys", lanes, 0);
      continue;
    }
    expect_close(ops, "lse", row_max[r] * 0.6931471805599453 + std::log(lanes), std::log(sum[r]), 1e-5);
    expect_close(ops, "output", out.floats()[r * kOut + 5] / lanes, weighted[r] / sum[r], 4 * tolerance);
  }
}

void check_store(const TileOps& ops, DType dtype, int n) {
  std::vector<float> acc = {};
  for (int i = 0; i < 2 * n; ++i) acc.push_back(i < n ? uniform(-300.f, 300.f) : NAN);
  std::vector<uint8_t> storage(2 * (n + 1) * 4, 0xAB);
  const int size = size_of(dtype);
  void* rows[] = {storage.data(), storage.data() + (n + 1) * size};
  const float factors[] = {0.25f, 0.f};
  ops.store_rows(rows, acc.data(), n, factors, 2, n, dtype);
  for (int i = 0; i < 2 * n; ++i) {
    const uint8_t* cell = static_cast<uint8_t*>(rows[i / n]) + i % n * size;
    const float expected = i < n ? acc[i] * 0.25f : 0.f;
    if (dtype == DType::kFloat32) expect_close(ops, "store", *reinterpret_cast<const float*>(cell), expected, 0);
    if (dtype == DType::kFloat16) {
      expect_close(ops, "store", to_float(*reinterpret_cast<const Float16*>(cell)),
                   to_float(from_float<Float16>(expected)), 0);
    }
    if (dtype == DType::kBFloat16) {
      expect_close(ops, "store", to_float(*reinterpret_cast<const BFloat16*>(cell)),
                   to_float(from_float<BFloat16>(expected)), 0);
    }
  }
  if (storage[n * size] != 0xAB) fail(ops, "store beyond the row", storage[n * size], 0xAB);
}

void check_transpose(const TileOps& ops) {
  constexpr int kRows = 48, kColumns = 32, kGap = 16;
  Buffer src(kRows * (kColumns + kGap) * sizeof(float)), dst(kColumns * (kRows + kGap) * sizeof(float));
  for (int i = 0; i < kRows * kColumns; ++i) src.floats()[i / kColumns * (kColumns + kGap) + i % kColumns] = i;
  ops.transpose(dst.floats(), kRows + kGap, src.floats(), kColumns + kGap, kRows, kColumns);
  for (int i = 0; i < kRows * kColumns; ++i) {
    expect_close(ops, "transpose", dst.floats()[i % kColumns * (kRows + kGap) + i / kColumns], i, 0);
  }
  if (!std::isnan(dst.floats()[kRows])) fail(ops, "transpose beyond the row", dst.floats()[kRows], NAN);
}

// Both parts together have twice the digits of one.
void check_split(const TileOps& ops) {
  constexpr int kRows = 3, kColumns = 64;
  if ((ops.split == nullptr) != (ops.element_size == 4)) fail(ops, "split of bf16 alone", ops.element_size, 2);
  if (ops.split == nullptr) return;
  Buffer src(kRows * kColumns * 4), factors(kColumns * 4), high(kRows * kColumns * 2), rest(kRows * kColumns * 2);
  for (int i = 0; i < kRows * kColumns; ++i) src.floats()[i] = uniform(-1.f, 1.f);
  for (int i = 0; i < kColumns; ++i) factors.floats()[i] = uniform(0.f, 4.f);
  for (const float* by : {static_cast<const float*>(nullptr), static_cast<const float*>(factors.floats())}) {
    ops.split(high.data(), rest.data(), src.floats(), by, kRows, kColumns);
    for (int i = 0; i < kRows * kColumns; ++i) {
      const float x = src.floats()[i] * (by == nullptr ? 1.f : by[i % kColumns]), h = element(ops, high.data(), i);
      expect_close(ops, "split, high", h, to_float(from_float<BFloat16>(x)), 0);
      expect_close(ops, "split, rest", element(ops, rest.data(), i), to_float(from_float<BFloat16>(x - h)), 0);
    }
  }
}

void check(const TileOps& ops, DType dtype) {
  std::vector<DType> kv_dtypes = {dtype, DType::kFloat8E4M3};
  if (ops.element_size == 2) kv_dtypes.push_back(DType::kFloat32);
  for (const DType kv_dtype : kv_dtypes) {
    for (const int m : {1, 5, 16, 23, 48}) {
      for (const int n : {32, 96}) {
        for (const int d : {32, 40, 80, 128}) check_products(ops, dtype, kv_dtype, m, n, d);
      }
    }
    check_products(ops, dtype, kv_dtype, 64, 64, 576);
  }
  for (const float cap : {0.f, 5.f}) {
    for (const float spread : {1.f, 20.f}) check_softmax(ops, cap, spread);
  }
  for (const int n : {8, 32, 40, 128}) check_store(ops, dtype, n);
  check_transpose(ops);
  check_split(ops);
  std::printf("%s %s ok\n", ops.name, name_of(dtype));
}

}  // namespace

int main() {
  for (const Isa isa : {Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx}) {
#if defined(ATTNOPS_EMULATE_AMX)
    const bool model = isa == Isa::kAmx && detected_isa() >= Isa::kAvx512Bf16;
#else
    const bool model = false;
#endif
    if (isa > detected_isa() && !model) continue;
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) check(*tile_ops(isa, dtype), dtype);
  }
}
