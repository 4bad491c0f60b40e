#pragma once
#include "paged_kv/params.h"

struct CUstream_st;

namespace attnops::paged_kv {

// One launch each; grids depend on shapes alone.
void launch(const PageTableParams& params, CUstream_st* stream);
void launch(const KvIndicesParams& params, CUstream_st* stream);
void launch(const CuSeqlensParams& params, CUstream_st* stream);
void launch(const TranslateParams& params, CUstream_st* stream);
void launch(const StoreKvParams& params, CUstream_st* stream);
void launch(const StoreMlaParams& params, CUstream_st* stream);

}  // namespace attnops::paged_kv
