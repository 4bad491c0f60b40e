#pragma once
#include <type_traits>

#include "core/linear_chunk.h"
#include "device/common/linear_token.cuh"
#include "device/sm80/linear_chunk_local.cuh"

// The part of a prompt that goes from chunk to chunk: a warp has 16 rows of values and their state in registers, and
// takes a chunk's tokens as columns:
//   U = (V - S K^T) T^T;  O = S Q^T + U P^T;  S = decay S + U K
// with the decays on the columns of the products, and beta on those of T. In SSD U is dt X.
namespace attnops {

template <int kKeys, bool kDelta, bool kChannels, int kWarps>
struct PassShared {
  static constexpr int kPanels = kKeys / 64, kValuePanels = (kWarps + 3) / 4, kStages = 2;
  static constexpr int kFactorBytes = kFactorRows * kChunk * 4;
  struct Stage {
    alignas(1024) unsigned char k[kPanels * kPanelBytes];
    unsigned char q[kPanels * kPanelBytes];
    unsigned char k_end[kChannels ? kPanels * kPanelBytes : 1024];
    unsigned char t[kDelta ? kPanelBytes : 1024];
    unsigned char p[kPanelBytes];
    unsigned char v[kValuePanels * kPanelBytes];
    float factors[kFactorRows][kChunk];
  };
  Stage stages[kStages];
};

template <int kThreads>
__device__ __forceinline__ void copy_linear(uint32_t to, const unsigned char* from, int bytes) {
  for (int i = threadIdx.x * 16; i < bytes; i += kThreads * 16) cp_async_16(to + i, from + i, true);
}

// A head's rows of values through one request: all but the products, which are `Pass::take`.
template <class Pass, int kKeys, bool kDelta, bool kChannels, int kWarps>
class ChunkPassBase {
 public:
  using Shared = PassShared<kKeys, kDelta, kChannels, kWarps>;
  using Stage = typename Shared::Stage;
  static constexpr bool kIsDelta = kDelta;
  static constexpr int kThreads = 32 * kWarps, kRows = 16 * kWarps, kKeyTiles = kKeys / 8;

  __device__ ChunkPassBase(const LinearPrefill& prefill, Shared& shared)
      : prefill_(prefill), p_(prefill.step), shared_(shared) {
    warp_ = threadIdx.x / 32 % kWarps, g_ = threadIdx.x % 32 / 4, t_ = threadIdx.x % 4;
  }
  __device__ ChunkPassBase(const LinearPrefill& prefill, Shared& shared, int64_t request, int head, int first_row)
      : ChunkPassBase(prefill, shared) {
    chunks_ = RequestChunks(prefill, request), request_ = request, head_ = head, first_row_ = first_row;
  }

  __device__ void run() {
    const int64_t prefix = prefill_.prefix(request_), slot = p_.state_indices[request_];
#pragma unroll
    for (int i = 0; i < 4 * kKeyTiles; ++i) state_[i] = 0.f;
    const int64_t count = chunks_.count();
    load_stage(0);
    cp_async_commit();
    if (prefix != 0) restore(slot);
    for (int64_t c = 0; c < count; ++c) {
      if (c + 1 < count) load_stage(c + 1);
      cp_async_commit();
      cp_async_wait<1>();
      __syncthreads();
      static_cast<Pass*>(this)->take(shared_.stages[c % 2], c);
      __syncthreads();
      const int64_t seen = prefix + chunks_.begin(c) + chunks_.size(c) - chunks_.first;
      const int64_t kept = prefill_.checkpoint(request_, seen);
      if (kept >= 0) save(kept);
    }
    save(slot);
  }

 protected:
  __device__ void save(int64_t slot) {
    each_pair(slot, [](auto* at, float& low, float& high, auto pairs) {
      using State = std::remove_pointer_t<decltype(at)>;
      const Vec<State, 2> pair{{to_state<State>(low), to_state<State>(high)}};
      if constexpr (pairs) {
        store_vec(at, pair);
      } else {
        at[0] = pair.data[0], at[1] = pair.data[1];
      }
    });
  }

  __device__ void restore(int64_t slot) {
    each_pair(slot, [](auto* at, float& low, float& high, auto pairs) {
      using State = std::remove_pointer_t<decltype(at)>;
      Vec<State, 2> pair;
      if constexpr (pairs) {
        pair = load_vec<Vec<State, 2>>(at);
      } else {
        pair.data[0] = at[0], pair.data[1] = at[1];
      }
      low = static_cast<float>(pair.data[0]), high = static_cast<float>(pair.data[1]);
    });
  }

  // body(address of two neighbours in the pool, the two, whether one access takes both). Types and boundaries are told
  // apart around all accesses, so that none waits for another.
  template <typename Body>
  __device__ void each_pair(int64_t slot, Body&& body) {
    with_token_type(p_.state_dtype, [&](auto type) {
      using State = decltype(type);
      const int row = first_row_ + 16 * warp_ + g_;
      State* base = static_cast<State*>(p_.states) + state_at(p_, slot, head_) + row * p_.stride_row + 2 * t_;
      const bool pairs = reinterpret_cast<uintptr_t>(base) % (2 * sizeof(State)) == 0 && p_.stride_row % 2 == 0;
      const auto walk = [&](auto whole) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (row + 8 * half >= p_.value_dim) break;
          State* own = base + 8 * half * p_.stride_row;
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n) {
            const int at = 4 * n + 2 * half;
            if (8 * n + 2 * t_ < p_.key_dim) body(own + 8 * n, state_[at], state_[at + 1], whole);
          }
        }
      };
      pairs ? walk(std::true_type{}) : walk(std::false_type{});
    });
  }

  __device__ void load_stage(int64_t c) {
    Stage& stage = shared_.stages[c % 2];
    const int64_t begin = chunks_.begin(c);
    const int count = chunks_.size(c), group = head_ / p_.heads_per_group;
    constexpr ChunkScratch kLayout{.panels = kKeys / 64, .delta = kDelta, .channels = kChannels};
    const unsigned char* scratch = static_cast<const unsigned char*>(prefill_.scratch) +
                                   ((chunks_.place + c) * p_.num_heads + head_) * kLayout.bytes();
    if constexpr (kChannels) {
      constexpr int kBytes = Shared::kPanels * kPanelBytes;
      copy_linear<kThreads>(smem_address(stage.k), scratch + kLayout.keys_at(), kBytes);
      copy_linear<kThreads>(smem_address(stage.q), scratch + kLayout.keys_at() + kBytes, kBytes);
      copy_linear<kThreads>(smem_address(stage.k_end), scratch + kLayout.keys_at() + 2 * kBytes, kBytes);
    } else {
      copy_rows<Shared::kPanels, kThreads>(smem_address(stage.k), p_.k, group, begin, count, 0, p_.key_dim);
      copy_rows<Shared::kPanels, kThreads>(smem_address(stage.q), p_.q, group, begin, count, 0, p_.key_dim);
    }
    if constexpr (kDelta) copy_linear<kThreads>(smem_address(stage.t), scratch, kPanelBytes);
    copy_linear<kThreads>(smem_address(stage.p), scratch + kLayout.p_at(), kPanelBytes);
    copy_linear<kThreads>(smem_address(stage.factors), scratch + kLayout.factors_at(), Shared::kFactorBytes);
    const int columns = min_of(p_.value_dim, first_row_ + kRows);  // beyond them the panel is not read
    copy_rows<Shared::kValuePanels, kThreads>(smem_address(stage.v), p_.v, head_, begin, count, first_row_, columns);
  }

  __device__ static void pack(uint32_t* a, const float* low, const float* high) {
    a[0] = pack2<__nv_bfloat16>(low[0], low[1]);
    a[1] = pack2<__nv_bfloat16>(low[2], low[3]);
    a[2] = pack2<__nv_bfloat16>(high[0], high[1]);
    a[3] = pack2<__nv_bfloat16>(high[2], high[3]);
  }

  // body(accumulator of a value, factors' tile, the value, and that of the next token, which is the next accumulator).
  template <typename Body>
  __device__ void each_value(const auto& stage, Body&& body) const {
    const uint32_t panel = smem_address(stage.v) + warp_ / 4 * kPanelBytes;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      uint32_t v[4];
      load_transposed(v, panel, 16 * n, warp_ % 4 * 2);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        body(8 * n + 2 * j, 2 * n + j / 2, __uint_as_float(v[j] << 16), __uint_as_float(v[j] & 0xffff0000u));
      }
    }
  }

  __device__ float2 factor(const auto& stage, int row, int tile) const {
    return *reinterpret_cast<const float2*>(&stage.factors[row][8 * tile + 2 * t_]);
  }

  // A row of factors, or ones where channels decay by themselves.
  __device__ void load_factors(const auto& stage, int row, float2 (&to)[8]) const {
#pragma unroll
    for (int n = 0; n < 8; ++n) to[n] = kChannels ? make_float2(1.f, 1.f) : factor(stage, row, n);
  }

  __device__ void load_values(const auto& stage, float (&to)[32]) const {
    each_value(stage, [&](int i, int, float low, float high) { to[i] = low, to[i + 1] = high; });
  }

  // What the values are, less what the state says of them: from there on `u` is what the inverse makes updates of.
  __device__ static void take_values(const float (&values)[32], const float2 (&decays)[8], float (&u)[32]) {
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      u[i] = fmaf(-decays[i / 4].x, u[i], values[i]);
      u[i + 1] = fmaf(-decays[i / 4].y, u[i + 1], values[i + 1]);
    }
  }

  // Updates of SSD.
  __device__ void scale_values(const auto& stage, float (&u)[32]) const {
    each_value(stage, [&](int i, int tile, float low, float high) {
      const float2 scale = factor(stage, kLastRow, tile);
      u[i] = scale.x * low, u[i + 1] = scale.y * high;
    });
  }

  __device__ static void pack_tokens(uint32_t (&a)[4][4], const float (&u)[32]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) pack(a[j], u + 8 * j, u + 8 * j + 4);
  }

  // Updates under the decay to the chunk's end.
  __device__ static void pack_decayed(const float2 (&decays)[8], uint32_t (&a)[4][4], const float (&u)[32]) {
    float decayed[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) decayed[i] = u[i] * (i % 2 == 0 ? decays[i / 4].x : decays[i / 4].y);
    pack_tokens(a, decayed);
  }

  __device__ void decay_out(const Stage& stage, float (&o)[32]) const {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 decay = kChannels ? make_float2(1.f, 1.f) : factor(stage, 1, n);
#pragma unroll
      for (int i = 0; i < 4; ++i) o[4 * n + i] *= i % 2 == 0 ? decay.x : decay.y;
    }
  }

  __device__ void decay_state(const auto& stage) {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      const float2 decay =
          kChannels ? factor(stage, n / 8, n % 8) : make_float2(stage.factors[3][0], stage.factors[3][0]);
#pragma unroll
      for (int i = 0; i < 4; ++i) state_[4 * n + i] *= i % 2 == 0 ? decay.x : decay.y;
    }
  }

  __device__ void add_skip(const Stage& stage, float (&o)[32]) const {
    if (kDelta || p_.skip == nullptr) return;
    const float skip = p_.skip[head_];
    each_value(stage, [&](int i, int, float low, float high) {
      o[i] = fmaf(skip, low, o[i]);
      o[i + 1] = fmaf(skip, high, o[i + 1]);
    });
  }

  // By way of the warp's values, which nobody reads any more: a token's 16 rows are then 32 bytes.
  __device__ void store_out(Stage& stage, const float (&o)[32], int64_t c) const {
    unsigned char* panel = stage.v + warp_ / 4 * kPanelBytes;
    const int first_chunk = warp_ % 4 * 2, lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t pair = transpose_8x8(pack2<__nv_bfloat16>(o[4 * n + 2 * h], o[4 * n + 2 * h + 1]));
        *reinterpret_cast<uint32_t*>(panel + panel_at(8 * n + g_, first_chunk + h) + 4 * t_) = pair;
      }
    }
    __syncwarp();
    const int64_t begin = chunks_.begin(c);
    const int count = chunks_.size(c), row = first_row_ + 16 * warp_ + lane % 2 * 8;
    if (row >= p_.value_dim) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 16 * i + lane / 2;
      if (token >= count) break;
      auto values = load_vec<Vec<__nv_bfloat16, 8>>(
          reinterpret_cast<const __nv_bfloat16*>(panel + panel_at(token, first_chunk + lane % 2)));
      if (!kDelta && p_.z.data != nullptr) {
        const __nv_bfloat16* gates = static_cast<const __nv_bfloat16*>(p_.z.data) +
                                     (begin + token) * p_.z.stride_request + head_ * p_.z.stride_head + row;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float z = static_cast<float>(gates[j]);
          values.data[j] = __float2bfloat16(static_cast<float>(values.data[j]) * z * sigmoid(z));
        }
      }
      store_vec(static_cast<__nv_bfloat16*>(p_.out) + (begin + token) * p_.out_stride_request +
                    head_ * p_.out_stride_head + row,
                values);
    }
  }

  const LinearPrefill& prefill_;
  const LinearStep& p_;
  Shared& shared_;
  RequestChunks chunks_;
  int64_t request_;
  int head_, first_row_, warp_, g_, t_;
  float state_[4 * kKeyTiles];  // in fours: rows g and g + 8 of the warp's 16, columns 8 n + 2 t and + 1
};

// The products by mma.sync.
template <int kKeys, bool kDelta, bool kChannels, int kWarps>
class ChunkPass : public ChunkPassBase<ChunkPass<kKeys, kDelta, kChannels, kWarps>, kKeys, kDelta, kChannels, kWarps> {
 public:
  using Base = ChunkPassBase<ChunkPass, kKeys, kDelta, kChannels, kWarps>;
  using Base::Base;
  using typename Base::Stage;

  __device__ void take(Stage& stage, int64_t c) {
    float u[32] = {}, o[32] = {};
    const uint32_t keys = smem_address(stage.k), queries = smem_address(stage.q);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      uint32_t a[4];
      Base::pack(a, this->state_ + 8 * i, this->state_ + 8 * i + 4);
      const uint32_t panel = i / 4 * kPanelBytes;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if constexpr (kDelta) multiply(u + 8 * n, a, keys + panel, 16 * n, i % 4);
        multiply(o + 8 * n, a, queries + panel, 16 * n, i % 4);
      }
    }
    uint32_t a[4][4];
    float2 decays[8];
    if constexpr (kDelta) {
      float values[32];
      this->load_values(stage, values);
      this->load_factors(stage, 0, decays);
      Base::take_values(values, decays, u);
    } else {
      this->scale_values(stage, u);
    }
    Base::pack_tokens(a, u);
    if constexpr (kDelta) {
#pragma unroll
      for (int i = 0; i < 32; ++i) u[i] = 0.f;
      multiply_lower(u, a, smem_address(stage.t));
      Base::pack_tokens(a, u);
    }
    this->decay_out(stage, o);
    multiply_lower(o, a, smem_address(stage.p));
    this->load_factors(stage, 2, decays);
    Base::pack_decayed(decays, a, u);
    this->decay_state(stage);
    const uint32_t last_keys = smem_address(kChannels ? stage.k_end : stage.k);
#pragma unroll
    for (int n = 0; n < kKeys / 8; n += 2) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t b[4];
        load_b_trans(b, last_keys + n / 8 * kPanelBytes, 16 * j, 8 * n % 64);
        mma_of(this->state_ + 4 * n, a[j], b[0], b[1]);
        mma_of(this->state_ + 4 * n + 4, a[j], b[2], b[3]);
      }
    }
    this->add_skip(stage, o);
    this->store_out(stage, o, c);
  }

 private:
  __device__ static void mma_of(float* c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_m16n8k16<__nv_bfloat16>(reinterpret_cast<float(&)[4]>(*c), a, b0, b1);
  }

  // 16 columns, and 16 k.
  __device__ static void multiply(float* c, const uint32_t (&a)[4], uint32_t panel, int n, int step) {
    uint32_t b[4];
    load_b(b, panel, n, step);
    mma_of(c, a, b[0], b[1]);
    mma_of(c + 4, a, b[2], b[3]);
  }

  // c += a m^T for 64 columns, where m is lower triangular.
  __device__ static void multiply_lower(float (&c)[32], const uint32_t (&a)[4][4], uint32_t panel) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int n = j; n < 4; ++n) multiply(c + 8 * n, a[j], panel, 16 * n, j);
    }
  }
};

// Grid: row blocks x heads x (requests and one more, for tokens of no request), in one dimension.
template <class Pass>
__global__ void __launch_bounds__(Pass::kThreads, 1)
    chunk_pass_kernel(const __grid_constant__ LinearPrefill p, int row_blocks) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Pass::Shared*>(memory);
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const LinearStep& step = p.step;
  const int row_block = blockIdx.x % row_blocks, work = blockIdx.x / row_blocks;
  const int head = work % step.num_heads, place = work / step.num_heads, first_row = row_block * Pass::kRows;
  if (place == step.batch_size) {
    clear_tokens(step, head, 0, p.first_token(0), first_row, Pass::kRows);
    return clear_tokens(step, head, p.first_token(step.batch_size), p.num_tokens, first_row, Pass::kRows);
  }
  if (step.report != nullptr && row_block == 0 && head == 0 && threadIdx.x == 0) {
    p.check(Pass::kIsDelta ? kReportDeltaPrefill : kReportSsdPrefill, place, step.report);
  }
  const int request = p.plan != nullptr ? p.plan[place] : place;
  if (request < 0 || request >= step.batch_size) return;
  const int64_t first = p.first_token(request), last = p.first_token(request + 1);
  if (!p.in_pool(step.state_indices[request])) return clear_tokens(step, head, first, last, first_row, Pass::kRows);
  if (last > first) Pass(p, shared, request, head, first_row).run();
}

template <class Pass>
void launch_pass_of(const char* what, const LinearPrefill& p, cudaStream_t stream) {
  const int row_blocks = ceil_div(p.step.value_dim, Pass::kRows);
  const int64_t blocks = (int64_t{p.step.batch_size} + 1) * p.step.num_heads * row_blocks;
  if (blocks > INT32_MAX) throw std::runtime_error(std::string(what) + ": more than 2^31 blocks of rows");
  constexpr int kBytes = static_cast<int>(sizeof(typename Pass::Shared));
  const LaunchShape shape{.blocks = static_cast<int>(blocks),
                          .threads = Pass::kThreads,
                          .shared_bytes = kBytes,
                          .max_shared_bytes = kBytes};
  launch_dependent<&chunk_pass_kernel<Pass>>(what, shape, stream, p, row_blocks);
}

}  // namespace attnops
