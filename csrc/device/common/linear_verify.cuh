#pragma once
#include "core/linear_verify.h"
#include "device/common/linear_token.cuh"

// Drafts against states that are only read. A draft's S k and S q are those of the state in the pool, decayed, and a
// sum over the rows behind it: the ring's and the draft's ancestors. So a state's row is multiplied once with all keys
// and queries, and all else are products of small vectors, made by each CTA in shared memory.
namespace attnops {

inline constexpr int kVerifyThreads = 128;
inline constexpr int kVerifyRows = 4;  // of a thread

// Shared memory, by offsets in floats: extents are those of the call.
struct VerifyLayout {
  int drafts, keys, rows_before;  // rows_before: of a ring, at most
  bool channels;

  __host__ __device__ int total_rows() const { return rows_before + drafts; }
  __host__ __device__ int row_keys() const { return 0; }                  // [rows, keys]
  __host__ __device__ int decays() const { return total_rows() * keys; }  // [rows, keys or 1]
  __host__ __device__ int queries() const { return decays() + total_rows() * (channels ? keys : 4); }  // [drafts, keys]
  __host__ __device__ int vectors() const { return queries() + drafts * keys; }                    // [2 drafts, keys]
  __host__ __device__ int products() const { return vectors() + 2 * drafts * keys; }               // [2 drafts, rows]
  __host__ __device__ int coefficients() const { return products() + 2 * drafts * total_rows(); }  // [drafts]
  __host__ __device__ int dots() const { return round_up(coefficients() + drafts, 4); }  // [rows of a CTA, 2 drafts]
  __host__ __device__ int floats(int cta_rows) const { return dots() + cta_rows * (2 * drafts + 1); }
};

// A draft's key, query and gates, by one warp.
template <int kMaxKeys, bool kDelta, bool kChannels>
__device__ __forceinline__ void make_draft(const LinearStep& p, int64_t token, int head, float* key, float* query,
                                           float* decay, float* coefficient) {
  const int lane = threadIdx.x % 32, group = head / p.heads_per_group;
  float keys[kMaxKeys / 32], queries[kMaxKeys / 32], sums[2] = {};
#pragma unroll
  for (int c = 0; c < kMaxKeys / 32; ++c) {
    const int column = lane + 32 * c;
    keys[c] = column < p.key_dim ? load_row(p.dtype, p.k, token, group, column) : 0.f;
    queries[c] = column < p.key_dim ? load_row(p.dtype, p.q, token, group, column) : 0.f;
    sums[0] += keys[c] * keys[c];
    sums[1] += queries[c] * queries[c];
    if constexpr (kChannels) {
      decay[column] = column < p.key_dim ? expf(token_log_decay(p, token, head, column)) : 0.f;
    }
  }
  const float key_scale = p.normalize ? rsqrtf(sum_of_lanes<32>(sums[0]) + kNormEpsilon) : 1.f;
  const float query_scale = p.scale * (p.normalize ? rsqrtf(sum_of_lanes<32>(sums[1]) + kNormEpsilon) : 1.f);
#pragma unroll
  for (int c = 0; c < kMaxKeys / 32; ++c) {
    key[lane + 32 * c] = keys[c] * key_scale;
    query[lane + 32 * c] = queries[c] * query_scale;
  }
  if (lane != 0) return;
  if constexpr (kChannels) {
    *coefficient = token_coefficient<kDelta>(p, token, head);
  } else {
    const TokenGate gate = token_gate<kDelta>(p, token, head);
    *coefficient = gate.coefficient;
    decay[0] = expf(gate.log_decay);
  }
}

// What a draft's key and query are multiplied with: the state's decay up to it, and of each row behind it the product
// of the keys under the decays since. Rows are walked from the draft to the state. By one warp.
template <int kMaxKeys, bool kChannels>
__device__ __forceinline__ void walk_back(const VerifyLayout& at, float* shared, int draft, int length,
                                          uint32_t ancestors) {
  constexpr int kEach = kMaxKeys / 32;
  const int lane = threadIdx.x % 32, rows = at.total_rows();
  const float* own_key = shared + at.row_keys() + (at.rows_before + draft) * kMaxKeys;
  const float* own_query = shared + at.queries() + draft * kMaxKeys;
  float key[kEach], query[kEach], decay[kEach];
#pragma unroll
  for (int c = 0; c < kEach; ++c) {
    key[c] = own_key[lane + 32 * c];
    query[c] = own_query[lane + 32 * c];
    decay[c] = 1.f;
  }
  float* of_key = shared + at.products() + 2 * draft * rows;
  float* of_query = of_key + rows;
  for (int row = at.rows_before + draft; row >= 0; --row) {
    const int before = row - at.rows_before;
    const bool seen = before >= 0 ? before == draft || (ancestors >> before & 1u) != 0 : row < length;
    float sums[2] = {};
    if (seen) {
      const float* other = shared + at.row_keys() + row * kMaxKeys;
#pragma unroll
      for (int c = 0; c < kEach; ++c) {
        const float scaled = decay[c] * other[lane + 32 * c];
        sums[0] = fmaf(key[c], scaled, sums[0]);
        sums[1] = fmaf(query[c], scaled, sums[1]);
        const float* decays = shared + at.decays() + row * (kChannels ? kMaxKeys : 4);
        decay[c] *= kChannels ? decays[lane + 32 * c] : decays[0];
      }
    }
    const float key_product = sum_of_lanes<32>(sums[0]), query_product = sum_of_lanes<32>(sums[1]);
    if (lane != 0) continue;
    of_key[row] = key_product;
    of_query[row] = query_product;
  }
  float* vectors = shared + at.vectors() + 2 * draft * kMaxKeys;
#pragma unroll
  for (int c = 0; c < kEach; ++c) {
    vectors[lane + 32 * c] = key[c] * decay[c];
    vectors[kMaxKeys + lane + 32 * c] = query[c] * decay[c];
  }
}

// Grid: row blocks x heads x requests, in one dimension.
template <typename State, int kMaxKeys, bool kDelta, bool kChannels, bool kVectors>
__global__ void __launch_bounds__(kVerifyThreads)
    linear_verify_kernel(const __grid_constant__ LinearVerify p, int row_blocks) {
  constexpr int kLanes = kMaxKeys / kLaneElements, kGroups = kVerifyThreads / kLanes, kCtaRows = kGroups * kVerifyRows;
  using Part = RowPart<State, kLanes>;
  extern __shared__ __align__(16) float shared[];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const LinearStep& step = p.step;
  const int row_block = blockIdx.x % row_blocks, work = blockIdx.x / row_blocks;
  const int head = work % step.num_heads, request = work / step.num_heads, drafts = p.drafts;
  const int first_row = row_block * kCtaRows, warp = threadIdx.x / 32;
  const VerifyLayout at{
      .drafts = drafts, .keys = kMaxKeys, .rows_before = p.rings.rows - drafts, .channels = kChannels};
  if (step.report != nullptr && row_block == 0 && head == 0 && threadIdx.x == 0) {
    p.check(kDelta ? kReportDeltaVerify : kReportSsdVerify, request, step.report);
  }
  const int64_t slot = step.state_indices[request], first_token = int64_t{request} * drafts;
  if (slot < 0 || slot >= step.num_slots) {
    return clear_tokens(step, head, first_token, first_token + drafts, first_row, kCtaRows);
  }
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const State* states = static_cast<const State*>(step.states) + state_at(step, slot, head);
  float state[kVerifyRows][kLaneElements];
#pragma unroll
  for (int r = 0; r < kVerifyRows; ++r) {
    const int row = first_row + group + r * kGroups;
    Part::template load<kVectors>(state[r], states + int64_t{row} * step.stride_row, lane,
                                  row < step.value_dim ? step.key_dim : 0);
  }

  const int length = p.rings.length(slot, drafts);
  for (int row = warp; row < length; row += kVerifyThreads / 32) {
    const float* key = p.rings.k_row(step, slot, head, row);
    const float* decay = p.rings.decay_row(step, slot, head, row);
    for (int c = threadIdx.x % 32; c < kMaxKeys; c += 32) {
      shared[at.row_keys() + row * kMaxKeys + c] = c < step.key_dim ? key[c] : 0.f;
      if constexpr (kChannels) shared[at.decays() + row * kMaxKeys + c] = c < step.key_dim ? decay[c] : 0.f;
    }
    if (!kChannels && threadIdx.x % 32 == 0) shared[at.decays() + row * 4] = decay[0];
  }
  for (int t = warp; t < drafts; t += kVerifyThreads / 32) {
    const int row = at.rows_before + t;
    make_draft<kMaxKeys, kDelta, kChannels>(
        step, first_token + t, head, shared + at.row_keys() + row * kMaxKeys, shared + at.queries() + t * kMaxKeys,
        shared + at.decays() + row * (kChannels ? kMaxKeys : 4), shared + at.coefficients() + t);
  }
  __syncthreads();
  for (int t = warp; t < drafts; t += kVerifyThreads / 32) {
    walk_back<kMaxKeys, kChannels>(at, shared, t, length, p.ancestors(request, t));
  }
  if (row_block == 0) {  // the ring's new rows
    for (int t = warp; t < drafts; t += kVerifyThreads / 32) {
      float* key = p.rings.k_row(step, slot, head, length + t);
      float* decay = p.rings.decay_row(step, slot, head, length + t);
      const float* from = shared + at.row_keys() + (at.rows_before + t) * kMaxKeys;
      const float* decays = shared + at.decays() + (at.rows_before + t) * (kChannels ? kMaxKeys : 4);
      for (int c = threadIdx.x % 32; c < step.key_dim; c += 32) {
        if (head % step.heads_per_group == 0) key[c] = from[c];
        if constexpr (kChannels) decay[c] = decays[c];
      }
      if (!kChannels && threadIdx.x % 32 == 0) decay[0] = decays[0];
    }
  }
  __syncthreads();

  float* dots = shared + at.dots();
  const int stride = 2 * drafts + 1;
  for (int i = kDelta ? 0 : 1; i < 2 * drafts; i += kDelta ? 1 : 2) {
    const float* vector = shared + at.vectors() + i * kMaxKeys;
    float sums[kVerifyRows] = {};
#pragma unroll
    for (int j = 0; j < Part::kVecs; ++j) {
      constexpr int kVec = Part::kVec;
      float values[kVec];
      load_shared(values, vector + Part::column(lane, j * kVec));
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
#pragma unroll
        for (int r = 0; r < kVerifyRows; ++r) sums[r] = fmaf(state[r][j * kVec + e], values[e], sums[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < kVerifyRows; ++r) {
      const float sum = sum_of_lanes<kLanes>(sums[r]);
      if (lane == 0) dots[(group + r * kGroups) * stride + i] = sum;
    }
  }
  __syncthreads();

  for (int own = threadIdx.x; own < kCtaRows && first_row + own < step.value_dim; own += kVerifyThreads) {
    const int row = first_row + own, rows = at.total_rows();
    float* sums = dots + own * stride;
    for (int j = 0; j < length; ++j) {
      const float u = p.rings.u_row(step, slot, head, j)[row];
      for (int i = kDelta ? 0 : 1; i < 2 * drafts; i += kDelta ? 1 : 2) {
        sums[i] = fmaf(u, shared[at.products() + i * rows + j], sums[i]);
      }
    }
    for (int t = 0; t < drafts; ++t) {
      const float value = load_row(step.dtype, step.v, first_token + t, head, row);
      const float u = shared[at.coefficients() + t] * (kDelta ? value - sums[2 * t] : value);
      p.rings.u_row(step, slot, head, length + t)[row] = u;
      for (int i = 2 * t; i < 2 * drafts; ++i) {  // this update into its own query and all later drafts
        const float product = shared[at.products() + i * rows + at.rows_before + t];
        if (i == 2 * t || product == 0.f) continue;  // a draft that is no ancestor may hold anything
        sums[i] = fmaf(u, product, sums[i]);
      }
      float out = sums[2 * t + 1];
      if constexpr (!kDelta) {
        if (step.skip != nullptr) out = fmaf(step.skip[head], value, out);
        if (step.z.data != nullptr) {
          const float z = load_row(step.dtype, step.z, first_token + t, head, row);
          out *= z * sigmoid(z);
        }
      }
      store_as(step.dtype, step.out, (first_token + t) * step.out_stride_request + head * step.out_stride_head + row,
               out);
    }
  }
}

// A ring whose rows do not fit the device's shared memory is an error with a name.
inline void check_shared_bytes(const char* what, int bytes) {
  int device = 0, most = 0;
  check_cuda(cudaGetDevice(&device), what);
  check_cuda(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), what);
  if (bytes > most) {
    throw std::runtime_error(std::string("attnops::") + what + ": ring_u.shape[2] (ring_rows) takes " +
                             std::to_string(bytes) + " bytes of shared memory, this device has " +
                             std::to_string(most));
  }
}

template <typename State, int kMaxKeys, bool kDelta, bool kChannels>
void launch_linear_verify(const char* what, const LinearVerify& p, cudaStream_t stream) {
  constexpr int kCtaRows = kVerifyThreads / (kMaxKeys / kLaneElements) * kVerifyRows;
  const LinearStep& step = p.step;
  const int row_blocks = ceil_div(step.value_dim, kCtaRows);
  const int64_t blocks = int64_t{step.batch_size} * step.num_heads * row_blocks;
  if (blocks > INT32_MAX) throw std::runtime_error(std::string(what) + ": more than 2^31 blocks of rows");
  const VerifyLayout at{
      .drafts = p.drafts, .keys = kMaxKeys, .rows_before = p.rings.rows - p.drafts, .channels = kChannels};
  const int bytes = 4 * at.floats(kCtaRows);
  check_shared_bytes(what, bytes);
  const LaunchShape shape{.blocks = static_cast<int>(blocks),
                          .threads = kVerifyThreads,
                          .shared_bytes = bytes,
                          .max_shared_bytes = INT32_MAX};
  const bool vectors =
      step.key_dim * sizeof(State) % 16 == 0 &&
      rows_aligned(step.states, sizeof(State), 16, step.stride_slot, step.stride_head, step.stride_row);
  if (vectors) {
    launch_dependent<&linear_verify_kernel<State, kMaxKeys, kDelta, kChannels, true>>(what, shape, stream, p,
                                                                                      row_blocks);
  } else {
    launch_dependent<&linear_verify_kernel<State, kMaxKeys, kDelta, kChannels, false>>(what, shape, stream, p,
                                                                                       row_blocks);
  }
}

}  // namespace attnops
