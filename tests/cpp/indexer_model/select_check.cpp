#include "model.h"
#include <vector_types.h>
#include <vector_functions.h>
#include <algorithm>
#include <numeric>
#include <cuda_bf16.h>
#include "sparse_indexer/cuda/topk_select.cuh"
using namespace attnops; using namespace attnops::sparse_indexer;
static double unit() { return rand() / (RAND_MAX + 1.0); }
int main(int argc, char** argv) {
  srand(atoi(argv[1])); int bad = 0; const int cases = atoi(argv[2]);
  for (int c = 0; c < cases; ++c) {
    const int cluster = 1 << rand() % 4; const int most = cluster * kHeldKeys;
    const int64_t count = 1 + (rand() % 3 ? rand() % most : rand() % 9000); const int k = rand() % 4 ? 1 + rand() % 2048 : 2048;
    const int pad = rand() % 4; std::vector<float> x(pad + count + 8);
    const int kind = rand() % 8;
    for (auto& v : x) {
      const double g = sqrt(-2 * log(unit() + 1e-300)) * cos(6.2831853 * unit());
      v = kind == 0 ? 1.f : kind == 1 ? float(rand() % 5) : kind == 2 ? float(g * 1e-3 + 7) : kind == 3 ? (rand() % 40 ? float(g) : (rand() & 1 ? INFINITY : -INFINITY)) : kind == 4 ? (rand() % 3 ? float(g) : NAN) : kind == 5 ? (rand() & 1 ? 0.f : -0.f) : kind == 6 ? float(exp(12 * g)) : float(g);
    }
    const float* row = (const float*)(((uintptr_t)x.data() + 15) & ~uintptr_t{15}) ;
    std::vector<float> aligned(count + 16 + pad); float* base = aligned.data(); while ((uintptr_t)base % 16) ++base; base += pad;
    if (base + count > aligned.data() + aligned.size()) aligned.resize(count + 64), base = aligned.data();
    std::copy(x.begin(), x.begin() + count, base);
    int32_t length = count; std::vector<int32_t> out(k, -9), pos(k, -9);
    SelectParams p{}; p.num_rows = 1; p.k = k; p.logits = base; p.stride_row = count; p.columns = count; p.dtype = DType::kFloat32; p.lengths = &length; p.page_size = 1; p.page_shift = 0; p.indices = out.data(); p.positions = pos.data(); p.stride_indices = p.stride_positions = k;
    int32_t start = rand() % 3 ? 0 : 4 * (1 + rand() % 500), end = start + count; std::vector<int32_t> table(end);
    if (start > 0) {  // as index_topk has it: nobody looks at what is in front of a row's first key
      for (int i = 0; i < end; ++i) table[i] = i < start ? -1 : 3 * i;
      p.logits = base - start; p.columns = end; p.lengths = &end; p.row_starts = &start; p.lengths_are_ends = true; p.page_table = table.data(); p.num_requests = 1; p.max_pages = end;
    }
    const bool stays = count + pad <= most - 3 && rand() % 6;
    run_cluster(0, cluster, kThreads, sizeof(SelectShared) + 64, [&] { stays ? topk_select_kernel<float, true>(p) : topk_select_kernel<float, false>(p); }, c);
    std::vector<int> order(count); std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return ordered(base[a]) > ordered(base[b]); });
    const int n = std::min<int64_t>(k, count); std::vector<int32_t> expected(order.begin(), order.begin() + n); std::sort(expected.begin(), expected.end()); expected.resize(k, -1);
    std::vector<int32_t> slots = expected;
    if (start > 0) for (auto& slot : slots) slot = slot < 0 ? -1 : 3 * (start + slot);
    if (slots != out || expected != pos) { ++bad; printf("case %d differs: cluster %d count %ld k %d kind %d stays %d\n", c, cluster, (long)count, k, kind, stays); }
  }
  printf("%d cases, %d differ\n", cases, bad);
}
