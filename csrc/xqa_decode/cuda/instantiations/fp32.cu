#include "device/common/tree_rows.cuh"
#include "device/sm80/fp8_rows.cuh"
#include "xqa_decode/cuda/launch.cuh"

// float32 queries, in plain arithmetic: for checks and for models that nobody serves at speed. A thread scores one key
// and then sums up two dims of the output; keys and values are read where they lie.
namespace attnops::xqa_decode {
namespace {

constexpr int kThreads = 128;
constexpr int kKeys = kThreads;  // of a step

__device__ float element(const void* pages, DType dtype, int64_t at) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(pages)[at];
  const uint32_t byte = static_cast<const uint8_t*>(pages)[at];
  uint32_t low, high;
  if (dtype == DType::kFloat8E5M2) {
    e5m2x4_to_half(byte, low, high);
  } else {
    e4m3x4_to_half(byte, low, high);
  }
  return __low2float(*reinterpret_cast<const __half2*>(&low));
}

template <class Combine>
__device__ float reduce(float value, float* shared, Combine combine) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value = combine(value, __shfl_xor_sync(~0u, value, step));
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  return combine(combine(shared[0], shared[1]), combine(shared[2], shared[3]));
}

// Where the key of a token lies: -1 when the row does not see it.
struct KeyPlace {
  int64_t page;
  int offset;
};

__device__ KeyPlace find_key(const Params& p, const PieceWalk& piece, int row_token, int token) {
  const int new_tokens_begin = piece.length() - p.seqlen_q, position = new_tokens_begin + row_token;
  if (token < piece.keys().begin || token >= piece.end_token()) return {-1, 0};
  const int first_draft = piece.length() - p.tree_keys, draft = token - first_draft;
  if (p.window_left >= 0) {
    const int begin =
        p.tree_mask ? draft_window_begin(p, piece.request(), row_token, first_draft) : position - p.window_left;
    if (token < begin) return {-1, 0};
  }
  if (p.tree_mask && draft >= 0) {
    const uint8_t* tree =
        p.tree_mask + piece.request() * p.tree_mask_stride_request + row_token * p.tree_mask_stride_token;
    if (!(tree[draft / 8] >> (draft % 8) & 1)) return {-1, 0};
  }
  if (p.causal && !p.tree_mask && token > position) return {-1, 0};
  const int cell = token / p.page_table.page_size;
  const int page = p.page_table.row(piece.request())[cell];
  if (p.page_table.has_page(page)) return {page, token - cell * p.page_table.page_size};
  if (p.report) {
    record_fault(p.report,
                 {ReportOp::kXqaDecode, ReportKind::kPageIndex, piece.request(), cell, page, p.page_table.num_pages});
  }
  return {-1, 0};
}

// One row of one piece. `shared`: kKeys probabilities, 8 for reductions, then the row of q and at last of out.
__device__ void run_row(const Params& p, const Shape& shape, const PieceWalk& piece, const WorkPlace& place,
                        const Splits& splits, int row, float* shared, int64_t* values) {
  float* probs = shared;
  float* scratch = shared + kKeys;
  float* query = scratch + 8;
  const int row_token = row / shape.group, head = place.kv_head * shape.group + row % shape.group;
  const auto* q = static_cast<const float*>(p.q) + place.request * p.q_stride_request + row_token * p.q_stride_token +
                  head * p.q_stride_head;
  __syncthreads();
  for (int d = threadIdx.x; d < p.head_dim; d += kThreads) query[d] = q[d];
  __syncthreads();
  const float scale = p.softmax_scale * (p.k_scale ? p.k_scale[place.kv_head * p.k_scale_stride] : 1.f);
  float top = -INFINITY, sum = 0.f, out[2] = {0.f, 0.f};
  for (int first = piece.first_token(); first < piece.end_token(); first += kKeys) {
    const KeyPlace key = find_key(p, piece, row_token, first + threadIdx.x);
    float score = -INFINITY;
    if (key.page >= 0) {
      const int64_t at = key.page * p.k_stride_page + key.offset * p.k_stride_token + place.kv_head * p.k_stride_head;
      score = 0.f;
      for (int d = 0; d < p.head_dim; ++d) score += query[d] * element(p.k_pages, p.kv_dtype, at + d);
      score *= scale;
      if (p.logit_cap != 0.f) score = p.logit_cap * tanhf(score / p.logit_cap);
    }
    const float next = fmaxf(top, reduce(score, scratch, [](float a, float b) { return fmaxf(a, b); }));
    const float factor = top == -INFINITY ? 0.f : expf(top - next);
    const float prob = key.page < 0 ? 0.f : expf(score - next);
    top = next;
    sum = sum * factor + reduce(prob, scratch, [](float a, float b) { return a + b; });
    out[0] *= factor, out[1] *= factor;
    probs[threadIdx.x] = prob;
    values[threadIdx.x] =
        key.page < 0 ? -1
                     : key.page * p.v_stride_page + key.offset * p.v_stride_token + place.kv_head * p.v_stride_head;
    __syncthreads();
    for (int k = 0; k < kKeys; ++k) {
      if (values[k] < 0) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int d = threadIdx.x + i * kThreads;
        if (d < p.head_dim) out[i] += probs[k] * element(p.v_pages, p.kv_dtype, values[k] + d);
      }
    }
    __syncthreads();
  }
  const bool empty = sum == 0.f;
#pragma unroll
  for (int i = 0; i < 2; ++i) query[threadIdx.x + i * kThreads] = empty ? 0.f : out[i] / sum;
  __syncthreads();
  const float lse = empty ? -INFINITY : top + logf(sum);
  for (int d = threadIdx.x * 4; d < p.head_dim; d += kThreads * 4) {
    const float4 four = *reinterpret_cast<const float4*>(query + d);
    if (splits.count > 1) {
      store_partial(p, shape, splits.slot(splits.index) * shape.rows + row, d, four, lse);
    } else {
      store_output<true>(p, shape, place, row, d, four, lse);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    fp32_kernel(const __grid_constant__ Params p, const __grid_constant__ Shape shape) {
  __shared__ __align__(16) float shared[kKeys + 8 + 2 * kThreads];
  __shared__ __align__(16) float scratch[kThreads * sizeof(PartialSum) / sizeof(float)];
  __shared__ int64_t values[kKeys];
  __shared__ MergeFlag flag;
  wait_for_earlier_kernels();
  const PartEntry entry(p, shape, static_cast<int>(blockIdx.x));
  if (!entry.has_work) return;
  for (PieceWalk piece(p, shape, entry, static_cast<int>(blockIdx.x)); piece.next();) {
    const WorkPlace place{piece.work(), piece.request(), piece.kv_head()};
    const Splits splits = piece.splits();
    if (piece.overflows()) {
      if (piece.starts_work()) store_nan<true>(p, shape, place, splits);
      continue;
    }
    for (int row = 0; row < shape.rows; ++row) run_row(p, shape, piece, place, splits, row, shared, values);
    if (splits.count > 1 && splits.arrivals > 0) {
      arrive_and_merge<kThreads, true>(p, shape, place, splits, piece.is_last(), &flag, scratch);
    }
  }
}

}  // namespace

void launch_fp32(const Params& p, cudaStream_t stream) {
  if (p.batch_size == 0) return;
  Shape shape = make_shape(p, p.seqlen_q * (p.num_q_heads / p.num_kv_heads), 1);
  launch_dependent<&fp32_kernel>("xqa_decode", {p.num_sm_parts, kThreads, 0, 0}, stream, p, shape);
}

}  // namespace attnops::xqa_decode
