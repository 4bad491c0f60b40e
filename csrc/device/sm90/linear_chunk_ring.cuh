#pragma once
#include "device/common/semaphore.cuh"
#include "device/sm80/linear_chunk_pass.cuh"
#include "device/sm90/barrier.cuh"
#include "device/sm90/copy.cuh"
#include "device/sm90/proxy.cuh"
#include "device/sm90/tensor_map.h"
#include "device/sm90/wgmma_rows_registers.cuh"

// The pass of device/sm80/linear_chunk_pass.cuh, divided: a warpgroup loads chunks into a ring, one goes from state to
// state, and one makes outputs of copies of the states and updates. What goes from chunk to chunk is then as short as
// it can be: three products, and what lies between them. CTAs stay: their loads are ahead in the next work while the
// last one's states are stored.
namespace attnops::sm90 {

// Tokens as boxes of 64 columns of one head and 64 tokens. Without `there` strides are none that a map takes.
struct RingMaps {
  CUtensorMap q, k, v;
  bool there;
};

// What a stage holds.
struct ChunkNote {
  int64_t begin;             // of its first token
  int size;                  // of tokens; 0: no work is left
  int head, first_row;       // of the work
  int start, kept, written;  // slots: read before the chunk, written after it; below 0: none
  bool first;                // of its request's chunks
};

template <int kKeys, bool kDelta, bool kChannels, int kGroups>
struct RingShared {
  using Stage = typename PassShared<kKeys, kDelta, kChannels, 4 * kGroups>::Stage;
  static constexpr int kCopyBytes = kGroups * (kKeys / 64 + 2) * kPanelBytes;
  static constexpr int kStages = 3 * sizeof(Stage) + kCopyBytes <= 226 << 10 ? 3 : 2;
  Stage stages[kStages];
  alignas(1024) unsigned char state[kGroups][kKeys / 64 * kPanelBytes];  // [values, keys], at the chunk's begin
  unsigned char u[kGroups][kPanelBytes];                                 // [values, tokens]
  unsigned char out[kGroups][kPanelBytes];                               // [tokens, values]
  ChunkNote notes[kStages];
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

  // marked: whether chunks are made while this runs.
  __device__ ChunkRing(const LinearPrefill& prefill, const RingMaps& maps, Shared& shared, bool marked)
      : Base(prefill, reinterpret_cast<typename Base::Shared&>(shared)), maps_(maps), ring_(shared), marked_(marked) {}

  // works: of requests, heads and row_blocks blocks of rows; a CTA takes every gridDim.x-th.
  __device__ void run(int works, int row_blocks) {
    if (threadIdx.x < kStages) {
      mbarrier_init(smem_address(&ring_.full[threadIdx.x]), kGroupThreads + 1);
      mbarrier_init(smem_address(&ring_.empty[threadIdx.x]), kMeeting);
      mbarrier_init_fence();
    }
    __syncthreads();
    const int group = threadIdx.x / kGroupThreads;
    if (group < kGroups) {
      registers_increase<kGroups == 1 ? 216 : 176>();
      run_states(group);
    } else if (group == kGroups) {
      if constexpr (kGroups > 1) registers_decrease<104>();
      run_outputs();
    } else {
      registers_decrease<kGroups == 1 ? 120 : 56>();
      run_loads(works, row_blocks);
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

  __device__ void run_loads(int works, int row_blocks) {
    const LinearStep& p = this->p_;
    Turn turn;
    int64_t loaded = 0;    // chunks
    bool marks = marked_;  // whether they are to be waited for
    for (int work = blockIdx.x; work < works; work += gridDim.x) {
      const int row_block = work % row_blocks, head = work / row_blocks % p.num_heads;
      const int place = work / row_blocks / p.num_heads, first_row = row_block * Base::kRows;
      if (p.report != nullptr && row_block == 0 && head == 0 && threadIdx.x % kGroupThreads == 0) {
        this->prefill_.check(kDelta ? kReportDeltaPrefill : kReportSsdPrefill, place, p.report);
      }
      const int request = this->prefill_.plan != nullptr ? this->prefill_.plan[place] : place;
      if (request < 0 || request >= p.batch_size) continue;
      const RequestChunks chunks(this->prefill_, request);
      const int slot = p.state_indices[request];
      if (!this->prefill_.in_pool(slot)) {
        clear(head, chunks.first, chunks.first + chunks.tokens, first_row);
        continue;
      }
      const int64_t prefix = this->prefill_.prefix(request), count = chunks.count();
      int64_t made = marks ? 0 : count;
      for (int64_t c = 0; c < count; ++c, ++loaded, turn.next()) {
        ChunkNote note{chunks.begin(c), chunks.size(c), head, first_row, -1, -1, -1, c == 0};
        if (c == 0 && prefix != 0) note.start = slot;
        if (c == count - 1) note.written = slot;
        const int64_t seen = prefix + note.begin + note.size - chunks.first;
        note.kept = static_cast<int>(this->prefill_.checkpoint(request, seen));
        if (loaded >= kStages) mbarrier_wait(empty(turn), turn.phase ^ 1);
        if (c == made && threadIdx.x % kGroupThreads < 32) {
          const int more = wait_for_marks(chunks.place + c, head, count - c);
          marks = more != 0;
          made = marks ? made + more : count;
        }
        load(turn, note, chunks.place + c);
      }
    }
    if (loaded >= kStages) mbarrier_wait(empty(turn), turn.phase ^ 1);
    if (threadIdx.x % kGroupThreads == 0) {
      ring_.notes[turn.stage].size = 0;
      mbarrier_arrive(full(turn));
    }
    mbarrier_arrive(full(turn));
    for (int i = blockIdx.x; i < row_blocks * p.num_heads; i += gridDim.x) {  // tokens of no request
      const int head = i / row_blocks, first_row = i % row_blocks * Base::kRows;
      clear(head, 0, this->prefill_.first_token(0), first_row);
      clear(head, this->prefill_.first_token(p.batch_size), this->prefill_.num_tokens, first_row);
    }
    wait_for_copies();
    if (marked_) wait_for_earlier_kernels();  // so that what comes behind this kernel comes behind those, too
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

  __device__ void clear(int head, int64_t begin, int64_t end, int first_row) const {
    clear_tokens(this->p_, head, begin, end, first_row, Base::kRows, threadIdx.x % kGroupThreads, kGroupThreads);
  }

  // A whole chunk's rows come as boxes. Others by row: what lies behind them is another request's, and must be zeros.
  __device__ void load(const Turn& turn, const ChunkNote& note, int64_t place) {
    const LinearStep& p = this->p_;
    Stage& stage = ring_.stages[turn.stage];
    const uint32_t full = this->full(turn), keys = smem_address(stage.k), queries = smem_address(stage.q),
                   values = smem_address(stage.v);
    const int group = note.head / p.heads_per_group;
    constexpr ChunkScratch kLayout{.panels = kKeys / 64, .delta = kDelta, .channels = kChannels};
    constexpr int kProducts = (kDelta ? 2 : 1) * kPanelBytes, kFactors = kFactorRows * kChunk * 4;
    constexpr int kKeyBytes = kChannels ? 3 * (kKeys / 64) * kPanelBytes : 0;
    constexpr int kBoxBytes = ((kChannels ? 0 : 2 * (kKeys / 64)) + kGroups) * kPanelBytes;
    const bool boxes = maps_.there && note.size == kChunk;
    if (threadIdx.x % kGroupThreads == 0) {
      ring_.notes[turn.stage] = note;
      const unsigned char* scratch = static_cast<const unsigned char*>(this->prefill_.scratch) +
                                     (place * p.num_heads + note.head) * kLayout.bytes();
      mbarrier_arrive_expect(full, kProducts + kFactors + kKeyBytes + (boxes ? kBoxBytes : 0));
      if constexpr (kChannels) copy_bytes(keys, scratch + kLayout.keys_at(), kKeyBytes, full);
      if (boxes) {
        const int begin = static_cast<int>(note.begin);
        if constexpr (!kChannels) {
#pragma unroll
          for (int i = 0; i < kKeys / 64; ++i) copy_box(keys + i * kPanelBytes, &maps_.k, full, 64 * i, begin, group);
        }
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
          copy_box(values + i * kPanelBytes, &maps_.v, full, note.first_row + 64 * i, begin, note.head);
        }
        if constexpr (!kChannels) {
#pragma unroll
          for (int i = 0; i < kKeys / 64; ++i) {
            copy_box(queries + i * kPanelBytes, &maps_.q, full, 64 * i, begin, group);
          }
        }
      }
      copy_bytes(smem_address(kDelta ? stage.t : stage.p), scratch, kProducts, full);
      copy_bytes(smem_address(stage.factors), scratch + kLayout.factors_at(), kFactors, full);
    }
    if (boxes) return mbarrier_arrive(full);
    if constexpr (!kChannels) {
      copy_rows<kKeys / 64, kGroupThreads>(keys, p.k, group, note.begin, note.size, 0, p.key_dim);
      copy_rows<kKeys / 64, kGroupThreads>(queries, p.q, group, note.begin, note.size, 0, p.key_dim);
    }
    const int columns = min_of(p.value_dim, note.first_row + Base::kRows);
    copy_rows<kGroups, kGroupThreads>(values, p.v, note.head, note.begin, note.size, note.first_row, columns);
    arrive_after_copies(full);
  }

  __device__ void run_states(int group) {
    const LinearStep& p = this->p_;
    for (Turn turn;; turn.next()) {
      Stage& stage = ring_.stages[turn.stage];
      const ChunkNote& note = ring_.notes[turn.stage];
      uint32_t state[kKeys / 16][4], a[4][4], decayed[4][4];
      float u[32];
      mbarrier_wait(full(turn), turn.phase);
      if (note.size == 0) break;
      if (note.first) begin_work(note);
#pragma unroll
      for (int i = 0; i < kKeys / 16; ++i) Base::pack(state[i], this->state_ + 8 * i, this->state_ + 8 * i + 4);
      fence_async_proxy();  // rows may arrive by ordinary writes
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
      const int kept = note.kept, written = note.written;
      mbarrier_arrive(empty(turn));
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        const int slot = i == 0 ? kept : written;
        if (slot >= 0) this->save(slot);
      }
    }
    named_barrier_sync(kStateFree, kMeeting);  // what the outputs have told last
    named_barrier_sync(kUpdatesFree, kMeeting);
  }

  __device__ void begin_work(const ChunkNote& note) {
    const int start = note.start;
    this->head_ = note.head, this->first_row_ = note.first_row;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) this->state_[i] = 0.f;
    if (start >= 0) this->restore(start);
  }

  // A warp's 16 rows and 16 columns of a panel.
  __device__ void put(const uint32_t (&a)[4], unsigned char* panel, int step) const {
    const int lane = threadIdx.x % 32;
    store_fragment(a, smem_address(panel) + panel_at(16 * (this->warp_ % 4) + lane % 16, 2 * step + lane / 16));
  }

  // A warp has 16 tokens.
  __device__ void run_outputs() {
    const LinearStep& p = this->p_;
    named_barrier_arrive(kStateFree, kMeeting);
    named_barrier_arrive(kUpdatesFree, kMeeting);
    for (Turn turn;; turn.next()) {
      Stage& stage = ring_.stages[turn.stage];
      float o[kGroups][32];
      mbarrier_wait(full(turn), turn.phase);
      const ChunkNote note = ring_.notes[turn.stage];
      if (note.size == 0) break;
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
          for (int v = 0; v < kGroups; ++v) add_values(stage.v + v * kPanelBytes, p.skip[note.head], o[v]);
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
      for (int v = 0; v < kGroups; ++v) store_tokens(note, v);
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

  __device__ void store_tokens(const ChunkNote& note, int panel) const {
    const LinearStep& p = this->p_;
    const int lane = threadIdx.x % 32, row = note.first_row + 64 * panel + lane % 8 * 8;
    if (row >= p.value_dim) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 16 * this->warp_ + 4 * i + lane / 8;
      if (token >= note.size) break;
      auto values = load_vec<Vec<Bf16, 8>>(reinterpret_cast<const Bf16*>(ring_.out[panel] + panel_at(token, lane % 8)));
      if (!kDelta && p.z.data != nullptr) {
        const Bf16* gates = static_cast<const Bf16*>(p.z.data) + (note.begin + token) * p.z.stride_request +
                            note.head * p.z.stride_head + row;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float z = static_cast<float>(gates[j]);
          values.data[j] = __float2bfloat16(static_cast<float>(values.data[j]) * z * sigmoid(z));
        }
      }
      store_vec(
          static_cast<Bf16*>(p.out) + (note.begin + token) * p.out_stride_request + note.head * p.out_stride_head + row,
          values);
    }
  }

  const RingMaps& maps_;
  Shared& ring_;
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

inline RingMaps make_ring_maps(const LinearPrefill& p) {
  const LinearStep& step = p.step;
  RingMaps maps{};
  maps.there = step.key_dim > 0 && step.value_dim > 0;
  for (const StepRows* rows : {&step.q, &step.k, &step.v}) {
    maps.there = maps.there && rows->stride_request > 0 && rows->stride_head > 0;
  }
  if (!maps.there) return maps;
  const auto map_of = [&](const StepRows& rows, int columns, int heads) {
    return make_tensor_map(
        {.dtype = DType::kBFloat16,
         .base = rows.data,
         .extents = {static_cast<uint64_t>(columns), static_cast<uint64_t>(p.num_tokens), static_cast<uint64_t>(heads)},
         .strides = {static_cast<uint64_t>(2 * rows.stride_request), static_cast<uint64_t>(2 * rows.stride_head)},
         .box_rows = kChunk});
  };
  const int groups = step.num_heads / step.heads_per_group;
  maps.q = map_of(step.q, step.key_dim, groups);
  maps.k = map_of(step.k, step.key_dim, groups);
  maps.v = map_of(step.v, step.value_dim, step.num_heads);
  return maps;
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
  launch_dependent<&chunk_ring_kernel<Ring>>(what, shape, stream, p, make_ring_maps(p), static_cast<int>(works),
                                             row_blocks, marked);
}

}  // namespace attnops::sm90
