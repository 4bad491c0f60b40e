// The kernels of csrc/fmha/cuda on the model of a CTA, against plain loops: random batches of ragged and paged keys.
// Arguments: the first seed, and how many.
// clang-format off: the model's own headers come before the kernels
#include "device/sm80/mma.cuh"
#include "warps.h"
// clang-format on
#define __noinline__
#include <cuda_fp8.h>

#include <cstdio>
#include <random>

inline int __shfl_sync(unsigned, int x, int lane) { return cuda_model::Lanes<int>(x)[lane]; }
inline int64_t __shfl_sync(unsigned, int64_t x, int lane) { return cuda_model::Lanes<int64_t>(x)[lane]; }
inline bool __any_sync(unsigned, bool own) { return __ballot_sync(~0u, own) != 0; }
inline int __float_as_int(float x) { return static_cast<int>(__float_as_uint(x)); }
inline void __threadfence() {}
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
inline int atomicAdd(int* to, int value) {
  const int before = *to;
  *to += value;
  return before;
}
#include "fmha/cuda/kernel.cuh"

namespace attnops::fmha {
namespace {

using T = __nv_bfloat16;

template <class Tr, Source kSource, int kStages>
void run(const Params& p, const Schedule& s, const Rows& rows) {
  if (SharedLayout<Tr>::bytes(kStages, rows.keys == Copy::kRawPieces) > static_cast<int>(sizeof(memory))) std::abort();
  const auto fresh = [] {  // what shared memory holds is anything
    if (threadIdx.x == 0) std::memset(memory, 0xff, sizeof(memory)), pending_copies.clear();
    __syncthreads();
  };
  if (s.max_pieces == 0) {
    cuda_model::run_grid(s.num_works, Tr::kThreads,
                         [&] { fresh(), fmha_mma_kernel<Tr, kSource, kStages>(p, s, rows); });
  } else {
    cuda_model::run_grid(1, Tr::kThreads, [&] { fresh(), fmha_mma_cut_kernel<Tr, kSource, kStages>(p, s, rows); });
  }
}

struct Problem {
  std::vector<int> q_lens, k_lens;
  int group, kv_heads, d, dv, page;
  bool causal, sinks, cut, unaligned, fp8, tree;
  int left, right, tile_q, stages;
  float cap;
};

template <class Tr>
double check(int seed) {
  std::mt19937 g(seed);
  const auto pick = [&](std::vector<int> of) { return of[g() % of.size()]; };
  Problem x;
  const int batch = pick({1, 2, 3});
  x.group = pick({1, 2, 3, 4, 5, 8});
  x.kv_heads = pick({1, 2});
  x.d = Tr::kHeadDimQk - pick({0, 0, 0, 8, 16}), x.dv = Tr::kHeadDimV - pick({0, 0, 8, 16});
  if (Tr::kHeadDimV == 256 && g() % 3 == 0) x.dv = 192, x.d = 192;
  x.page = pick({0, 0, 64, 128, 16, 1, 24});
  x.causal = g() % 3 != 0, x.sinks = g() % 3 == 0;
  x.left = g() % 3 == 0 ? pick({0, 5, 64, 100}) : -1, x.right = g() % 5 == 0 ? pick({0, 3, 40}) : -1;
  x.cap = g() % 5 == 0 ? 2.f : 0.f;
  x.cut = g() % 3 == 0, x.unaligned = g() % 8 == 0, x.fp8 = !x.unaligned && g() % 6 == 0;
  x.tree = x.causal && g() % 5 == 0, x.stages = pick({1, 2, 2});
  x.tile_q = pick({Tr::kRows, Tr::kRows / 2, 16, 40});
  for (int b = 0; b < batch; ++b) {
    x.q_lens.push_back(pick({0, 1, 7, 33, 64, 90, 130}));
    x.k_lens.push_back(x.q_lens.back() + pick({0, 0, 1, 60, 64, 200, 300}));
    if (!x.causal && g() % 2) x.k_lens.back() = pick({0, 1, 64, 65, 150});
  }
  const int heads = x.group * x.kv_heads, page = x.page;
  Params p{};
  p.batch_size = batch, p.num_q_heads = heads, p.num_kv_heads = x.kv_heads, p.head_dim_qk = x.d, p.head_dim_v = x.dv;
  std::vector<int> cu_q{0}, cu_k{0}, cells;
  int pages = 0;
  for (int b = 0; b < batch; ++b) {
    cu_q.push_back(cu_q.back() + x.q_lens[b]), cu_k.push_back(cu_k.back() + x.k_lens[b]);
    if (page) pages += (x.k_lens[b] + page - 1) / page;
  }
  const int padding = pick({0, 0, 3}), tokens = cu_q.back() + padding, most_pages = page ? 1100 / page + 1 : 1;
  const int key_rows = page ? (pages + 1) * page : std::max(cu_k.back(), 1), off = x.unaligned ? 1 : 0;
  std::vector<int> order_of_pages(pages + 1);
  for (int i = 0; i <= pages; ++i) order_of_pages[i] = i;
  std::shuffle(order_of_pages.begin(), order_of_pages.end(), g);
  cells.assign(batch * most_pages, -7);
  for (int b = 0, next = 0; b < batch && page; ++b) {
    for (int i = 0; i < (x.k_lens[b] + page - 1) / page; ++i) cells[b * most_pages + i] = order_of_pages[next++];
  }
  std::normal_distribution<float> normal;
  const auto fill = [&](std::vector<T>& v, int64_t n, float scale) {
    v.resize(n + 16);
    for (T& e : v) e = T(normal(g) * scale);
  };
  std::vector<T> q, k, v, out(int64_t{std::max(tokens, 1)} * heads * x.dv + 16, T(NAN));
  fill(q, int64_t{tokens} * heads * x.d, pick({1, 1, 4}));
  fill(k, int64_t{key_rows} * x.kv_heads * x.d, 1), fill(v, int64_t{key_rows} * x.kv_heads * x.dv, 1);
  // Keys that no request has hold NaN.
  std::vector<char> used(key_rows, page == 0);
  const auto key_row = [&](int b, int key) {
    return page ? cells[b * most_pages + key / page] * page + key % page : cu_k[b] + key;
  };
  for (int b = 0; b < batch; ++b) {
    for (int key = 0; key < x.k_lens[b]; ++key) used[key_row(b, key)] = 1;
  }
  for (int r = 0; r < key_rows; ++r) {
    if (used[r]) continue;
    for (int i = 0; i < x.kv_heads * x.d; ++i) k[off + int64_t{r} * x.kv_heads * x.d + i] = T(NAN);
    for (int i = 0; i < x.kv_heads * x.dv; ++i) v[off + int64_t{r} * x.kv_heads * x.dv + i] = T(NAN);
  }
  std::vector<uint8_t> k8(k.size()), v8(v.size());
  if (x.fp8) {  // numbers that FP8 holds
    const auto round = [](std::vector<T>& wide, std::vector<uint8_t>& narrow) {
      for (size_t i = 0; i < wide.size(); ++i) {
        narrow[i] = __nv_cvt_float_to_fp8(float(wide[i]), __NV_NOSAT, __NV_E4M3);
        wide[i] = T(__half2float(__half(__nv_cvt_fp8_to_halfraw(narrow[i], __NV_E4M3))));
      }
    };
    round(k, k8), round(v, v8);
  }
  std::vector<float> lse(std::max(tokens, 1) * heads, NAN), sinks(heads);
  for (float& e : sinks) e = normal(g);
  p.num_q_tokens = tokens, p.num_k_tokens = key_rows;
  p.q = q.data() + off, p.k = x.fp8 ? static_cast<void*>(k8.data()) : k.data() + off,
  p.v = x.fp8 ? static_cast<void*>(v8.data()) : v.data() + off, p.out = out.data();
  p.q_stride_head = x.d, p.q_stride_token = heads * x.d, p.out_stride_head = x.dv, p.out_stride_token = heads * x.dv;
  p.k_stride_head = x.d, p.k_stride_token = x.kv_heads * x.d, p.v_stride_head = x.dv,
  p.v_stride_token = x.kv_heads * x.dv;
  p.lse = g() % 4 ? lse.data() : nullptr;
  p.paged = page != 0;
  if (page) {
    p.k_stride_page = page * p.k_stride_token, p.v_stride_page = page * p.v_stride_token;
    p.page_table.cells = cells.data(), p.page_table.stride_request = most_pages, p.page_table.max_pages = most_pages;
    p.page_table.num_pages = pages + 1, p.page_table.page_size = page;
    p.cache_seqlens = x.k_lens.data();
  } else {
    p.cu_seqlens_k = cu_k.data();
  }
  p.cu_seqlens_q = cu_q.data(), p.tile_q = x.tile_q;
  std::vector<int> order;
  std::vector<int4> pieces(1);
  for (int b = 0; b < batch; ++b) {
    const int tiles = (x.q_lens[b] + x.tile_q - 1) / x.tile_q;
    for (int t = tiles - 1; t >= 0; --t) order.push_back(b), order.push_back(t);
  }
  p.num_tiles = static_cast<int>(order.size()) / 2 + 1;
  order.push_back(-1), order.push_back(-1);
  p.tile_order = order.data();
  p.softmax_scale = 1.f / std::sqrt(static_cast<float>(x.d)), p.causal = x.causal, p.window_left = x.left;
  p.window_right = x.right, p.logit_cap = x.cap, p.sinks = x.sinks ? sinks.data() : nullptr;
  p.dtype = DType::kBFloat16, p.kv_dtype = x.fp8 ? DType::kFloat8E4M3 : DType::kBFloat16;
  // A draft token sees itself and some before it.
  constexpr int kMaskBytes = 17;
  std::vector<uint8_t> tree(tokens * kMaskBytes + 1);
  const auto bit = [&](int token, int draft) -> int { return tree[token * kMaskBytes + draft / 8] >> draft % 8 & 1; };
  for (int b = 0; b < batch && x.tree; ++b) {
    for (int i = 0; i < x.q_lens[b]; ++i) {
      for (int j = 0; j <= i; ++j) {
        if (j == i || g() % 2) tree[(cu_q[b] + i) * kMaskBytes + j / 8] |= 1 << j % 8;
      }
    }
  }
  if (x.tree)
    p.tree_mask = tree.data(), p.tree_mask_stride_token = p.tree_mask_bytes = kMaskBytes, x.left = p.window_left = -1;
  std::vector<int> semaphores(4, 0);
  p.semaphores = semaphores.data();

  const int pack = sm90::heads_per_tile(x.group, p.tile_q, Tr::kRows);
  Schedule s = sm90::schedule_of(p, Tr::kRows, pack);
  std::vector<float> partial;
  if (x.cut && !off) {  // every tile in some pieces
    for (int i = 0; i + 1 < p.num_tiles; ++i) {
      const int n = pick({2, 3});
      for (int j = 0; j < n; ++j) pieces.push_back({order[2 * i], order[2 * i + 1], j, n});
    }
    s.max_pieces = p.max_pieces = static_cast<int>(pieces.size()) - 1;
    pieces[0] = {s.max_pieces, -1, 0, 0};
    partial.assign(int64_t{s.max_pieces} * s.works_per_tile * Tr::kRows * (x.dv + 1) + 4, NAN);
    p.partial = partial.data(), p.partial_size = partial.size(), p.pieces = &pieces[0].x;
    s.num_works += s.max_pieces * s.works_per_tile;
    if (s.max_pieces == 0) return 0;
  }
  Rows rows{};
  const auto aligned = [](const void* a, int64_t b, int64_t c, int64_t d) {
    return (reinterpret_cast<uintptr_t>(a) / 2 | b | c | d) % 8 == 0;
  };
  const auto copy = [](bool yes) { return yes ? Copy::kPieces : Copy::kElements; };
  rows.queries = copy(aligned(p.q, p.q_stride_token, p.q_stride_head, 0));
  rows.out = copy(aligned(p.out, p.out_stride_token, p.out_stride_head, 0));
  rows.keys = copy(aligned(p.k, p.k_stride_page, p.k_stride_token, p.k_stride_head) &&
                   aligned(p.v, p.v_stride_page, p.v_stride_token, p.v_stride_head));
  rows.page_size = page, rows.pages = page ? pages + 1 : 1;
  const int size = x.fp8 ? 1 : 2;
  if (x.fp8) rows.keys = Copy::kRawPieces;
  rows.k = {size * p.k_stride_page, size * p.k_stride_token, size * p.k_stride_head};
  rows.v = {size * p.v_stride_page, size * p.v_stride_token, size * p.v_stride_head};
  const auto units = [](const Strides& s) {
    return Units{static_cast<uint32_t>(s.page / 16), static_cast<uint32_t>(s.token / 16),
                 static_cast<uint32_t>(s.head / 16)};
  };
  rows.k_units = units(rows.k), rows.v_units = units(rows.v);
  const int stages = rows.keys == Copy::kPieces ? std::min(x.stages, Tr::kMostStages) : 1;
  std::printf(
      "seed %d d %d,%d group %d page %d causal %d window %d,%d cap %g cut %d unaligned %d fp8 %d tree %d stages %d "
      "tile_q %d:",
      seed, x.d, x.dv, x.group, page, x.causal, x.left, x.right, x.cap, s.max_pieces, off, x.fp8, x.tree, stages,
      x.tile_q);
  for (int b = 0; b < batch; ++b) std::printf(" %d on %d", x.q_lens[b], x.k_lens[b]);
  std::fflush(stdout);
  const bool in_row = x.tree ? false : !page || page % Tr::kKeys == 0;
  if (rows.keys != Copy::kPieces) {
    run<Tr, Source::kAny, 1>(p, s, rows);
  } else if (stages == 2) {
    (in_row ? run<Tr, Source::kInRow, Tr::kMostStages> : run<Tr, Source::kGathered, Tr::kMostStages>)(p, s, rows);
  } else {
    (in_row ? run<Tr, Source::kInRow, 1> : run<Tr, Source::kGathered, 1>)(p, s, rows);
  }

  double worst = 0;
  for (int b = 0; b < batch; ++b) {
    for (int i = 0; i < x.q_lens[b]; ++i) {
      for (int h = 0; h < heads; ++h) {
        const int token = cu_q[b] + i, position = x.k_lens[b] - x.q_lens[b] + i, kv = h / x.group;
        std::vector<double> scores, result(x.dv, 0.);
        std::vector<int> keys;
        double top = x.sinks ? sinks[h] : -INFINITY, total = 0;
        for (int key = 0; key < x.k_lens[b]; ++key) {
          if (x.causal && key > position) continue;
          if (x.tree && key >= x.k_lens[b] - x.q_lens[b] && !bit(token, key - x.k_lens[b] + x.q_lens[b])) continue;
          if (x.left >= 0 && key < position - x.left) continue;
          if (x.right >= 0 && key > position + x.right) continue;
          double score = 0;
          for (int e = 0; e < x.d; ++e) {
            score += double(float(q[off + (int64_t{token} * heads + h) * x.d + e])) *
                     float(k[off + (int64_t{key_row(b, key)} * x.kv_heads + kv) * x.d + e]);
          }
          score *= p.softmax_scale;
          if (x.cap > 0) score = x.cap * std::tanh(score / x.cap);
          scores.push_back(score), keys.push_back(key), top = std::max(top, score);
        }
        double plain = 0;
        for (size_t n = 0; n < keys.size(); ++n) {
          const double weight = std::exp(scores[n] - top);
          total += weight, plain += weight;
          for (int e = 0; e < x.dv; ++e) {
            result[e] += weight * float(v[off + (int64_t{key_row(b, keys[n])} * x.kv_heads + kv) * x.dv + e]);
          }
        }
        if (x.sinks) total += std::exp(sinks[h] - top);
        for (int e = 0; e < x.dv; ++e) {
          const double expected = keys.empty() ? 0. : result[e] / total;
          const double difference = std::abs(expected - float(out[(int64_t{token} * heads + h) * x.dv + e]));
          worst = std::max(worst, difference == difference ? difference : 1e9);
        }
        if (p.lse != nullptr) {
          const double expected = keys.empty() ? -INFINITY : top + std::log(plain), own = lse[token * heads + h];
          if (!(own == expected || std::abs(own - expected) < 1e-3)) worst = std::max(worst, 1e6);
        }
      }
    }
  }
  for (int i = cu_q.back() * heads * x.dv; i < tokens * heads * x.dv; ++i)
    worst = std::max(worst, float(out[i]) == 0.f ? 0. : 1e8);
  std::printf(" error %g\n", worst);
  if (!(worst < 0.03)) std::printf("WRONG\n"), std::exit(1);
  return worst;
}

}  // namespace
}  // namespace attnops::fmha

int main(int argc, char** argv) {
  using namespace attnops::fmha;
  const int first = std::atoi(argv[1]), count = std::atoi(argv[2]);
  for (int seed = first; seed < first + count; ++seed) {
    switch (argc > 3 ? std::atoi(argv[3]) : seed % 5) {
      case 0: check<Traits<__nv_bfloat16, 128, 128, 64, 2, 4>>(seed); break;
      case 1: check<Traits<__nv_bfloat16, 64, 64, 64, 2, 6>>(seed); break;
      case 2: check<Traits<__nv_bfloat16, 192, 128, 64, 2, 4>>(seed); break;
      case 3: check<Traits<__nv_bfloat16, 256, 256, 64, 1, 4>>(seed); break;
      default: check<Traits<__nv_bfloat16, 96, 96, 64, 2, 4>>(seed); break;
    }
  }
}
