#pragma once
#include <cstring>
#include <string>
#include <type_traits>

#include "device/common/linear_state.cuh"
#include "device/common/pdl.cuh"

// The kernel of `LinearStep`: bound by memory, so its shape is that of the loads. A group of lanes owns a row of the
// state, 16 elements a lane; a thread has kStepRows rows in flight, and asks for them before anything else. Meanwhile
// the CTA makes keys, queries and gates, a column a thread. Both dot products of a row come from one pass: S k of the
// old state gives u, and out = decay (S q) + u (k q).
namespace attnops {

// Calls `body` with a value of the tokens' type. One branch around all of a thread's loads, so that none waits for
// another.
template <typename Body>
__device__ __forceinline__ void with_token_type(DType dtype, Body&& body) {
  if (dtype == DType::kBFloat16) {
    body(__nv_bfloat16{});
  } else if (dtype == DType::kFloat16) {
    body(__half{});
  } else {
    body(float{});
  }
}

// Asked for here, not where it is used: the compiler would move it behind the branch that needs it.
template <typename T>
__device__ __forceinline__ float load_here(const T* from) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 4) {
    uint32_t bits;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(bits) : "l"(from));
    return __uint_as_float(bits);
  } else {
    T x;
    uint16_t bits;
    asm volatile("ld.global.b16 %0, [%1];" : "=h"(bits) : "l"(from));
    memcpy(&x, &bits, 2);
    return static_cast<float>(x);
  }
#else
  return static_cast<float>(*from);
#endif
}

// The bits of a gate, of the tokens' type or of float32 (`wide`). Two loads under a predicate, of which one runs: no
// branch, and no conversion, which would wait for the load.
template <typename T>
__device__ __forceinline__ uint32_t load_gate(const StepRows& rows, int64_t i, bool wide) {
#if defined(__CUDA_ARCH__)
  uint32_t bits;
  if constexpr (sizeof(T) == 4) {
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(bits) : "l"(static_cast<const T*>(rows.data) + i));
  } else {
    const char* from = static_cast<const char*>(rows.data) + i * (wide ? 4 : 2);
    asm volatile(
        "{\n .reg .pred wide;\n setp.ne.b32 wide, %2, 0;\n"
        " @wide ld.global.b32 %0, [%1];\n @!wide ld.global.u16 %0, [%1];\n}"
        : "=r"(bits)
        : "l"(from), "r"(static_cast<int>(wide)));
  }
  return bits;
#else
  if (wide) return static_cast<const uint32_t*>(rows.data)[i];
  return static_cast<const uint16_t*>(rows.data)[i];
#endif
}

template <typename T>
__device__ __forceinline__ float gate_value(uint32_t bits, bool wide) {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(bits);
  } else {
    T x;
    const uint16_t low = static_cast<uint16_t>(bits);
    memcpy(&x, &low, 2);
    return wide ? __uint_as_float(bits) : static_cast<float>(x);
  }
}

// What the rows of a head share: key, query and decay of each column, zero behind key_dim. A thread makes every
// kStepThreads-th column, and all threads have the sums.
template <int kMaxKeys>
struct alignas(16) StepColumns {
  static constexpr int kEach = (kMaxKeys + kStepThreads - 1) / kStepThreads;
  static constexpr int kWarps = kStepThreads / 32;
  float key[kMaxKeys], query[kMaxKeys], decay[kMaxKeys];
  float sums[3][kWarps];  // of key^2, query^2 and key query, by warp

  __device__ float sum(int i) const {
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += sums[i][w];
    return total;
  }
};

// kElements consecutive floats of shared memory.
template <int kElements>
__device__ __forceinline__ void load_shared(float (&x)[kElements], const float* from) {
#pragma unroll
  for (int j = 0; j < kElements; j += 4) {
    const float4 vec = *reinterpret_cast<const float4*>(from + j);
    x[j] = vec.x, x[j + 1] = vec.y, x[j + 2] = vec.z, x[j + 3] = vec.w;
  }
}

// A token through a thread's rows of a state: they decay as they are multiplied, each part once, and a part's key and
// query serve all of them. The new state's product with the query is by_query + update x what is returned. `value(r)`:
// of a row, read where it is used.
template <typename Part, bool kDelta, bool kChannels, int kLanes, int kRows, int kMaxKeys, typename Value>
__device__ __forceinline__ float step_rows(float (&state)[kRows][kLaneElements], const StepColumns<kMaxKeys>& columns,
                                           int lane, float factor, float coefficient, float key_scale,
                                           float query_scale, const Value& value, float (&update)[kRows],
                                           float (&by_query)[kRows]) {
  float by_key[kRows] = {}, key_query = 0.f;
#pragma unroll
  for (int r = 0; r < kRows; ++r) by_query[r] = 0.f;
#pragma unroll
  for (int j = 0; j < Part::kVecs; ++j) {
    constexpr int kVec = Part::kVec;
    const int column = Part::column(lane, j * kVec);
    float keys[kVec], queries[kVec], decays[kVec];
    load_shared(keys, columns.key + column);
    load_shared(queries, columns.query + column);
    if constexpr (kChannels) load_shared(decays, columns.decay + column);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const float scaled_key = keys[i] * key_scale, scaled_query = queries[i] * query_scale;
      key_query = fmaf(scaled_key, scaled_query, key_query);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float& s = state[r][j * kVec + i];
        s *= kChannels ? decays[i] : factor;
        by_key[r] = fmaf(s, scaled_key, by_key[r]);
        by_query[r] = fmaf(s, scaled_query, by_query[r]);
      }
    }
  }
  key_query = sum_of_lanes<kLanes>(key_query);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    by_query[r] = sum_of_lanes<kLanes>(by_query[r]);
    update[r] = coefficient * (kDelta ? value(r) - sum_of_lanes<kLanes>(by_key[r]) : value(r));
  }
#pragma unroll
  for (int j = 0; j < Part::kVecs; ++j) {
    constexpr int kVec = Part::kVec;
    float keys[kVec];
    load_shared(keys, columns.key + Part::column(lane, j * kVec));
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const float scaled_key = keys[i] * key_scale;
#pragma unroll
      for (int r = 0; r < kRows; ++r) state[r][j * kVec + i] = fmaf(update[r], scaled_key, state[r][j * kVec + i]);
    }
  }
  return key_query;
}

// What a kernel may count on.
enum class StepCase {
  kAny,
  kVectors,  // rows of states start on 16-byte boundaries
  kWhole,    // that, bf16 tokens, keys as long as the kernel's, and rows that fill the CTAs
};

// Grid: row blocks x heads x requests, in one dimension; of whole CTAs in three.
template <typename State, int kMaxKeys, bool kDelta, bool kChannels, StepCase kCase, int kRows = kStepRows>
__global__ void __launch_bounds__(kStepThreads)
    linear_step_kernel(const __grid_constant__ LinearStep p, int row_blocks, int ahead) {
  constexpr bool kWhole = kCase == StepCase::kWhole, kVectors = kCase != StepCase::kAny;
  constexpr int kLanes = kMaxKeys / kLaneElements, kGroups = kStepThreads / kLanes;
  using Part = RowPart<State, kLanes>;
  using Columns = StepColumns<kMaxKeys>;
  __shared__ Columns columns;
  __shared__ float2 gates;
  wait_and_let_next_start(!p.behind_convolution);
  const int work = blockIdx.x / row_blocks, row_block = kWhole ? blockIdx.x : blockIdx.x % row_blocks;
  const int head = kWhole ? blockIdx.y : work % p.num_heads, request = kWhole ? blockIdx.z : work / p.num_heads;
  const int key_dim = kWhole ? kMaxKeys : p.key_dim;
  const auto has_row = [&](int row) { return kWhole || row < p.value_dim; };
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const int first_row = row_block * kGroups * kRows + group;
  const StepSlots<State> slots(p, kDelta ? kReportDeltaDecode : kReportSsdDecode, request, head,
                               row_block == 0 && head == 0 && threadIdx.x == 0);

  float state[kRows][kLaneElements];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = first_row + r * kGroups;
    const bool reads = slots.from != nullptr && has_row(row);
    Part::template load<kVectors, true>(state[r], slots.from + int64_t{row} * p.stride_row, lane, reads ? key_dim : 0);
  }

  if (kWhole && ahead > 0 && p.behind_convolution && threadIdx.x == kStepThreads - 1) {
    ask_for_state<State>(p, request + ahead, head, row_block * kGroups * kRows, kGroups * kRows);
  }

  float key[Columns::kEach], query[Columns::kEach], gate[Columns::kEach], value[kRows], z[kRows];
  float rate = 1.f, beta = 1.f;  // a of the head, or dt; b
  const bool logits = p.a_log != nullptr;
  const float a_log = logits ? load_here(p.a_log + head) : 0.f;
  const float skip = !kDelta && p.skip != nullptr ? load_here(p.skip + head) : 0.f;
  float biases[Columns::kEach] = {};  // of the columns, or the head's
  if (p.dt_bias != nullptr) {
#pragma unroll
    for (int c = 0; c < (kChannels ? Columns::kEach : 1); ++c) {
      const int column = c * kStepThreads + threadIdx.x;
      if (!kChannels || column < key_dim) {
        biases[c] = load_here(p.dt_bias + (kChannels ? int64_t{head} * key_dim + column : head));
      }
    }
  }
  const auto load_tokens = [&](auto token) {
    using T = decltype(token);
    const auto pointer = [&](const StepRows& rows, int of, int64_t i) {
      return static_cast<const T*>(rows.data) + request * rows.stride_request + of * rows.stride_head + i;
    };
    const auto at = [&](const StepRows& rows, int of, int64_t i) { return static_cast<float>(*pointer(rows, of, i)); };
    const int shared = head / p.heads_per_group;
    constexpr bool kOfTokens = kWhole && kChannels;  // gates: 2 % of its time, measured
    const bool wide = !kOfTokens && p.gate_dtype == DType::kFloat32;
    const auto gate_bits = [&](const StepRows& rows, int i) {
      return load_gate<T>(rows, request * rows.stride_request + head * rows.stride_head + i, wide);
    };
    // Before keys and queries, as these would be waited for where a load has a branch.
    uint32_t of_columns[Columns::kEach] = {}, of_rate = 0, of_beta = 0;
    const bool has_rate = !kChannels && (kDelta || p.a.data != nullptr);
    if (has_rate) of_rate = gate_bits(p.a, 0);
    if (kDelta && !kOfTokens) of_beta = gate_bits(p.b, 0);
    if constexpr (kChannels && !kOfTokens) {
#pragma unroll
      for (int c = 0; c < Columns::kEach; ++c) {
        const int column = c * kStepThreads + threadIdx.x;
        if (column < key_dim) of_columns[c] = gate_bits(p.a, column);
      }
    }
    wait_and_let_next_start(p.behind_convolution);
#pragma unroll
    for (int c = 0; c < Columns::kEach; ++c) {
      const int column = c * kStepThreads + threadIdx.x;
      const bool inside = column < key_dim;
      key[c] = inside ? at(p.k, shared, column) : 0.f;
      query[c] = inside ? at(p.q, shared, column) : 0.f;
      if (kOfTokens) gate[c] = inside ? at(p.a, head, column) : 0.f;
    }
    if (kDelta && kOfTokens) beta = load_here(pointer(p.b, head, 0));
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = first_row + r * kGroups;
      value[r] = has_row(row) ? at(p.v, head, row) : 0.f;
      z[r] = !kDelta && p.z.data != nullptr && has_row(row) ? at(p.z, head, row) : 0.f;
    }
#pragma unroll
    for (int c = 0; c < (kOfTokens ? 0 : Columns::kEach); ++c) gate[c] = gate_value<T>(of_columns[c], wide);
    if (has_rate) rate = gate_value<T>(of_rate, wide);
    if (kDelta && !kOfTokens) beta = gate_value<T>(of_beta, wide);
  };
  if constexpr (kWhole) {
    load_tokens(__nv_bfloat16{});
  } else {
    with_token_type(p.dtype, load_tokens);
  }

  if (kWhole && ahead > 0 && !p.behind_convolution && threadIdx.x == kStepThreads - 1) {
    ask_for_state<State>(p, request + ahead, head, row_block * kGroups * kRows, kGroups * kRows);
  }

  float sums[3] = {};
#pragma unroll
  for (int c = 0; c < Columns::kEach; ++c) {
    const int column = c * kStepThreads + threadIdx.x;
    sums[0] += key[c] * key[c];
    sums[1] += query[c] * query[c];
    sums[2] += key[c] * query[c];
    if (column >= kMaxKeys) continue;
    columns.key[column] = key[c];
    columns.query[column] = query[c];
    if constexpr (kChannels) {
      columns.decay[column] =
          column < key_dim ? expf(log_decay(gate[c], logits, a_log, biases[c], p.lower_bound)) : 0.f;
    }
  }
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    sums[i] = sum_of_lanes<32>(sums[i]);
    if (threadIdx.x % 32 == 0) columns.sums[i][threadIdx.x / 32] = sums[i];
  }
  // Each thread needs the gate. One warp makes what takes long of it.
  if (threadIdx.x < 32) {
    float factor, coefficient = 0.f;
    if constexpr (kDelta) {
      factor = kChannels ? 1.f : expf(log_decay(rate, logits, a_log, biases[0], p.lower_bound));
    } else {
      const float dt = rate + biases[0];
      coefficient = p.softplus ? softplus(dt) : dt;
      factor = expf(rate_times(a_log, coefficient));
    }
    if (threadIdx.x == 0) gates = make_float2(factor, coefficient);
  }
  if (kDelta && logits) beta = sigmoid(beta);
  __syncthreads();
  const float factor = gates.x, coefficient = kDelta ? beta : gates.y;
  const float key_scale = p.normalize ? rsqrtf(columns.sum(0) + kNormEpsilon) : 1.f;
  const float query_scale = p.scale * (p.normalize ? rsqrtf(columns.sum(1) + kNormEpsilon) : 1.f);

  float update[kRows], by_query[kRows];
  const float key_query = step_rows<Part, kDelta, kChannels, kLanes>(
      state, columns, lane, factor, coefficient, key_scale, query_scale, [&](int r) { return value[r]; }, update,
      by_query);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = first_row + r * kGroups;
    if (!has_row(row)) continue;
    if (slots.to != nullptr) {
      Part::template store<kVectors, true>(state[r], slots.to + int64_t{row} * p.stride_row, lane, key_dim);
    }
    float out = fmaf(update[r], key_query, by_query[r]);
    if constexpr (!kDelta) {
      if (p.skip != nullptr) out = fmaf(skip, value[r], out);
      if (p.z.data != nullptr) out *= z[r] * sigmoid(z[r]);
    }
    const int64_t to = request * p.out_stride_request + head * p.out_stride_head + row;
    if (lane == 0) store_as(kWhole ? DType::kBFloat16 : p.dtype, p.out, to, slots.from == nullptr ? 0.f : out);
  }
}

// A launch over all of a call's rows. Vectors of 16 bytes where every row of the states starts on such a boundary.
template <bool kDelta, bool kChannels, typename State, int kMaxKeys>
void launch_linear_step(const char* what, const LinearStep& p, cudaStream_t stream) {
  constexpr int kGroupRows = kStepThreads / (kMaxKeys / kLaneElements), kRowsPerBlock = kGroupRows * kStepRows;
  const int row_blocks = ceil_div(p.value_dim, kRowsPerBlock);
  const int64_t blocks = int64_t{p.batch_size} * p.num_heads * row_blocks;
  if (blocks > INT32_MAX) throw std::runtime_error(std::string(what) + ": more than 2^31 blocks of rows");
  LaunchShape shape{
      .blocks = static_cast<int>(blocks), .threads = kStepThreads, .shared_bytes = 0, .max_shared_bytes = 0};
  using Case = StepCase;
  const bool vectors = p.key_dim * sizeof(State) % 16 == 0 &&
                       rows_aligned(p.states, sizeof(State), 16, p.stride_slot, p.stride_head, p.stride_row);
  if constexpr (!std::is_same_v<State, __half> && kMaxKeys <= 128) {
    constexpr int kMostAcross = 65535;  // blocks in the grid's other dimensions
    const bool narrow = !kChannels || p.gate_dtype == p.dtype;
    if (vectors && narrow && p.dtype == DType::kBFloat16 && p.key_dim == kMaxKeys && p.value_dim % kRowsPerBlock == 0 &&
        p.num_heads <= kMostAcross && p.batch_size <= kMostAcross) {
      const auto whole = [&](auto rows) {
        constexpr int kRows = decltype(rows)::value;
        shape.blocks = p.value_dim / (kGroupRows * kRows), shape.blocks_y = p.num_heads, shape.blocks_z = p.batch_size;
        launch_dependent<&linear_step_kernel<State, kMaxKeys, kDelta, kChannels, Case::kWhole, kRows>>(
            what, shape, stream, p, shape.blocks,
            requests_ahead(what, p, shape.blocks * p.num_heads, kRows > kStepRows ? 3 : 5));
      };
      // States of 16 bits are half the bytes of a row, and what comes before the rows is the same. So a thread has
      // twice as many where CTAs are still many.
      if constexpr (sizeof(State) == 2) {
        if (p.value_dim % (2 * kRowsPerBlock) == 0 && blocks >= int64_t{48} * device_sms(what)) {
          return whole(std::integral_constant<int, 2 * kStepRows>{});
        }
      }
      return whole(std::integral_constant<int, kStepRows>{});
    }
  }
  if (vectors) {
    launch_dependent<&linear_step_kernel<State, kMaxKeys, kDelta, kChannels, Case::kVectors>>(what, shape, stream, p,
                                                                                              row_blocks, 0);
  } else {
    launch_dependent<&linear_step_kernel<State, kMaxKeys, kDelta, kChannels, Case::kAny>>(what, shape, stream, p,
                                                                                          row_blocks, 0);
  }
}

// A row of a decode op's table of kernels: one type of states, and keys up to a bound.
struct LinearStepImpl {
  const char* name;
  DType state_dtype;
  int max_keys;
  void (*launch)(const LinearStep&, cudaStream_t);

  std::string reject(const LinearStep& p) const {
    if (p.state_dtype != state_dtype) {
      return std::string("takes states of ") + name_of(state_dtype) + ", got " + name_of(p.state_dtype);
    }
    if (p.key_dim > max_keys) return "takes keys of at most " + std::to_string(max_keys) + " elements";
    return "";
  }
};

#define ATTNOPS_LINEAR_STEP_IMPLS(launch)                               \
  {                                                                     \
      {"fp32_64", DType::kFloat32, 64, &launch<float, 64>},             \
      {"fp32_128", DType::kFloat32, 128, &launch<float, 128>},          \
      {"fp32_256", DType::kFloat32, 256, &launch<float, 256>},          \
      {"bf16_64", DType::kBFloat16, 64, &launch<__nv_bfloat16, 64>},    \
      {"bf16_128", DType::kBFloat16, 128, &launch<__nv_bfloat16, 128>}, \
      {"bf16_256", DType::kBFloat16, 256, &launch<__nv_bfloat16, 256>}, \
      {"fp16_64", DType::kFloat16, 64, &launch<__half, 64>},            \
      {"fp16_128", DType::kFloat16, 128, &launch<__half, 128>},         \
      {"fp16_256", DType::kFloat16, 256, &launch<__half, 256>},         \
  }

}  // namespace attnops
