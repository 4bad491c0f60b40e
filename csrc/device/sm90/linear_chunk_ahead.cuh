#pragma once
#include "device/common/semaphore.cuh"
#include "device/sm80/linear_chunk_local.cuh"
#include "device/sm90/barrier.cuh"
#include "device/sm90/linear_chunk_multiply.cuh"
#include "device/sm90/proxy.cuh"

// Chunks of the delta rule made while the pass takes earlier ones, where heads are too few for all SMs: CTAs that stay,
// one an SM, on the SMs that the pass leaves free. Each chunk of a head has a mark, which is cleared before.
namespace attnops::sm90 {

inline constexpr int kAheadWorkers = 4;  // of a CTA, each with a chunk of its own

struct MeetWorker : MultiplyGroup {
  static constexpr bool kMarks = true;
  __device__ static void meet() { named_barrier_sync(1 + threadIdx.x / kLocalThreads, kLocalThreads); }
  // What all threads of a worker have written before they met.
  __device__ static void mark(unsigned char* at) {
    fence_async_proxy_everywhere();  // it is read by bulk copies
    add_acq_rel(reinterpret_cast<int32_t*>(at), 1);
  }
};

static __global__ void clear_marks_kernel(void* scratch, int64_t chunks, int stride, int at) {
  wait_for_earlier_kernels();
  let_next_kernel_start();  // which leaves its SMs free until then
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < chunks) *reinterpret_cast<int32_t*>(static_cast<unsigned char*>(scratch) + i * stride + at) = 0;
}

template <int kKeys>
__global__ void __launch_bounds__(kAheadWorkers* kLocalThreads, 1)
    chunk_ahead_kernel(const __grid_constant__ LinearPrefill p, int groups, int parts) {
  extern __shared__ __align__(1024) unsigned char memory[];
  wait_for_earlier_kernels();
  let_next_kernel_start();  // once all CTAs of this one are there
  const int worker = threadIdx.x / kLocalThreads;
  auto& shared = reinterpret_cast<LocalShared<kKeys>*>(memory)[worker];
  // The first chunks of all requests, then the second ones, as far as requests are alike.
  const int requests = p.step.batch_size, places = static_cast<int>(chunk_places(p.num_tokens, requests));
  const int each = ceil_div(places, requests), parts_of_all = groups * parts;
  for (int i = blockIdx.x * kAheadWorkers + worker; i < each * requests * parts_of_all;
       i += gridDim.x * kAheadWorkers) {
    const int turn = i / parts_of_all, place = turn % requests * each + turn / requests;
    if (place < places) make_chunk<kKeys, true, MeetWorker, true>(p, shared, place, i / parts % groups, i % parts);
  }
}

// Whether its indices fit 32 bits.
inline bool ahead_counts(const LinearPrefill& p) {
  const int64_t places = chunk_places(p.num_tokens, p.step.batch_size) + p.step.batch_size;
  return places * p.step.num_heads <= INT32_MAX / 2;
}

template <int kKeys>
void launch_chunk_ahead(const char* what, const LinearPrefill& p, int ctas, cudaStream_t stream) {
  constexpr ChunkScratch kLayout{.panels = kKeys / 64, .delta = true, .channels = false};
  const int groups = p.step.num_heads / p.step.heads_per_group, parts = ceil_div(p.step.heads_per_group, kLocalHeads);
  const int64_t chunks = chunk_places(p.num_tokens, p.step.batch_size) * p.step.num_heads;
  constexpr int kClearThreads = 256, kBytes = static_cast<int>(kAheadWorkers * sizeof(LocalShared<kKeys>));
  static_assert(kBytes <= 227 << 10);
  launch_dependent<&clear_marks_kernel>(what,
                                        {.blocks = static_cast<int>(ceil_div(chunks, int64_t{kClearThreads})),
                                         .threads = kClearThreads,
                                         .shared_bytes = 0,
                                         .max_shared_bytes = 0},
                                        stream, p.scratch, chunks, kLayout.bytes(), kLayout.mark_at());
  launch_dependent<&chunk_ahead_kernel<kKeys>>(
      what,
      {.blocks = ctas, .threads = kAheadWorkers * kLocalThreads, .shared_bytes = kBytes, .max_shared_bytes = kBytes},
      stream, p, groups, parts);
}

}  // namespace attnops::sm90
