// Cases of topk_select, in the kernels' own code: selection by clusters, of a row twice read, and of rows without more
// than k columns.
#include "model.h"
#include <vector_types.h>
#include <vector_functions.h>
#include <algorithm>
#include <numeric>
#include <cuda_bf16.h>
#include "sparse_indexer/cuda/topk_select.cuh"
using namespace attnops; using namespace attnops::sparse_indexer;
static double unit() { return rand() / (RAND_MAX + 1.0); }
static float draw(int kind, double edge) {
  const double g = sqrt(-2 * log(unit() + 1e-300)) * cos(6.2831853 * unit());
  return kind == 0 ? 1.f : kind == 1 ? float(rand() % 5) : kind == 2 ? float(g * 1e-3 + 7) : kind == 3 ? (rand() % 40 ? float(g) : (rand() & 1 ? INFINITY : -INFINITY)) : kind == 4 ? (rand() % 3 ? float(g) : NAN) : kind == 5 ? (rand() & 1 ? 0.f : -0.f) : kind == 6 ? float(exp(12 * g)) : float(g * edge);
}
enum Way { kClusters, kTwice, kAll };
int main(int argc, char** argv) {
  srand(atoi(argv[1])); int bad = 0; const int cases = atoi(argv[2]);
  for (int c = 0; c < cases; ++c) {
    const Way way = Way(rand() % 3); const int cluster = way == kClusters ? 1 << rand() % 4 : 1; const int most = cluster * kHeldKeys;
    const int k = rand() % 4 ? 1 + rand() % 2048 : 2048;
    const int64_t columns = way == kTwice ? 1 + rand() % (rand() % 3 ? 30000 : kMostStreamed) : way == kAll ? 1 + rand() % k : 1 + (rand() % 3 ? rand() % most : rand() % 9000);
    const int64_t count = way == kAll ? rand() % (columns + 1) : columns;
    const int pad = rand() % 4, kind = rand() % 9;
    std::vector<float> memory(columns + 32); float* base = memory.data(); while ((uintptr_t)base % 16) ++base; base += pad;
    const double edge = 1 + unit();
    for (int64_t i = 0; i < count; ++i) base[i] = kind == 8 ? float(rand() % 2000 ? -unit() : i) : draw(kind, edge);
    const int gap = rand() % 3 ? 4 * (rand() % 3) : rand() % 9, shift = rand() % 3 ? 0 : rand() % 4;
    std::vector<int32_t> memory_out(k + 16, -9), memory_pos(k + 16, -9); int32_t *out = memory_out.data(), *pos = memory_pos.data();
    while ((uintptr_t)out % 16) ++out; while ((uintptr_t)pos % 16) ++pos; out += shift, pos += shift;
    const int page_size = rand() % 3 ? 0 : rand() % 2 ? 1 : 1 + rand() % 70;
    std::vector<int32_t> table; int32_t length = count, start = 0;
    SelectParams p{}; p.num_rows = 1; p.k = k; p.logits = base; p.stride_row = columns; p.columns = columns; p.dtype = DType::kFloat32; p.lengths = &length; p.row_starts = &start; p.page_size = 1; p.page_shift = 0; p.indices = out; p.positions = rand() % 4 ? pos : nullptr; p.stride_indices = p.stride_positions = k + gap;
    if (page_size > 0) {
      table.resize(columns / page_size + 5); for (auto& page : table) page = rand() % 50 ? rand() % 20000 : -1;
      p.page_table = table.data() + rand() % 4; p.num_requests = 1; p.max_pages = columns / page_size + (rand() % 2); p.page_size = page_size; p.page_shift = shift_of(page_size);
    }
    int32_t end = 0;
    if (rand() % 3 == 0) {  // as index_topk has it: nobody looks at what is in front of a row's first key
      start = 4 * (1 + rand() % 500), end = start + count;
      p.logits = base - start, p.columns += start, p.lengths = &end, p.lengths_are_ends = true, p.max_pages += page_size > 0 ? start / page_size : 0;
      if (page_size > 0) { table.insert(table.begin(), start / page_size, 7); p.page_table = table.data() + rand() % 4; }
    }
    const bool stays = count + pad <= most - 3 && rand() % 6;
    if (way == kAll) {
      const int parts = 1 + rand() % 16;
      for (int block = 0; block * kTakeWarps < parts; ++block) run_cluster(block, 1, kTakeThreads, 64, [&] { topk_take_all_kernel(p, parts); }, c);
    } else if (way == kTwice) {
      run_cluster(0, 1, kThreads, sizeof(StreamShared) + 64, [&] { topk_select_stream_kernel<float>(p); }, c);
    } else {
      run_cluster(0, cluster, kThreads, sizeof(SelectShared) + 64, [&] { stays ? topk_select_kernel<float, true>(p) : topk_select_kernel<float, false>(p); }, c);
    }
    std::vector<int> order(count); std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return ordered(base[a]) > ordered(base[b]); });
    const int n = std::min<int64_t>(k, count); std::vector<int32_t> expected(order.begin(), order.begin() + n); std::sort(expected.begin(), expected.end()); expected.resize(k, -1);
    std::vector<int32_t> indices = expected;
    for (auto& i : indices) if (i >= 0 && page_size > 0) { const int at = i + start; i = at / page_size >= p.max_pages || p.page_table[at / page_size] < 0 ? -1 : p.page_table[at / page_size] * page_size + at % page_size; }
    const bool wrong = !std::equal(indices.begin(), indices.end(), out) || (p.positions != nullptr && !std::equal(expected.begin(), expected.end(), pos));
    const bool outside = out[k] != -9 || pos[k] != -9 || (shift > 0 && (out[-1] != -9 || pos[-1] != -9));
    if (wrong || outside) { ++bad; printf("case %d differs%s: way %d cluster %d count %ld k %d kind %d stays %d page size %d\n", c, outside ? " outside" : "", way, cluster, (long)count, k, kind, stays, page_size); }
  }
  printf("%d cases, %d differ\n", cases, bad);
}
