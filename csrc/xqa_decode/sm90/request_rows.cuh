#pragma once
#include "core/math.h"
#include "xqa_decode/cuda/traits.cuh"
#include "xqa_decode/params.h"

// Where the rows of a request lie in q, out and lse. In a ragged batch requests bring up to seqlen_q tokens, which lie
// behind one another. They are a request's newest tokens, so they are the last of its rows: positions are those of any
// batch, and the rows before them are nobody's. Those are computed, and not stored.
namespace attnops::xqa_decode::sm90 {

// Kernels of ragged batches are those of the plan, and know nothing else that others do not.
template <class Base>
struct RaggedTraits : Base {
  static constexpr bool kRagged = true;
};

template <class Tr>
constexpr bool is_ragged() {
  return requires { requires Tr::kRagged; };
}

// Where a request's cells of the page table begin. Requests of a ragged batch may share rows of it.
template <class Tr, class Load>
__device__ __forceinline__ const int32_t* cells_of(const Params& p, int request, const Load& load) {
  if constexpr (is_ragged<Tr>()) {
    if (p.table_rows) request = min_of(max_of(load(p.table_rows + request), 0), p.num_table_rows - 1);
  }
  return p.page_table.row(request);
}
template <class Tr>
__device__ __forceinline__ const int32_t* cells_of(const Params& p, int request) {
  return cells_of<Tr>(p, request, [](const int32_t* at) { return __ldg(at); });
}

// Where a ragged request's tokens end, behind `least` tokens: any number may stand there.
__device__ __forceinline__ int ragged_end(const Params& p, int request, int least = 0) {
  return min_of(max_of(__ldg(p.cu_seqlens_q + request + 1), least), static_cast<int>(p.num_tokens));
}

// Where rows are read. Rows of nobody read a row that there is.
template <bool kRagged>
struct QueryPlace {
  int64_t at;     // of token 0, in elements
  int least = 0;  // tokens before it are not read

  __device__ __forceinline__ QueryPlace(const Params& p, int request) {
    if constexpr (kRagged) {
      const int first = ragged_end(p, request, 1) - p.seqlen_q;
      at = first * p.q_stride_token, least = max_of(-first, 0);
    } else {
      at = request * p.q_stride_request;
    }
  }

  __device__ __forceinline__ int token(int token) const { return kRagged ? max_of(token, least) : token; }
};

// Where rows are written.
template <bool kRagged>
struct ResultPlace {
  int64_t at;         // in out, of token 0, in elements
  int64_t token;      // the same in tokens, for lse
  int first_row = 0;  // rows before it are nobody's

  __device__ __forceinline__ ResultPlace(const Params& p, const Shape& shape, int request) {
    if constexpr (kRagged) {
      const int end = ragged_end(p, request), begin = min_of(max_of(__ldg(p.cu_seqlens_q + request), 0), end);
      token = end - p.seqlen_q, at = token * p.out_stride_token;
      first_row = max_of(p.seqlen_q - (end - begin), 0) * shape.group;
    } else {
      at = request * p.out_stride_request, token = static_cast<int64_t>(request) * p.seqlen_q;
    }
  }

  __device__ __forceinline__ bool is_nobodys(int row) const { return kRagged && row < first_row; }
};

// Rows behind the last request: zeros, as of a row without keys. By all threads of the grid.
__device__ __forceinline__ void clear_rows_behind(const Params& p) {
  const int first = ragged_end(p, p.batch_size - 1);
  const int64_t rows = (p.num_tokens - first) * p.num_q_heads;
#pragma unroll 1
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t token = first + row / p.num_q_heads, head = row % p.num_q_heads;
    auto* const out = static_cast<uint16_t*>(p.out) + token * p.out_stride_token + head * p.out_stride_head;
#pragma unroll 1
    for (int d = threadIdx.x; d < p.head_dim; d += blockDim.x) out[d] = 0;
    if (p.lse && threadIdx.x == 0) p.lse[token * p.num_q_heads + head] = -INFINITY;
  }
}

}  // namespace attnops::xqa_decode::sm90
