#pragma once
#include <cmath>

#define __launch_bounds__(...)
#define __grid_constant__
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <vector>

// A software model of a CTA: its threads are contexts that take turns, and meet at barriers and in warps. What a kernel
// asks of its warp (shuffles, matrix products) is answered here, so that kernels run on a machine without a GPU.
namespace cuda_model {

struct Dim {
  unsigned x = 0, y = 0, z = 0;
};

struct Warp {
  int arrived = 0, alive = 0;
  uint64_t generation = 0;
  alignas(16) unsigned char slots[2][32][64];  // in turns: nobody is two exchanges ahead
};

struct Cta {
  std::vector<ucontext_t> contexts;
  std::vector<std::vector<unsigned char>> stacks;
  std::vector<char> done;
  std::vector<Warp> warps;
  ucontext_t scheduler;
  int current = 0, arrived = 0, alive = 0;
  uint64_t generation = 0;
  struct Named {
    int arrived = 0;
    uint64_t generation = 0;
  } named[16];  // hardware barriers
  std::function<void()> body;
  std::vector<std::function<void()>> copies;  // that the engine has not made yet
};

inline Cta* cta = nullptr;

// For what a GPU leaves open: which threads run first, and when copies land. The same in each run.
inline uint32_t drawn(uint32_t below) {
  static uint64_t state = 1;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(state >> 33) % below;
}

// Has something done at some time from now on.
inline void later(std::function<void()> copy) {
  if (drawn(2) == 0) return copy();
  cta->copies.push_back(std::move(copy));
}

inline void yield() { swapcontext(&cta->contexts[cta->current], &cta->scheduler); }

inline void meet(int& arrived, const int& alive, uint64_t& generation) {
  const uint64_t own = generation;
  if (++arrived >= alive) {
    arrived = 0;
    ++generation;
    return;
  }
  while (generation == own) {
    yield();
    if (generation == own && arrived >= alive && alive > 0) {  // the others have left
      arrived = 0;
      ++generation;
    }
  }
}

inline void meet_cta() { meet(cta->arrived, cta->alive, cta->generation); }

// What every lane of the warp gives, to all of them.
template <typename T>
const T* exchange(const T& own, uint64_t& turn_of_lane) {
  static_assert(sizeof(T) <= 64);
  Warp& warp = cta->warps[cta->current / 32];
  auto& slots = warp.slots[turn_of_lane++ % 2];
  std::memcpy(slots[cta->current % 32], &own, sizeof(T));
  meet(warp.arrived, warp.alive, warp.generation);
  return reinterpret_cast<const T*>(&slots[0][0]);
}

inline std::vector<uint64_t> turns;

template <typename T>
struct Lanes {
  const unsigned char* slots;
  explicit Lanes(const T& own) : slots(reinterpret_cast<const unsigned char*>(exchange(own, turns[cta->current]))) {}
  const T& operator[](int lane) const { return *reinterpret_cast<const T*>(slots + 64 * lane); }
};

}  // namespace cuda_model

inline cuda_model::Dim threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_model {

inline void enter() {
  cta->body();
  Warp& warp = cta->warps[cta->current / 32];
  cta->done[cta->current] = 1;
  --warp.alive;
  --cta->alive;
  if (warp.alive > 0 && warp.arrived >= warp.alive) warp.arrived = 0, ++warp.generation;
  if (cta->alive > 0 && cta->arrived >= cta->alive) cta->arrived = 0, ++cta->generation;
  swapcontext(&cta->contexts[cta->current], &cta->scheduler);
}

inline void run_cta(int threads, std::function<void()> body) {
  constexpr int kStack = 512 << 10;
  static Cta model;
  cta = &model;
  model.contexts.resize(threads);
  if (static_cast<int>(model.stacks.size()) < threads) model.stacks.resize(threads, std::vector<unsigned char>(kStack));
  model.done.assign(threads, 0);
  model.warps.assign((threads + 31) / 32, Warp{});
  model.current = 0, model.arrived = 0, model.alive = threads, model.generation = 0;
  std::fill(std::begin(model.named), std::end(model.named), Cta::Named{});
  model.body = std::move(body);
  turns.assign(threads, 0);
  blockDim.x = threads;
  for (int i = 0; i < threads; ++i) {
    ++model.warps[i / 32].alive;
    getcontext(&model.contexts[i]);
    model.contexts[i].uc_stack.ss_sp = model.stacks[i].data();
    model.contexts[i].uc_stack.ss_size = kStack;
    model.contexts[i].uc_link = nullptr;
    makecontext(&model.contexts[i], enter, 0);
  }
  while (model.alive > 0 || !model.copies.empty()) {
    for (size_t i = 0; i < model.copies.size();) {
      if (drawn(3) != 0) {
        ++i;
        continue;
      }
      model.copies[i]();
      model.copies.erase(model.copies.begin() + i);
    }
    const int first = drawn(threads);
    for (int turn = 0; turn < threads; ++turn) {
      const int i = (first + turn) % threads;
      if (model.done[i]) continue;
      model.current = i;
      threadIdx.x = i;
      swapcontext(&model.scheduler, &model.contexts[i]);
    }
  }
}

template <typename Body>
void run_grid(int64_t blocks, int threads, Body body) {
  gridDim.x = blocks;
  for (int64_t i = 0; i < blocks; ++i) {
    blockIdx.x = i;
    run_cta(threads, body);
  }
}

}  // namespace cuda_model

inline void __syncthreads() { cuda_model::meet_cta(); }
inline bool __syncthreads_and(bool own) {
  static bool all;
  cuda_model::meet_cta();
  all = true;
  cuda_model::meet_cta();
  all = all && own;
  cuda_model::meet_cta();
  const bool result = all;
  cuda_model::meet_cta();
  return result;
}
inline void __syncwarp() { cuda_model::Lanes<int> meet(0); }
inline float __shfl_xor_sync(unsigned, float x, int distance) {
  return cuda_model::Lanes<float>(x)[cuda_model::cta->current % 32 ^ distance];
}
inline float __shfl_sync(unsigned, float x, int lane) { return cuda_model::Lanes<float>(x)[lane]; }
inline uint32_t __ballot_sync(unsigned, bool own) {
  const cuda_model::Lanes<int> lanes(own);
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<uint32_t>(lanes[i] != 0) << i;
  return bits;
}
inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline bool __all_sync(unsigned, bool own) {
  const cuda_model::Lanes<int> lanes(own);
  bool all = true;
  for (int i = 0; i < 32; ++i) all = all && lanes[i] != 0;
  return all;
}
inline bool __any_sync(unsigned, bool own) {
  const cuda_model::Lanes<int> lanes(own);
  bool any = false;
  for (int i = 0; i < 32; ++i) any = any || lanes[i] != 0;
  return any;
}
inline float __shfl_down_sync(unsigned, float x, int distance) {
  const int lane = cuda_model::cta->current % 32;
  return cuda_model::Lanes<float>(x)[lane + distance < 32 ? lane + distance : lane];
}
inline float __shfl_up_sync(unsigned, float x, int distance) {
  const int lane = cuda_model::cta->current % 32;
  return cuda_model::Lanes<float>(x)[lane >= distance ? lane - distance : lane];
}
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float __uint_as_float(uint32_t x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}
#define __expf expf
#define __logf logf
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
template <typename T>
T __ldcs(const T* from) {
  return *from;
}
template <typename T>
void __stcs(T* to, const T& x) {
  *to = x;
}
