#pragma once
#include "device/sm90/linear_chunk_multiply.cuh"
#include "device/sm90/linear_chunk_ring.cuh"

// Prompts in one launch: a warpgroup makes a chunk while the ones of linear_chunk_consume.cuh take the chunk before.
// Nothing of a chunk leaves its SM. What it makes has the bits of linear_chunk_local.cuh. In the delta rule an inverse
// takes longer than a chunk's way from state to state, so that is for more heads than SMs.
namespace attnops::sm90 {

template <int kKeys_, bool kDelta_, int kGroups_>
struct WholeShared {
  static constexpr int kKeys = kKeys_, kGroups = kGroups_, kStages = 2, kRowStages = 3;
  static constexpr bool kDelta = kDelta_, kChannels = false, kMakes = true;
  // Outputs lie where queries were, updates of the delta rule where values were. State spaces add values to outputs.
  struct Rows {
    alignas(1024) unsigned char k[kKeys / 64 * kPanelBytes];
    unsigned char q[(kKeys / 64 > kGroups ? kKeys / 64 : kGroups) * kPanelBytes];
  };
  struct Stage {
    alignas(1024) unsigned char t[kDelta ? kPanelBytes : 1024];
    unsigned char p[kPanelBytes];  // by those who make outputs
    unsigned char v[kGroups * kPanelBytes];
    float factors[kFactorRows][kChunk];  // without those of queries
    float sums[kChunk], key_scale[kChunk];
  };
  // What an inverse is made in.
  struct Work {
    static constexpr int kStride = LocalProducts<1>::kStride, kHeadsAtOnce = 1;
    typename LocalProducts<1>::Lower l[1];
    float x[1][32][36];
  };
  struct None {};
  // Rows are asked for a chunk earlier than what is made of them.
  struct Turn {
    int stage = 0, rows = 0;
    uint32_t phase = 0, rows_phase = 0;

    __device__ void next() {
      if (++stage == kStages) stage = 0, phase ^= 1;
      if (++rows == kRowStages) rows = 0, rows_phase ^= 1;
    }
  };

  Rows rows_[kRowStages];
  Stage stages[kStages];
  alignas(1024) unsigned char state[kGroups][kKeys / 64 * kPanelBytes];  // [values, keys], at the chunk's begin
  alignas(1024) unsigned char u[kDelta ? 1 : kGroups][kDelta ? 1024 : kPanelBytes];  // [values, tokens]
  alignas(16) std::conditional_t<kDelta, Work, None> work;
  float sums[2][kChunk], coefficient[2][kChunk];  // of a chunk and the next one
  ChunkNote notes[kStages];
  alignas(8) uint64_t full_[kStages], empty_[kStages], rows_full_[kRowStages];

  __device__ uint32_t full(const Turn& turn) { return smem_address(&full_[turn.stage]); }
  __device__ uint32_t empty(const Turn& turn) { return smem_address(&empty_[turn.stage]); }
  __device__ uint32_t rows_full(int rows) { return smem_address(&rows_full_[rows]); }
  __device__ void wait_for_rows(const Turn& turn) { mbarrier_wait(rows_full(turn.rows), turn.rows_phase); }
  __device__ unsigned char* keys(const Turn& turn) { return rows_[turn.rows].k; }
  __device__ unsigned char* last_keys(const Turn& turn) { return keys(turn); }
  __device__ unsigned char* queries(const Turn& turn) { return rows_[turn.rows].q; }
  __device__ unsigned char* updates(const Turn& turn, int group) { return stages[turn.stage].v + group * kPanelBytes; }
  __device__ unsigned char* out(const Turn& turn, int group) { return queries(turn) + group * kPanelBytes; }
};

template <int kKeys_, bool kDelta_, int kGroups_>
class ChunkWhole : public ChunkConsumers<WholeShared<kKeys_, kDelta_, kGroups_>> {
 public:
  using Base = ChunkConsumers<WholeShared<kKeys_, kDelta_, kGroups_>>;
  using Base::kDelta;
  using Base::kGroups;
  using Base::kGroupThreads;
  using Base::kKeys;
  using Base::kMeeting;
  using typename Base::Shared;
  using typename Base::Stage;
  using typename Base::Turn;
  static constexpr int kStages = Shared::kStages;

  __device__ ChunkWhole(const LinearPrefill& prefill, const RingMaps& maps, Shared& shared, bool /*marked*/)
      : Base(prefill, shared), maps_(maps) {}

  __device__ static void meet() { named_barrier_sync(Base::kMakers, kGroupThreads); }  // of those that make

  __device__ void run(int works, int row_blocks) {
    auto& s = this->ring_;
    if (threadIdx.x < kStages) {
      mbarrier_init(smem_address(&s.full_[threadIdx.x]), 2 * kGroupThreads + 1);
      mbarrier_init(smem_address(&s.empty_[threadIdx.x]), kMeeting);
    }
    if (threadIdx.x < Shared::kRowStages) mbarrier_init(s.rows_full(threadIdx.x), kGroupThreads + 1);
    if (threadIdx.x < Shared::kRowStages) mbarrier_init_fence();
    __syncthreads();
    const int group = threadIdx.x / kGroupThreads;
    if (group < kGroups) {
      registers_increase<kStateRegisters>();
      this->run_states(group);
    } else if (group == kGroups) {
      registers_decrease<kOutRegisters>();
      this->run_outputs();
    } else {
      registers_decrease<kMakeRegisters>();
      run_makes(works, row_blocks);
    }
  }

 private:
  // Of 128 a thread, or of 168 where the CTA has 384 threads.
  static constexpr int kStateRegisters = kGroups == 1 ? 216 : 160;
  static constexpr int kOutRegisters = kGroups == 1 ? 144 : kDelta ? 96 : 104;
  static constexpr int kMakeRegisters = kGroups == 1 ? 144 : kDelta ? 96 : 88;
  static_assert(kGroups * kStateRegisters + kOutRegisters + kMakeRegisters <= (kGroups == 1 ? 504 : 512));

  __device__ void run_makes(int works, int row_blocks) {
    auto& s = this->ring_;
    const int thread = threadIdx.x % kGroupThreads, warp = thread / 32;
    ChunkWalk<kDelta, Base::kRows> walk(this->prefill_, works, row_blocks);
    ChunkNote note, next;
    Turn turn;
    int64_t made = -1;
    int rows = 0;
    for (;; ++made) {
      if (made >= kStages) mbarrier_wait(s.empty(turn), turn.phase ^ 1);
      const bool more = walk.next(next);
      GateWords gates{};
      if (more) {
        load_rows(rows, next);
        if (++rows == Shared::kRowStages) rows = 0;
        if (warp == 0) gates = load(next);
      }
      if (made < 0) {
        if (!more) break;
        if (warp == 0) sum(next, gates, 0);
        note = next;
        continue;
      }
      load_values(turn, note);
      make(turn, more, next, gates);
      fence_async_proxy();
      mbarrier_arrive(s.full(turn));
      turn.next();
      note = next;
      if (!more) break;
    }
    made = made < 0 ? 0 : made + 1;
    if (made >= kStages) mbarrier_wait(s.empty(turn), turn.phase ^ 1);
    if (thread == 0) {
      s.notes[turn.stage].size = 0;
      mbarrier_arrive(s.full(turn));
    }
    mbarrier_arrive(s.full(turn));
    mbarrier_arrive(s.full(turn));
    walk.clear_rest();
    wait_for_copies();
  }

  // What the consumers read of a chunk, and the sums of the next one's gates.
  __device__ void make(const Turn& turn, bool more, const ChunkNote& next, const GateWords& gates) {
    auto& s = this->ring_;
    Stage& stage = s.stages[turn.stage];
    const int thread = threadIdx.x % kGroupThreads, warp = thread / 32;
    const TokenScales scales{s.sums[turn.stage], s.coefficient[turn.stage], stage.key_scale, nullptr};
    const auto put_token = [&](int token) {
      put_factors<false, false>(scales, token, &stage.factors[0][0]);
      stage.sums[token] = scales.sums[token];
    };
    if constexpr (kDelta) {
      s.wait_for_rows(turn);
      fence_async_proxy();  // rows may arrive by ordinary writes
      {
        float products[32];
        const uint32_t keys = smem_address(s.keys(turn));
        wgmma_fence();
        multiply_by_keys<kKeys>(products, keys, keys);
        wgmma_commit();
        wgmma_wait<0>(products);
        put_key_scales<true>(this->p_, products, stage.key_scale);
        meet();
        put_lower(products, scales);
      }
      if (more && warp == 0) sum(next, gates, turn.stage ^ 1);  // it has the fewest products
      meet();
      if (thread < kChunk) put_token(thread);
      invert<ChunkWhole>(s.work, 1);
      store_inverse(s.work.l[0], stage.t);
    } else if (warp == 0) {
      __syncwarp();
      stage.key_scale[thread] = stage.key_scale[thread + 32] = 1.f;
      put_token(thread);
      put_token(thread + 32);
      if (more) sum(next, gates, turn.stage ^ 1);
    }
  }

  __device__ void put_lower(const float (&products)[32], const TokenScales& scales) {
    const int first = 16 * (threadIdx.x % kGroupThreads / 32) + threadIdx.x % 32 / 4;
    const float of_row[2] = {scales.key[first] * scales.coefficient[first],
                             scales.key[first + 8] * scales.coefficient[first + 8]};
    each_pair_of_tokens(scales.sums, scales.key, [&](int n, int r, int row, int column, float2 decay) {
      put_key_pair(this->ring_.work.l[0], products + 4 * n + 2 * r, row, column, decay, of_row[r]);
    });
  }

  __device__ GateWords load(const ChunkNote& note) const {
    return load_gates<kDelta>(this->p_, note.begin, note.size, note.head);
  }
  __device__ void sum(const ChunkNote& note, const GateWords& gates, int to) {
    sum_gates<kDelta>(this->p_, gates, note.size, note.head, this->ring_.sums[to], this->ring_.coefficient[to]);
  }

  // A whole chunk's rows come as boxes. Others by row: what lies behind them is another request's, and must be zeros.
  __device__ bool boxes(const ChunkNote& note) const { return maps_.there && note.size == kChunk; }

  __device__ void load_rows(int place, const ChunkNote& note) {
    const LinearStep& p = this->p_;
    auto& rows = this->ring_.rows_[place];
    const uint32_t full = this->ring_.rows_full(place), keys = smem_address(rows.k), queries = smem_address(rows.q);
    const int group = note.head / p.heads_per_group;
    if (threadIdx.x % kGroupThreads == 0) {
      mbarrier_arrive_expect(full, boxes(note) ? 2 * (kKeys / 64) * kPanelBytes : 0);
      if (boxes(note)) {
        copy_boxes<kKeys / 64>(keys, maps_.k, full, 0, note, group);
        copy_boxes<kKeys / 64>(queries, maps_.q, full, 0, note, group);
      }
    }
    if (boxes(note)) return mbarrier_arrive(full);
    copy_rows<kKeys / 64, kGroupThreads>(keys, p.k, group, note.begin, note.size, 0, p.key_dim);
    copy_rows<kKeys / 64, kGroupThreads>(queries, p.q, group, note.begin, note.size, 0, p.key_dim);
    arrive_after_copies(full);
  }

  __device__ void load_values(const Turn& turn, const ChunkNote& note) {
    const LinearStep& p = this->p_;
    const uint32_t full = this->ring_.full(turn), values = smem_address(this->ring_.stages[turn.stage].v);
    if (threadIdx.x % kGroupThreads == 0) {
      this->ring_.notes[turn.stage] = note;
      mbarrier_arrive_expect(full, boxes(note) ? kGroups * kPanelBytes : 0);
      if (boxes(note)) copy_boxes<kGroups>(values, maps_.v, full, note.first_row, note, note.head);
    }
    if (boxes(note)) return mbarrier_arrive(full);
    const int columns = min_of(p.value_dim, note.first_row + Base::kRows);
    copy_rows<kGroups, kGroupThreads>(values, p.v, note.head, note.begin, note.size, note.first_row, columns);
    arrive_after_copies(full);
  }

  const RingMaps& maps_;
};

}  // namespace attnops::sm90
