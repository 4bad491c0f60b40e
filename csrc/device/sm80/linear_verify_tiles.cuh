#pragma once
#include "device/sm80/linear_draft_step.cuh"

// linear_verify_kernel with products by matrix units: a warp multiplies 16 rows of a state, all its columns, with the
// keys and queries of all drafts. Numbers are split into two of 11 bits each, so three products (two, where the state
// has 16 bits) have about float32's accuracy. Sums need no shuffles: a lane has one draft of each four, and two rows.
// Keys of the ring and of the drafts are a tile of their own, which one more warp takes.
namespace attnops {

// 16 rows of `T` with all columns. `rows(r, c)` is a lane's vector c of row g + 8 r. Of the sums a lane has (row g,
// column 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1) of each block: the large parts' here, what the small ones add
// apart.
template <typename T, int kBlocks, typename Rows>
__device__ __forceinline__ void multiply_tile(const Rows& rows, const float* factors, int columns,
                                              float (&sums)[kBlocks][4], float (&rest)[kBlocks][4]) {
  constexpr int kVec = 16 / static_cast<int>(sizeof(T)), kChunks = kTileKeys / (4 * kVec);
  constexpr bool kWide = sizeof(T) == 4;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const float* own[kBlocks];  // sums of columns that are not there are not used
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) own[b] = factors + min_of(8 * b + g, columns - 1) * kTileStride + t * kVec;
#pragma unroll(kBlocks == 1 ? 4 : 2)
  for (int c = 0; c < kChunks; ++c) {
    uint32_t upper[2][kVec], lower[2][kVec];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto vec = rows(r, c);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const float x = vec.at(e);
        // Of what is left 11 bits of at most 13 are read.
        upper[r][e] = kWide ? __float_as_uint(x) & 0xffffe000u : __float_as_uint(x);
        lower[r][e] = kWide ? __float_as_uint(x - __uint_as_float(upper[r][e])) : 0u;
      }
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float large[kVec], small[kVec];
      load_shared(large, own[b] + c * 4 * kVec);
      load_shared(small, own[b] + columns * kTileStride + c * 4 * kVec);
#pragma unroll
      for (int e = 0; e < kVec; e += 2) {
        const uint32_t high[4] = {upper[0][e], upper[1][e], upper[0][e + 1], upper[1][e + 1]};
        mma_m16n8k8_tf32(sums[b], high, __float_as_uint(large[e]), __float_as_uint(large[e + 1]));
        mma_m16n8k8_tf32(rest[b], high, __float_as_uint(small[e]), __float_as_uint(small[e + 1]));
        if constexpr (kWide) {
          const uint32_t low[4] = {lower[0][e], lower[1][e], lower[0][e + 1], lower[1][e + 1]};
          mma_m16n8k8_tf32(rest[b], low, __float_as_uint(large[e]), __float_as_uint(large[e + 1]));
        }
      }
    }
  }
}

// Products of rows' keys with the drafts' keys and queries, under the decays between them. By one warp for 16 rows.
template <bool kDelta, int kBlocks>
__device__ __forceinline__ void multiply_keys(const LinearVerify& p, const VerifyTileLayout& at, float* shared,
                                              int request, int length, int tile) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, drafts = at.drafts;
  const float* keys = shared + at.row_keys() + (tile * kTileRows + g) * kTileStride + 4 * t;
  float sums[kBlocks][4] = {}, rest[kBlocks][4] = {};
  multiply_tile<float, kBlocks>(
      [&](int r, int c) { return load_vec<RowVec<float, 4>>(keys + 8 * r * kTileStride + 16 * c); },
      shared + at.factors(), at.columns, sums, rest);
  const float* decays = shared + at.decays();
  float behind[2] = {1.f, 1.f};  // the ring's rows behind one's own
  const int first = tile * kTileRows + g;
  for (int i = length - 1; i > first; --i) {
    behind[0] *= decays[i];
    if (i > first + 8) behind[1] *= decays[i];
  }
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (kDelta && n == 1) break;  // a lane's two columns are one draft's
      const int draft = kDelta ? 4 * b + t : 8 * b + 2 * t + n;
      if (draft >= drafts) continue;
      const uint32_t path = p.ancestors(request, draft) | 1u << draft;
      float after[2] = {1.f, 1.f};  // the path's drafts behind one's own row
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int own = first + 8 * r - at.rows_before;
        for (int d = draft; d >= 0 && d > own; --d) after[r] *= path >> d & 1u ? decays[at.rows_before + d] : 1.f;
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = first + 8 * r, own = row - at.rows_before;
        const bool seen = row < length || (own >= 0 && own <= draft && (path >> own & 1u) != 0);
        const float decay = own >= 0 ? after[r] : after[r] * behind[r];
        float* to = shared + at.products() + row * at.product_stride() + 8 * b + 2 * t;
        if constexpr (kDelta) {
          *reinterpret_cast<float2*>(to) = seen ? make_float2(decay * (sums[b][2 * r] + rest[b][2 * r]),
                                                              decay * (sums[b][2 * r + 1] + rest[b][2 * r + 1]))
                                                : make_float2(0.f, 0.f);
        } else {
          to[n] = seen ? decay * (sums[b][2 * r + n] + rest[b][2 * r + n]) : 0.f;
        }
      }
    }
  }
}

// Asks for a later request's state and ring to be in L2 when its CTA comes, and as many rows behind the ring as drafts
// may have been accepted. By one thread.
template <typename State>
__device__ __forceinline__ void ask_for_drafts(const LinearVerify& p, int request, int head, int first_row, int rows,
                                               int accepted) {
#if __CUDA_ARCH__ >= 900
  const LinearStep& step = p.step;
  ask_for_state<State>(step, request, head, first_row, rows);
  if (request >= step.batch_size || first_row > 0) return;
  const int64_t slot = step.state_indices[request];
  if (slot < 0 || slot >= step.num_slots) return;
  const int length = p.rings.length(slot, p.drafts) + accepted;
  const auto ask = [](const float* from, int floats) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(4 * floats) : "memory");
  };
  if (length == 0) return;
  ask(p.rings.u_row(step, slot, head, 0), length * step.value_dim);
  if (head % step.heads_per_group == 0) ask(p.rings.k_row(step, slot, head, 0), length * kTileKeys);
  if (p.rings.per_channel) ask(p.rings.decay_row(step, slot, head, 0), length * kTileKeys);
#endif
}

// All of a CTA's warps meet, each kind from its own place.
template <bool kDelta>
__device__ __forceinline__ void meet_tiles() {
#if defined(__CUDA_ARCH__)
  asm volatile("bar.sync 1, %0;" ::"n"(kTileThreads<kDelta>) : "memory");
#else
  __syncthreads();
#endif
}

// What the warp without rows does: it brings the ring, and multiplies keys.
template <typename State, bool kDelta, bool kChannels, int kBlocks, class Params>
__device__ __forceinline__ void take_ring(const Params& given, const VerifyTileLayout& at, float* shared, int64_t slot,
                                          int head, int request, int first_row, int ahead) {
  constexpr bool kCommits = std::is_same_v<Params, LinearDraftStep>;
  const LinearVerify& p = verification(given);
  const LinearStep& step = p.step;
  const int lane = threadIdx.x % 32;
  int own_draft = 0;  // of the accepted ones, one a lane
  if constexpr (kCommits) own_draft = lane < at.drafts ? given.commit().draft_row(request, 0, lane) : 0;
  const TileRing ring = tile_ring(given, slot, request);
  const int rows = ring.rows(), length = ring.length;
  const float* ring_u = p.rings.u_row(step, slot, head, 0);
  const float* ring_k = p.rings.k_row(step, slot, head, 0);
  const float* ring_decay = p.rings.decay_row(step, slot, head, 0);
  const bool own = 4 * lane < at.cta_rows, has = own && first_row + 4 * lane < step.value_dim;
  const auto bring = [&](int row, int from) {
    float* updates = kCommits ? tile_updates(at, shared, row) : shared + at.values() + row * at.cta_rows;
    if (own) {
      cp_async_16(smem_address(updates + 4 * lane), ring_u + from * step.value_dim + (has ? first_row + 4 * lane : 0),
                  has);
    }
    cp_async_16(smem_address(shared + at.row_keys() + row * kTileStride + 4 * lane),
                ring_k + from * kTileKeys + 4 * lane, true);
    if constexpr (kChannels) {
      cp_async_16(smem_address(shared + at.decays() + row * kTileKeys + 4 * lane),
                  ring_decay + from * kTileKeys + 4 * lane, true);
    }
  };
  for (int row = 0; row < ring.before; ++row) bring(row, row);
  if constexpr (!kChannels) {
    for (int row = lane; row < ring.before; row += 32) shared[at.decays() + row] = ring_decay[row];
  }
  if constexpr (kCommits) {
    for (int i = 0; i < ring.more; ++i) {
      bring(ring.before + i, ring.before + __shfl_sync(0xffffffffu, own_draft, i));
    }
    if (!kChannels && lane < ring.more) {
      shared[at.decays() + ring.before + lane] = ring_decay[ring.before + own_draft];
    }
  }
  if (ahead > 0 && lane == 0) {
    ask_for_drafts<State>(p, request + ahead, head, first_row, at.cta_rows, kCommits ? at.drafts : 0);
  }
  if (kCommits && ring.folds) {
    cp_async_wait_all();
    __syncwarp();
    scale_ring<kChannels>(at, shared, rows);
    meet_tiles<kDelta>();
    meet_tiles<kDelta>();  // the states are folded
  }
  // With gates per channel the other warps walk along the ring, else it is this one's until it has multiplied.
  if constexpr (kChannels) cp_async_wait_all();
  meet_tiles<kDelta>();
  if constexpr (!kChannels) {
    cp_async_wait_all();
    __syncwarp();
    for (int tile = 0; tile * kTileRows < at.total_rows(); ++tile) {
      multiply_keys<kDelta, kBlocks>(p, at, shared, request, length, tile);
    }
    if (lane < at.drafts) {
      const float* decays = shared + at.decays();
      const uint32_t path = p.ancestors(request, lane) | 1u << lane;
      float decay = 1.f;
      for (int i = 0; i < length; ++i) decay *= decays[i];
      for (int d = 0; d <= lane; ++d) decay *= path >> d & 1u ? decays[at.rows_before + d] : 1.f;
      shared[at.state_decays() + lane] = decay;
    }
  }
  meet_tiles<kDelta>();
  if constexpr (kCommits) keep_rows<kChannels>(given, at, shared, ring, own_draft, slot, head, request);
}

// Grid: row blocks, heads, requests. `ahead`: requests whose states are asked for into L2. Params: LinearVerify, or
// LinearDraftStep where a CTA has all rows of a head.
template <typename State, bool kDelta, bool kChannels, int kBlocks, class Params>
__global__ void __launch_bounds__(kTileThreads<kDelta>, 16 / kTileWarps<kDelta>)
    linear_verify_tile_kernel(const __grid_constant__ Params given, int ahead) {
  constexpr bool kCommits = std::is_same_v<Params, LinearDraftStep>;
  constexpr int kWarps = kTileWarps<kDelta>, kCtaRows = kTileCtaRows<kDelta>;
  constexpr int kVec = 16 / static_cast<int>(sizeof(State));
  constexpr int kDrafts = kBlocks * kBlockDrafts<kDelta>, kEach = kDrafts / 4;  // of a lane
  using Part = RowVec<State, kVec>;
  extern __shared__ __align__(16) float shared[];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const LinearVerify& p = verification(given);
  const LinearStep& step = p.step;
  const int head = blockIdx.y, request = blockIdx.z, drafts = p.drafts, first_row = blockIdx.x * kCtaRows;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const VerifyTileLayout at = verify_tiles<State, kDelta, kChannels, kBlocks>(p);
  if (step.report != nullptr && blockIdx.x == 0 && head == 0 && threadIdx.x == 0) {
    check_drafts<kDelta>(given, request, step.report);
  }
  const int64_t slot = step.state_indices[request], first_token = int64_t{request} * drafts;
  const bool padding = slot < 0 || slot >= step.num_slots;
  if (warp == kWarps && !padding) {
    return take_ring<State, kDelta, kChannels, kBlocks>(given, at, shared, slot, head, request, first_row, ahead);
  }
  // All loads come before what is made of them. Those of the drafts do not wait for the slot.
  const int group = head / step.heads_per_group;
  TileDraft<kDelta, kChannels> draft;
  if (warp < drafts) draft.load(step, first_token + warp, head, group);
  const int rows[2] = {first_row + warp * kTileRows + g, first_row + warp * kTileRows + g + 8};
  const auto draft_of = [&](int i) { return kDelta ? 4 * i + t : i / 2 * 8 + 2 * t + i % 2; };
  if (padding) return clear_tokens(step, head, first_token, first_token + drafts, first_row, kCtaRows);
  const TileRing ring = tile_ring(given, slot, request);
  const int length = ring.length;
  {
    const int row = warp * kTileRows + lane / 8, vec = lane % 8;  // 128 bytes of each of four rows
    const State* states = static_cast<const State*>(step.states) + state_at(step, slot, head) + vec * kVec;
    const uint32_t to = smem_address(shared + row * at.state_stride) + 16 * vec;
#pragma unroll
    for (int r = 0; r < kTileRows; r += 4) {
      const bool has = first_row + row + r < step.value_dim;
      const State* from = states + (has ? first_row + row + r : 0) * step.stride_row;
#pragma unroll
      for (int c = 0; c < kTileKeys / kVec; c += 8) {
        cp_async_16(to + 4 * r * at.state_stride + 16 * c, from + c * kVec, has);
      }
    }
  }
  if (kCommits && ring.folds) {
    meet_tiles<kDelta>();
    cp_async_wait_all();  // a warp's rows are its own
    __syncwarp();
    fold_tile<State>(step, at, shared, ring.rows(), slot, head, first_row);
    meet_tiles<kDelta>();
  }
  const auto make = [&](const TileDraft<kDelta, kChannels>& one, int d) {
    const bool first = !kCommits && blockIdx.x == 0;  // writes the ring's new rows
    one.make(step, at, shared, d,
             first && head == group * step.heads_per_group ? p.rings.k_row(step, slot, head, length + d) : nullptr,
             first ? p.rings.decay_row(step, slot, head, length + d) : nullptr);
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
                           (first_token + draft_of(i)) * step.v.stride_request + head * step.v.stride_head;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (draft_of(i) < drafts && rows[r] < step.value_dim) values[i][r] = from[rows[r]];
    }
  }
  meet_tiles<kDelta>();
  if constexpr (kChannels) {
    for (int d = warp; d < drafts; d += kWarps) {
      float* factors = shared + at.factors() + 2 * d * kTileStride;
      walk_back<kTileKeys>(at, shared, d, length, p.ancestors(request, d), [&](int column, float key, float query) {
        float* rest = factors + at.columns * kTileStride;
        split(key, factors[column], rest[column]);
        split(query, factors[kTileStride + column], rest[kTileStride + column]);
      });
    }
    meet_tiles<kDelta>();
  }
  cp_async_wait_all();  // a warp's rows are its own
  __syncwarp();
  float sums[kBlocks][4] = {}, rest[kBlocks][4] = {};
  const float* state = shared + (warp * kTileRows + g) * at.state_stride + 4 * t;
  multiply_tile<State, kBlocks>([&](int r, int c) { return load_vec<Part>(state + 8 * r * at.state_stride + 16 * c); },
                                shared + at.factors(), at.columns, sums, rest);
  if constexpr (!kChannels) meet_tiles<kDelta>();

  // To each product of the state come those of the rows behind the draft, of the ring and of the drafts.
  const float* updates = shared + at.values() + warp * kTileRows + g;
  const auto value = [&](int i, int r) { return __uint_as_float(uint32_t{values[i][r]} << 16); };
  float by_key[kEach][2] = {}, by_query[kEach][2], u[kEach][2], coefficients[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int known = min_of(draft_of(i), drafts - 1);
    const float decay = kChannels ? 1.f : shared[at.state_decays() + known];
    coefficients[i] = shared[at.coefficients() + known];
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
  float* ring_u = p.rings.u_row(step, slot, head, length);
  const float skip = !kDelta && step.skip != nullptr ? step.skip[head] : 0.f;
  __nv_bfloat16* out =
      static_cast<__nv_bfloat16*>(step.out) + first_token * step.out_stride_request + head * step.out_stride_head;
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

// Where tokens are of bf16, keys of 128 elements, and all rows on the boundaries of its accesses.
template <typename State>
bool verify_tiles_take(const LinearVerify& p) {
  constexpr int kMostAcross = 65535;  // blocks in the grid's other dimensions
  const LinearStep& s = p.step;
  const auto aligned = [](const StepRows& rows) {
    return rows_aligned(rows.data, 2, 8, rows.stride_request, rows.stride_head);
  };
  return s.dtype == DType::kBFloat16 && s.key_dim == kTileKeys && s.value_dim % 4 == 0 && p.drafts <= 8 &&
         s.num_heads <= kMostAcross && s.batch_size <= kMostAcross && aligned(s.q) && aligned(s.k) &&
         rows_aligned(s.states, sizeof(State), 16, s.stride_slot, s.stride_head, s.stride_row) &&
         rows_aligned(p.rings.u, 4, 16) && rows_aligned(p.rings.k, 4, 16) &&
         (!p.rings.per_channel || rows_aligned(p.rings.decay, 4, 16));
}

// That, and a CTA has all rows of a head.
template <typename State, bool kDelta>
bool draft_tiles_take(const LinearDraftStep& p) {
  return verify_tiles_take<State>(p.verify) && p.verify.step.value_dim <= kTileCtaRows<kDelta>;
}

template <typename State, bool kDelta, bool kChannels, int kBlocks, class Params>
void launch_verify_tiles_of(const char* what, const Params& given, cudaStream_t stream) {
  const LinearVerify& p = verification(given);
  const LinearStep& step = p.step;
  const VerifyTileLayout at = verify_tiles<State, kDelta, kChannels, kBlocks>(p);
  const int bytes = 4 * at.floats(), row_blocks = ceil_div(step.value_dim, at.cta_rows);
  check_shared_bytes(what, bytes);
  // While CTAs work, states come for half of those that will run when they have ended. More would not stay in L2.
  const int half = 8 / kTileWarps<kDelta> * device_sms(what), of_request = row_blocks * step.num_heads;
  const int ahead = step.stride_row == kTileKeys ? max_of(half / max_of(of_request, 1), 1) : 0;
  const LaunchShape shape{.blocks = row_blocks,
                          .threads = kTileThreads<kDelta>,
                          .shared_bytes = bytes,
                          .max_shared_bytes = INT32_MAX,
                          .blocks_y = step.num_heads,
                          .blocks_z = step.batch_size};
  launch_dependent<&linear_verify_tile_kernel<State, kDelta, kChannels, kBlocks, Params>>(what, shape, stream, given,
                                                                                          ahead);
}

template <typename State, bool kDelta, bool kChannels, class Params>
void launch_verify_tiles(const char* what, const Params& given, cudaStream_t stream) {
  if constexpr (kDelta) {
    if (verification(given).drafts > kBlockDrafts<kDelta>) {
      return launch_verify_tiles_of<State, kDelta, kChannels, 2>(what, given, stream);
    }
  }
  launch_verify_tiles_of<State, kDelta, kChannels, 1>(what, given, stream);
}

template <typename State, int kMaxKeys, bool kDelta, bool kChannels>
void launch_linear_drafts(const char* what, const LinearVerify& p, cudaStream_t stream) {
  if constexpr (kMaxKeys == kTileKeys && !std::is_same_v<State, __half>) {
    if (verify_tiles_take<State>(p)) return launch_verify_tiles<State, kDelta, kChannels>(what, p, stream);
  }
  launch_linear_verify<State, kMaxKeys, kDelta, kChannels>(what, p, stream);
}

// A commit and the verification behind it in one launch; false: no kernel takes both.
template <typename State, int kMaxKeys, bool kDelta, bool kChannels>
bool launch_draft_tiles(const char* what, const LinearDraftStep& p, cudaStream_t stream) {
  if constexpr (kMaxKeys == kTileKeys && !std::is_same_v<State, __half>) {
    if (draft_tiles_take<State, kDelta>(p)) {
      launch_verify_tiles<State, kDelta, kChannels>(what, p, stream);
      return true;
    }
  }
  return false;
}

}  // namespace attnops
