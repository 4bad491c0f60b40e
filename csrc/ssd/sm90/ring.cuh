#pragma once
#include "device/sm90/cluster.cuh"
#include "device/sm90/linear_chunk.cuh"

// Prompts of state spaces in one launch: updates need no state, so all that a chunk's outputs wait for is one copy of
// the state at its begin. One warpgroup goes from state to state, two make the outputs of every other chunk, and one
// brings chunks and makes their gates.
namespace attnops::sm90 {

template <int kKeys_, Part kPart_>
struct SsdPlaces {
  static constexpr int kKeys = kKeys_, kGroups = 1, kPanels = kKeys / 64, kStages = 4, kOutputGroups = 2;
  static constexpr bool kDelta = false, kChannels = false, kMakes = true;
  static constexpr Part kPart = kPart_;
  using Note = std::conditional_t<kPart == Part::kWhole, ChunkNote, SegmentNote>;
  using Turn = RingTurn<kStages>;
  struct Stage {
    alignas(1024) unsigned char k[kPanels * kPanelBytes];
    unsigned char q[kPanels * kPanelBytes];
    unsigned char v[kPanelBytes];
    float sums[kChunk];    // of log-decays, to base 2
    float times[kChunk];   // dt, times what queries are multiplied with
    float to_end[kChunk];  // dt under the decay from the token to the chunk's end
    float decay;           // of the chunk
  };

  Stage stages[kStages];
  alignas(1024) unsigned char state[kOutputGroups][kPanels * kPanelBytes];  // [values, keys], at the chunk's begin
  unsigned char o[kOutputGroups][kPanelBytes];                              // [tokens, values]
  float gates[kStages][2][kChunk];                                          // of a warp that loads: sums and dt
  Note notes[kStages];
  alignas(8) uint64_t full_[kStages], empty_[kStages];

  __device__ uint32_t full(const Turn& turn) { return smem_address(&full_[turn.stage]); }
  __device__ uint32_t empty(const Turn& turn) { return smem_address(&empty_[turn.stage]); }
};

// kCtas: of a cluster. Their works share keys and queries, of which each brings its part to all of them.
template <int kKeys_, int kCtas, Part kPart_ = Part::kWhole>
class SsdRing : public ChunkConsumers<SsdPlaces<kKeys_, kPart_>> {
 public:
  using Base = ChunkConsumers<SsdPlaces<kKeys_, kPart_>>;
  using Base::kGroupThreads;
  using Base::kKeys;
  using Base::kPart;
  using typename Base::Bf16;
  using typename Base::Note;
  using typename Base::Shared;
  using typename Base::Stage;
  using typename Base::Turn;
  static constexpr int kStages = Shared::kStages, kOutputGroups = Shared::kOutputGroups;
  static constexpr bool kDelta = false, kOutputs = true;
  static constexpr int kClusterCtas = kCtas, kThreads = (kOutputGroups + 2) * kGroupThreads;

  __device__ SsdRing(const LinearPrefill& prefill, const RingMaps& maps, Shared& shared, const ChunkCuts& cuts)
      : Base(prefill, shared, &cuts), maps_(maps) {}

  // works: of requests, heads and row_blocks blocks of rows; a CTA takes every gridDim.x-th.
  __device__ void run(int works, int row_blocks) {
    if (threadIdx.x < kStages) {
      mbarrier_init(smem_address(&this->ring_.full_[threadIdx.x]), 33);  // a warp, and its bytes
      mbarrier_init(smem_address(&this->ring_.empty_[threadIdx.x]), kCtas * kMeeting);
      mbarrier_init_fence();
    }
    meet();
    const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kGroupThreads, 0);  // one of a warp
    if (group == 0) {
      registers_increase<152>();
      run_states();
    } else if (group <= kOutputGroups) {
      registers_increase<144>();
      run_outputs(group - 1);
    } else {
      registers_decrease<72>();
      run_loads(works, row_blocks);
    }
    if constexpr (kCtas > 1) meet();  // others may still arrive at barriers of this CTA
  }

 private:
  enum Barrier { kStateThere = 1, kStateFree = kStateThere + kOutputGroups };
  static constexpr int kMeeting = 2 * kGroupThreads;  // states, and one group of outputs

  __device__ static void meet() {
    if constexpr (kCtas > 1) {
      __syncwarp();
      cluster_arrive();
      cluster_wait();
    } else {
      __syncthreads();
    }
  }

  // This thread has read a stage: all CTAs that write to it are told. By each thread, as racecheck follows no other.
  __device__ void release(const Turn& turn) {
    const uint32_t empty = this->ring_.empty(turn);
    mbarrier_arrive(empty);
    if constexpr (kCtas > 1) {
      static_assert(kCtas == 2);
      mbarrier_arrive_remote_if(address_in(empty, 1 - cluster_rank()), true);
    }
  }

  // Values of a chunk as they are added to the state at its end.
  __device__ void take_values(const Stage& stage, uint32_t (&to)[4][4]) const {
    float u[32];
    this->each_value(stage, [&](int i, int tile, float low, float high) {
      const float2 scale = *reinterpret_cast<const float2*>(&stage.to_end[8 * tile + 2 * this->t_]);
      u[i] = scale.x * low, u[i + 1] = scale.y * high;
    });
    Base::pack_tokens(to, u);
  }

  // A chunk's values are made ready while the products of the one before run.
  __device__ void run_states() {
    Turn turn;
    uint32_t values[4][4];
    int copy = 0;
    const uint32_t zero = this->p_.batch_size < 0;  // what a product reads must not be made while another one runs
    mbarrier_wait(this->ring_.full(turn), turn.phase);
    take_values(this->ring_.stages[turn.stage], values);
    while (this->ring_.notes[turn.stage].size != 0) {
      const Stage& stage = this->ring_.stages[turn.stage];
      const Note& note = this->ring_.notes[turn.stage];
      if (note.first) this->begin_work(note);
      const int kept = note.kept, written = note.written;
      const float decay = stage.decay;
      uint32_t state[kKeys / 16][4];
#pragma unroll
      for (int i = 0; i < kKeys / 16; ++i) Base::pack(state[i], this->state_ + 8 * i, this->state_ + 8 * i + 4);
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) this->state_[i] *= decay;
      wgmma_fence();
      const uint32_t keys = smem_address(stage.k);
#pragma unroll
      for (int panel = 0; panel < kKeys / 64; ++panel) {
        float(&part)[32] = reinterpret_cast<float(&)[32]>(this->state_[32 * panel]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          wgmma_rows<Bf16, 1>(part, values[j], operand_descriptor(keys + panel * kPanelBytes) + j * kStepMnMajor, 1);
        }
      }
      wgmma_commit();
      named_barrier_sync(kStateFree + copy, kMeeting);
#pragma unroll
      for (int i = 0; i < kKeys / 16; ++i) this->put(state[i], this->ring_.state[copy] + i / 4 * kPanelBytes, i % 4);
      named_barrier_arrive(kStateThere + copy, kMeeting);  // the fence is theirs who read it
      Turn next = turn;
      next.next();
      uint32_t later[4][4];
      mbarrier_wait(this->ring_.full(next), next.phase);
      take_values(this->ring_.stages[next.stage], later);
      if (zero != 0) {  // never: so that they are made ahead of the wait
        float words[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) words[i] = __uint_as_float(later[i / 4][i % 4]);
        store_numbers(words, smem_address(this->ring_.o[0]));
      }
      __syncwarp();
      wgmma_wait<0>(this->state_);
#pragma unroll
      for (int i = 0; i < 16; ++i) values[i / 4][i % 4] = later[i / 4][i % 4] ^ zero;
      release(turn);
      if ((kept & written) >= 0) {
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
          const int slot = i == 0 ? kept : written;
          if (slot >= 0) this->save(slot);
        }
      }
      turn = next, copy = copy + 1 == kOutputGroups ? 0 : copy + 1;
    }
    for (int i = 0; i < kOutputGroups; ++i) named_barrier_sync(kStateFree + i, kMeeting);  // told last
  }

  // Every other chunk. A warp has 16 tokens.
  __device__ void run_outputs(int group) {
    const LinearStep& p = this->p_;
    named_barrier_arrive(kStateFree + group, kMeeting);
    Turn turn;
    for (int i = 0; i < group; ++i) turn.next();
    while (true) {
      Stage& stage = this->ring_.stages[turn.stage];
      mbarrier_wait(this->ring_.full(turn), turn.phase);
      const Note note = this->ring_.notes[turn.stage];
      if (note.size == 0) break;
      const uint32_t queries = smem_address(stage.q), values = smem_address(stage.v);
      const uint32_t state = smem_address(this->ring_.state[group]);
      float o[32], of_state[32], decays[2];
      uint32_t made[4][4];
      multiply_queries(stage, decays, made);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        wgmma_rows<Bf16, 1>(o, made[j], operand_descriptor(values) + j * kStepMnMajor, j > 0);
      }
      wgmma_commit();
      named_barrier_sync(kStateThere + group, kMeeting);
      fence_async_proxy();
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kKeys / 16; ++i) {
        const uint32_t panel = i / 4 * kPanelBytes;
        wgmma_n64<Bf16>(of_state, operand_descriptor(queries + panel) + i % 4 * kStepKMajor,
                        operand_descriptor(state + panel) + i % 4 * kStepKMajor, i > 0);
      }
      wgmma_commit();
      wgmma_wait<0>(o, of_state);
      named_barrier_arrive(kStateFree + group, kMeeting);
#pragma unroll
      for (int i = 0; i < 32; ++i) o[i] = fmaf(decays[i / 2 % 2], of_state[i], o[i]);
      if (p.skip != nullptr) add_values(stage.v, p.skip[note.head], o);
      release(turn);
      __syncwarp();  // the outputs before have been read
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t a[4];
        Base::pack(a, o + 8 * j, o + 8 * j + 4);
        this->put(a, this->ring_.o[group], j);
      }
      __syncwarp();
      if (p.z.data != nullptr) {
        store_gated(note, this->ring_.o[group]);
      } else {
        store_plain(note, this->ring_.o[group]);
      }
      for (int i = 0; i < kOutputGroups; ++i) turn.next();
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

  __device__ void store_gated(const Note& note, const unsigned char* out) const {
    const LinearStep& p = this->p_;
    const int lane = threadIdx.x % 32, row = note.first_row + lane % 8 * 8;
    if (row >= p.value_dim) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 16 * this->warp_ + 4 * i + lane / 8;
      if (token >= note.size) break;
      auto values = load_vec<Vec<Bf16, 8>>(reinterpret_cast<const Bf16*>(out + panel_at(token, lane % 8)));
      const Bf16* gates = static_cast<const Bf16*>(p.z.data) + (note.begin + token) * p.z.stride_request +
                          note.head * p.z.stride_head + row;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float z = static_cast<float>(gates[j]);
        values.data[j] = __float2bfloat16(static_cast<float>(values.data[j]) * z * sigmoid(z));
      }
      store_vec(
          static_cast<Bf16*>(p.out) + (note.begin + token) * p.out_stride_request + note.head * p.out_stride_head + row,
          values);
    }
  }

  // The same without gates, whose code lies between the stores.
  __device__ void store_plain(const Note& note, const unsigned char* out) const {
    const LinearStep& p = this->p_;
    const int lane = threadIdx.x % 32, row = note.first_row + lane % 8 * 8, first = 16 * this->warp_ + lane / 8;
    if (row >= p.value_dim) return;
    uint4 values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[i] = *reinterpret_cast<const uint4*>(out + panel_at(first + 4 * i, lane % 8));
    }
    Bf16* to =
        static_cast<Bf16*>(p.out) + (note.begin + first) * p.out_stride_request + note.head * p.out_stride_head + row;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + 4 * i < note.size) *reinterpret_cast<uint4*>(to + 4 * i * p.out_stride_request) = values[i];
    }
  }

  // The masked products of queries with keys, times dt, and what the state says of queries is multiplied with.
  __device__ void multiply_queries(const Stage& stage, float (&decays)[2], uint32_t (&made)[4][4]) const {
    float products[32];
    wgmma_fence();
    multiply_by_keys<kKeys>(products, smem_address(stage.q), smem_address(stage.k));
    wgmma_commit();
    const int first = 16 * this->warp_ + this->g_;
    const float of_row[2] = {stage.sums[first], stage.sums[first + 8]};
#pragma unroll
    for (int r = 0; r < 2; ++r) decays[r] = this->p_.scale * exp2_approx(of_row[r]);
    // What products are multiplied with is made while they run, in blocks of 16 tokens.
    float factors[32];
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      if (block > this->warp_) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int n = 2 * block + half;
        const float2 sums = *reinterpret_cast<const float2*>(&stage.sums[8 * n + 2 * this->t_]);
        const float2 times = *reinterpret_cast<const float2*>(&stage.times[8 * n + 2 * this->t_]);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          factors[4 * n + 2 * r] = times.x * exp2_approx(of_row[r] - sums.x);
          factors[4 * n + 2 * r + 1] = times.y * exp2_approx(of_row[r] - sums.y);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) made[i / 4][i % 4] = 0;
    wgmma_wait<0>(products);
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      if (block > this->warp_) break;
      float pairs[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) pairs[i] = products[8 * block + i] * factors[8 * block + i];
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

  __device__ auto walk_of(int works, int row_blocks) const {
    if constexpr (kPart == Part::kWhole) {
      return ChunkWalk<false, Base::kRows>(this->prefill_, works, row_blocks);
    } else {
      return SegmentWalk<false, Base::kRows, kKeys, false>(this->prefill_, *this->cuts_, works, row_blocks);
    }
  }

  // A warp has a stage. It walks past what the others bring.
  __device__ void run_loads(int works, int row_blocks) {
    static_assert(kStages == kGroupThreads / 32);
    auto walk = walk_of(works, row_blocks);
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) % kGroupThreads / 32, 0);
    Turn turn;
    for (; walk.advance(); turn.next()) {
      if (turn.stage != warp) continue;
      Note note;
      walk.describe(note);
      load(turn, note);
    }
    for (int i = 0; i < kOutputGroups; ++i, turn.next()) {  // each group of outputs is told of the end
      if (turn.stage != warp) continue;
      mbarrier_wait(this->ring_.empty(turn), turn.phase ^ 1);
      if (threadIdx.x % 32 == 0) {
        this->ring_.notes[turn.stage].size = 0;
        mbarrier_arrive(this->ring_.full(turn));
      }
      mbarrier_arrive(this->ring_.full(turn));
    }
    walk.clear_rest();
  }

  // By one warp. A whole chunk's rows come as boxes. Others by row: what lies behind them is another request's, and
  // must be zeros.
  __device__ void load(const Turn& turn, const Note& note) {
    const LinearStep& p = this->p_;
    Stage& stage = this->ring_.stages[turn.stage];
    constexpr int kPanels = kKeys / 64;
    const uint32_t full = this->ring_.full(turn), keys = smem_address(stage.k), queries = smem_address(stage.q);
    const uint32_t values = smem_address(stage.v);
    const int group = note.head / p.heads_per_group, lane = threadIdx.x % 32;
    const bool boxes = maps_.there && note.size == kChunk;
    // Gates are made before the stage is free.
    float *of_sums = this->ring_.gates[turn.stage][0], *of_times = this->ring_.gates[turn.stage][1];
    sum_gates<false>(p, load_gates<false>(p, note.begin, note.size, note.head), note.size, note.head, of_sums,
                     of_times);
    __syncwarp();
    const float2 sums = reinterpret_cast<const float2*>(of_sums)[lane];
    const float2 times = reinterpret_cast<const float2*>(of_times)[lane];
    const float of_all = of_sums[kChunk - 1], decay = exp2_approx(of_all);
    const float2 to_end = make_float2(times.x * exp2_approx(of_all - sums.x), times.y * exp2_approx(of_all - sums.y));
    mbarrier_wait(this->ring_.empty(turn), turn.phase ^ 1);
    if (lane == 0) {
      this->ring_.notes[turn.stage] = note;
      mbarrier_arrive_expect(full, boxes ? (2 * kPanels + 1) * kPanelBytes : 0);
      if (boxes) {
        if constexpr (kCtas > 1) {
          const int rank = cluster_rank();
#pragma unroll
          for (int i = 0; i < 2 * kPanels / kCtas; ++i) {
            const int panel = i * kCtas + rank, of = panel % kPanels;
            copy_box_to_ctas(keys + panel * kPanelBytes, panel < kPanels ? &maps_.k : &maps_.q, full, 64 * of,
                             static_cast<int>(note.begin), group, (1 << kCtas) - 1);
          }
        } else {
          copy_boxes<kPanels>(keys, maps_.k, full, 0, note, group);
          copy_boxes<kPanels>(queries, maps_.q, full, 0, note, group);
        }
        copy_boxes<1>(values, maps_.v, full, note.first_row, note, note.head);
      }
    }
    reinterpret_cast<float2*>(stage.sums)[lane] = sums;
    reinterpret_cast<float2*>(stage.times)[lane] = make_float2(p.scale * times.x, p.scale * times.y);
    reinterpret_cast<float2*>(stage.to_end)[lane] = to_end;
    if (lane == 0) stage.decay = decay;
    if (!boxes) {
#pragma unroll 1
      for (int i = 0; i < 2 * kPanels; ++i) {  // few addresses at once: registers are scarce here
        copy_rows<1, 32>(keys + i * kPanelBytes, i < kPanels ? p.k : p.q, group, note.begin, note.size,
                         i % kPanels * 64, p.key_dim);
      }
      const int columns = min_of(p.value_dim, note.first_row + Base::kRows);
      copy_rows<1, 32>(values, p.v, note.head, note.begin, note.size, note.first_row, columns);
      wait_for_copies();
      fence_async_proxy();
    }
    __syncwarp();  // the places of gates have been read
    mbarrier_arrive(full);
  }

  const RingMaps& maps_;
};

// Bytes of shared memory of the largest kernel for keys of kKeys elements.
template <int kKeys>
inline constexpr int kSsdSharedBytes = static_cast<int>(
    max_of(sizeof(SsdPlaces<kKeys, Part::kCut>), sizeof(RingShared<kKeys, false, false, 1, Part::kEnds>)));

template <class Ring>
__global__ void __launch_bounds__(Ring::kThreads, 1)
    ssd_ring_kernel(const __grid_constant__ LinearPrefill p, const __grid_constant__ RingMaps maps,
                    const __grid_constant__ ChunkCuts cuts, int works, int row_blocks) {
  extern __shared__ __align__(1024) unsigned char memory[];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  Ring(p, maps, *reinterpret_cast<typename Ring::Shared*>(memory), cuts).run(works, row_blocks);
}

// ctas: how many take the works in turns.
template <class Ring>
void launch_ssd_ring(const char* what, const LinearPrefill& p, const ChunkCuts& cuts, int64_t works, int64_t ctas,
                     cudaStream_t stream) {
  if (works > INT32_MAX - ctas) throw std::runtime_error(std::string(what) + ": more than 2^31 blocks of rows");
  constexpr int kBytes = static_cast<int>(sizeof(typename Ring::Shared)), kCtas = Ring::kClusterCtas;
  const LaunchShape shape{.blocks = static_cast<int>(max_of(min_of(works, ctas / kCtas * kCtas), int64_t{kCtas})),
                          .threads = Ring::kThreads,
                          .shared_bytes = kBytes,
                          .max_shared_bytes = kBytes,
                          .cluster = kCtas};
  launch_dependent<&ssd_ring_kernel<Ring>>(what, shape, stream, p, ring_maps_of(p), cuts, static_cast<int>(works),
                                           ceil_div(p.step.value_dim, Ring::kRows));
}

template <int kKeys>
void launch_ssd_chunks(const LinearPrefill& p, cudaStream_t stream) {
  constexpr const char* kWhat = "ssd_prefill";
  const int sms = device_sms(kWhat), most = choose_cut(p, kKeys, false, sms);
  if (most > 0) {
    using Segments = SsdRing<kKeys, 1, Part::kCut>;
    constexpr ChunkScratch kLayout{.panels = kKeys / 64, .delta = false, .channels = false};
    const ChunkCuts cuts = place_cuts(p, most, kKeys, kLayout);
    launch_chunk_local<kKeys, false, MeetGroup, false>(kWhat, p, stream);
    launch_chunk_cut<ChunkRing<kKeys, false, false, 1, Part::kEnds>>(kWhat, p, cuts, stream);
    launch_chunk_join<kKeys, false>(kWhat, p, cuts, stream);
    const int works = cut_works<Segments>(p, cuts);
    return launch_ssd_ring<Segments>(kWhat, p, cuts, works, works, stream);
  }
  const int row_blocks = ceil_div(p.step.value_dim, 64);
  const int64_t works = int64_t{p.step.batch_size} * p.step.num_heads * row_blocks;
  if (row_blocks % 2 == 0) {  // a head's blocks of rows come in pairs
    return launch_ssd_ring<SsdRing<kKeys, 2>>(kWhat, p, {}, works, sms, stream);
  }
  launch_ssd_ring<SsdRing<kKeys, 1>>(kWhat, p, {}, works, sms, stream);
}

}  // namespace attnops::sm90
