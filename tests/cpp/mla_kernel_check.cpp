// mla_decode's tiled kernel, on every table of cpu/tile_ops.h that this processor can run (AMX by its software model
// when compiled so), against the plain reference, piece by piece. See test_mla_kernel.py.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "cpu/convert.h"
#include "cpu/isa.h"
#include "cpu/tile_ops.h"
#include "mla_decode/cpu/kernel.h"
#include "mla_decode/cpu/reference.h"

namespace {

using namespace attnops;
using namespace attnops::mla_decode;
using attnops::cpu::BFloat16;

constexpr int kHeads = 21, kSeqlenQ = 3, kPages = 8;

std::vector<BFloat16> random_values(size_t count, std::mt19937& generator) {
  std::normal_distribution<float> normal;
  std::vector<BFloat16> values(count);
  for (BFloat16& value : values) value = attnops::cpu::from_float<BFloat16>(normal(generator));
  return values;
}

// Rows of 656 bytes. The scales have all of float32's bits: bf16 cannot hold e4m3 times one.
std::vector<uint8_t> random_rows(size_t count, std::mt19937& generator) {
  constexpr int kScales = 4;
  std::uniform_int_distribution<int> magnitude(0, 0x7E), sign(0, 1);  // 0x7F is NaN
  std::uniform_real_distribution<float> scale(4e-3f, 8e-3f);
  std::vector<uint8_t> rows(count * kFp8RowBytes);
  for (size_t r = 0; r < count; ++r) {
    uint8_t* row = rows.data() + r * kFp8RowBytes;
    for (int i = 0; i < kHeadDimV; ++i) row[i] = static_cast<uint8_t>(magnitude(generator) | sign(generator) << 7);
    float scales[kScales];
    for (float& value : scales) value = scale(generator);
    std::memcpy(row + kHeadDimV, scales, sizeof(scales));
    const std::vector<BFloat16> rope = random_values(kHeadDimRope, generator);
    std::memcpy(row + kHeadDimV + sizeof(scales), rope.data(), rope.size() * sizeof(BFloat16));
  }
  return rows;
}

struct Problem {
  Problem(int page_size, int length, bool bytes) : cache_seqlen(length) {
    std::mt19937 generator(3);
    q = random_values(kSeqlenQ * kHeads * kHeadDimQk, generator);
    const size_t tokens = static_cast<size_t>(kPages) * page_size;
    if (bytes) {
      rows = random_rows(tokens, generator);
    } else {
      pages = random_values(tokens * kHeadDimQk, generator);
    }
    out.resize(kSeqlenQ * kHeads * kHeadDimV);
    lse.resize(kSeqlenQ * kHeads);
    for (int i = 0; i < kPages; ++i) table.push_back(kPages - 1 - i);
    p.batch_size = 1;
    p.seqlen_q = kSeqlenQ;
    p.num_q_heads = kHeads;
    p.q = q.data();
    p.q_stride_token = kHeads * kHeadDimQk;
    p.q_stride_head = kHeadDimQk;
    p.kv_pages = bytes ? static_cast<const void*>(rows.data()) : pages.data();
    p.kv_stride_token = bytes ? kFp8RowBytes : kHeadDimQk;
    p.kv_stride_page = page_size * p.kv_stride_token;
    p.page_table.cells = table.data();
    p.page_table.num_pages = kPages;
    p.page_table.page_size = page_size;
    p.page_table.max_pages = static_cast<int64_t>(table.size());
    p.cache_seqlens = &cache_seqlen;
    p.out = out.data();
    p.out_stride_token = kHeads * kHeadDimV;
    p.out_stride_head = kHeadDimV;
    p.lse = lse.data();
    p.softmax_scale = 0.07f;
    p.causal = true;
    p.window_left = -1;
    p.dtype = DType::kBFloat16;
    p.kv_dtype = bytes ? DType::kUInt8 : DType::kBFloat16;
  }

  Params p{};
  std::vector<BFloat16> q, pages, out;
  std::vector<uint8_t> rows;
  std::vector<float> lse;
  std::vector<int32_t> table;
  int32_t cache_seqlen;
};

void check(Isa isa, const attnops::cpu::TileOps& ops, int page_size, int length, bool bytes) {
  Problem actual(page_size, length, bytes), expected(page_size, length, bytes);
  const int rows = kSeqlenQ * kHeads, tiles = (length + kPlanTileTokens - 1) / kPlanTileTokens;
  const mla_decode::cpu::Piece piece{
      .request = 0, .first_row = 0, .num_rows = rows, .first_tile = 0, .num_tiles = tiles, .partial = -1};
  mla_decode::cpu::run_tiled(actual.p, piece, &ops);
  mla_decode::cpu::run_reference(expected.p, piece);
  double difference = 0, norm = 0, worst_lse = 0;
  for (size_t i = 0; i < actual.out.size(); ++i) {
    const double a = attnops::cpu::to_float(actual.out[i]), b = attnops::cpu::to_float(expected.out[i]);
    difference += (a - b) * (a - b);
    norm += b * b;
  }
  for (int i = 0; i < rows; ++i) worst_lse = std::fmax(worst_lse, std::fabs(actual.lse[i] - expected.lse[i]));
  const double error = std::sqrt(difference / norm);
  const bool good = error < 6e-3 && worst_lse < 1e-4;  // a NaN passes neither
  std::printf("%s page %d, %d keys%s: error %.2e, lse %.2e%s\n", name_of(isa), page_size, length,
              bytes ? " of 656 bytes" : "", error, worst_lse, good ? "" : " FAILED");
  if (!good) std::exit(1);
}

}  // namespace

int main() {
  static_assert(kSeqlenQ * kHeads <= kPlanRows, "one piece holds all rows");
  for (const Isa isa : {Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx}) {
#if defined(ATTNOPS_EMULATE_AMX)
    const bool model = isa == Isa::kAmx && attnops::cpu::detected_isa() >= Isa::kAvx512Bf16;
#else
    const bool model = false;
#endif
    if (isa > attnops::cpu::detected_isa() && !model) continue;
    for (const int page_size : {64, 32, 40}) {  // where rows lie as a matrix, and where they must be gathered
      for (const int length : {3, 128, 230}) {
        for (const bool bytes : {false, true}) {
          check(isa, *attnops::cpu::tile_ops(isa, DType::kBFloat16), page_size, length, bytes);
        }
      }
    }
  }
}
