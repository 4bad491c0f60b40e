#pragma once
#include "device/sm80/cp_async.cuh"
#include "device/sm80/linear_verify_draft.cuh"
#include "device/sm80/linear_verify_products.cuh"

// linear_verify_kernel with products by matrix units: a warp multiplies 16 rows of a state, all its columns, with the
// keys and queries of all drafts. Numbers are split into two of 11 bits each, so three products (two, where the state
// has 16 bits) have about float32's accuracy. Sums need no shuffles: a lane has one draft of each four, and two rows.
// Keys of the ring and of the drafts are a tile of their own, which one more warp takes. CTAs stay: as soon as a warp
// has multiplied its rows it asks for those of the CTA's next work, so memory is busy while drafts wait for one
// another.
namespace attnops {

// All of a CTA's warps meet, each kind from its own place.
template <bool kDelta>
__device__ __forceinline__ void meet_tiles() {
#if defined(__CUDA_ARCH__)
  asm volatile("bar.sync 1, %0;" ::"n"(kTileThreads<kDelta>) : "memory");
#else
  __syncthreads();
#endif
}

// A block of rows of a request's head.
struct TileWork {
  int number, request, head, first_row, slot;
};

// Those of a CTA: every gridDim.x-th one.
template <int kCtaRows>
struct TileWorks {
  const LinearStep& step;
  int row_blocks, count;

  // Asked for early.
  __device__ __forceinline__ int slot_of(int number) const {
    return number < count ? step.state_indices[number / row_blocks / step.num_heads] : 0;
  }
  // The first one from `number` on that is no padding, with a number of at least `count` if there is none. `clear` gets
  // the padding before it.
  template <typename Clear>
  __device__ __forceinline__ TileWork from(int number, int slot, const Clear& clear) const {
    for (;; number += gridDim.x, slot = slot_of(number)) {
      const int block = number / row_blocks, request = block / step.num_heads;
      const TileWork work{number, request, block - request * step.num_heads, (number - block * row_blocks) * kCtaRows,
                          slot};
      if (number >= count || (slot >= 0 && slot < step.num_slots)) return work;
      clear(work);
    }
  }
};

// Asks for a warp's rows of a state.
template <typename State>
__device__ __forceinline__ void ask_for_tile(const LinearStep& step, const VerifyTileLayout& at, float* shared,
                                             const TileWork& work, int warp) {
  constexpr int kVec = 16 / static_cast<int>(sizeof(State));
  const int lane = threadIdx.x % 32, row = warp * kTileRows + lane / 8, vec = lane % 8;  // 128 bytes of four rows
  const State* states = static_cast<const State*>(step.states) + state_at(step, work.slot, work.head) + vec * kVec;
  const uint32_t to = smem_address(shared + row * at.state_stride) + 16 * state_vec(row, vec);
#pragma unroll
  for (int r = 0; r < kTileRows; r += 4) {
    const bool has = work.first_row + row + r < step.value_dim;
    const State* from = states + (has ? work.first_row + row + r : 0) * step.stride_row;
#pragma unroll
    for (int c = 0; c < kTileKeys / kVec; c += 8) {
      cp_async_16(to + 4 * r * at.state_stride + 16 * c, from + c * kVec, has);
    }
  }
}

// What the warp without rows does: it brings rings, those of the next work while the others use this one's, and
// multiplies keys.
template <bool kDelta, bool kChannels, int kBlocks>
struct TileRing {
  static constexpr int kCtaRows = kTileCtaRows<kDelta>;
  const LinearVerify& p;
  const VerifyTileLayout& at;
  float* shared;
  int length = 0;
  float decay = 1.f;  // of the ring's row that has the lane's number

  // `rows`: what the slot says of its ring.
  __device__ __forceinline__ void ask(const TileWork& work, int rows, int turn) {
    const LinearStep& step = p.step;
    const int lane = threadIdx.x % 32;
    length = p.rings.within(rows, at.drafts);
    const float* ring_u = p.rings.u_row(step, work.slot, work.head, 0);
    const float* ring_k = p.rings.k_row(step, work.slot, work.head, 0);
    const float* ring_decay = p.rings.decay_row(step, work.slot, work.head, 0);
    float* values = shared + at.values() + turn * at.value_floats();
    const bool own = 4 * lane < kCtaRows, has = own && work.first_row + 4 * lane < step.value_dim;
    if (!kChannels && lane < length) decay = ring_decay[lane];
    for (int row = 0; row < length; ++row) {
      if (own) {
        cp_async_16(smem_address(values + row * kCtaRows + 4 * lane),
                    ring_u + row * step.value_dim + (has ? work.first_row + 4 * lane : 0), has);
      }
      cp_async_16(smem_address(shared + at.row_keys() + row * kTileStride + 4 * lane),
                  ring_k + row * kTileKeys + 4 * lane, true);
      if constexpr (kChannels) {
        cp_async_16(smem_address(shared + at.decays() + row * kTileKeys + 4 * lane),
                    ring_decay + row * kTileKeys + 4 * lane, true);
      }
    }
  }

  // Before the drafts are there.
  __device__ __forceinline__ void put_decays(const TileWork& work) const {
    if constexpr (kChannels) return;
    const int lane = threadIdx.x % 32;
    if (lane < length) shared[at.decays() + lane] = decay;
    const float* more = p.rings.decay_row(p.step, work.slot, work.head, 0);
    for (int row = lane + 32; row < length; row += 32) shared[at.decays() + row] = more[row];
    __syncwarp();
  }

  // When they are.
  __device__ __forceinline__ void multiply(const TileWork& work) const {
    const int lane = threadIdx.x % 32;
    cp_async_wait_all();
    __syncwarp();
    for (int tile = 0; tile * kTileRows < at.total_rows(); ++tile) {
      multiply_keys<kDelta, kBlocks>(p, at, shared, work.request, length, tile);
    }
    if (lane < at.drafts) {
      const float* decays = shared + at.decays();
      const uint32_t path = p.ancestors(work.request, lane) | 1u << lane;
      float all = 1.f;
      for (int i = 0; i < length; ++i) all *= decays[i];
      for (int d = 0; d <= lane; ++d) all *= path >> d & 1u ? decays[at.rows_before + d] : 1.f;
      shared[at.state_decays() + lane] = all;
    }
    __syncwarp();  // before the ring's next rows come here
  }
};

template <bool kDelta, bool kChannels, int kBlocks>
__device__ __forceinline__ void take_rings(const LinearVerify& p, const VerifyTileLayout& at, float* shared,
                                           const TileWorks<kTileCtaRows<kDelta>>& works) {
  const auto pass_over = [](const TileWork&) {};
  TileRing<kDelta, kChannels, kBlocks> ring{p, at, shared};
  TileWork work = works.from(blockIdx.x, works.slot_of(blockIdx.x), pass_over);
  if (work.number < works.count) ring.ask(work, p.rings.lengths[work.slot], 0);
  for (int turn = 0; work.number < works.count; turn ^= 1) {
    const int ahead = work.number + gridDim.x, slot = works.slot_of(ahead);
    ring.put_decays(work);
    // With gates per channel the other warps walk along the ring, else its keys are this one's.
    if constexpr (kChannels) cp_async_wait_all();
    meet_tiles<kDelta>();
    const TileWork next = works.from(ahead, slot, pass_over);
    const bool more = next.number < works.count;
    const int rows = more ? p.rings.lengths[next.slot] : 0;  // has come when the products are made
    if constexpr (kChannels) {
      meet_tiles<kDelta>();
    } else {
      ring.multiply(work);
    }
    work = next;
    if (more) ring.ask(work, rows, turn ^ 1);
    meet_tiles<kDelta>();
  }
}

// Grid: any number of CTAs.
template <typename State, bool kDelta, bool kChannels, int kBlocks>
__global__ void __launch_bounds__(kTileThreads<kDelta>, kTileCtas<kDelta>)
    linear_verify_tile_kernel(const __grid_constant__ LinearVerify p, int row_blocks) {
  constexpr int kWarps = kTileWarps<kDelta>, kCtaRows = kTileCtaRows<kDelta>;
  constexpr int kVec = 16 / static_cast<int>(sizeof(State));
  constexpr int kDrafts = kBlocks * kBlockDrafts<kDelta>, kEach = kDrafts / 4;  // of a lane
  using Part = RowVec<State, kVec>;
  extern __shared__ __align__(16) float shared[];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const LinearStep& step = p.step;
  const int drafts = p.drafts;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const VerifyTileLayout at = verify_tiles<State, kDelta, kChannels, kBlocks>(p);
  if (step.report != nullptr && blockIdx.x == 0) {
    for (int request = threadIdx.x; request < step.batch_size; request += kTileThreads<kDelta>) {
      p.check(kDelta ? kReportDeltaVerify : kReportSsdVerify, request, step.report);
    }
  }
  const TileWorks<kCtaRows> works{step, row_blocks, step.batch_size * step.num_heads * row_blocks};
  if (warp == kWarps) return take_rings<kDelta, kChannels, kBlocks>(p, at, shared, works);

  const auto clear = [&](const TileWork& work) {
    const int64_t first = int64_t{work.request} * drafts;
    clear_tokens(step, work.head, first, first + drafts, work.first_row, kCtaRows, threadIdx.x, 32 * kWarps);
  };
  TileDraft<kDelta, kChannels> draft;
  int ring_rows = 0;  // as the slot says
  // What a work needs from memory, asked for before anything is made of it.
  const auto ask = [&](const TileWork& work, int rows) {
    if (work.number >= works.count) return;
    ring_rows = rows;
    ask_for_tile<State>(step, at, shared, work, warp);
    if (warp < drafts) {
      draft.load(step, int64_t{work.request} * drafts + warp, work.head, work.head / step.heads_per_group);
    }
  };
  const auto rows_of = [&](const TileWork& work) { return work.number < works.count ? p.rings.lengths[work.slot] : 0; };
  const auto draft_of = [&](int i) { return kDelta ? 4 * i + t : i / 2 * 8 + 2 * t + i % 2; };
  TileWork next = works.from(blockIdx.x, works.slot_of(blockIdx.x), clear);
  ask(next, rows_of(next));
  for (int turn = 0; next.number < works.count; turn ^= 1) {
    const TileWork work = next;
    const int ahead = work.number + gridDim.x, ahead_slot = works.slot_of(ahead);
    const int head = work.head, group = head / step.heads_per_group, length = p.rings.within(ring_rows, drafts);
    const int first_token = work.request * drafts;
    const int rows[2] = {work.first_row + warp * kTileRows + g, work.first_row + warp * kTileRows + g + 8};
    const auto make = [&](const TileDraft<kDelta, kChannels>& one, int d) {
      const bool first = work.first_row == 0;  // writes the ring's new rows
      one.make(
          step, at, shared, d,
          first && head == group * step.heads_per_group ? p.rings.k_row(step, work.slot, head, length + d) : nullptr,
          first ? p.rings.decay_row(step, work.slot, head, length + d) : nullptr);
    };
    if (warp < drafts) make(draft, warp);
    if constexpr (kDrafts > kWarps) {
      for (int d = warp + kWarps; d < drafts; d += kWarps) {
        TileDraft<kDelta, kChannels> more;
        more.load(step, first_token + d, head, group);
        make(more, d);
      }
    }
    uint16_t values[kEach][2] = {};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint16_t* from = static_cast<const uint16_t*>(step.v.data) +
                             int64_t{first_token + draft_of(i)} * step.v.stride_request + head * step.v.stride_head;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (draft_of(i) < drafts && rows[r] < step.value_dim) values[i][r] = from[rows[r]];
      }
    }
    meet_tiles<kDelta>();
    if constexpr (kChannels) {
      for (int d = warp; d < drafts; d += kWarps) {
        float* factors = shared + at.factors() + 2 * d * kTileStride;
        walk_back<kTileKeys>(at, shared, d, length, p.ancestors(work.request, d),
                             [&](int column, float key, float query) {
                               float* rest = factors + at.columns * kTileStride;
                               split(key, factors[column], rest[column]);
                               split(query, factors[kTileStride + column], rest[kTileStride + column]);
                             });
      }
      meet_tiles<kDelta>();
    }
    next = works.from(ahead, ahead_slot, clear);
    const int next_rows = rows_of(next);  // has come when the products are made
    cp_async_wait_all();                  // a warp's rows are its own
    __syncwarp();
    float sums[kBlocks][4] = {}, rest[kBlocks][4] = {};
    const float* state = shared + (warp * kTileRows + g) * at.state_stride + 4 * t;
    const int odd = 4 * state_vec(g, 0);
    multiply_tile<State, kBlocks>(
        [&](int r, int c) {
          return load_vec<Part>(state + 8 * r * at.state_stride + 16 * c + (c % 2 == 0 ? odd : -odd));
        },
        shared + at.factors(), at.columns, sums, rest);
    float coefficients[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) coefficients[i] = shared[at.coefficients() + min_of(draft_of(i), drafts - 1)];
    __syncwarp();
    ask(next, next_rows);
    meet_tiles<kDelta>();

    // To each product of the state come those of the rows behind the draft, of the ring and of the drafts.
    const float* updates = shared + at.values() + turn * at.value_floats() + warp * kTileRows + g;
    const auto value = [&](int i, int r) { return __uint_as_float(uint32_t{values[i][r]} << 16); };
    float by_key[kEach][2] = {}, by_query[kEach][2], u[kEach][2];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int known = min_of(draft_of(i), drafts - 1);
      const float decay = kChannels ? 1.f : shared[at.state_decays() + known];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int block = kDelta ? i : i / 2, n = 2 * r + (kDelta ? 1 : i % 2);
        if constexpr (kDelta) by_key[i][r] = decay * (sums[block][2 * r] + rest[block][2 * r]);
        by_query[i][r] = decay * (sums[block][n] + rest[block][n]);
      }
    }
    const auto products = [&](int row, int i) {  // of a row's key with the draft's key and query
      const float* from = shared + at.products() + row * at.product_stride() + (kDelta ? 8 * i + 2 * t : draft_of(i));
      return kDelta ? *reinterpret_cast<const float2*>(from) : make_float2(0.f, *from);
    };
#pragma unroll 2
    for (int j = 0; j < length; ++j, updates += kCtaRows) {
      const float own[2] = {updates[0], updates[8]};
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const float2 pair = products(j, i);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if constexpr (kDelta) by_key[i][r] = fmaf(own[r], pair.x, by_key[i][r]);
          by_query[i][r] = fmaf(own[r], pair.y, by_query[i][r]);
        }
      }
    }
#pragma unroll
    for (int s = 0; s < kDrafts; ++s) {
      if (s >= drafts) break;
      const int place = kDelta ? s / 4 : s / 8 * 2 + s % 2, from = lane - t + (kDelta ? s % 4 : s % 8 / 2);
      float own[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        u[place][r] = coefficients[place] * (value(place, r) - by_key[place][r]);
        own[r] = __shfl_sync(0xffffffffu, u[place][r], from);
      }
#pragma unroll
      for (int i = kDelta ? place : place / 2 * 2; i < kEach; ++i) {
        const float2 pair = products(at.rows_before + s, i);
        // A draft that is no ancestor may hold anything, and its products are 0.
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (kDelta && pair.x != 0.f && draft_of(i) > s) by_key[i][r] = fmaf(own[r], pair.x, by_key[i][r]);
          if (pair.y != 0.f && draft_of(i) >= s) by_query[i][r] = fmaf(own[r], pair.y, by_query[i][r]);
        }
      }
    }
    float* ring_u = p.rings.u_row(step, work.slot, head, length);
    const float skip = !kDelta && step.skip != nullptr ? step.skip[head] : 0.f;
    __nv_bfloat16* out = static_cast<__nv_bfloat16*>(step.out) + int64_t{first_token} * step.out_stride_request +
                         head * step.out_stride_head;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int own = draft_of(i);
      if (own >= drafts) continue;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (rows[r] >= step.value_dim) continue;
        ring_u[own * step.value_dim + rows[r]] = coefficients[i] * (value(i, r) - by_key[i][r]);
        float result = by_query[i][r];
        if constexpr (!kDelta) {
          if (step.skip != nullptr) result = fmaf(skip, value(i, r), result);
          if (step.z.data != nullptr) {
            const float z = load_row(DType::kBFloat16, step.z, first_token + own, head, rows[r]);
            result *= z * sigmoid(z);
          }
        }
        out[own * step.out_stride_request + rows[r]] = __float2bfloat16(result);
      }
    }
  }
}

// Where tokens are of bf16, keys of 128 elements, and all rows on the boundaries of its accesses.
template <typename State>
bool verify_tiles_take(const LinearVerify& p) {
  constexpr int64_t kMostWorks = 1 << 30;
  const LinearStep& s = p.step;
  const auto aligned = [](const StepRows& rows) {
    return rows_aligned(rows.data, 2, 8, rows.stride_request, rows.stride_head);
  };
  return s.dtype == DType::kBFloat16 && s.key_dim == kTileKeys && s.value_dim % 4 == 0 && p.drafts <= 8 &&
         int64_t{s.batch_size} * s.num_heads * s.value_dim <= kMostWorks && aligned(s.q) && aligned(s.k) &&
         rows_aligned(s.states, sizeof(State), 16, s.stride_slot, s.stride_head, s.stride_row) &&
         rows_aligned(p.rings.u, 4, 16) && rows_aligned(p.rings.k, 4, 16) &&
         (!p.rings.per_channel || rows_aligned(p.rings.decay, 4, 16));
}

template <typename State, bool kDelta, bool kChannels, int kBlocks>
void launch_verify_tiles_of(const char* what, const LinearVerify& p, cudaStream_t stream) {
  const LinearStep& step = p.step;
  const VerifyTileLayout at = verify_tiles<State, kDelta, kChannels, kBlocks>(p);
  const int bytes = 4 * at.floats(), row_blocks = ceil_div(step.value_dim, at.cta_rows);
  check_shared_bytes(what, bytes);
  const int works = step.batch_size * step.num_heads * row_blocks, resident = kTileCtas<kDelta> * device_sms(what);
  const LaunchShape shape{.blocks = min_of(works, resident),
                          .threads = kTileThreads<kDelta>,
                          .shared_bytes = bytes,
                          .max_shared_bytes = INT32_MAX};
  launch_dependent<&linear_verify_tile_kernel<State, kDelta, kChannels, kBlocks>>(what, shape, stream, p, row_blocks);
}

template <typename State, int kMaxKeys, bool kDelta, bool kChannels>
void launch_linear_drafts(const char* what, const LinearVerify& p, cudaStream_t stream) {
  if constexpr (kMaxKeys == kTileKeys && !std::is_same_v<State, __half>) {
    if (verify_tiles_take<State>(p)) {
      if (p.drafts <= kBlockDrafts<kDelta>) return launch_verify_tiles_of<State, kDelta, kChannels, 1>(what, p, stream);
      if constexpr (kDelta) return launch_verify_tiles_of<State, kDelta, kChannels, 2>(what, p, stream);
    }
  }
  launch_linear_verify<State, kMaxKeys, kDelta, kChannels>(what, p, stream);
}

}  // namespace attnops
