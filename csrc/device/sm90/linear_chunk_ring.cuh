#pragma once
#include "device/sm80/linear_chunk_pass.cuh"
#include "device/sm90/barrier.cuh"
#include "device/sm90/copy.cuh"
#include "device/sm90/wgmma_rows_registers.cuh"

// The pass of device/sm80/linear_chunk_pass.cuh, divided: a warpgroup loads chunks into a ring, one goes from state to
// state, and one makes outputs of copies of the states and updates. What goes from chunk to chunk is then as short as
// it can be: three products, and what lies between them.
namespace attnops::sm90 {

template <int kKeys, bool kDelta, bool kChannels, int kGroups>
struct RingShared {
  using Stage = typename PassShared<kKeys, kDelta, kChannels, 4 * kGroups>::Stage;
  static constexpr int kCopyBytes = kGroups * (kKeys / 64 + 2) * kPanelBytes;
  static constexpr int kStages = 3 * sizeof(Stage) + kCopyBytes <= 226 << 10 ? 3 : 2;
  Stage stages[kStages];
  alignas(1024) unsigned char state[kGroups][kKeys / 64 * kPanelBytes];  // [values, keys], at the chunk's begin
  unsigned char u[kGroups][kPanelBytes];                                 // [values, tokens]
  unsigned char out[kGroups][kPanelBytes];                               // [tokens, values]
  alignas(8) uint64_t full[kStages], empty[kStages];
};

// kGroups: of warpgroups that go from state to state, 64 rows of values each.
template <int kKeys, bool kDelta, bool kChannels, int kGroups>
class ChunkRing
    : public ChunkPassBase<ChunkRing<kKeys, kDelta, kChannels, kGroups>, kKeys, kDelta, kChannels, 4 * kGroups> {
 public:
  using Base = ChunkPassBase<ChunkRing, kKeys, kDelta, kChannels, 4 * kGroups>;
  using Shared = RingShared<kKeys, kDelta, kChannels, kGroups>;
  using typename Base::Stage;
  using Bf16 = __nv_bfloat16;
  static constexpr int kStages = Shared::kStages, kGroupThreads = 128;
  static constexpr int kThreads = (kGroups + 2) * kGroupThreads, kMeeting = (kGroups + 1) * kGroupThreads;

  __device__ ChunkRing(const LinearPrefill& prefill, Shared& shared, int64_t request, int head, int first_row)
      : Base(prefill, reinterpret_cast<typename Base::Shared&>(shared), request, head, first_row), ring_(shared) {}

  __device__ void run() {
    if (threadIdx.x < kStages) {
      mbarrier_init(smem_address(&ring_.full[threadIdx.x]), kGroupThreads + 1);
      mbarrier_init(smem_address(&ring_.empty[threadIdx.x]), kMeeting);
      mbarrier_init_fence();
    }
    __syncthreads();
    const int64_t count = this->chunks_.count();
    const int group = threadIdx.x / kGroupThreads;
    if (group < kGroups) {
      registers_increase<kGroups == 1 ? 216 : 176>();
      run_states(count, group);
    } else if (group == kGroups) {
      run_outputs(count);
    } else {
      registers_decrease<kGroups == 1 ? 120 : 32>();
      load(count);
    }
  }

 private:
  enum Barrier { kStateThere = 1, kStateFree, kUpdatesThere, kUpdatesFree };  // of all but the loads

  struct Turn {
    int stage = 0;
    uint32_t phase = 0;

    __device__ void next() {
      if (++stage == kStages) stage = 0, phase ^= 1;
    }
  };
  __device__ uint32_t full(const Turn& turn) { return smem_address(&ring_.full[turn.stage]); }
  __device__ uint32_t empty(const Turn& turn) { return smem_address(&ring_.empty[turn.stage]); }

  __device__ void load(int64_t count) {
    const LinearStep& p = this->p_;
    const int group = this->head_ / p.heads_per_group;
    const int columns = min_of(p.value_dim, this->first_row_ + Base::kRows);
    constexpr ChunkScratch kLayout{.panels = kKeys / 64, .delta = kDelta, .channels = kChannels};
    constexpr int kProducts = (kDelta ? 2 : 1) * kPanelBytes, kFactors = kFactorRows * kChunk * 4;
    constexpr int kKeyBytes = kChannels ? 3 * (kKeys / 64) * kPanelBytes : 0;
    Turn turn;
    for (int64_t c = 0; c < count; ++c, turn.next()) {
      Stage& stage = ring_.stages[turn.stage];
      if (c >= kStages) mbarrier_wait(empty(turn), turn.phase ^ 1);
      if (threadIdx.x % kGroupThreads == 0) {
        const unsigned char* scratch = static_cast<const unsigned char*>(this->prefill_.scratch) +
                                       ((this->chunks_.place + c) * p.num_heads + this->head_) * kLayout.bytes();
        mbarrier_arrive_expect(full(turn), kProducts + kFactors + kKeyBytes);
        copy_bytes(smem_address(kDelta ? stage.t : stage.p), scratch, kProducts, full(turn));
        copy_bytes(smem_address(stage.factors), scratch + kLayout.factors_at(), kFactors, full(turn));
        if constexpr (kChannels) copy_bytes(smem_address(stage.k), scratch + kLayout.keys_at(), kKeyBytes, full(turn));
      }
      const int64_t begin = this->chunks_.begin(c);
      const int size = this->chunks_.size(c);
      if constexpr (!kChannels) {
        copy_rows<kKeys / 64, kGroupThreads>(smem_address(stage.k), p.k, group, begin, size, 0, p.key_dim);
        copy_rows<kKeys / 64, kGroupThreads>(smem_address(stage.q), p.q, group, begin, size, 0, p.key_dim);
      }
      copy_rows<kGroups, kGroupThreads>(smem_address(stage.v), p.v, this->head_, begin, size, this->first_row_,
                                        columns);
      arrive_after_copies(full(turn));
    }
    wait_for_copies();
  }

  __device__ void run_states(int64_t count, int group) {
    const LinearStep& p = this->p_;
    const int64_t prefix = this->prefill_.prefix(this->request_), slot = p.state_indices[this->request_];
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) this->state_[i] = 0.f;
    if (prefix != 0) {
      this->each_element(slot, [&](float& s, int64_t at) { s = load_as(p.state_dtype, p.states, at); });
    }
    Turn turn;
    for (int64_t c = 0; c < count; ++c, turn.next()) {
      Stage& stage = ring_.stages[turn.stage];
      uint32_t state[kKeys / 16][4], a[4][4], decayed[4][4];
      float u[32];
#pragma unroll
      for (int i = 0; i < kKeys / 16; ++i) Base::pack(state[i], this->state_ + 8 * i, this->state_ + 8 * i + 4);
      mbarrier_wait(full(turn), turn.phase);
      fence_async_proxy();  // rows arrive by ordinary writes
      if constexpr (kDelta) {
        wgmma_fence();
        const uint32_t keys = smem_address(stage.k);
#pragma unroll
        for (int i = 0; i < kKeys / 16; ++i) {
          wgmma_n64<Bf16>(u, state[i], operand_descriptor(keys + i / 4 * kPanelBytes) + i % 4 * kStepKMajor, i > 0);
        }
        wgmma_commit();
      }
      named_barrier_sync(kStateFree, kMeeting);  // no branch: products are in flight
#pragma unroll
      for (int i = 0; i < kKeys / 16; ++i) put(state[i], ring_.state[group] + i / 4 * kPanelBytes, i % 4);
      fence_async_proxy();
      named_barrier_arrive(kStateThere, kMeeting);
      this->decay_state(stage);
      if constexpr (kDelta) wgmma_wait<0>(u);
      this->take_values(stage, u);
      Base::pack_tokens(a, u);
      if constexpr (kDelta) {
        wgmma_fence();
        const uint32_t inverse = smem_address(stage.t);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          wgmma_n64<Bf16>(u, a[j], operand_descriptor(inverse) + j * kStepKMajor, j > 0);
        }
        wgmma_commit();
        wgmma_wait<0>(u);
        Base::pack_tokens(a, u);
      }
      this->pack_decayed(stage, decayed, u);
      wgmma_fence();
      const uint32_t keys = smem_address(kChannels ? stage.k_end : stage.k);
#pragma unroll
      for (int panel = 0; panel < kKeys / 64; ++panel) {
        float(&part)[32] = reinterpret_cast<float(&)[32]>(this->state_[32 * panel]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          wgmma_rows<Bf16, 1>(part, decayed[j], operand_descriptor(keys + panel * kPanelBytes) + j * kStepMnMajor, 1);
        }
      }
      wgmma_commit();
      named_barrier_sync(kUpdatesFree, kMeeting);
#pragma unroll
      for (int j = 0; j < 4; ++j) put(a[j], ring_.u[group], j);
      fence_async_proxy();
      named_barrier_arrive(kUpdatesThere, kMeeting);
      wgmma_wait<0>(this->state_);
      mbarrier_arrive(empty(turn));
      const int64_t seen = prefix + this->chunks_.begin(c) + this->chunks_.size(c) - this->chunks_.first;
      const int64_t kept = this->prefill_.checkpoint(this->request_, seen);
      if (kept >= 0) this->save(kept);
    }
    named_barrier_sync(kStateFree, kMeeting);  // what the outputs have told last
    named_barrier_sync(kUpdatesFree, kMeeting);
    this->save(slot);
  }

  // A warp's 16 rows and 16 columns of a panel.
  __device__ void put(const uint32_t (&a)[4], unsigned char* panel, int step) const {
    const int lane = threadIdx.x % 32;
    store_fragment(a, smem_address(panel) + panel_at(16 * (this->warp_ % 4) + lane % 16, 2 * step + lane / 16));
  }

  // A warp has 16 tokens.
  __device__ void run_outputs(int64_t count) {
    const LinearStep& p = this->p_;
    named_barrier_arrive(kStateFree, kMeeting);
    named_barrier_arrive(kUpdatesFree, kMeeting);
    Turn turn;
    for (int64_t c = 0; c < count; ++c, turn.next()) {
      Stage& stage = ring_.stages[turn.stage];
      float o[kGroups][32];
      mbarrier_wait(full(turn), turn.phase);
      fence_async_proxy();
      named_barrier_sync(kStateThere, kMeeting);
      wgmma_fence();
      const uint32_t queries = smem_address(stage.q);
#pragma unroll
      for (int v = 0; v < kGroups; ++v) {
        const uint32_t state = smem_address(ring_.state[v]);
#pragma unroll
        for (int i = 0; i < kKeys / 16; ++i) {
          const uint32_t panel = i / 4 * kPanelBytes;
          wgmma_n64<Bf16>(o[v], operand_descriptor(queries + panel) + i % 4 * kStepKMajor,
                          operand_descriptor(state + panel) + i % 4 * kStepKMajor, i > 0);
        }
      }
      wgmma_commit();
      wait(o);
      named_barrier_arrive(kStateFree, kMeeting);
      if constexpr (!kChannels) {
        const int token = 16 * this->warp_ + this->g_;
        const float decays[2] = {stage.factors[1][token], stage.factors[1][token + 8]};
#pragma unroll
        for (int i = 0; i < 32 * kGroups; ++i) o[i / 32][i % 32] *= decays[i / 2 % 2];
      }
      named_barrier_sync(kUpdatesThere, kMeeting);
      wgmma_fence();
      const uint32_t products = smem_address(stage.p);
#pragma unroll
      for (int v = 0; v < kGroups; ++v) {
        const uint32_t updates = smem_address(ring_.u[v]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          wgmma_n64<Bf16>(o[v], operand_descriptor(products) + j * kStepKMajor,
                          operand_descriptor(updates) + j * kStepKMajor, 1);
        }
      }
      wgmma_commit();
      wait(o);
      named_barrier_arrive(kUpdatesFree, kMeeting);
      if constexpr (!kDelta) {
        if (p.skip != nullptr) {
#pragma unroll
          for (int v = 0; v < kGroups; ++v) add_values(stage.v + v * kPanelBytes, p.skip[this->head_], o[v]);
        }
      }
      mbarrier_arrive(empty(turn));
      __syncwarp();  // the chunk before has been read
#pragma unroll
      for (int v = 0; v < kGroups; ++v) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          uint32_t a[4];
          Base::pack(a, o[v] + 8 * j, o[v] + 8 * j + 4);
          put(a, ring_.out[v], j);
        }
      }
      __syncwarp();
#pragma unroll
      for (int v = 0; v < kGroups; ++v) store_tokens(c, v);
    }
  }

  __device__ static void wait(float (&o)[kGroups][32]) {
    if constexpr (kGroups == 1) {
      wgmma_wait<0>(o[0]);
    } else {
      wgmma_wait<0>(o[0], o[1]);
    }
  }

  __device__ void add_values(const unsigned char* values, float skip, float (&o)[32]) const {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t pair = *reinterpret_cast<const uint32_t*>(
            values + panel_at(16 * this->warp_ + this->g_ + 8 * h, n) + 4 * this->t_);
        o[4 * n + 2 * h] = fmaf(skip, __uint_as_float(pair << 16), o[4 * n + 2 * h]);
        o[4 * n + 2 * h + 1] = fmaf(skip, __uint_as_float(pair & 0xffff0000u), o[4 * n + 2 * h + 1]);
      }
    }
  }

  __device__ void store_tokens(int64_t c, int panel) const {
    const LinearStep& p = this->p_;
    const int64_t begin = this->chunks_.begin(c);
    const int size = this->chunks_.size(c), lane = threadIdx.x % 32;
    const int row = this->first_row_ + 64 * panel + lane % 8 * 8;
    if (row >= p.value_dim) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 16 * this->warp_ + 4 * i + lane / 8;
      if (token >= size) break;
      auto values = load_vec<Vec<Bf16, 8>>(reinterpret_cast<const Bf16*>(ring_.out[panel] + panel_at(token, lane % 8)));
      if (!kDelta && p.z.data != nullptr) {
        const Bf16* gates = static_cast<const Bf16*>(p.z.data) + (begin + token) * p.z.stride_request +
                            this->head_ * p.z.stride_head + row;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float z = static_cast<float>(gates[j]);
          values.data[j] = __float2bfloat16(static_cast<float>(values.data[j]) * z * sigmoid(z));
        }
      }
      store_vec(
          static_cast<Bf16*>(p.out) + (begin + token) * p.out_stride_request + this->head_ * p.out_stride_head + row,
          values);
    }
  }

  Shared& ring_;
};

}  // namespace attnops::sm90
