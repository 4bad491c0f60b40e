// A software model of a cluster of CTAs: threads are contexts that take turns in random order, and meet at barriers and in
// warps. For select_check.cpp and logits_check.cpp.
#pragma once
#define __launch_bounds__(...)
#define __grid_constant__
#include <ucontext.h>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>
#include <cstdio>
struct Dim { unsigned x = 0, y = 0, z = 0; };
inline Dim threadIdx, blockIdx, blockDim, gridDim;
struct Meet { int arrived = 0, alive = 0; uint64_t generation = 0; };
struct WarpM : Meet { alignas(16) unsigned char slots[2][32][64]; };
struct Model {
  std::vector<ucontext_t> contexts; std::vector<unsigned char*> stacks; std::vector<char> done;
  std::vector<WarpM> warps; std::vector<Meet> ctas; Meet cluster; std::vector<uint64_t> turns;
  ucontext_t scheduler; int current = 0, threads = 0, size = 1, first = 0;
  std::vector<std::vector<unsigned char>> memory; std::function<void()> body;
  std::vector<std::function<void()>> letters;  // between CTAs, on their way
  bool ended(int cta) const { return ctas[cta].alive == 0; }
  void deliver() {
    for (size_t i = 0; i < letters.size();) {
      if (rand() % 3) { ++i; continue; }
      auto letter = letters[i]; letters.erase(letters.begin() + i); letter();
    }
  }
};
inline Model M;
inline void yield_() { swapcontext(&M.contexts[M.current], &M.scheduler); }
inline uint64_t arrive_(Meet& m) { const uint64_t own = m.generation; if (++m.arrived >= m.alive) { m.arrived = 0; ++m.generation; } return own; }
inline void check_(Meet& m) { if (m.alive > 0 && m.arrived >= m.alive) { m.arrived = 0; ++m.generation; } }
inline void await_(Meet& m, uint64_t own) { while (m.generation == own) { yield_(); check_(m); } }
inline int cta_() { return M.current / M.threads; }
inline void __syncthreads() { auto& m = M.ctas[cta_()]; await_(m, arrive_(m)); }
template <typename T> const unsigned char* exchange_(const T& own) {
  WarpM& w = M.warps[M.current / 32]; auto& slots = w.slots[M.turns[M.current]++ % 2];
  std::memcpy(slots[M.current % 32], &own, sizeof(T)); await_(w, arrive_(w)); return &slots[0][0];
}
template <typename T> struct Lanes { const unsigned char* s; explicit Lanes(const T& own) : s(exchange_(own)) {} T operator[](int l) const { T v; std::memcpy(&v, s + 64 * l, sizeof(T)); return v; } };
inline int lane_() { return M.current % 32; }
template <typename T> T __shfl_xor_sync(unsigned, T x, int d) { return Lanes<T>(x)[lane_() ^ d]; }
template <typename T> T __shfl_up_sync(unsigned, T x, int d) { Lanes<T> l(x); return l[lane_() >= d ? lane_() - d : lane_()]; }
template <typename T> T __shfl_sync(unsigned, T x, int s) { return Lanes<T>(x)[s & 31]; }
inline unsigned __ballot_sync(unsigned, bool p) { Lanes<int> l(p); unsigned b = 0; for (int i = 0; i < 32; ++i) b |= unsigned(l[i] != 0) << i; return b; }
inline void __syncwarp() { Lanes<int> l(0); }
inline bool __any_sync(unsigned m, bool p) { return __ballot_sync(m, p) != 0; }
inline unsigned __reduce_add_sync(unsigned, unsigned x) { Lanes<unsigned> l(x); unsigned s = 0; for (int i = 0; i < 32; ++i) s += l[i]; return s; }
inline unsigned __reduce_max_sync(unsigned, unsigned x) { Lanes<unsigned> l(x); unsigned s = 0; for (int i = 0; i < 32; ++i) s = l[i] > s ? l[i] : s; return s; }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned atomicAdd(unsigned* p, unsigned v) { unsigned o = *p; *p += v; return o; }
inline unsigned atomicOr(unsigned* p, unsigned v) { unsigned o = *p; *p |= v; return o; }
inline unsigned atomicMax(unsigned* p, unsigned v) { unsigned o = *p; if (v > o) *p = v; return o; }
inline float __uint_as_float(uint32_t x) { float y; std::memcpy(&y, &x, 4); return y; }
inline uint32_t __float_as_uint(float x) { uint32_t y; std::memcpy(&y, &x, 4); return y; }
inline float __logf(float x) { return logf(x); }
inline float __int_as_float(int x) { float y; std::memcpy(&y, &x, 4); return y; }
inline unsigned char* own_memory_() { return M.memory[cta_()].data(); }
inline void enter_() {
  M.body(); M.done[M.current] = 1;
  auto leave = [](Meet& m) { --m.alive; check_(m); };
  leave(M.warps[M.current / 32]); leave(M.ctas[cta_()]); leave(M.cluster);
  swapcontext(&M.contexts[M.current], &M.scheduler);
}
inline std::function<void()> extra_ = [] {};
inline void run_cluster(int first_block, int size, int threads, size_t bytes, std::function<void()> body, unsigned seed) {
  const int n = size * threads; M.threads = threads; M.size = size; M.first = first_block; M.body = body;
  M.contexts.resize(n); while ((int)M.stacks.size() < n) M.stacks.push_back((unsigned char*)malloc(96 << 10));
  M.done.assign(n, 0); M.warps.assign(n / 32, WarpM{}); M.ctas.assign(size, Meet{}); M.cluster = Meet{}; M.cluster.alive = n; M.turns.assign(n, 0);
  M.memory.assign(size, std::vector<unsigned char>(bytes + 64)); for (auto& m : M.memory) for (auto& b : m) b = rand();
  for (int i = 0; i < n; ++i) { ++M.warps[i / 32].alive; ++M.ctas[i / threads].alive; getcontext(&M.contexts[i]); M.contexts[i].uc_stack.ss_sp = M.stacks[i]; M.contexts[i].uc_stack.ss_size = 96 << 10; M.contexts[i].uc_link = nullptr; makecontext(&M.contexts[i], enter_, 0); }
  int left = n; std::vector<int> order(n); for (int i = 0; i < n; ++i) order[i] = i;
  int idle = 0;
  while (true) {
    // whole CTAs in random order, so that some run ahead
    bool any = false; const int shift = rand() % n; const bool back = rand() & 1;
    for (int k = 0; k < n; ++k) { int i = (k + shift) % n; if (back) i = n - 1 - i; if (M.done[i]) continue; any = true; M.current = i; threadIdx.x = i % threads; blockIdx.x = first_block + i / threads; swapcontext(&M.scheduler, &M.contexts[i]); }
    if (!any) break; M.deliver(); extra_(); if (++idle > 200000) { printf("hangs\n"); abort(); }
  }
}
