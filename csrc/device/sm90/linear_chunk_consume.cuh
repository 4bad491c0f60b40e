#pragma once
#include <type_traits>

#include "device/sm80/linear_chunk_pass.cuh"
#include "device/sm90/barrier.cuh"
#include "device/sm90/linear_chunk_multiply.cuh"
#include "device/sm90/linear_chunk_walk.cuh"
#include "device/sm90/store_box.cuh"
#include "device/sm90/wgmma_rows_registers.cuh"

namespace attnops::sm90 {

// The pass of device/sm80/linear_chunk_pass.cuh, divided: one or two warpgroups go from state to state, and one makes
// outputs of copies of the states and updates. What goes from chunk to chunk is then as short as it can be: three
// products, and what lies between them. `Shared` says where a chunk lies (RingShared).
template <class Shared_>
class ChunkConsumers : public ChunkPassBase<ChunkConsumers<Shared_>, Shared_::kKeys, Shared_::kDelta,
                                            Shared_::kChannels, 4 * Shared_::kGroups> {
 public:
  using Shared = Shared_;
  static constexpr int kKeys = Shared::kKeys, kGroups = Shared::kGroups;
  static constexpr bool kDelta = Shared::kDelta, kChannels = Shared::kChannels, kMakes = Shared::kMakes;
  using Base = ChunkPassBase<ChunkConsumers, kKeys, kDelta, kChannels, 4 * kGroups>;
  using Stage = typename Shared::Stage;
  using Turn = typename Shared::Turn;
  using Bf16 = __nv_bfloat16;
  using Note = typename Shared::Note;
  static constexpr Part kPart = Shared::kPart;
  static constexpr bool kOutputs = kPart != Part::kEnds;
  static constexpr int kGroupThreads = 128;
  static constexpr int kMeeting = (kGroups + (kOutputs ? 1 : 0)) * kGroupThreads, kThreads = kMeeting + kGroupThreads;

  __device__ ChunkConsumers(const LinearPrefill& prefill, Shared& shared, const ChunkCuts* cuts = nullptr,
                            const RingMaps* out_maps = nullptr)
      : Base(prefill, reinterpret_cast<typename Base::Shared&>(shared)),
        ring_(shared),
        cuts_(cuts),
        out_maps_(out_maps) {}

 protected:
  // Each group of states meets the outputs by itself.
  // Updates have two barriers by turns: states may tell of the next ones before the outputs have heard of these.
  enum Barrier { kStateThere = 1, kStateFree, kUpdatesThere, kLaterThere, kValuesRead, kBarriers = 5 };
  static constexpr int kMeetingOfGroup = 2 * kGroupThreads;
  static constexpr int kOutsThere =
      2 * kBarriers + 1;  // of the warps that make outputs: all of a chunk lie in their place

  __device__ static Barrier other(Barrier there) { return there == kUpdatesThere ? kLaterThere : kUpdatesThere; }

  __device__ static void meet(Barrier barrier, int group) {
    named_barrier_sync(barrier + kBarriers * group, kMeetingOfGroup);
  }
  __device__ static void tell(Barrier barrier, int group) {
    named_barrier_arrive(barrier + kBarriers * group, kMeetingOfGroup);
  }

  __device__ void run_states(int group) {
    Barrier there = kUpdatesThere;
    uint32_t own = fragment_place();
    Turn turn;
    mbarrier_wait(ring_.full(turn), turn.phase);
    while (ring_.notes[turn.stage].size != 0) {
      keep(own);
      Stage& stage = ring_.stages[turn.stage];
      const Note& note = ring_.notes[turn.stage];
      uint32_t state[kKeys / 16][4], a[4][4], decayed[4][4];
      float u[32];
      float2 decays[8];
      // What makes numbers that are wanted behind a wait stays ahead of it, also in machine code, since stores that
      // never happen want them, too. Else it goes to where the next products wait for it.
      const bool never = note.size < 0;
      if (note.first) begin_work(note);
#pragma unroll
      for (int i = 0; i < kKeys / 16; ++i) Base::pack(state[i], this->state_ + 8 * i, this->state_ + 8 * i + 4);
      if (!note.boxes) fence_async_proxy();  // rows may arrive by ordinary writes
      if constexpr (kDelta) {
        wgmma_fence();
        const uint32_t keys = smem_address(ring_.keys(turn));
#pragma unroll
        for (int i = 0; i < kKeys / 16; ++i) {
          wgmma_n64<Bf16>(u, state[i], operand_descriptor(keys + i / 4 * kPanelBytes) + i % 4 * kStepKMajor, i > 0);
        }
        wgmma_commit();
      }
      if constexpr (kOutputs) {
        meet(kStateFree, group);  // no branch: products are in flight
        const uint32_t to = smem_address(ring_.state[group]) + own;
#pragma unroll
        for (int i = 0; i < kKeys / 16; ++i) store_fragment(state[i], (to ^ 32 * (i % 4)) + i / 4 * kPanelBytes);
        tell(kStateThere, group);  // the fence is theirs who read it: here it would be on the way of the state
      }
      this->decay_state(stage);
      if constexpr (kDelta) {
        float values[32];
        this->load_values(stage, values);
        this->load_factors(stage, 0, decays);
        if (kOutputs && never) {
          store_numbers(this->state_, smem_address(stage.t));
          if constexpr (kGroups == 1) store_numbers(values, smem_address(stage.t));
        }
        wgmma_wait<0>(u);
        Base::take_values(values, decays, u);
      } else {
        this->scale_values(stage, u);
      }
      Base::pack_tokens(a, u);
      if constexpr (kDelta) {
        wgmma_fence();
        const uint32_t inverse = smem_address(stage.t);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          wgmma_n64<Bf16>(u, a[j], operand_descriptor(inverse) + j * kStepKMajor, j > 0);
        }
        wgmma_commit();
        this->load_factors(stage, 2, decays);
        wgmma_wait<0>(u);
        Base::pack_decayed(decays, decayed, u);
      } else {
        this->load_factors(stage, 2, decays);
        Base::pack_decayed(decays, decayed, u);
      }
      wgmma_fence();
      const uint32_t last_keys = smem_address(ring_.last_keys(turn));
#pragma unroll
      for (int panel = 0; panel < kKeys / 64; ++panel) {
        float(&part)[32] = reinterpret_cast<float(&)[32]>(this->state_[32 * panel]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          wgmma_rows<Bf16, 1>(part, decayed[j], operand_descriptor(last_keys + panel * kPanelBytes) + j * kStepMnMajor,
                              1);
        }
      }
      wgmma_commit();
      if constexpr (kOutputs) {
        Base::pack_tokens(a, u);
        named_barrier_sync(kValuesRead + kBarriers * group, kGroupThreads);  // updates lie where they were
        const uint32_t to = smem_address(ring_.updates(turn, group)) + own;
#pragma unroll
        for (int j = 0; j < 4; ++j) store_fragment(a[j], to ^ 32 * j);
        tell(there, group);
      }
      // The next chunk is waited for while products run. It does not wait for this one: there are two stages.
      Turn next = turn;
      next.next();
      mbarrier_wait(ring_.full(next), next.phase);
      if constexpr (kPart == Part::kEnds) {
        const int to = note.to;
        const bool map = note.map;
        wgmma_wait<0>(this->state_);
        mbarrier_arrive(ring_.empty(turn));
        if (to >= 0) save_end(to, map);
      } else {
        const int kept = note.kept, written = note.written;
        wgmma_wait<0>(this->state_);
        mbarrier_arrive(ring_.empty(turn));
        if ((kept & written) >= 0) {
#pragma unroll 1
          for (int i = 0; i < 2; ++i) {
            const int slot = i == 0 ? kept : written;
            if (slot >= 0) this->save(slot);
          }
        }
      }
      turn = next, there = other(there);
    }
    if constexpr (kOutputs) {
      meet(kStateFree, group);  // what the outputs have told last
    }
  }

  __device__ void begin_work(const Note& note) {
    const int start = note.start;
    this->head_ = note.head, this->first_row_ = note.first_row;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) this->state_[i] = 0.f;
    if (start >= 0) this->restore(start);
    if constexpr (kPart == Part::kCut) {
      const int from = note.from;
      if (from >= 0) {
        each_end(from, false, [](float* at, float& low, float& high) {
          const auto pair = load_vec<Vec<float, 2>>(at);
          low = pair.data[0], high = pair.data[1];
        });
      }
    } else if constexpr (kPart == Part::kEnds) {
      if (note.copy >= 0) save_end(note.copy, false);
      if (note.map) set_identity();
    }
  }

  __device__ void set_identity() {
    const int row = this->first_row_ + 16 * this->warp_ + this->g_;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      if (8 * (i / 4) + 2 * this->t_ + i % 2 == row + i % 4 / 2 * 8) this->state_[i] = 1.f;
    }
  }

  __device__ void save_end(int place, bool map) {
    each_end(place, map, [](float* at, float low, float high) { store_vec(at, Vec<float, 2>{{low, high}}); });
  }

  // body(address of two neighbours of a segment's end, the two).
  template <typename Body>
  __device__ void each_end(int place, bool map, Body&& body) {
    const int row = this->first_row_ + 16 * this->warp_ + this->g_, rows = map ? kKeys : this->p_.value_dim;
    float* base = (map ? cuts_->maps : cuts_->ends) + (int64_t{place} * rows + row) * kKeys + 2 * this->t_;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + 8 * half >= rows) break;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        const int at = 4 * n + 2 * half;
        body(base + 8 * half * kKeys + 8 * n, this->state_[at], this->state_[at + 1]);
      }
    }
  }

  // One register, not one for each address that is made of it ahead of a loop: those would be spilled.
  __device__ static void keep(uint32_t& word) { asm volatile("" : "+r"(word)); }

  // Where a lane's part of its warp's 16 rows lies in a panel: of step j at this ^ 32 j.
  __device__ uint32_t fragment_place() const {
    const int lane = threadIdx.x % 32;
    return panel_at(16 * (this->warp_ % 4) + lane % 16, lane / 16);
  }

  // A warp's 16 rows and 16 columns of a panel.
  __device__ void put(const uint32_t (&a)[4], unsigned char* panel, int step) const {
    const int lane = threadIdx.x % 32;
    store_fragment(a, smem_address(panel) + panel_at(16 * (this->warp_ % 4) + lane % 16, 2 * step + lane / 16));
  }

  // A warp has 16 tokens. The first one, whose masked products are the fewest, stores what all have made.
  __device__ void run_outputs() {
    static_assert(kDelta);
    for (int v = 0; v < kGroups; ++v) tell(kStateFree, v);
    const bool first_warp = this->warp_ % 4 == 0, stores = first_warp && threadIdx.x % 32 == 0;
    uint32_t own = fragment_place();
    Barrier there = kUpdatesThere;
    Turn next;
    for (;; there = other(there)) {
      keep(own);
      const Turn turn{__shfl_sync(0xffffffffu, next.stage, 0), next.phase};  // one of a warp, for the compiler
      next.next();
      Stage& stage = ring_.stages[turn.stage];
      float o[kGroups][32];
      mbarrier_wait(ring_.full(turn), turn.phase);
      const Note& of_stage = ring_.notes[turn.stage];
      if (of_stage.size == 0) break;
      __syncwarp();
      if (!of_stage.boxes) fence_async_proxy();
      float decays[2] = {1.f, 1.f};
      uint32_t made[4][4];
      if constexpr (kMakes) {
        multiply_queries(turn, decays, made);
      } else if constexpr (!kChannels) {
        decays[0] = stage.factors[1][16 * this->warp_ + this->g_];
        decays[1] = stage.factors[1][16 * this->warp_ + this->g_ + 8];
      }
      if (stores) wait_for_reads();  // of the outputs before; the other warps meet this one where states are there
      const uint32_t queries = smem_address(ring_.queries(turn));
      for (int v = 0; v < kGroups; ++v) meet(kStateThere, v);
      fence_async_proxy();
#pragma unroll
      for (int v = 0; v < kGroups; ++v) {
        wgmma_fence();
        const uint32_t state = smem_address(ring_.state[v]);
#pragma unroll
        for (int i = 0; i < kKeys / 16; ++i) {
          const uint32_t panel = i / 4 * kPanelBytes;
          wgmma_n64<Bf16>(o[v], operand_descriptor(queries + panel) + i % 4 * kStepKMajor,
                          operand_descriptor(state + panel) + i % 4 * kStepKMajor, i > 0);
        }
        wgmma_commit();
      }
      if constexpr (kGroups > 1) {
        wgmma_wait<1>(o[0]);
        tell(kStateFree, 0);
      }
      wgmma_wait<0>(o[kGroups - 1]);
      tell(kStateFree, kGroups - 1);
      if constexpr (!kChannels) {
#pragma unroll
        for (int i = 0; i < 32 * kGroups; ++i) o[i / 32][i % 32] *= decays[i / 2 % 2];
      }
      uint32_t products = 0;
      if constexpr (!kMakes) products = smem_address(stage.p);
      for (int v = 0; v < kGroups; ++v) meet(there, v);
      fence_async_proxy();
#pragma unroll
      for (int v = 0; v < kGroups; ++v) {
        wgmma_fence();
        const uint32_t updates = smem_address(ring_.updates(turn, v));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint64_t columns = operand_descriptor(updates) + j * kStepKMajor;
          if constexpr (kMakes) {
            wgmma_n64<Bf16>(o[v], made[j], columns, 1);
          } else {
            wgmma_n64<Bf16>(o[v], operand_descriptor(products) + j * kStepKMajor, columns, 1);
          }
        }
        wgmma_commit();
      }
      const Note note = of_stage;
      if constexpr (kGroups > 1) wgmma_wait<1>(o[0]);
      wgmma_wait<0>(o[kGroups - 1]);
      __syncwarp();
      mbarrier_arrive(ring_.empty(turn));
      const uint32_t to = smem_address(ring_.o[0]) + own;
#pragma unroll
      for (int v = 0; v < kGroups; ++v) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          uint32_t a[4];
          Base::pack(a, o[v] + 8 * j, o[v] + 8 * j + 4);
          store_fragment(a, (to ^ 32 * j) + v * kPanelBytes);
        }
      }
      if (out_maps_->out_there && note.size == kChunk) {
        named_barrier_meet(kOutsThere, kGroupThreads, first_warp);
        if (stores) {
          fence_async_proxy();
#pragma unroll
          for (int v = 0; v < kGroups; ++v) {
            store_box(&out_maps_->out, smem_address(ring_.o[v]), note.first_row + 64 * v, static_cast<int>(note.begin),
                      note.head);
          }
          commit_stores();
        }
        continue;
      }
      __syncwarp();
#pragma unroll
      for (int v = 0; v < kGroups; ++v) store_tokens(note, ring_.o[v], v);
    }
    if (stores) wait_for_stores();
  }

  // The masked products of queries with keys, and what the state says of queries is multiplied with.
  __device__ void multiply_queries(const Turn& turn, float (&decays)[2], uint32_t (&made)[4][4]) {
    Stage& stage = ring_.stages[turn.stage];
    float products[32], scale[2];
    wgmma_fence();
    multiply_by_keys<kKeys>(products, smem_address(ring_.queries(turn)), smem_address(ring_.keys(turn)));
    wgmma_commit();
    const float *sums = stage.factors[1], *key_scale = stage.factors[kLastRow];
    const int first = 16 * this->warp_ + this->g_;
    const float of_row[2] = {sums[first], sums[first + 8]};
    mbarrier_wait(ring_.scaled(turn), turn.phase);
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scale[r] = ring_.scales[turn.stage][first + 8 * r];
      decays[r] = scale[r] * exp2_approx(of_row[r]);
    }
    // What products are multiplied with is made while they run, in blocks of 16 tokens.
    float factors[32];
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      if (block > this->warp_) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int n = 2 * block + half;
        const float2 of_column = *reinterpret_cast<const float2*>(&sums[8 * n + 2 * this->t_]);
        const float2 of_key = *reinterpret_cast<const float2*>(&key_scale[8 * n + 2 * this->t_]);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          factors[4 * n + 2 * r] = scale[r] * (of_key.x * exp2_approx(of_row[r] - of_column.x));
          factors[4 * n + 2 * r + 1] = scale[r] * (of_key.y * exp2_approx(of_row[r] - of_column.y));
        }
      }
    }
    wgmma_wait<0>(products);
#pragma unroll
    for (int i = 0; i < 16; ++i) made[i / 4][i % 4] = 0;
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      if (block > this->warp_) break;
      float pairs[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) pairs[i] = factors[8 * block + i] * products[8 * block + i];
      if (block == this->warp_) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {  // rows g and g + 8, columns 2 t and + 1, + 8 and + 9
          const int row = this->g_ + i / 2 % 2 * 8, column = i / 4 * 8 + 2 * this->t_ + i % 2;
          pairs[i] = column > row ? 0.f : pairs[i];
        }
      }
      Base::pack(made[block], pairs, pairs + 4);
    }
  }

  __device__ void store_tokens(const ChunkNote& note, const unsigned char* out, int panel) const {
    const LinearStep& p = this->p_;
    const int lane = threadIdx.x % 32, row = note.first_row + 64 * panel + lane % 8 * 8;
    if (row >= p.value_dim) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 16 * this->warp_ + 4 * i + lane / 8;
      if (token >= note.size) break;
      const auto values = load_vec<Vec<Bf16, 8>>(reinterpret_cast<const Bf16*>(out + panel_at(token, lane % 8)));
      store_vec(
          static_cast<Bf16*>(p.out) + (note.begin + token) * p.out_stride_request + note.head * p.out_stride_head + row,
          values);
    }
  }

  Shared& ring_;
  const ChunkCuts* cuts_;
  const RingMaps* out_maps_;  // for outputs
};

}  // namespace attnops::sm90
