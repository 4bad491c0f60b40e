#pragma once
#include <string>

#include "core/math.h"
#include "device/common/capability.h"
#include "device/common/vec.h"
#include "xqa_decode/params.h"
#include "xqa_decode/sm90/limits.h"

namespace attnops::xqa_decode::sm90 {

// A work's CTAs, as far as an H200 runs all works' at the same time, two per SM: it holds 14 clusters of 16, 30 of 8,
// 62 of 4 and 132 of 2, measured.
inline constexpr int kMaxLogCtas = 4;
inline constexpr int kClustersHeld[kMaxLogCtas + 1] = {264, 132, 62, 30, 14};

inline constexpr int log_most_ctas(int works) {
  int log_ctas = kMaxLogCtas;
  while (log_ctas > 0 && kClustersHeld[log_ctas] < works) --log_ctas;
  return log_ctas;
}

// Where a work has several clusters, their results meet in memory, so many items (four values of a row) at a time.
inline constexpr int kUnitItems = 8;

// Whether the plan has what a meeting takes: a semaphore per unit, and room among the partial results.
inline bool clusters_can_meet(const Params& p, int works, int clusters, int units_per_row) {
  const int64_t rows = p.seqlen_q * (p.num_q_heads / p.num_kv_heads);
  const int64_t units = rows * units_per_row, records = units * works * clusters;
  return p.num_semaphores >= units * works && p.num_partials * rows >= records &&
         p.num_partials * rows * p.head_dim >= records * kUnitItems * 4;
}

// Few works take several clusters each, at most a CTA per SM then: meeting in memory costs more than it brings else.
inline int log_clusters_per_work(const Params& p, int works, int log_ctas) {
  if (log_ctas < kMaxLogCtas) return 0;
  int log_clusters = 0;
  while (log_clusters < 3 && works << (log_ctas + log_clusters + 1) <= 128) ++log_clusters;
  const int units_per_row = (p.head_dim <= 64 ? 64 : 128) / 4 / kUnitItems;
  return clusters_can_meet(p, works, 1 << log_clusters, units_per_row) ? log_clusters : 0;
}

// Up to so many tokens per CTA these kernels are faster, measured; beyond, the plan's even division over all SMs is.
// Clusters of 16 are crowded into fewer SMs than there are; over 16-bit pages more than 8 rows suit wgmma better; and
// over FP8 pages one CTA per SM in clusters of two is slower than the plan's two.
inline int most_share_tokens(const Params& p, int works, int rows, int log_ctas) {
  const bool fp8 = p.kv_dtype != p.dtype;
  const bool few = log_ctas == kMaxLogCtas || (fp8 && log_ctas <= 1 && works <= 66) || (!fp8 && rows > 8);
  return few ? 256 : 512;
}

// Why the cluster kernels do not serve these arguments; "" when they do. Only what the host knows: shapes, not lengths.
inline std::string reject_cluster(const Params& p) {
  const int works = p.batch_size * p.num_kv_heads, rows = p.seqlen_q * (p.num_q_heads / p.num_kv_heads);
  if (works == 0) return "takes at least one request, got none";
  if (works > kClustersHeld[1]) {
    return "takes batch_size * num_kv_heads up to " + std::to_string(kClustersHeld[1]) + ", got " +
           std::to_string(works);
  }
  if (rows > 16) return "takes seqlen_q * group up to 16, got " + std::to_string(rows);
  const int log_ctas = log_most_ctas(works);
  const int64_t most = int64_t{most_share_tokens(p, works, rows, log_ctas)}
                       << (log_ctas + log_clusters_per_work(p, works, log_ctas));
  if (most_visible_tokens(p) > most) {
    return "takes up to " + std::to_string(most) + " tokens of each of " + std::to_string(works) +
           " (request, KV head), the page table or the window has " + std::to_string(most_visible_tokens(p));
  }
  if (p.fixed_split_tokens != 0) return "takes balanced plans, got fixed_split_tokens";
  if (p.report) return "has no checked mode, got report";
  const int size = size_of(p.dtype);
  if (p.head_dim * size % 16 != 0 ||
      !rows_aligned(p.q, size, 16, p.q_stride_request, p.q_stride_token, p.q_stride_head)) {
    return "takes rows of q that start on 16-byte boundaries";
  }
  const int sm = usable_sm("xqa_decode");
  if (sm != 90) return "runs on sm_90, this device is sm_" + std::to_string(sm);
  return "";
}

}  // namespace attnops::xqa_decode::sm90
