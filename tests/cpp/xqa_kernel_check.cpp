// The decode's AMX row against the scalar reference, tile by tile, on the software model of AMX.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "cpu/isa.h"
#include "xqa_decode/cpu/instantiations.h"
#include "xqa_decode/cpu/reference.h"

using namespace attnops::xqa_decode::cpu;

namespace {

constexpr int kRowsAtMost = 33;

uint16_t bf16_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

struct Case {
  int rows, head_dim, tokens, step;  // elements from a token to the next; 0: shuffled
  bool masked;
};

// Two tiles in turn; the second has what the case says, the first is full.
std::vector<float> run(const TileKernel& kernel, const Case& c, const std::vector<uint16_t>& pool,
                       const std::vector<int>& places, const std::vector<uint16_t>& q, std::vector<float>& sums) {
  const int row_bytes = kernel.q_row_bytes(c.head_dim), stride = kernel.acc_stride(c.head_dim);
  struct alignas(64) Line {
    char bytes[64];
  };
  const auto lines = [](int64_t bytes) { return std::vector<Line>(bytes / 64 + 2); };
  auto packed = lines(int64_t{48} * row_bytes), acc = lines(int64_t{48} * stride * 4);
  auto scratch = lines(kernel.scratch_bytes(c.head_dim));
  char* packed_q = reinterpret_cast<char*>(packed.data());
  for (int r = 0; r < c.rows; ++r) kernel.pack_q(q.data() + r * c.head_dim, c.head_dim, packed_q + r * row_bytes);
  if (kernel.begin) kernel.begin();
  if (kernel.arrange_q) kernel.arrange_q(packed_q, c.rows, c.head_dim);
  std::vector<float> row_max(c.rows, -INFINITY), row_sum(c.rows, 0.f);
  const std::vector<uint16_t> zeros(c.head_dim, 0);
  std::vector<uint64_t> visible(c.rows);
  for (int r = 0; r < c.rows; ++r) visible[r] = 0x5555555555555555ull * (r % 3) | uint64_t{1} << r % c.tokens;
  for (int tile = 0; tile < 2; ++tile) {
    const int tokens = tile == 0 ? kTileTokens : c.tokens;
    const char *k[kTileTokens], *v[kTileTokens];
    for (int t = 0; t < kTileTokens; ++t) {
      const uint16_t* at = pool.data() + places[tile * kTileTokens + t];
      k[t] = reinterpret_cast<const char*>(t < tokens ? at : zeros.data());
      v[t] = reinterpret_cast<const char*>(t < tokens ? at + c.head_dim : zeros.data());
    }
    kernel.attend({.num_rows = c.rows,
                   .head_dim = c.head_dim,
                   .group = c.rows % 2 ? 4 : c.rows,  // of odd numbers of rows, several tokens
                   .num_tokens = tokens,
                   .k_rows = k,
                   .v_rows = v,
                   .visible = c.masked && tile == 1 ? visible.data() : nullptr,
                   .fetch_rows = nullptr,
                   .num_fetch = 0,
                   .fetch_bytes = 2 * c.head_dim,
                   .q = packed_q,
                   .acc = reinterpret_cast<float*>(acc.data()),
                   .row_max = row_max.data(),
                   .row_sum = row_sum.data(),
                   .scratch = reinterpret_cast<char*>(scratch.data()),
                   .score_scale = 0.2f,
                   .score_cap = 0.f});
  }
  if (kernel.end) kernel.end();
  std::vector<float> out(static_cast<size_t>(c.rows) * c.head_dim);
  for (int r = 0; r < c.rows; ++r) {
    kernel.store_partial(reinterpret_cast<float*>(acc.data()) + r * stride, c.head_dim, 1.f / row_sum[r],
                         out.data() + r * c.head_dim);
    sums.push_back(row_max[r] + std::log2(row_sum[r]));
  }
  return out;
}

bool check(const Case& c) {
  std::mt19937 random(c.rows * 1000 + c.head_dim + c.tokens);
  std::normal_distribution<float> normal;
  const int tokens = 2 * kTileTokens, step = c.step ? c.step : 2 * c.head_dim;
  std::vector<uint16_t> pool(static_cast<size_t>(tokens) * step), q(static_cast<size_t>(kRowsAtMost) * c.head_dim);
  for (auto& x : pool) x = bf16_of(normal(random));
  for (auto& x : q) x = bf16_of(normal(random));
  std::vector<int> places(tokens);
  for (int t = 0; t < tokens; ++t) places[t] = (c.step ? t : (t * 37 + 5) % tokens) * step;
  std::vector<float> sums, expected_sums;
  const auto out = run(amx_bfloat16, c, pool, places, q, sums);
  using attnops::cpu::BFloat16;
  const auto expected = run(reference::kKernel<BFloat16, BFloat16>, c, pool, places, q, expected_sums);
  double error = 0, norm = 0, worst = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    error += (out[i] - expected[i]) * (out[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  for (size_t i = 0; i < sums.size(); ++i) worst = std::fmax(worst, std::fabs(sums[i] - expected_sums[i]));
  const double relative = std::sqrt(error / norm);
  const bool good = relative < 4e-3 && worst < 1e-3;
  if (!good) {
    std::printf("%d rows of %d, %d tokens, step %d, masked %d: %g, %g\n", c.rows, c.head_dim, c.tokens, c.step,
                c.masked, relative, worst);
  }
  return good;
}

}  // namespace

int main() {
  if (attnops::cpu::detected_isa() < attnops::Isa::kAvx512Bf16) {
    std::puts("skipped: needs AVX-512-BF16");
    return 0;
  }
  int bad = 0, cases = 0;
  for (const int rows : {1, 2, 3, 4, 5, 8, 16, 17, 33}) {
    for (const int head_dim : {8, 40, 64, 72, 96, 128, 256}) {
      for (const int tokens : {1, 15, 16, 17, 32, 33, 48, 63, 64}) {
        for (const int step : {0, 2 * head_dim, 6 * head_dim}) {
          bad += !check({rows, head_dim, tokens, step, (rows + tokens) % 2 == 0});
          ++cases;
        }
      }
    }
  }
  std::printf("%d of %d cases differ\n", bad, cases);
  return bad != 0;
}
