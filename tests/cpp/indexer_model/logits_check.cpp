#include "model.h"
#include <vector_types.h>
#include <vector_functions.h>
#include <cuda_bf16.h>
#include "core/types.h"
#include "engine.h"
#include "sparse_indexer/sm90/launch.cuh"
using namespace attnops; using namespace attnops::sparse_indexer; 
static double unit() { return rand() / (RAND_MAX + 1.0); }
static int pick(std::initializer_list<int> l) { return l.begin()[rand() % l.size()]; }
int main(int argc, char** argv) {
  srand(atoi(argv[1])); const int cases = atoi(argv[2]); int bad = 0; extra_ = run_engine;
  for (int c = 0; c < cases; ++c) {
    const int heads = pick({1, 7, 8, 12, 16, 32, 33, 64, 64}), dim = pick({64, 128, 128}), ragged = rand() % 3 == 0;
    const int page = pick({1, 5, 8, 16, 24, 64, 64, 64, 100, 256, 512}); g_sms = pick({1, 2, 3});
    const int odd = rand() % 5 == 0;  // rows on 4 bytes
    const int S = ragged ? 1 : pick({1, 1, 2, 3, 4, 8, 11, 16}), B = 1 + rand() % 4, T = ragged ? 1 + rand() % 60 : S * B;
    const int most = pick({40, 300, 700}); std::vector<int> length(T), start(T); int64_t num_keys = 1 + rand() % most;
    for (int t = 0; t < T; ++t) { if (ragged) { start[t] = rand() % num_keys - (rand() % 9 == 0); length[t] = start[t] + rand() % (num_keys + 1) - 3; } else { length[t] = rand() % 6 == 0 ? -rand() % 3 : rand() % (most + 1); } }
    const int cells = most / page + 2; const int64_t pages = ragged ? 1 : B * cells + 1; const int stride_q = dim + (odd ? 4 : 16 * (rand() % 2));
    std::vector<uint8_t> qb(T * heads * stride_q + 64); for (auto& b : qb) b = rand() % 0x7f | (rand() & 128); 
    uint8_t* q = (uint8_t*)(((uintptr_t)qb.data() + 15) & ~uintptr_t{15}); if (odd) q += 4;
    std::vector<float> w(T * heads); for (auto& x : w) x = unit() * 2 - 1;
    const int64_t stride_page = int64_t(page) * (dim + 4) + 16 * (rand() % 2) + (odd ? 4 : 0) + ((16 - page * (dim + 4) % 16) % 16) * !odd * (rand() % 2);
    std::vector<uint8_t> pool(pages * stride_page + 64); uint8_t* P = (uint8_t*)(((uintptr_t)pool.data() + 15) & ~uintptr_t{15});
    for (auto& b : pool) b = rand() % 0x7f | (rand() & 128);
    for (int64_t i = 0; i < pages; ++i) for (int j = 0; j < page; ++j) { float s = unit() + .1f; memcpy(P + i * stride_page + page * dim + 4 * j, &s, 4); }
    std::vector<int> table(B * cells); { std::vector<int> o(pages); for (int i = 0; i < pages; ++i) o[i] = i; for (int i = pages - 1; i > 0; --i) std::swap(o[i], o[rand() % (i + 1)]); for (int i = 0; i < B * cells; ++i) table[i] = o[i % pages]; }
    if (rand() % 5 == 0) table[rand() % table.size()] = pick({-1, 1 << 30, (int)pages});
    const int stride_k = dim + (odd ? 4 : 0); std::vector<uint8_t> kb(num_keys * stride_k + 64); for (auto& b : kb) b = rand() % 0x7f | (rand() & 128); uint8_t* K = (uint8_t*)(((uintptr_t)kb.data() + 15) & ~uintptr_t{15});
    std::vector<float> ks(num_keys); for (auto& s : ks) s = unit() + .1f;
    LogitsParams p{}; const int64_t columns = (ragged ? num_keys : most) + rand() % 4; std::vector<float> out(T * columns, NAN);
    p.logits = out.data(); p.stride_row = p.columns = columns; p.q = q; p.num_rows = T; p.stride_token = int64_t(heads) * stride_q; p.stride_head = stride_q; p.num_heads = heads; p.dim = dim; p.weights = w.data(); p.stride_weights = heads; p.ragged = ragged;
    p.pages = {P, stride_page, pages, dim, page, (page & (page - 1)) ? -1 : __builtin_ctz(page)}; p.page_table = table.data(); p.stride_table = cells; p.max_pages = cells; p.cache_seqlens = length.data(); p.seqlen_q = S;
    p.k = K; p.num_keys = num_keys; p.stride_k = stride_k; p.k_scale = ks.data(); p.row_starts = start.data(); p.row_ends = length.data(); p.compressed = ragged && rand() % 2;
    if (getenv("V")) { printf("case %d heads %d dim %d ragged %d page %d T %d S %d odd %d box %d\n", c, heads, dim, ragged, page, T, S, odd, sparse_indexer::sm90::box_rows_of(p)); fflush(stdout); }
    heads <= 8 ? sparse_indexer::sm90::launch_heads<8>(p, 0) : heads <= 16 ? sparse_indexer::sm90::launch_heads<16>(p, 0) : heads <= 32 ? sparse_indexer::sm90::launch_heads<32>(p, 0) : sparse_indexer::sm90::launch_heads<64>(p, 0);
    std::vector<char> seen(T * columns); double err = 0, norm = 1e-30; bool wrong = false;
    for (int t = 0; t < T; ++t) { const KeyRange r = keys_of(p, t); for (int64_t k = r.begin; k < r.end; ++k) {
      const uint8_t* key = K + k * stride_k; float scale = ragged ? ks[k] : 0; if (!ragged) { int pg = table[t / S * cells + k / page]; key = nullptr; if (pg >= 0 && pg < pages) { key = P + pg * stride_page + k % page * dim; memcpy(&scale, P + pg * stride_page + page * dim + 4 * (k % page), 4); } }
      double sum = 0; if (key) for (int h = 0; h < heads; ++h) { double d = 0; for (int i = 0; i < dim; ++i) d += double(attnops::sm90::e4m3(q[t * p.stride_token + h * stride_q + i])) * attnops::sm90::e4m3(key[i]); sum += w[t * heads + h] * (d > 0 ? d : 0); }
      const int64_t at = t * columns + r.first_column + k - r.begin; seen[at] = 1; const double e = scale * sum - out[at]; if (!(e == e)) wrong = true; err += e * e; norm += scale * sum * scale * sum; } }
    for (size_t i = 0; i < seen.size(); ++i) if (!seen[i] && out[i] == out[i]) wrong = true;
    if (wrong || sqrt(err / norm) > 1e-4) { ++bad; printf("case %d WRONG %g %d: heads %d dim %d ragged %d page %d T %d S %d odd %d box %d\n", c, sqrt(err / norm), wrong, heads, dim, ragged, page, T, S, odd, sparse_indexer::sm90::box_rows_of(p)); fflush(stdout); }
  }
  printf("%d cases, %d wrong\n", cases, bad);
}
