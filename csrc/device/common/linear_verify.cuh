#pragma once
#include "core/linear_verify.h"
#include "device/common/arch.h"
#include "device/common/linear_token.cuh"

// Drafts against states that are only read. A draft's S k and S q are those of the state in the pool, decayed, and a
// sum over the rows behind it: the ring's and the draft's ancestors. So a state's row is multiplied once with all keys
// and queries, and all else are products of small vectors, made by each CTA in shared memory.
namespace attnops {

inline constexpr int kVerifyThreads = 256;

// Shared memory, by offsets in floats: extents are those of the call.
struct VerifyLayout {
  int drafts, keys, cta_rows, rows_before;  // rows_before: of a ring, at most
  bool channels;

  __host__ __device__ int total_rows() const { return rows_before + drafts; }
  __host__ __device__ int key_stride() const { return keys; }
  __host__ __device__ int query_stride() const { return keys; }
  // Products of a row's key with each draft's key and query, in pairs; two drafts are four floats.
  __host__ __device__ int product_stride() const { return round_up(2 * drafts, 4); }
  __host__ __device__ int row_keys() const { return 0; }                  // [rows, keys]
  __host__ __device__ int decays() const { return total_rows() * keys; }  // [rows, keys or 1]
  __host__ __device__ int queries() const { return decays() + total_rows() * (channels ? keys : 4); }  // [drafts, keys]
  // What the state is multiplied with, with gates per channel: [2 drafts, keys]. Else it is a draft's own rows, and the
  // state's decay up to it comes to their products.
  __host__ __device__ int vectors() const { return queries() + drafts * keys; }
  __host__ __device__ int products() const { return vectors() + (channels ? 2 * drafts * keys : 0); }  // [rows, stride]
  __host__ __device__ int values() const { return products() + total_rows() * product_stride(); }
  // Values are [rows, rows of a CTA]: updates of the ring, then what the drafts bring.
  __host__ __device__ int coefficients() const { return values() + total_rows() * cta_rows; }  // [drafts]
  __host__ __device__ int state_decays() const { return coefficients() + drafts; }             // [drafts]
  __host__ __device__ int dots() const { return state_decays() + drafts; }  // [rows of a CTA, 2 drafts]
  __host__ __device__ int floats() const { return dots() + cta_rows * (2 * drafts + 1); }
};

// A draft's key, query and gates, by one warp. Types are told apart around all loads, so that none waits for another.
template <int kMaxKeys, bool kDelta, bool kChannels>
__device__ __forceinline__ void make_draft(const LinearStep& p, int64_t token, int head, float* key, float* query,
                                           float* decay, float* coefficient) {
  constexpr int kEach = kMaxKeys / 32;
  const int lane = threadIdx.x % 32, group = head / p.heads_per_group;
  float keys[kEach] = {}, queries[kEach] = {}, gates[kEach] = {}, biases[kEach] = {}, sums[2] = {}, b = 0.f;
  gates[0] = 1.f;
  with_token_type(p.dtype, [&](auto type) {
    using T = decltype(type);
    const T* k = static_cast<const T*>(p.k.data) + token * p.k.stride_request + group * p.k.stride_head;
    const T* q = static_cast<const T*>(p.q.data) + token * p.q.stride_request + group * p.q.stride_head;
#pragma unroll
    for (int c = 0; c < kEach; ++c) {
      const int column = lane + 32 * c;
      if (column < p.key_dim) keys[c] = static_cast<float>(k[column]), queries[c] = static_cast<float>(q[column]);
    }
  });
  with_token_type(p.gate_dtype, [&](auto type) {
    using T = decltype(type);
    if (p.a.data != nullptr) {
      const T* a = static_cast<const T*>(p.a.data) + token * p.a.stride_request + head * p.a.stride_head;
#pragma unroll
      for (int c = 0; c < (kChannels ? kEach : 1); ++c) {
        const int column = kChannels ? lane + 32 * c : 0;
        if (column < p.key_dim) gates[c] = static_cast<float>(a[column]);
      }
    }
    if (kDelta)
      b = static_cast<float>(static_cast<const T*>(p.b.data)[token * p.b.stride_request + head * p.b.stride_head]);
  });
  const float a_log = p.a_log != nullptr ? p.a_log[head] : 0.f;
  if (p.dt_bias != nullptr) {
#pragma unroll
    for (int c = 0; c < (kChannels ? kEach : 1); ++c) {
      const int column = lane + 32 * c;
      if (!kChannels || column < p.key_dim)
        biases[c] = p.dt_bias[kChannels ? int64_t{head} * p.key_dim + column : head];
    }
  }
#pragma unroll
  for (int c = 0; c < kEach; ++c) {
    const int column = lane + 32 * c;
    sums[0] += keys[c] * keys[c];
    sums[1] += queries[c] * queries[c];
    if constexpr (kChannels) {
      decay[column] =
          column < p.key_dim ? expf(log_decay(gates[c], p.a_log != nullptr, a_log, biases[c], p.lower_bound)) : 0.f;
    }
  }
  const float key_scale = p.normalize ? rsqrtf(sum_of_lanes<32>(sums[0]) + kNormEpsilon) : 1.f;
  const float query_scale = p.scale * (p.normalize ? rsqrtf(sum_of_lanes<32>(sums[1]) + kNormEpsilon) : 1.f);
#pragma unroll
  for (int c = 0; c < kEach; ++c) {
    key[lane + 32 * c] = keys[c] * key_scale;
    query[lane + 32 * c] = queries[c] * query_scale;
  }
  if (lane != 0) return;
  const TokenGate gate = gate_of<kDelta>(p, gates[0], b, a_log, biases[0]);
  *coefficient = gate.coefficient;
  if constexpr (!kChannels) decay[0] = expf(gate.log_decay);
}

// With gates per channel, what a draft's key and query are multiplied with: the state's decay up to it, and of each row
// behind it the product of the keys under the decays since. Rows are walked from the draft to the state. By one warp.
template <int kMaxKeys, typename Layout, typename Put>
__device__ __forceinline__ void walk_back(const Layout& at, float* shared, int draft, int length, uint32_t ancestors,
                                          const Put& put) {
  constexpr int kEach = kMaxKeys / 32;
  const int lane = threadIdx.x % 32;
  const float* own_key = shared + at.row_keys() + (at.rows_before + draft) * at.key_stride();
  const float* own_query = shared + at.queries() + draft * at.query_stride();
  float key[kEach], query[kEach], decay[kEach];
#pragma unroll
  for (int c = 0; c < kEach; ++c) {
    key[c] = own_key[lane + 32 * c];
    query[c] = own_query[lane + 32 * c];
    decay[c] = 1.f;
  }
  const auto take = [&](int row, bool seen) {  // without branches, so that sums of several rows overlap
    const float* other = shared + at.row_keys() + row * at.key_stride();
    const float* decays = shared + at.decays() + row * kMaxKeys;
    float sums[2] = {};
#pragma unroll
    for (int c = 0; c < kEach; ++c) {
      const float scaled = decay[c] * other[lane + 32 * c];
      sums[0] = fmaf(key[c], scaled, sums[0]);
      sums[1] = fmaf(query[c], scaled, sums[1]);
      decay[c] *= seen ? decays[lane + 32 * c] : 1.f;
    }
    const float2 pair = make_float2(sum_of_lanes<32>(sums[0]), sum_of_lanes<32>(sums[1]));
    float* to = shared + at.products() + row * at.product_stride() + 2 * draft;
    if (lane == 0) *reinterpret_cast<float2*>(to) = seen ? pair : make_float2(0.f, 0.f);
  };
#pragma unroll 4
  for (int t = draft; t >= 0; --t) take(at.rows_before + t, t == draft || (ancestors >> t & 1u) != 0);
#pragma unroll 4
  for (int row = length - 1; row >= 0; --row) take(row, true);
#pragma unroll
  for (int c = 0; c < kEach; ++c) put(lane + 32 * c, key[c] * decay[c], query[c] * decay[c]);
}

// The same where a row has one decay, by all threads: eight lanes take a row and a draft. The decays between them come
// to the product.
template <int kKeys>
__device__ __forceinline__ void multiply_rows(const LinearVerify& p, const VerifyLayout& at, float* shared, int request,
                                              int length) {
  constexpr int kLanes = 8, kAtOnce = kVerifyThreads / kLanes;
  const int lane = threadIdx.x % kLanes, drafts = at.drafts, count = drafts * (length + drafts);
  const auto place = [&](int row) { return row < length ? row : at.rows_before + row - length; };
  for (int first = 0; first < count; first += kAtOnce) {
    const int own = first + static_cast<int>(threadIdx.x) / kLanes, task = min_of(own, count - 1);
    const int draft = task % drafts, row = task / drafts;
    const uint32_t ancestors = p.ancestors(request, draft) | 1u << draft;
    const auto seen = [&](int other) { return other < length || (ancestors >> (other - length) & 1u) != 0; };
    const float* key = shared + at.row_keys() + (at.rows_before + draft) * kKeys;
    const float* query = shared + at.queries() + draft * kKeys;
    const float* others = shared + at.row_keys() + place(row) * kKeys;
    float by_key = 0.f, by_query = 0.f, decay = 1.f;
#pragma unroll
    for (int i = 0; i < kKeys / (4 * kLanes); ++i) {
      const int column = 4 * (i * kLanes + lane);
      float keys[4], queries[4], other[4];
      load_shared(keys, key + column);
      load_shared(queries, query + column);
      load_shared(other, others + column);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        by_key = fmaf(keys[e], other[e], by_key);
        by_query = fmaf(queries[e], other[e], by_query);
      }
    }
    for (int later = row + 1 + lane; later <= length + draft; later += kLanes) {
      if (seen(later)) decay *= shared[at.decays() + 4 * place(later)];
    }
    by_key = sum_of_lanes<kLanes>(by_key);
    by_query = sum_of_lanes<kLanes>(by_query);
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      decay *= __shfl_xor_sync(0xffffffffu, decay, distance);
    }
    if (lane != 0 || own >= count || row > length + draft) continue;
    const bool here = seen(row);
    *reinterpret_cast<float2*>(shared + at.products() + place(row) * at.product_stride() + 2 * draft) =
        here ? make_float2(decay * by_key, decay * by_query) : make_float2(0.f, 0.f);
    if (row == 0) shared[at.state_decays() + draft] = here ? decay * shared[at.decays() + 4 * place(0)] : decay;
  }
}

// Lane i of each kLanes has the sum over them of x[i].
template <int kLanes, int kHalf = kLanes / 2>
__device__ __forceinline__ float sum_of_each(float (&x)[kLanes]) {
  const bool upper = (threadIdx.x & kHalf) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float kept = upper ? x[i + kHalf] : x[i], sent = upper ? x[i] : x[i + kHalf];
    x[i] = kept + __shfl_xor_sync(0xffffffffu, sent, kHalf);
  }
  if constexpr (kHalf > 1) return sum_of_each<kLanes, kHalf / 2>(x);
  return x[0];
}

// A row of values through the drafts: `sums` are the state's products with each draft's key and query. To each come
// those of the rows behind it, of the ring and of the drafts.
template <bool kDelta, bool kChannels>
__device__ __forceinline__ void finish_row(const LinearVerify& p, const VerifyLayout& at, const float* shared,
                                           const float* sums, int64_t slot, int request, int head, int length, int own,
                                           int row) {
  const LinearStep& step = p.step;
  const int drafts = p.drafts;
  const float* values = shared + at.values() + own;
  float by_key[kMaxDrafts], by_query[kMaxDrafts];
#pragma unroll
  for (int t = 0; t < kMaxDrafts; ++t) {
    const float decay = kChannels || t >= drafts ? 1.f : shared[at.state_decays() + t];
    by_key[t] = kDelta && t < drafts ? decay * sums[2 * t] : 0.f;
    by_query[t] = t < drafts ? decay * sums[2 * t + 1] : 0.f;
  }
  for (int j = 0; j < length; ++j) {
    const float u = values[j * at.cta_rows];
    const float* products = shared + at.products() + j * at.product_stride();
#pragma unroll
    for (int t = 0; t < kMaxDrafts; t += 2) {
      if (t >= drafts) break;
      const float4 two = *reinterpret_cast<const float4*>(products + 2 * t);
      by_key[t] = fmaf(u, two.x, by_key[t]);
      by_query[t] = fmaf(u, two.y, by_query[t]);
      by_key[t + 1] = fmaf(u, two.z, by_key[t + 1]);
      by_query[t + 1] = fmaf(u, two.w, by_query[t + 1]);
    }
  }
  const int64_t first_token = int64_t{request} * drafts;
#pragma unroll
  for (int t = 0; t < kMaxDrafts; ++t) {
    if (t >= drafts) break;
    const float value = values[(at.rows_before + t) * at.cta_rows];
    const float u = shared[at.coefficients() + t] * (kDelta ? value - by_key[t] : value);
    p.rings.u_row(step, slot, head, length + t)[row] = u;
    const float* products = shared + at.products() + (at.rows_before + t) * at.product_stride();
    by_query[t] = fmaf(u, products[2 * t + 1], by_query[t]);
#pragma unroll
    for (int later = t + 1; later < kMaxDrafts; ++later) {
      if (later >= drafts) break;
      const float2 pair = *reinterpret_cast<const float2*>(products + 2 * later);
      // A draft that is no ancestor may hold anything, and its products are 0.
      by_key[later] = pair.x == 0.f ? by_key[later] : fmaf(u, pair.x, by_key[later]);
      by_query[later] = pair.y == 0.f ? by_query[later] : fmaf(u, pair.y, by_query[later]);
    }
    float out = by_query[t];
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

// Rows of a CTA whose threads have kRows each.
template <int kMaxKeys, int kRows>
inline constexpr int kVerifyCtaRows = kVerifyThreads / (kMaxKeys / kLaneElements) * kRows;

// Grid: row blocks x heads x requests, in one dimension.
template <typename State, int kMaxKeys, bool kDelta, bool kChannels, bool kVectors, int kVerifyRows>
__global__ void __launch_bounds__(kVerifyThreads, kVerifyRows == 2 ? 3 : 2)
    linear_verify_kernel(const __grid_constant__ LinearVerify p, int row_blocks) {
  constexpr int kLanes = kMaxKeys / kLaneElements, kGroups = kVerifyThreads / kLanes;
  constexpr int kCtaRows = kVerifyCtaRows<kMaxKeys, kVerifyRows>;
  using Part = RowPart<State, kLanes>;
  extern __shared__ __align__(16) float shared[];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const LinearStep& step = p.step;
  const int row_block = blockIdx.x % row_blocks, work = blockIdx.x / row_blocks;
  const int head = work % step.num_heads, request = work / step.num_heads, drafts = p.drafts;
  const int first_row = row_block * kCtaRows, warp = threadIdx.x / 32;
  const VerifyLayout at{.drafts = drafts,
                        .keys = kMaxKeys,
                        .cta_rows = kCtaRows,
                        .rows_before = p.rings.rows - drafts,
                        .channels = kChannels};
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
#pragma unroll 4
  for (int i = threadIdx.x; i < length * kCtaRows; i += kVerifyThreads) {
    const int own = i % kCtaRows, row = first_row + own;
    if (row < step.value_dim) shared[at.values() + i] = p.rings.u_row(step, slot, head, i / kCtaRows)[row];
  }
  with_token_type(step.dtype, [&](auto type) {
    using T = decltype(type);
    const T* from = static_cast<const T*>(step.v.data) + first_token * step.v.stride_request +
                    head * step.v.stride_head + first_row;
    float* to = shared + at.values() + at.rows_before * kCtaRows;
#pragma unroll 4
    for (int i = threadIdx.x; i < drafts * kCtaRows; i += kVerifyThreads) {
      const int own = i % kCtaRows;
      if (first_row + own < step.value_dim) {
        to[i] = static_cast<float>(from[i / kCtaRows * step.v.stride_request + own]);
      }
    }
  });
  // The ring's keys are the first warps', drafts the last ones'.
  for (int t = kVerifyThreads / 32 - 1 - warp; t < drafts; t += kVerifyThreads / 32) {
    const int row = at.rows_before + t;
    make_draft<kMaxKeys, kDelta, kChannels>(
        step, first_token + t, head, shared + at.row_keys() + row * kMaxKeys, shared + at.queries() + t * kMaxKeys,
        shared + at.decays() + row * (kChannels ? kMaxKeys : 4), shared + at.coefficients() + t);
  }
  __syncthreads();
  if constexpr (kChannels) {
    for (int t = warp; t < drafts; t += kVerifyThreads / 32) {
      float* vectors = shared + at.vectors() + 2 * t * kMaxKeys;
      walk_back<kMaxKeys>(at, shared, t, length, p.ancestors(request, t), [&](int column, float key, float query) {
        vectors[column] = key;
        vectors[kMaxKeys + column] = query;
      });
    }
  } else {
    multiply_rows<kMaxKeys>(p, at, shared, request, length);
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
  if constexpr (kChannels) __syncthreads();

  float* dots = shared + at.dots();
  constexpr int kAtOnce = kLanes / kVerifyRows;  // vectors, so that each lane ends with one sum
  const int stride = 2 * drafts + 1, count = kDelta ? 2 * drafts : drafts;
  for (int first = 0; first < count; first += kAtOnce) {
    float sums[kLanes] = {};
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int i = min_of(first + n, count - 1), t = kDelta ? i / 2 : i;
      const bool by_query = !kDelta || i % 2 != 0;
      const float* vector = shared + (kChannels  ? at.vectors() + (2 * t + by_query) * kMaxKeys
                                      : by_query ? at.queries() + t * kMaxKeys
                                                 : at.row_keys() + (at.rows_before + t) * kMaxKeys);
#pragma unroll
      for (int j = 0; j < Part::kVecs; ++j) {
        constexpr int kVec = Part::kVec;
        float values[kVec];
        load_shared(values, vector + Part::column(lane, j * kVec));
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
#pragma unroll
          for (int r = 0; r < kVerifyRows; ++r) {
            sums[n * kVerifyRows + r] = fmaf(state[r][j * kVec + e], values[e], sums[n * kVerifyRows + r]);
          }
        }
      }
    }
    const float sum = sum_of_each<kLanes>(sums);
    const int i = first + lane / kVerifyRows, own = group + lane % kVerifyRows * kGroups;
    if (i < count) dots[own * stride + (kDelta ? i : 2 * i + 1)] = sum;
  }
  __syncthreads();
  for (int own = threadIdx.x; own < kCtaRows && first_row + own < step.value_dim; own += kVerifyThreads) {
    finish_row<kDelta, kChannels>(p, at, shared, dots + own * stride, slot, request, head, length, own,
                                  first_row + own);
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

template <typename State, int kMaxKeys, bool kDelta, bool kChannels, int kRows>
void launch_linear_verify_of(const char* what, const LinearVerify& p, cudaStream_t stream) {
  constexpr int kCtaRows = kVerifyCtaRows<kMaxKeys, kRows>;
  const LinearStep& step = p.step;
  const int row_blocks = ceil_div(step.value_dim, kCtaRows);
  const int64_t blocks = int64_t{step.batch_size} * step.num_heads * row_blocks;
  if (blocks > INT32_MAX) throw std::runtime_error(std::string(what) + ": more than 2^31 blocks of rows");
  const VerifyLayout at{.drafts = p.drafts,
                        .keys = kMaxKeys,
                        .cta_rows = kCtaRows,
                        .rows_before = p.rings.rows - p.drafts,
                        .channels = kChannels};
  const int bytes = 4 * at.floats();
  check_shared_bytes(what, bytes);
  const LaunchShape shape{.blocks = static_cast<int>(blocks),
                          .threads = kVerifyThreads,
                          .shared_bytes = bytes,
                          .max_shared_bytes = INT32_MAX};
  const bool vectors =
      step.key_dim * sizeof(State) % 16 == 0 &&
      rows_aligned(step.states, sizeof(State), 16, step.stride_slot, step.stride_head, step.stride_row);
  if (vectors) {
    launch_dependent<&linear_verify_kernel<State, kMaxKeys, kDelta, kChannels, true, kRows>>(what, shape, stream, p,
                                                                                             row_blocks);
  } else {
    launch_dependent<&linear_verify_kernel<State, kMaxKeys, kDelta, kChannels, false, kRows>>(what, shape, stream, p,
                                                                                              row_blocks);
  }
}

// Where heads fill the GPU a thread has four rows: what a CTA makes of its drafts then serves twice as many.
template <typename State, int kMaxKeys, bool kDelta, bool kChannels>
void launch_linear_verify(const char* what, const LinearVerify& p, cudaStream_t stream) {
  if constexpr (kMaxKeys == 128 && !kChannels) {
    const int64_t heads = int64_t{p.step.batch_size} * p.step.num_heads;
    if (p.step.value_dim > kVerifyCtaRows<kMaxKeys, 2> && heads >= 4 * device_sms(what)) {
      return launch_linear_verify_of<State, kMaxKeys, kDelta, kChannels, 4>(what, p, stream);
    }
  }
  launch_linear_verify_of<State, kMaxKeys, kDelta, kChannels, 2>(what, p, stream);
}

}  // namespace attnops
