#pragma once
#include "sparse_indexer/params.h"

struct CUstream_st;

namespace attnops::sparse_indexer {

struct PieceParams;

// One launch; grid and clusters depend on shapes alone.
void launch(const SelectParams& params, CUstream_st* stream);
void launch(const StoreIndexParams& params, CUstream_st* stream);
void launch(const QuantizeQueryParams& params, CUstream_st* stream);
void launch(const GatherIndexParams& params, CUstream_st* stream);
void launch(const ExpandParams& params, CUstream_st* stream);
void launch_begin(const PieceParams& params, CUstream_st* stream);
void launch_carry(const PieceParams& params, CUstream_st* stream);

}  // namespace attnops::sparse_indexer
