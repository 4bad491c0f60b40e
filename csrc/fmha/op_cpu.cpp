#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

#include "cpu/convert.h"
#include "cpu/isa.h"
#include "cpu/tile_ops.h"
#include "fmha/cpu/kernel.h"
#include "fmha/cpu/reference.h"
#include "fmha/op.h"
#include "scheduler/varlen_cuts.h"
#include "torch_bindings/cpu_faults.h"

namespace attnops::fmha {
namespace {

int num_tiles_of(int seqlen_q, int tile_q) { return seqlen_q > 0 ? (seqlen_q - 1) / tile_q + 1 : 0; }

// Cumulative lengths from 0 on that never decrease, up to `limit`.
void check_bounds(const char* op, const char* name, const int32_t* bounds, int batch_size, int64_t limit) {
  for (int b = 0; b <= batch_size; ++b) {
    const int64_t low = b ? bounds[b - 1] : 0;
    if (bounds[b] < low || bounds[b] > limit) {
      fail(op, std::string(name) + "[" + std::to_string(b) + "] must be in [" + std::to_string(low) + ", " +
                   std::to_string(limit) + "], got " + std::to_string(bounds[b]));
    }
  }
}

int seqlen_k_of(const PlanParams& p, int request) {
  if (p.cu_seqlens_k) return p.cu_seqlens_k[request + 1] - p.cu_seqlens_k[request];
  if (p.cache_seqlens) return max_of(p.cache_seqlens[request], 0);
  return p.cu_seqlens_q[request + 1] - p.cu_seqlens_q[request];
}

// What a GPU cuts of the tiles in tile_order (scheduler/varlen_cuts.h).
void cut_tiles(const PlanParams& p, int64_t num_tiles) {
  std::vector<int> units;
  for (int64_t i = 0; i < num_tiles; ++i) {
    const int request = p.tile_order[2 * i], seqlen_q = p.cu_seqlens_q[request + 1] - p.cu_seqlens_q[request];
    const int64_t cost = varlen_tile_cost(p.geometry, seqlen_q, seqlen_k_of(p, request), p.tile_order[2 * i + 1]);
    units.push_back(cost_units(cost));
  }
  const int tokens = p.cu_seqlens_q[p.geometry.num_requests] - p.cu_seqlens_q[0];
  const Cut cut = find_cut(units, p.works_per_tile, p.num_sms, p.max_pieces, tokens, p.geometry.tile_q, p.cut_in_part);
  int rows = 0;
  for (int64_t i = cut.first; i < num_tiles && cut.limit != kNeverCut; ++i) {
    const int count = pieces_of(units[i], cut.limit);
    for (int piece = 0; count > 1 && piece < count; ++piece) {
      int32_t* row = p.pieces + 4 * int64_t{++rows};
      row[0] = p.tile_order[2 * i];
      row[1] = p.tile_order[2 * i + 1];
      row[2] = piece;
      row[3] = count;
    }
  }
  p.pieces[0] = rows;
  p.pieces[1] = cut.limit;
  p.pieces[2] = cut.first;
  p.pieces[3] = 0;
}

// The stable counting sort of scheduler/varlen_tiles.h.
void fmha_plan_cpu(const Tensor& tile_order, const Tensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                   const OptionalTensor& cache_seqlens, int64_t tile_q, bool causal, int64_t window_left,
                   const OptionalTensor& pieces, int64_t works_per_tile, int64_t num_sms, bool cut_in_part) {
  const PlanParams p = checked_plan_params(tile_order, cu_seqlens_q, cu_seqlens_k, cache_seqlens, tile_q, causal,
                                           window_left, pieces, works_per_tile, num_sms, cut_in_part);
  check_bounds("fmha_plan", "cu_seqlens_q", p.cu_seqlens_q, p.geometry.num_requests, kMaxInt32);
  if (p.cu_seqlens_k) check_bounds("fmha_plan", "cu_seqlens_k", p.cu_seqlens_k, p.geometry.num_requests, kMaxInt32);
  int64_t num_tiles = 0;
  for (int b = 0; b < p.geometry.num_requests; ++b) {
    num_tiles += num_tiles_of(p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b], p.geometry.tile_q);
  }
  if (num_tiles > p.max_tiles) {
    fail("fmha_plan", "tile_order.shape[0] (max_tiles) must hold the " + std::to_string(num_tiles) +
                          " tiles of cu_seqlens_q, got " + std::to_string(p.max_tiles));
  }
  const auto for_each_request = [&p](const auto& visit) {
    for (int b = 0; b < p.geometry.num_requests; ++b) {
      const int seqlen_q = p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b];
      const int seqlen_k = seqlen_k_of(p, b);
      const int tiles = num_tiles_of(seqlen_q, p.geometry.tile_q);
      if (tiles > 0) visit(b, tiles, cost_bin(varlen_tile_cost(p.geometry, seqlen_q, seqlen_k, tiles - 1)));
    }
  };

  int64_t first_of_bin[kCostBins + 1] = {};  // longest first: bin kCostBins - 1 comes at 0
  for_each_request([&](int, int tiles, int bin) { first_of_bin[kCostBins - bin] += tiles; });
  for (int i = 1; i <= kCostBins; ++i) first_of_bin[i] += first_of_bin[i - 1];
  for_each_request([&](int request, int tiles, int bin) {
    for (int tile = tiles - 1; tile >= 0; --tile) {
      int32_t* row = p.tile_order + 2 * first_of_bin[kCostBins - 1 - bin]++;
      row[0] = request;
      row[1] = tile;
    }
  });
  std::fill(p.tile_order + 2 * num_tiles, p.tile_order + 2 * p.max_tiles, -1);
  if (p.pieces) cut_tiles(p, num_tiles);
}

// What a GPU kernel cannot afford to ask: the CPU sees the lengths and the plan, so a wrong one is an error at once.
void check_lengths_and_plan(const char* op, const Params& p) {
  check_bounds(op, "cu_seqlens_q", p.cu_seqlens_q, p.batch_size, p.num_q_tokens);
  if (!p.paged) check_bounds(op, "cu_seqlens_k", p.cu_seqlens_k, p.batch_size, p.num_k_tokens);
  int64_t expected = 0, found = 0;
  std::vector<int64_t> first_tile;
  for (int b = 0; b < p.batch_size; ++b) {
    const int seqlen_q = p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b];
    first_tile.push_back(expected);
    expected += num_tiles_of(seqlen_q, p.tile_q);
    if (p.tree_mask && seqlen_q > 8 * p.tree_mask_bytes) {
      fail(op, "tree_mask.shape[1] (mask_bytes) must be at least " + std::to_string(ceil_div(seqlen_q, 8)) +
                   " (one bit per query token of request " + std::to_string(b) + "), got " +
                   std::to_string(p.tree_mask_bytes));
    }
  }
  std::vector<bool> planned(expected);
  for (int64_t i = 0; i < p.num_tiles; ++i) {
    const int request = p.tile_order[2 * i], tile = p.tile_order[2 * i + 1];
    if (request == -1) continue;
    const bool exists = request >= 0 && request < p.batch_size && tile >= 0 &&
                        tile < num_tiles_of(p.cu_seqlens_q[request + 1] - p.cu_seqlens_q[request], p.tile_q);
    if (!exists) found = -1;
    if (!exists) break;
    if (!planned[first_tile[request] + tile]) ++found;
    planned[first_tile[request] + tile] = true;
  }
  if (found != expected) {
    fail(op, "tile_order is not the plan of these cu_seqlens_q with tile_q " + std::to_string(p.tile_q) + ": " +
                 (found < 0 ? std::string("a tile outside the batch") : std::to_string(found) + " tiles") +
                 ", expected " + std::to_string(expected));
  }
}

// Rows behind the last request belong to nobody: padding of a captured batch. They must not stay garbage.
void clear_padding(const Params& p) {
  const int64_t row_bytes = static_cast<int64_t>(p.head_dim_v) * size_of(p.dtype);
  for (int64_t token = p.cu_seqlens_q[p.batch_size]; token < p.num_q_tokens; ++token) {
    for (int head = 0; head < p.num_q_heads; ++head) {
      const int64_t offset = token * p.out_stride_token + head * p.out_stride_head;
      std::fill_n(static_cast<char*>(p.out) + offset * size_of(p.dtype), row_bytes, 0);
      if (p.lse) p.lse[token * p.num_q_heads + head] = -INFINITY;
    }
  }
}

// e4m3 queries as the rows of `out`'s dtype that they are: every e4m3 value is one of bfloat16.
std::vector<attnops::cpu::BFloat16> widen_queries(Params& p) {
  std::vector<attnops::cpu::BFloat16> rows(p.num_q_tokens * p.num_q_heads * p.head_dim_qk);
  const auto* q = static_cast<const attnops::cpu::Float8E4M3*>(p.q);
  auto* to = rows.data();
  for (int64_t token = 0; token < p.num_q_tokens; ++token) {
    for (int head = 0; head < p.num_q_heads; ++head) {
      const auto* from = q + token * p.q_stride_token + head * p.q_stride_head;
      for (int d = 0; d < p.head_dim_qk; ++d) {
        *to++ = attnops::cpu::from_float<attnops::cpu::BFloat16>(attnops::cpu::to_float(from[d]));
      }
    }
  }
  p.q = rows.data();
  p.q_stride_head = p.head_dim_qk;
  p.q_stride_token = static_cast<int64_t>(p.num_q_heads) * p.head_dim_qk;
  p.dtype = DType::kBFloat16;
  return rows;
}

// Calls `each(i)` for i below `count`, by as many threads as help. The first come first: plans put long tiles there.
template <class MakeState, class Each>
void for_all(int64_t count, const MakeState& make_state, const Each& each) {
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), count);
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    auto state = make_state();
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) each(state, i);
  });
}

// The matrix kernel of one thread.
struct Worker {
  Worker(const Params& p, const attnops::cpu::TileOps& ops) : scope(ops), kernel(p, ops) {}
  const attnops::cpu::TileScope scope;
  cpu::Kernel kernel;
};

// All works of a plan, where these are so few that threads share their keys; else none.
std::vector<cpu::Work> shared_works(const Params& p, int64_t threads) {
  std::vector<cpu::Work> works;
  cpu::Work work;
  int most_cuts = 0;
  for (int64_t item = 0, items = cpu::num_items(p); item < items; ++item) {
    if (!cpu::work_of(p, item, work)) continue;
    if (static_cast<int64_t>(works.size()) == 4 * threads) return {};
    works.push_back(work);
    const cpu::KeyRange cuts = cpu::cuts_of_work(p, work);
    most_cuts = std::max(most_cuts, cuts.end - cuts.begin);
  }
  return most_cuts > 1 ? works : std::vector<cpu::Work>{};
}

// Cuts of few works, by all threads: as many at a time as fit into a bounded scratch. In between they are added up.
void run_cuts(const Params& p, const std::vector<cpu::Work>& works, const attnops::cpu::TileOps& ops) {
  constexpr int kRowsAtOnce = 16;
  struct Cut {
    int work, number;
  };
  std::vector<Cut> cuts;
  for (int i = 0; i < static_cast<int>(works.size()); ++i) {
    const cpu::KeyRange range = cpu::cuts_of_work(p, works[i]);
    for (int number = range.begin; number < range.end; ++number) cuts.push_back({i, number});
  }
  const int64_t at_once = 4 * torch::stable::get_num_threads();
  const auto make_worker = [&] { return std::make_unique<Worker>(p, ops); };
  const int dim_v = make_worker()->kernel.dim_v();
  const int64_t floats = cpu::PartialRows::floats(cpu::kMaxRows, dim_v);
  const std::unique_ptr<float[]> scratch(new float[floats * (at_once + static_cast<int64_t>(works.size()))]);
  const auto place = [&](int64_t i) { return cpu::PartialRows::in(scratch.get() + i * floats, cpu::kMaxRows, dim_v); };
  const auto total = [&](int work) { return place(at_once + work); };
  for (int i = 0; i < static_cast<int>(works.size()); ++i) {
    const cpu::PartialRows rows = total(i);
    std::fill_n(rows.acc, int64_t{works[i].num_rows} * dim_v, 0.f);
    std::fill_n(rows.row_max, works[i].num_rows, -INFINITY);
    std::fill_n(rows.row_sum, works[i].num_rows * attnops::cpu::kSumLanes, 0.f);
  }
  for (int64_t first = 0, all = static_cast<int64_t>(cuts.size()); first < all; first += at_once) {
    const int64_t count = std::min(at_once, all - first);
    for_all(count, make_worker, [&](const auto& worker, int64_t i) {
      worker->kernel.run_cut(works[cuts[first + i].work], cuts[first + i].number, place(i));
    });
    for_all(
        cpu::kMaxRows / kRowsAtOnce, [] { return 0; },
        [&](int, int64_t block) {
          const int begin = static_cast<int>(block) * kRowsAtOnce;
          for (int64_t i = 0; i < count; ++i) {
            const int work = cuts[first + i].work, end = std::min(begin + kRowsAtOnce, works[work].num_rows);
            cpu::add_rows(total(work), place(i), begin, end, dim_v);
          }
        });
  }
  for_all(static_cast<int64_t>(works.size()), make_worker,
          [&](const auto& worker, int64_t i) { worker->kernel.store(works[i], total(static_cast<int>(i))); });
}

void run(const char* op, const Params& params, const Tensor&) {
  Params p = params;
  std::vector<attnops::cpu::BFloat16> queries;
  if (p.dtype == DType::kFloat8E4M3) queries = widen_queries(p);
  CpuFaults faults(op, "k_pages", p.report);
  check_lengths_and_plan(op, p);
  if (p.paged) faults.check_lengths(ReportOp::kFmhaPaged, p.page_table, p.cache_seqlens, p.batch_size);
  p.report = faults.report();
  clear_padding(p);
  const bool has_tiles = p.kv_dtype != DType::kFloat8E5M2;
  const attnops::cpu::TileOps* ops = has_tiles ? attnops::cpu::tile_ops(attnops::cpu::current_isa(), p.dtype) : nullptr;
  const int64_t items = cpu::num_items(p);
  if (ops == nullptr) {
    for_all(
        items, [] { return 0; },
        [&](int, int64_t item) {
          cpu::Work work;
          if (cpu::work_of(p, item, work)) cpu::run_reference(p, work);
        });
  } else if (const std::vector<cpu::Work> works = shared_works(p, torch::stable::get_num_threads()); !works.empty()) {
    run_cuts(p, works, *ops);
  } else {
    for_all(
        items, [&] { return std::make_unique<Worker>(p, *ops); },
        [&](const auto& worker, int64_t item) {
          cpu::Work work;
          if (cpu::work_of(p, item, work)) worker->kernel.run(work);
        });
  }
  faults.check();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CPU, m) {
  m.impl("fmha_plan", TORCH_BOX(&fmha_plan_cpu));
  m.impl("fmha_varlen", TORCH_BOX(&fmha_varlen<&run>));
  m.impl("fmha_paged", TORCH_BOX(&fmha_paged<&run>));
}

}  // namespace attnops::fmha
