#include "cpu/tile/vec_avx512.h"
// Vec comes first.
#include "cpu/tile/chunk.h"

namespace attnops::cpu {

const ChunkKernels& avx512_chunk_kernels() { return kChunkKernels; }

}  // namespace attnops::cpu
