#include "device/common/split_kv_plan.cuh"
#include "mla_decode/cuda/plan.h"

namespace attnops::mla_decode {

void launch_plan(const SplitKvGeometry& geometry, const int32_t* cache_seqlens, int32_t* tile_scheduler_metadata,
                 int32_t* num_splits, CUstream_st* stream) {
  constexpr bool kFills = true;
  launch_split_kv_plan<kPlanTileTokens, kFills>("mla_decode_plan", geometry, cache_seqlens, tile_scheduler_metadata,
                                                num_splits, stream);
}

namespace {

struct ListLengths {
  SelectedRows selected, extra;
  __device__ int operator[](int request) const { return ListKeys(selected, extra, request).end; }
};

}  // namespace

void launch_list_plan(const SplitKvGeometry& geometry, const SelectedRows& selected, const SelectedRows& extra,
                      int32_t* tile_scheduler_metadata, int32_t* num_splits, CUstream_st* stream) {
  launch_split_kv_plan<kPlanTileTokens, false>("sparse_mla_plan", geometry, ListLengths{selected, extra},
                                               tile_scheduler_metadata, num_splits, stream);
}

}  // namespace attnops::mla_decode
