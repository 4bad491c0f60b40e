#pragma once
#include "device/common/semaphore.cuh"
#include "device/sm90/linear_chunk_consume.cuh"
#include "device/sm90/proxy.cuh"

// Chunks that lie in scratch, or are made there while this runs: warps load them into a ring by turns, the others are
// those of linear_chunk_consume.cuh. CTAs stay: their loads are ahead in the next work while the last one's states are
// stored.
namespace attnops::sm90 {

template <int kStages>
struct RingTurn {
  int stage = 0;
  uint32_t phase = 0;

  __device__ void next() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// Of the delta rule. State spaces take what follows for the ends of segments alone; their other kernels are in
// ssd/sm90/ring.cuh.
template <int kKeys_, bool kDelta_, bool kChannels_, int kGroups_, Part kPart_ = Part::kWhole, bool kMakes_ = false>
struct RingShared {
  static_assert(kDelta_);
  static constexpr int kKeys = kKeys_, kGroups = kGroups_;
  static constexpr bool kDelta = true, kChannels = kChannels_, kMakes = false;
  static constexpr Part kPart = kPart_;
  using Note = std::conditional_t<kPart == Part::kWhole, ChunkNote, SegmentNote>;
  using Stage = typename PassShared<kKeys, true, kChannels, 4 * kGroups>::Stage;
  static constexpr int kCopyBytes = kGroups * (kKeys / 64 + 1) * kPanelBytes;
  static constexpr int kStages = 3 * sizeof(Stage) + kCopyBytes <= 226 << 10 ? 3 : 2;

  using Turn = RingTurn<kStages>;

  Stage stages[kStages];
  alignas(1024) unsigned char state[kGroups][kKeys / 64 * kPanelBytes];  // [values, keys], at the chunk's begin
  unsigned char o[kGroups][kPanelBytes];                                 // [tokens, values]
  Note notes[kStages];
  alignas(8) uint64_t full_[kStages], empty_[kStages];

  __device__ uint32_t full(const Turn& turn) { return smem_address(&full_[turn.stage]); }
  __device__ uint32_t empty(const Turn& turn) { return smem_address(&empty_[turn.stage]); }
  __device__ unsigned char* keys(const Turn& turn) { return stages[turn.stage].k; }
  __device__ unsigned char* last_keys(const Turn& turn) {
    return kChannels ? stages[turn.stage].k_end : stages[turn.stage].k;
  }
  __device__ unsigned char* queries(const Turn& turn) { return stages[turn.stage].q; }
  __device__ unsigned char* updates(const Turn& turn, int group) { return stages[turn.stage].v + group * kPanelBytes; }
};

// The masked products of queries are made where outputs are, and have no place. Updates lie where values were, so that
// outputs have a place of their own: a stage is free as soon as their products are over, not when they are stored.
template <int kKeys_, int kGroups_>
struct RingShared<kKeys_, true, false, kGroups_, Part::kWhole, true> {
  static constexpr int kKeys = kKeys_, kGroups = kGroups_, kPanels = kKeys / 64;
  static constexpr bool kDelta = true, kChannels = false, kMakes = true;
  static constexpr Part kPart = Part::kWhole;
  using Note = ChunkNote;
  struct Stage {
    alignas(1024) unsigned char k[kPanels * kPanelBytes];
    unsigned char q[kPanels * kPanelBytes];
    unsigned char t[kPanelBytes];
    unsigned char v[kGroups * kPanelBytes];
    float factors[kFactorRows][kChunk];
  };
  static constexpr int kMost = 226 << 10, kCopyBytes = kGroups * (kPanels + 1) * kPanelBytes;
  static constexpr int kStages = 4 * sizeof(Stage) + kCopyBytes <= kMost   ? 4
                                 : 3 * sizeof(Stage) + kCopyBytes <= kMost ? 3
                                                                           : 2;

  using Turn = RingTurn<kStages>;

  Stage stages[kStages];
  alignas(1024) unsigned char state[kGroups][kPanels * kPanelBytes];
  unsigned char o[kGroups][kPanelBytes];
  float scales[kStages][kChunk];  // of queries, whose norms a warp makes that loads nothing
  Note notes[kStages];
  alignas(8) uint64_t full_[kStages], empty_[kStages], scaled_[kStages];

  __device__ uint32_t full(const Turn& turn) { return smem_address(&full_[turn.stage]); }
  __device__ uint32_t empty(const Turn& turn) { return smem_address(&empty_[turn.stage]); }
  __device__ uint32_t scaled(const Turn& turn) { return smem_address(&scaled_[turn.stage]); }
  __device__ unsigned char* keys(const Turn& turn) { return stages[turn.stage].k; }
  __device__ unsigned char* last_keys(const Turn& turn) { return stages[turn.stage].k; }
  __device__ unsigned char* queries(const Turn& turn) { return stages[turn.stage].q; }
  __device__ unsigned char* updates(const Turn& turn, int group) { return stages[turn.stage].v + group * kPanelBytes; }
};

// Without outputs: two CTAs an SM. No queries, and no copies of states.
template <int kKeys_, bool kDelta_, bool kChannels_>
struct RingShared<kKeys_, kDelta_, kChannels_, 1, Part::kEnds> {
  static constexpr int kKeys = kKeys_, kGroups = 1;
  static constexpr bool kDelta = kDelta_, kChannels = kChannels_, kMakes = false;
  static constexpr Part kPart = Part::kEnds;
  using Note = SegmentNote;
  struct Stage {
    alignas(1024) unsigned char k[kKeys / 64 * kPanelBytes];
    unsigned char k_end[kChannels ? kKeys / 64 * kPanelBytes : 1024];
    unsigned char t[kDelta ? kPanelBytes : 1024];
    unsigned char v[kPanelBytes];
    float factors[kFactorRows][kChunk];
  };
  static constexpr int kStages = 3 * sizeof(Stage) + 1024 <= 112 << 10 ? 3 : 2;

  using Turn = RingTurn<kStages>;

  Stage stages[kStages];
  Note notes[kStages];
  alignas(8) uint64_t full_[kStages], empty_[kStages];

  __device__ uint32_t full(const Turn& turn) { return smem_address(&full_[turn.stage]); }
  __device__ uint32_t empty(const Turn& turn) { return smem_address(&empty_[turn.stage]); }
  __device__ unsigned char* keys(const Turn& turn) { return stages[turn.stage].k; }
  __device__ unsigned char* last_keys(const Turn& turn) {
    return kChannels ? stages[turn.stage].k_end : stages[turn.stage].k;
  }
};

// kGroups: of warpgroups that go from state to state, 64 rows of values each.
template <int kKeys_, bool kDelta_, bool kChannels_, int kGroups_, Part kPart_ = Part::kWhole, bool kMakes_ = false>
class ChunkRing : public ChunkConsumers<RingShared<kKeys_, kDelta_, kChannels_, kGroups_, kPart_, kMakes_>> {
 public:
  using Base = ChunkConsumers<RingShared<kKeys_, kDelta_, kChannels_, kGroups_, kPart_, kMakes_>>;
  using Base::kChannels;
  using Base::kDelta;
  using Base::kGroups;
  using Base::kGroupThreads;
  using Base::kKeys;
  using Base::kMakes;
  using Base::kOutputs;
  using Base::kPart;
  using typename Base::Note;
  using typename Base::Shared;
  using typename Base::Stage;
  using typename Base::Turn;
  static constexpr int kStages = Shared::kStages;
  // Warps that load, each with a chunk of its own. A stage is always the same warp's: one that runs ahead of another
  // would take the stage's last phase but one for the last.
  static constexpr int kLoaders = kStages == 4 && kMakes ? 2 : kStages, kScaler = 3;
  static_assert(kStages % kLoaders == 0 && kLoaders <= (kMakes ? kScaler : 4));

  // marked: whether chunks are made while this runs.
  __device__ ChunkRing(const LinearPrefill& prefill, const RingMaps& maps, Shared& shared, bool marked)
      : Base(prefill, shared, nullptr, &maps), maps_(maps), marked_(marked) {}
  __device__ ChunkRing(const LinearPrefill& prefill, const RingMaps& maps, Shared& shared, const ChunkCuts& cuts)
      : Base(prefill, shared, &cuts, &maps), maps_(maps), marked_(false) {}

  // works: of requests, heads and row_blocks blocks of rows; a CTA takes every gridDim.x-th. Threads beyond kThreads
  // have nothing to do.
  __device__ void run(int works, int row_blocks) {
    if (threadIdx.x < kStages) {
      mbarrier_init(smem_address(&this->ring_.full_[threadIdx.x]), 33);  // a warp, and its bytes
      mbarrier_init(smem_address(&this->ring_.empty_[threadIdx.x]), Base::kMeeting);
      if constexpr (kMakes) mbarrier_init(smem_address(&this->ring_.scaled_[threadIdx.x]), 32);
      mbarrier_init_fence();
    }
    __syncthreads();
    const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kGroupThreads, 0);  // one of a warp
    if constexpr (!kOutputs) {
      if (group == 0) {
        registers_increase<192>();
        this->run_states(0);
      } else {
        registers_decrease<64>();
        run_loads(works, row_blocks);
      }
    } else if (group < kGroups) {
      registers_increase<kGroups == 1 ? 216 : 168>();
      this->run_states(group);
    } else if (group == kGroups) {
      if constexpr (kGroups > 1 && !kMakes) registers_decrease<120>();
      this->run_outputs();
    } else if (group == kGroups + 1) {
      registers_decrease<kGroups == 1 ? 120 : kMakes ? 48 : 56>();
      run_loads(works, row_blocks);
    } else {
      registers_decrease<24>();
    }
  }

 private:
  __device__ auto walk_of(int works, int row_blocks) const {
    if constexpr (kPart == Part::kWhole) {
      return ChunkWalk<kDelta, Base::kRows>(this->prefill_, works, row_blocks);
    } else {
      return SegmentWalk<kDelta, Base::kRows, kKeys, !kOutputs>(this->prefill_, *this->cuts_, works, row_blocks);
    }
  }

  // A warp takes every kLoaders-th chunk, and walks past the others. All walk, since they clear together what no
  // request has.
  __device__ void run_loads(int works, int row_blocks) {
    auto walk = walk_of(works, row_blocks);
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) % kGroupThreads / 32, 0);  // one of a warp
    Turn turn;
    int taken = 0;  // by which warp
    if (kMakes && warp == kScaler) {
      if constexpr (kMakes) {
        for (; walk.advance(); turn.next()) scale_queries(turn);
      }
    } else {
      int64_t made = 0;  // chunks of the work that have no mark to wait for
      int work = -1;
      for (bool marks = marked_; walk.advance(); turn.next(), taken = taken + 1 == kLoaders ? 0 : taken + 1) {
        if (taken != warp) continue;
        if constexpr (kPart == Part::kWhole) {
          if (work != walk.work()) work = walk.work(), made = 0;
          if (marks && walk.chunk() >= made) {
            Note note;
            walk.describe(note);
            const int more = wait_for_marks(walk.place(), note.head, walk.left() + 1);
            marks = more != 0;
            made = walk.chunk() + more;
          }
        }
        Note note;
        walk.describe(note);
        load(turn, note, walk.place());
      }
      if (taken == warp) {
        mbarrier_wait(this->ring_.empty(turn), turn.phase ^ 1);
        if (threadIdx.x % 32 == 0) {
          this->ring_.notes[turn.stage].size = 0;
          mbarrier_arrive(this->ring_.full(turn));
        }
        mbarrier_arrive(this->ring_.full(turn));
      }
    }
    if constexpr (kOutputs) walk.clear_rest();
    wait_for_copies();
    if (marked_) wait_for_earlier_kernels();  // so that what comes behind this kernel comes behind those, too
  }

  // What a chunk's queries are multiplied with, by one warp.
  __device__ void scale_queries(const Turn& turn) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t queries = smem_address(this->ring_.queries(turn));
    mbarrier_wait(this->ring_.full(turn), turn.phase);
#pragma unroll 1
    for (int rows = 0; rows < kChunk; rows += 16) {
      float squares[2][4];
      square_rows<kKeys>(squares, queries, rows);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (2 * t + i != g) continue;
          this->ring_.scales[turn.stage][rows + g + 8 * r] =
              query_scale_of(this->p_, this->p_.normalize, squares[r][2 * r + i]);
        }
      }
    }
    mbarrier_arrive(this->ring_.scaled(turn));
  }

  // How many of a head's next chunks have been made, up to 32 of `count`, as soon as the first has: by one warp, a mark
  // a lane. Bounds that fall name chunks that nobody makes. So after some time it waits for the kernel that makes all,
  // and says 0: no mark is to be waited for.
  __device__ int wait_for_marks(int64_t place, int head, int64_t count) const {
    constexpr ChunkScratch kLayout{.panels = kKeys / 64, .delta = kDelta, .channels = kChannels};
    constexpr int kPatience = 1 << 12;  // reads of the L2, some 3 ms
    const int64_t chunk = (place + threadIdx.x % 32) * this->p_.num_heads + head;
    const auto* mark = reinterpret_cast<const int32_t*>(static_cast<const unsigned char*>(this->prefill_.scratch) +
                                                        chunk * kLayout.bytes() + kLayout.mark_at());
    const bool own = threadIdx.x % 32 < count;
    for (int turn = 0; turn < kPatience; ++turn) {
      const uint32_t there = __ballot_sync(0xffffffffu, own && load_acquire(mark) != 0);
      if ((there & 1u) == 0) continue;
      fence_async_proxy_everywhere();
      return __ffs(~there) > 0 ? __ffs(~there) - 1 : 32;
    }
    wait_for_earlier_kernels();
    return 0;
  }

  // By one warp, as soon as the stage is free. A whole chunk's rows come as boxes. Others by row: what lies behind them
  // is another request's, and must be zeros.
  __device__ void load(const Turn& turn, const Note& note, int64_t place) {
    const LinearStep& p = this->p_;
    Stage& stage = this->ring_.stages[turn.stage];
    const uint32_t full = this->ring_.full(turn), keys = smem_address(stage.k), values = smem_address(stage.v);
    const int group = note.head / p.heads_per_group;
    constexpr ChunkScratch kLayout{.panels = kKeys / 64, .delta = kDelta, .channels = kChannels};
    constexpr int kPanels = kKeys / 64, kProducts = (kDelta + (kOutputs && !kMakes)) * kPanelBytes;
    constexpr int kFactors = kFactorRows * kChunk * 4, kCopies = kOutputs ? 3 : 2;
    constexpr int kKeyBytes = kChannels ? kCopies * kPanels * kPanelBytes : 0;
    constexpr int kBoxBytes = ((kChannels ? 0 : (kCopies - 1) * kPanels) + kGroups) * kPanelBytes;
    bool map = false;
    if constexpr (!kOutputs) map = note.map;
    const bool boxes = maps_.there && note.size == kChunk;
    const unsigned char* scratch =
        static_cast<const unsigned char*>(this->prefill_.scratch) + (place * p.num_heads + note.head) * kLayout.bytes();
    mbarrier_wait(this->ring_.empty(turn), turn.phase ^ 1);
    if (threadIdx.x % 32 == 0) {
      this->ring_.notes[turn.stage] = note;
      this->ring_.notes[turn.stage].boxes = boxes && !map;
      const int box_bytes = boxes ? kBoxBytes - (map ? kGroups * kPanelBytes : 0) : 0;
      mbarrier_arrive_expect(full, kProducts + kFactors + kKeyBytes + box_bytes);
      if constexpr (kChannels && kOutputs) copy_bytes(keys, scratch + kLayout.keys_at(), kKeyBytes, full);
      if constexpr (kChannels && !kOutputs) {
        copy_bytes(keys, scratch + kLayout.keys_at(), kKeyBytes / 2, full);
        copy_bytes(smem_address(stage.k_end), scratch + kLayout.keys_at() + kKeyBytes, kKeyBytes / 2, full);
      }
      if (boxes) {
        if constexpr (!kChannels) copy_boxes<kPanels>(keys, maps_.k, full, 0, note, group);
        if (!map) copy_boxes<kGroups>(values, maps_.v, full, note.first_row, note, note.head);
        if constexpr (!kChannels && kOutputs) {
          copy_boxes<kPanels>(smem_address(stage.q), maps_.q, full, 0, note, group);
        }
      }
      if constexpr (kDelta) copy_bytes(smem_address(stage.t), scratch, kProducts, full);
      copy_bytes(smem_address(stage.factors), scratch + kLayout.factors_at(), kFactors, full);
    }
    if (boxes && !map) return mbarrier_arrive(full);
    if constexpr (!kChannels) {
      if (!boxes) {
        rows(keys, p.k, group, note, kPanels, 0, note.size, p.key_dim);
        if constexpr (kOutputs) rows(smem_address(stage.q), p.q, group, note, kPanels, 0, note.size, p.key_dim);
      }
    }
    const int columns = min_of(p.value_dim, note.first_row + Base::kRows);
    rows(values, p.v, note.head, note, kGroups, note.first_row, map ? 0 : note.size, columns);
    arrive_after_copies(full);
  }

  // One panel after another: few addresses at once, as registers are scarce here.
  __device__ void rows(uint32_t to, const StepRows& from, int plane, const Note& note, int panels, int first, int count,
                       int columns) const {
#pragma unroll 1
    for (int i = 0; i < panels; ++i) {
      copy_rows<1, 32>(to + i * kPanelBytes, from, plane, note.begin, count, first + 64 * i, columns);
    }
  }

  const RingMaps& maps_;
  bool marked_;
};

template <class Ring>
__global__ void __launch_bounds__(Ring::kThreads, 1)
    chunk_ring_kernel(const __grid_constant__ LinearPrefill p, const __grid_constant__ RingMaps maps, int works,
                      int row_blocks, bool marked) {
  extern __shared__ __align__(1024) unsigned char memory[];
  if (!marked) wait_for_earlier_kernels();  // else the kernel ahead has, before it let this one start
  let_next_kernel_start();
  Ring(p, maps, *reinterpret_cast<typename Ring::Shared*>(memory), marked).run(works, row_blocks);
}

// Whether a request has more chunks than `most`. Asked by all threads of a CTA.
__device__ inline bool has_chunks(const LinearPrefill& p, int64_t most) {
  bool within = true;
  for (int64_t i = threadIdx.x; i < p.step.batch_size; i += blockDim.x) {
    within = within && RequestChunks(p, i).count() <= most;
  }
  return !__syncthreads_and(within);
}

// Works of two groups of states, or twice as many of one: with one a chunk takes less time, with two an SM takes more
// of them. So one long request is taken by the first, which only the device knows of.
template <class Wide, class Narrow>
__global__ void __launch_bounds__(Wide::kThreads, 1)
    chunk_rings_kernel(const __grid_constant__ LinearPrefill p, const __grid_constant__ RingMaps maps, int works,
                       int row_blocks, int narrow_works, int narrow_row_blocks, int64_t most) {
  extern __shared__ __align__(1024) unsigned char memory[];
  static_assert(Narrow::kThreads <= Wide::kThreads);
  const bool narrow = has_chunks(p, most);  // the kernel ahead does not write what this reads
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (narrow) {
    Narrow(p, maps, *reinterpret_cast<typename Narrow::Shared*>(memory), false).run(narrow_works, narrow_row_blocks);
  } else {
    Wide(p, maps, *reinterpret_cast<typename Wide::Shared*>(memory), false).run(works, row_blocks);
  }
}

template <class Ring>
__global__ void __launch_bounds__(Ring::kThreads, Ring::kOutputs ? 1 : 2)
    chunk_cut_kernel(const __grid_constant__ LinearPrefill p, const __grid_constant__ RingMaps maps,
                     const __grid_constant__ ChunkCuts cuts, int works, int row_blocks) {
  extern __shared__ __align__(1024) unsigned char memory[];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  Ring(p, maps, *reinterpret_cast<typename Ring::Shared*>(memory), cuts).run(works, row_blocks);
}

template <class Ring>
void launch_chunk_ring(const char* what, const LinearPrefill& p, int sms, bool marked, cudaStream_t stream) {
  const int row_blocks = ceil_div(p.step.value_dim, Ring::kRows);
  const int64_t works = int64_t{p.step.batch_size} * p.step.num_heads * row_blocks;
  if (works > INT32_MAX - sms) throw std::runtime_error(std::string(what) + ": more than 2^31 blocks of rows");
  constexpr int kBytes = static_cast<int>(sizeof(typename Ring::Shared));
  const LaunchShape shape{.blocks = static_cast<int>(max_of(min_of(works, int64_t{sms}), int64_t{1})),
                          .threads = Ring::kThreads,
                          .shared_bytes = kBytes,
                          .max_shared_bytes = kBytes};
  launch_dependent<&chunk_ring_kernel<Ring>>(what, shape, stream, p, ring_maps_of(p), static_cast<int>(works),
                                             row_blocks, marked);
}

// A wide pass takes a request of this many eighths of what an SM takes of all chunks, at most.
inline constexpr int kLongChainEighths = 12;

template <class Wide, class Narrow>
void launch_chunk_rings(const char* what, const LinearPrefill& p, int sms, cudaStream_t stream) {
  const int row_blocks = ceil_div(p.step.value_dim, Wide::kRows), narrow = ceil_div(p.step.value_dim, Narrow::kRows);
  const int64_t heads = int64_t{p.step.batch_size} * p.step.num_heads;
  if (heads * narrow > INT32_MAX - sms) throw std::runtime_error(std::string(what) + ": more than 2^31 blocks of rows");
  constexpr int kBytes = static_cast<int>(max_of(sizeof(typename Wide::Shared), sizeof(typename Narrow::Shared)));
  const LaunchShape shape{.blocks = static_cast<int>(max_of(min_of(heads * narrow, int64_t{sms}), int64_t{1})),
                          .threads = Wide::kThreads,
                          .shared_bytes = kBytes,
                          .max_shared_bytes = kBytes};
  const int64_t chunks = (p.num_tokens / kChunk + p.step.batch_size / 2) * p.step.num_heads * row_blocks;
  launch_dependent<&chunk_rings_kernel<Wide, Narrow>>(
      what, shape, stream, p, ring_maps_of(p), static_cast<int>(heads * row_blocks), row_blocks,
      static_cast<int>(heads * narrow), narrow, chunks * kLongChainEighths / 8 / sms);
}

// Works of a pass over segments: one a CTA, since some places have no segment.
template <class Ring>
int cut_works(const LinearPrefill& p, const ChunkCuts& cuts) {
  const int blocks = ceil_div(p.step.value_dim, Ring::kRows) + (Ring::kDelta && !Ring::kOutputs ? Ring::kKeys / 64 : 0);
  return static_cast<int>(segment_places(p.num_tokens, p.step.batch_size, cuts.most)) * p.step.num_heads * blocks;
}

template <class Ring>
void launch_chunk_cut(const char* what, const LinearPrefill& p, const ChunkCuts& cuts, cudaStream_t stream) {
  const int works = cut_works<Ring>(p, cuts);
  constexpr int kBytes = static_cast<int>(sizeof(typename Ring::Shared));
  const LaunchShape shape{
      .blocks = works, .threads = Ring::kThreads, .shared_bytes = kBytes, .max_shared_bytes = kBytes};
  launch_dependent<&chunk_cut_kernel<Ring>>(what, shape, stream, p, ring_maps_of(p), cuts, works,
                                            ceil_div(p.step.value_dim, Ring::kRows));
}

}  // namespace attnops::sm90
