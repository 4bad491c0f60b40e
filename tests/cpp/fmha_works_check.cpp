// csrc/fmha/sm90/work.cuh on a CPU: over all works of a plan, each row of queries meets the keys that it sees once, and
// two CTAs of a pair the same keys. Random batches; the argument says how many.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <utility>
#include <vector>

#define __device__
#define __host__
#define __forceinline__ inline
struct int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
inline float __fdividef(float a, float b) { return a / b; }
static struct {
  unsigned x = 0;
} blockIdx, threadIdx, gridDim;
#include "fmha/sm90/work.cuh"

namespace {

using namespace attnops;
using namespace attnops::fmha;
using namespace attnops::fmha::sm90;

constexpr int kKeys = 128;  // of a tile

#define EXPECT(condition)                                                \
  do {                                                                   \
    if (!(condition)) {                                                  \
      std::printf("seed %d, line %d: %s\n", seed, __LINE__, #condition); \
      std::exit(1);                                                      \
    }                                                                    \
  } while (false)

struct Batch {
  Params p{};
  std::vector<int> first_q{0}, first_k{0}, order;
  std::vector<int4> pieces{{0, kNeverCut, 0, 0}};
  Cuts cuts;
};

// What fmha_varlen and fmha_plan make of random lengths. Tiles of some rows are cut at a random limit. Pieces of a tile
// follow each other.
void draw(int seed, Batch& b, int& rows) {
  std::mt19937 generator(seed);
  const auto pick = [&](std::vector<int> of) { return of[generator() % of.size()]; };
  Params& p = b.p;
  p.batch_size = pick({1, 2, 3, 6});
  p.num_kv_heads = pick({1, 2, 8});
  p.num_q_heads = p.num_kv_heads * pick({1, 2, 4, 5, 7, 8, 16, 71});
  p.head_dim_qk = p.head_dim_v = pick({64, 128, 256});
  p.kv_dtype = p.dtype = DType::kBFloat16;
  p.tile_q = pick({1, 3, 7, 16, 32, 64, 128, 300});
  p.causal = pick({0, 1}) != 0;
  p.window_left = pick({-1, -1, 70});
  p.window_right = -1;
  rows = pick({128, 192});
  for (int i = 0; i < p.batch_size; ++i) {
    const int queries = pick({0, 1, 5, 17, 130, 400});
    b.first_q.push_back(b.first_q.back() + queries);
    b.first_k.push_back(b.first_k.back() + queries + pick({0, 3, 900, 30000}));
  }
  const VarlenGeometry geometry{p.batch_size, p.tile_q, p.window_left, p.causal};
  b.cuts.limit = pick({2, 4, 20, kNeverCut});
  b.pieces[0].z = pick({0, 0, 1, 2, 5});
  for (int request = p.batch_size - 1; request >= 0; --request) {
    const int queries = b.first_q[request + 1] - b.first_q[request], keys = b.first_k[request + 1] - b.first_k[request];
    for (int tile = ceil_div(queries, p.tile_q) - 1; tile >= 0; --tile) {
      const bool may_cut = static_cast<int>(b.order.size()) / 2 >= b.pieces[0].z;
      b.order.insert(b.order.end(), {request, tile});
      const int units = cost_units(varlen_tile_cost(geometry, queries, keys, tile));
      const int count = may_cut && units > b.cuts.limit ? pieces_of(units, b.cuts.limit) : 0;
      for (int piece = 0; piece < count; ++piece) b.pieces.push_back({request, tile, piece, count});
    }
  }
  b.order.insert(b.order.end(), {-1, -1});
  b.cuts.pieces = static_cast<int>(b.pieces.size()) - 1;
  if (b.cuts.pieces == 0) b.cuts.limit = kNeverCut;
  p.num_q_tokens = b.first_q.back();
  p.num_k_tokens = b.first_k.back();
  p.cu_seqlens_q = b.first_q.data();
  p.cu_seqlens_k = b.first_k.data();
  p.tile_order = b.order.data();
  p.num_tiles = static_cast<int>(b.order.size()) / 2;
  p.pieces = reinterpret_cast<const int*>(b.pieces.data());
  p.max_pieces = b.cuts.pieces;
}

Schedule schedule_of(const Batch& b, int rows) {
  const Params& p = b.p;
  Schedule s = sm90::schedule_of(p, rows, heads_per_tile(p.num_q_heads / p.num_kv_heads, p.tile_q, rows));
  s.max_pieces = b.cuts.pieces;
  s.num_works += s.max_pieces * s.works_per_tile;
  return s;
}

// The numbers of all works, as CTAs come to them that take a tile's chunks at once.
std::vector<int> in_turn(const Params& p, Schedule s, const Cuts& cuts) {
  s.turns = s.chunks;
  std::vector<int> found;
  for (int taken = 0; taken < s.num_works / s.turns; ++taken) {
    for (int turn = 0; turn < s.turns; ++turn) {
      Work w{};
      found.push_back(index_in_turn(s, taken, turn));
      if (!decode_work<kKeys>(p, s, cuts, found.back(), w) || ends_request(s, w)) break;
    }
  }
  return found;
}

void check(int seed) {
  Batch b;
  int rows;
  draw(seed, b, rows);
  const Params& p = b.p;
  const Schedule s = schedule_of(b, rows);
  const int group = p.num_q_heads / p.num_kv_heads;
  std::map<std::pair<int, int>, std::vector<std::pair<int, int>>> tiles;  // of a token and head
  const auto decode = [&](int index) {
    Work w{}, plain{};  // as all kernels have it, and those of plain calls alone
    const bool exists = decode_work<kKeys>(p, s, b.cuts, index, w);
    EXPECT((decode_work<kKeys, true>(p, s, b.cuts, index, plain)) == exists);
    EXPECT(std::memcmp(&w, &plain, sizeof(Work)) == 0);
    if (!exists) w.num_tokens = -1;
    return w;
  };
  bool ended = false;
  for (int index = 0; index < s.num_works; ++index) {
    const Work w = decode(index);
    EXPECT(!ended || w.num_tokens < 0);  // a CTA stops at the first one
    ended = w.num_tokens < 0;
    if (s.blocks_per_group % 2 == 0 && index % 2 == 0) {
      const Work other = decode(index + 1);
      EXPECT(other.num_tokens == w.num_tokens);
      EXPECT(w.num_tokens <= 0 ||
             (other.request == w.request && other.first_token == w.first_token && other.kv_head == w.kv_head &&
              other.tile_begin == w.tile_begin && other.tile_end == w.tile_end && other.q_head == w.q_head + s.pack));
    }
    for (int row = 0; row < rows && w.num_tokens > 0; ++row) {
      const auto [token, head, exists] = place_of_row(s, w, row);
      if (!exists) continue;
      EXPECT(token < w.num_tokens && head < p.num_q_heads && head / group == w.kv_head);
      tiles[{w.first_q_token + w.first_token + token, head}].push_back({w.tile_begin, w.tile_end});
    }
  }
  std::vector<int> taken = in_turn(p, s, b.cuts);
  std::sort(taken.begin(), taken.end());
  EXPECT(std::adjacent_find(taken.begin(), taken.end()) == taken.end());
  for (int index = 0; index < s.num_works; ++index) {  // nobody comes to what has no tokens, and is no piece
    const bool is_piece = index < b.cuts.pieces * s.works_per_tile;
    EXPECT((decode(index).num_tokens <= 0 && !is_piece) || std::binary_search(taken.begin(), taken.end(), index));
  }
  for (int request = 0; request < p.batch_size; ++request) {
    const int queries = b.first_q[request + 1] - b.first_q[request], keys = b.first_k[request + 1] - b.first_k[request];
    for (int token = 0; token < queries; ++token) {
      const int position = keys - queries + token, end = p.causal ? position + 1 : keys;
      const int begin = p.window_left < 0 ? 0 : std::max(position - p.window_left, 0);
      for (int head = 0; head < p.num_q_heads; ++head) {
        auto& of = tiles[{b.first_q[request] + token, head}];
        EXPECT(!of.empty());
        std::sort(of.begin(), of.end());
        for (size_t i = 1; i < of.size(); ++i) EXPECT(of[i].first == of[i - 1].second);
        EXPECT(end <= begin || (of.front().first * kKeys <= begin && of.back().second * kKeys >= end));
      }
    }
  }
}

}  // namespace

int main(int, char** arguments) {
  const int count = std::atoi(arguments[1]);
  for (int seed = 0; seed < count; ++seed) check(seed);
  std::printf("%d batches\n", count);
}
