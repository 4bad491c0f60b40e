#pragma once
#include "speculation/tree.h"

struct CUstream_st;

namespace attnops::speculation {

// One launch each; grids depend on shapes alone.
void launch(const BuildTreeParams& params, CUstream_st* stream);
void launch_greedy(const VerifyParams& params, CUstream_st* stream);
void launch_sampling(const VerifyParams& params, CUstream_st* stream);
void launch(const DraftIndicesParams& params, CUstream_st* stream);
void launch(const PackMaskParams& params, CUstream_st* stream);

// `groups` of moves that do not wait for one another; `first`: cells and report are this launch's affair.
void launch(const AcceptedMoves& moves, int batch_size, int groups, const Buffers& buffers, bool first,
            CUstream_st* stream);
void launch(const TailMoves& moves, int batch_size, int groups, const Buffers& buffers, bool first,
            CUstream_st* stream);

}  // namespace attnops::speculation
