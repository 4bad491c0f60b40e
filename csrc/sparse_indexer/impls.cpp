#include <initializer_list>

#include "core/impl_table.h"
#include "device/common/capability.h"
#include "sparse_indexer/logits_impls.h"
#include "sparse_indexer/sm90/launch.h"

namespace attnops::sparse_indexer {
namespace {

constexpr int64_t kMostLogitRows = 1 << 30;  // counted by int

struct Key {
  const LogitsParams& params;
  int sm;
};

struct Impl {
  const char* name;
  int heads;
  void (*launch)(const LogitsParams&, CUstream_st*);

  std::string reject(const Key& key) const {
    if (key.sm != 90) return "runs on sm_90, this device is sm_" + std::to_string(key.sm);
    if (key.params.num_heads > heads) {
      return "takes up to " + std::to_string(heads) + " heads, got " + std::to_string(key.params.num_heads);
    }
    if (key.params.num_rows > kMostLogitRows) {
      return "takes up to " + std::to_string(kMostLogitRows) + " rows, got " + std::to_string(key.params.num_rows);
    }
    return "";
  }
};

constexpr std::initializer_list<Impl> kImpls = {
#if defined(ATTNOPS_HAS_SM90)
    {"sm90_heads8", 8, &sm90::launch_heads8},
    {"sm90_heads16", 16, &sm90::launch_heads16},
    {"sm90_heads32", 32, &sm90::launch_heads32},
    {"sm90_heads64", 64, &sm90::launch_heads64},
#endif
};

}  // namespace

void launch_logits(const char* op, const LogitsParams& params, CUstream_st* stream) {
  select_impl("index_logits", kImpls, Key{params, usable_sm(op)}).launch(params, stream);
}

}  // namespace attnops::sparse_indexer
