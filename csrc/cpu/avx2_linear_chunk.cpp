#include "cpu/tile/vec_avx2.h"
// Vec comes first.
#include "cpu/tile/chunk.h"

namespace attnops::cpu {

const ChunkKernels& avx2_chunk_kernels() { return kChunkKernels; }

}  // namespace attnops::cpu
