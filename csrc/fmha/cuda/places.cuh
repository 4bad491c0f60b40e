#pragma once
#include "fmha/sm90/work.cuh"

namespace attnops::fmha {

using sm90::Schedule;
using sm90::Work;

// Bytes from the start of the pools to a key's rows; kNobody, which is 0 but for its sign, where no row of the tile
// sees the key, or its page is outside the pool. Both rows then become zeros.
struct Place {
  static constexpr int64_t kNobody = INT64_MIN;
  int64_t k, v;
};

// Bytes from one row of a pool to another.
struct Strides {
  int64_t page, token, head;
};

// A page that the pool does not have, in checked mode.
inline __device__ __noinline__ void report_page(const Params& p, const Work& w, int key, int cell, int page) {
  if (p.report == nullptr || !sm90::is_seen(p, w, key)) return;  // its cell was not read
  record_fault(p.report, {ReportOp::kFmhaPaged, ReportKind::kPageIndex, w.request, cell, page, p.page_table.num_pages});
}

// Where the keys of a work's tiles lie: places of two tiles in shared memory. Of the CTA's threads the first kKeys have
// a row of K each, the next kKeys a row of V.
template <int kKeys>
class Places {
 public:
  static constexpr int kBytes = 2 * kKeys * sizeof(Place);

  __device__ __forceinline__ Places(const Params& p, const Schedule& s, const Strides& k, const Strides& v,
                                    const Work& w, char* shared)
      : p_(p), s_(s), k_(k), v_(v), w_(w), places_(reinterpret_cast<Place*>(shared)) {}

  __device__ __forceinline__ Place* of_tile(int tile) const { return places_ + tile % 2 * kKeys; }

  // The page of this thread's key of a tile; below 0: the key is nobody's. Nobody waits for it before `place`.
  __device__ __forceinline__ int look_up(int tile) const {
    if (!is_mine()) return -1;
    const int key = key_of(tile);
    if (key < w_.key_begin || key >= w_.key_end || !sm90::is_seen(p_, w_, key)) return -1;
    return p_.paged ? p_.page_table.row(w_.request)[s_.page_size.divide(key)] : 0;
  }

  __device__ __forceinline__ void place(int tile, int page) const {
    if (!is_mine()) return;
    const bool is_key = threadIdx.x < kKeys;
    const Strides& strides = is_key ? k_ : v_;
    const int key = key_of(tile);
    int token = w_.first_k_token + key;
    if (p_.paged) {
      const int cell = s_.page_size.divide(key);
      token = key - cell * p_.page_table.page_size;
      if (!p_.page_table.has_page(page)) {
        if (is_key && key >= w_.key_begin && key < w_.key_end) report_page(p_, w_, key, cell, page);
        page = -1;
      }
    }
    const int64_t at = page * strides.page + token * strides.token + w_.kv_head * strides.head;
    Place* const places = of_tile(tile) + threadIdx.x % kKeys;
    (is_key ? places->k : places->v) = page < 0 ? Place::kNobody : at;
  }

 private:
  __device__ __forceinline__ static bool is_mine() { return threadIdx.x < 2 * kKeys; }
  __device__ __forceinline__ int key_of(int tile) const {
    return w_.place_of(tile) * kKeys + static_cast<int>(threadIdx.x) % kKeys;
  }

  const Params& p_;
  const Schedule& s_;
  const Strides &k_, &v_;
  const Work& w_;
  Place* places_;
};

}  // namespace attnops::fmha
