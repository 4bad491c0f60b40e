#pragma once
#include "device/common/named_barrier.cuh"
#include "device/sm80/cp_async.cuh"
#include "device/sm80/linear_verify_draft.cuh"
#include "device/sm80/linear_verify_products.cuh"

// linear_verify_kernel with products by matrix units: a warp multiplies 16 rows of a state, all its columns, with the
// keys and queries of all drafts. Numbers are split into two of 11 bits each, so three products (two, where the state
// has 16 bits) have about float32's accuracy. Sums need no shuffles: a lane has one draft of each four, and two rows.
// CTAs stay. Some warps make keys and queries of the drafts and multiply them with those of the ring, for the CTA's
// next work while those with rows are at this one. These ask for their next rows as soon as they have multiplied.
namespace attnops {

// What the two kinds of warps tell each other.
enum TileBarrier : int {
  kFactorsThere = 1,  // what states are multiplied with
  kFactorsFree,
  kProductsThere,                      // all else, of either turn
  kProductsFree = kProductsThere + 2,  // of either turn
  kMakersMeet = kProductsFree + 2,
};

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
  __device__ __forceinline__ TileWork at(int number, int slot) const {
    const int block = number / row_blocks, request = block / step.num_heads;
    return {number, request, block - request * step.num_heads, (number - block * row_blocks) * kCtaRows, slot};
  }
  // The first one from `number` on that is no padding, with a number of at least `count` if there is none. `clear` gets
  // the padding before it.
  template <typename Clear>
  __device__ __forceinline__ TileWork from(int number, int slot, const Clear& clear) const {
    for (;; number += gridDim.x, slot = slot_of(number)) {
      const TileWork work = at(number, slot);
      if (number >= count || (slot >= 0 && slot < step.num_slots)) return work;
      clear(work);
    }
  }
};

// Asks for a warp's rows of a state. It stays in L2 where the commit is likely to fold its ring.
template <typename State>
__device__ __forceinline__ void ask_for_tile(const LinearStep& step, const VerifyTileLayout& at, float* shared,
                                             const TileWork& work, int warp, bool stays) {
  constexpr int kVec = 16 / static_cast<int>(sizeof(State));
  const int lane = threadIdx.x % 32, row = warp * kTileRows + lane / 8, vec = lane % 8;  // 128 bytes of four rows
  const State* states = static_cast<const State*>(step.states) + state_at(step, work.slot, work.head) + vec * kVec;
  const uint32_t to = smem_address(shared + row * at.state_stride) + 16 * state_vec(row, vec);
  const uint64_t policy = stays ? used_again() : used_once();
#pragma unroll
  for (int r = 0; r < kTileRows; r += 4) {
    const bool has = work.first_row + row + r < step.value_dim;
    const State* from = states + (has ? work.first_row + row + r : 0) * step.stride_row;
#pragma unroll
    for (int c = 0; c < kTileKeys / kVec; c += 8) {
      cp_async_16(to + 4 * r * at.state_stride + 16 * c, from + c * kVec, has, policy);
    }
  }
}

// What the warps without rows do: they bring rings, make keys and queries of drafts, and multiply keys.
template <bool kDelta, bool kChannels, int kBlocks>
struct TileMakers {
  static constexpr int kCtaRows = kTileCtaRows<kDelta>, kAll = kTileThreads<kDelta>;
  static constexpr int kMakers = kTileMakers<kDelta>, kDrafts = kBlocks * kBlockDrafts<kDelta>;
  static constexpr int kOwn = (kDrafts + kMakers - 1) / kMakers;  // drafts of a warp, at most
  const LinearVerify& p;
  VerifyTileLayout& at;
  float* shared;
  int warp;  // of those that make
  int length = 0;
  float decay = 1.f;  // of the ring's row that has the lane's number

  __device__ __forceinline__ void meet() const { sync_named(kMakersMeet, 32 * kMakers); }

  // `rows`: what the slot says of its ring.
  __device__ __forceinline__ void ask(const TileWork& work, int rows) {
    const LinearStep& step = p.step;
    const int lane = threadIdx.x % 32;
    length = p.rings.within(rows, at.drafts);
    const float* ring_u = p.rings.u_row(step, work.slot, work.head, 0);
    const float* ring_k = p.rings.k_row(step, work.slot, work.head, 0);
    const float* ring_decay = p.rings.decay_row(step, work.slot, work.head, 0);
    const bool own = 4 * lane < kCtaRows, has = own && work.first_row + 4 * lane < step.value_dim;
    if (!kChannels && warp == kMakers - 1 && lane < length) decay = ring_decay[lane];
    for (int row = warp; row < length; row += kMakers) {
      if (own) {
        cp_async_16(smem_address(shared + at.values() + row * kCtaRows + 4 * lane),
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

  // A warp's drafts, the first of which has been asked for. Before anything is written `wait` is called, once.
  template <typename Wait>
  __device__ __forceinline__ void make(const TileWork& work, const TileDraft<kDelta, kChannels>& first,
                                       const Wait& wait) {
    const LinearStep& step = p.step;
    const int group = work.head / step.heads_per_group;
    const bool writes = work.first_row == 0, writes_key = writes && work.head == group * step.heads_per_group;
    bool waited = false;
    const auto once = [&] {
      if (!waited) wait();
      waited = true;
    };
    const auto one = [&](const TileDraft<kDelta, kChannels>& draft, int d) {
      draft.make(step, at, shared, d, writes_key ? p.rings.k_row(step, work.slot, work.head, length + d) : nullptr,
                 writes ? p.rings.decay_row(step, work.slot, work.head, length + d) : nullptr, once);
    };
    if (warp < at.drafts) one(first, warp);
    once();
    if constexpr (kOwn > 1) {
      TileDraft<kDelta, kChannels> more;
#pragma unroll 1
      for (int d = warp + kMakers; d < at.drafts; d += kMakers) {
        more.load(step, int64_t{work.request} * at.drafts + d, work.head, group);
        one(more, d);
      }
    }
  }

  // Of all rows' keys with all drafts, a block of a tile a warp. The last warp has what the state decays by.
  __device__ __forceinline__ void multiply(const TileWork& work) const {
    const int tiles = at.whole_rows() / kTileRows, lane = threadIdx.x % 32;
    for (int i = warp; i < tiles * kBlocks; i += kMakers) {
      multiply_keys<kDelta, kDrafts>(p, at, shared, work.request, length, i / kBlocks, i % kBlocks);
    }
    if (warp == kMakers - 1 && lane < at.drafts) {
      float decays[kDrafts];
      load_decays(at, shared, decays);
      const uint32_t path = p.ancestors(work.request, lane) | 1u << lane;
      shared[at.state_decays() + lane] = shared[at.decays() + at.total_rows()] * path_decay(decays, path, -1, lane);
    }
  }

  // With gates per channel, in place of it.
  __device__ __forceinline__ void walk(const TileWork& work) const {
    for (int d = warp; d < at.drafts; d += kMakers) {
      float* factors = shared + at.factors() + 2 * d * kTileStride;
      walk_back<kTileKeys>(at, shared, d, length, p.ancestors(work.request, d),
                           [&](int column, float key, float query) {
                             float* rest = factors + at.columns * kTileStride;
                             split(key, factors[column], rest[column]);
                             split(query, factors[kTileStride + column], rest[kTileStride + column]);
                           });
    }
  }

  __device__ __forceinline__ void run(const TileWorks<kCtaRows>& works) {
    const auto pass_over = [](const TileWork&) {};
    TileDraft<kDelta, kChannels> draft;
    const auto ask_draft = [&](const TileWork& work) {
      if (warp < at.drafts) {
        draft.load(p.step, int64_t{work.request} * at.drafts + warp, work.head, work.head / p.step.heads_per_group);
      }
    };
    const int first_slot = works.slot_of(blockIdx.x);
    ask_draft(works.at(blockIdx.x, 0));  // what it brings does not wait for its slot
    TileWork work = works.from(blockIdx.x, first_slot, pass_over);
    if (work.number >= works.count) return;
    const int rows = p.rings.lengths[work.slot];
    if (work.number != static_cast<int>(blockIdx.x)) ask_draft(work);
    ask(work, rows);
    for (bool first = true;; first = false) {
      const int ahead = work.number + gridDim.x, slot = works.slot_of(ahead);
      make(work, draft, [&] {
        if (!first) sync_named(kFactorsFree, kAll);
      });
      if constexpr (!kChannels) arrive_named(kFactorsThere, kAll);
      const TileWork next = works.from(ahead, slot, pass_over);
      const bool more = next.number < works.count;
      const int next_rows = more ? p.rings.lengths[next.slot] : 0;  // has come when the products are made
      if (more) ask_draft(next);
      if (!kChannels && warp == kMakers - 1) {
        put_decays(at, shared, p.rings.decay_row(p.step, work.slot, work.head, 0), decay, length);
      }
      cp_async_wait_all();
      meet();
      if constexpr (kChannels) {
        walk(work);
        arrive_named(kFactorsThere, kAll);
      } else {
        multiply(work);
      }
      arrive_named(kProductsThere + at.turn, kAll);
      meet();  // before rows of the next ring come where keys were
      at.turn ^= 1;
      if (!first) sync_named(kProductsFree + at.turn, kAll);
      if (!more) break;
      work = next;
      ask(work, next_rows);
    }
    sync_named(kFactorsFree, kAll);  // what those with rows have told last
    sync_named(kProductsFree + (at.turn ^ 1), kAll);
  }
};

// Grid: any number of CTAs.
template <typename State, bool kDelta, bool kChannels, int kBlocks>
__global__ void __launch_bounds__(kTileThreads<kDelta>, kTileCtas<kDelta>)
    linear_verify_tile_kernel(const __grid_constant__ LinearVerify p, int row_blocks) {
  constexpr int kWarps = kTileWarps<kDelta>, kCtaRows = kTileCtaRows<kDelta>, kAll = kTileThreads<kDelta>;
  constexpr int kVec = 16 / static_cast<int>(sizeof(State));
  constexpr int kDrafts = kBlocks * kBlockDrafts<kDelta>, kEach = kDrafts / 4;  // of a lane
  using Part = RowVec<State, kVec>;
  extern __shared__ __align__(16) float shared[];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const LinearStep& step = p.step;
  const int drafts = p.drafts;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  VerifyTileLayout at = verify_tiles<State, kDelta, kChannels, kBlocks>(p);
  if (step.report != nullptr && blockIdx.x == 0) {
    for (int request = threadIdx.x; request < step.batch_size; request += kTileThreads<kDelta>) {
      p.check(kDelta ? kReportDeltaVerify : kReportSsdVerify, request, step.report);
    }
  }
  const TileWorks<kCtaRows> works{step, row_blocks, step.batch_size * step.num_heads * row_blocks};
  if (warp >= kWarps) {
    return TileMakers<kDelta, kChannels, kBlocks>{p, at, shared, warp - kWarps}.run(works);
  }
  const auto clear = [&](const TileWork& work) {
    const int64_t first = int64_t{work.request} * drafts;
    clear_tokens(step, work.head, first, first + drafts, work.first_row, kCtaRows, threadIdx.x, 32 * kWarps);
  };
  const auto draft_of = [&](int i) { return kDelta ? 4 * i + t : i / 2 * 8 + 2 * t + i % 2; };
  TileWork next = works.from(blockIdx.x, works.slot_of(blockIdx.x), clear);
  const auto rows_of = [&](const TileWork& work) { return work.number < works.count ? p.rings.lengths[work.slot] : 0; };
  int next_rows = rows_of(next);
  if (next.number < works.count) ask_for_tile<State>(step, at, shared, next, warp, false);
  for (; next.number < works.count; at.turn ^= 1) {
    const TileWork work = next;
    const int ahead = work.number + gridDim.x, ahead_slot = works.slot_of(ahead);
    const int head = work.head, first_token = work.request * drafts, length = p.rings.within(next_rows, drafts);
    const int rows[2] = {work.first_row + warp * kTileRows + g, work.first_row + warp * kTileRows + g + 8};
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
    next = works.from(ahead, ahead_slot, clear);
    next_rows = rows_of(next);  // has come when the products are made
    sync_named(kFactorsThere, kAll);
    cp_async_wait_all();  // a warp's rows are its own
    __syncwarp();
    float sums[kBlocks][4] = {}, rest[kBlocks][4] = {};
    const float* state = shared + (warp * kTileRows + g) * at.state_stride + 4 * t;
    const int odd = 4 * state_vec(g, 0);
    multiply_tile<State, kBlocks>(
        [&](int r, int c) {
          return load_vec<Part>(state + 8 * r * at.state_stride + 16 * c + (c % 2 == 0 ? odd : -odd));
        },
        shared + at.factors(), at.columns, sums, rest);
    arrive_named(kFactorsFree, kAll);
    __syncwarp();
    if (next.number < works.count) {
      ask_for_tile<State>(step, at, shared, next, warp, next_rows + drafts + drafts / 2 > p.rings.rows);
    }
    sync_named(kProductsThere + at.turn, kAll);

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
    arrive_named(kProductsFree + at.turn, kAll);
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
