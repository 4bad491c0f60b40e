// Barriers in memory, copies that land at random times, e4m3 products: what the kernel of logits asks for.
#pragma once
#include <cuda.h>
#include <map>
#include <deque>
#include <string>
constexpr int kArenaDynamic = 212992; constexpr int kArena = kArenaDynamic + 20480;
inline int g_sms = 3;
alignas(1024) inline unsigned char g_arena[kArena];
inline unsigned char* arena() { return g_arena; }
struct Bar { int count = 0, pending = 0; long tx = 0; uint64_t phase = 0; };
inline std::map<uint32_t, Bar> bars;
inline void turn_(Bar& b) { if (b.pending == 0 && b.tx == 0) { ++b.phase; b.pending = b.count; } }
struct Job { std::function<void()> run; };
inline std::deque<Job> engine;          // copies in flight
inline std::vector<std::vector<std::function<void()>>> own_copies;  // of a thread
inline void new_cta() { bars.clear(); engine.clear(); own_copies.assign(1024, {}); for (auto& b : g_arena) b = 0x7f; }
inline void finish_cta() { for (auto& [a, b] : bars) if (b.tx != 0) { printf("bytes expected and not there\n"); abort(); } if (!engine.empty()) { printf("copies left\n"); } }
inline void arrive_bar(uint32_t a, int n = 1) { auto& b = bars.at(a); b.pending -= n; if (b.pending < 0) { printf("too many arrivals\n"); abort(); } turn_(b); }
inline void model_expect(uint32_t a, int bytes) { bars.at(a).tx += bytes; }
inline void model_cp(uint32_t to, const void* from, int bytes, bool valid) {
  if (to % bytes || (valid && (uintptr_t)from % bytes)) { printf("unaligned\n"); abort(); }
  own_copies[M.current].push_back([=] { if (valid) memcpy(arena() + to, from, bytes); else memset(arena() + to, 0, bytes); });
}
inline void run_engine() { for (size_t i = 0; i < engine.size();) { if (rand() % 3 == 0) { auto j = engine[i].run; engine.erase(engine.begin() + i); j(); } else ++i; } }
inline float __int2_dummy() { return 0; }
namespace attnops {
namespace sm90 {
inline uint32_t smem_address(const void* p) { auto d = (const unsigned char*)p - arena(); if (d < 0 || d >= kArena) abort(); return d; }
inline void mbarrier_init(uint32_t a, int n) { bars[a] = {n, n, 0, 0}; }
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint32_t a) { arrive_bar(a); }
inline void mbarrier_arrive_if(uint32_t a, bool yes) { if (yes) arrive_bar(a); }
inline void mbarrier_wait(uint32_t a, uint32_t parity) { while ((bars.at(a).phase & 1) != (parity ^ 1)) yield_(); if (rand() % 4 == 0) yield_(); }
inline void mbarrier_arrive_expect(uint32_t a, int bytes) { bars.at(a).tx += bytes; arrive_bar(a); }
inline void named_barrier_sync(int id, int threads) {
  static std::map<int, std::pair<int, long>> meetings;  // threads there, meetings that were
  auto& m = meetings[id]; const long mine = m.second;
  if (++m.first == threads) { m.first = 0; ++m.second; return; }
  while (m.second == mine) yield_();
}
inline void fence_async_proxy() {}
template <int k> void registers_increase() {} template <int k> void registers_decrease() {}
inline void copy16(uint32_t to, const void* from, bool valid) { model_cp(to, from, 16, valid); }
inline void arrive_after_copies(uint32_t a) {
  auto mine = std::move(own_copies[M.current]); own_copies[M.current].clear();
  engine.push_back({[mine, a] { for (auto& c : mine) c(); arrive_bar(a); }});
}
struct ModelMap { const unsigned char* base; uint64_t extents[3], strides[2]; uint32_t box[3]; };
static_assert(sizeof(ModelMap) <= sizeof(CUtensorMap));
inline void prefetch_map(const CUtensorMap*) {}
inline void copy_box(uint32_t to, const CUtensorMap* map, uint32_t a, int x, int y, int z) {
  ModelMap m; memcpy(&m, map, sizeof m);
  if (to % 1024) { printf("box not on 1 KB\n"); abort(); }
  engine.push_back({[=] {
    for (uint32_t k = 0; k < m.box[2]; ++k) for (uint32_t j = 0; j < m.box[1]; ++j) for (uint32_t i = 0; i < m.box[0]; ++i) {
      const int64_t X = x + i, Y = int64_t{y} + j, Z = int64_t{z} + k; const bool in = X < m.extents[0] && Y >= 0 && Y < m.extents[1] && Z >= 0 && Z < m.extents[2];
      uint32_t at = to + ((k * m.box[1] + j) * m.box[0]) + i; at ^= (at >> 7 & 7) << 4;
      arena()[at] = in ? m.base[X + Y * m.strides[0] + Z * m.strides[1]] : 0;
    }
    auto& b = bars.at(a); b.tx -= m.box[0] * m.box[1] * m.box[2]; turn_(b);
  }});
}
inline void copy_box(uint32_t to, const CUtensorMap* map, uint32_t a, int x, int y, int z, uint64_t) { copy_box(to, map, a, x, y, z); }
inline void copy_bytes(uint32_t to, const void* from, int bytes, uint32_t a) {
  if (to % 16 || bytes % 16 || (uintptr_t)from % 16) { printf("bytes unaligned\n"); abort(); }
  engine.push_back({[=] { memcpy(arena() + to, from, bytes); auto& b = bars.at(a); b.tx -= bytes; turn_(b); }});
}
inline void copy_bytes(uint32_t to, const void* from, int bytes, uint32_t a, uint64_t) { copy_bytes(to, from, bytes, a); }
inline uint64_t l2_policy(bool) { return 0; }
struct MapGeometry { DType dtype; const void* base; uint64_t extents[3]; uint64_t strides[2]; uint32_t box_rows; };
inline CUtensorMap encode_tensor_map(DType, const void* base, int rank, const uint64_t* e, const uint64_t* s, const uint32_t* box) {
  ModelMap m{(const unsigned char*)base, {e[0], e[1], e[2]}, {s[0], s[1]}, {box[0], box[1], box[2]}};
  if ((uintptr_t)base % 16 || s[0] % 16 || s[1] % 16 || !s[0] || !s[1] || !e[0] || !e[1] || !e[2] || box[1] > 256 || box[2] > 256 || box[0] != 128 || rank != 3) { printf("map refused\n"); abort(); }
  CUtensorMap out{}; memcpy(&out, &m, sizeof m); return out;
}
inline CUtensorMap make_tensor_map(const MapGeometry& g) { const uint32_t box[3] = {128, g.box_rows, 1}; return encode_tensor_map(g.dtype, g.base, 3, g.extents, g.strides, box); }
inline int swizzled(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }
inline constexpr int kStepKMajor = 2;
inline void wgmma_fence() {} inline void wgmma_commit() {}
template <int n> void pin(float (&)[n]) {}
template <int k, class... A> void wgmma_wait(A&...) {}
inline uint32_t uniform_operand(uint32_t address) { return __shfl_sync(~0u, (address & 0x3FFFF) >> 4, 0); }
template <int> uint64_t group_descriptor(uint32_t operand) { return operand; }
inline void load_fragment(uint32_t (&a)[4], uint32_t address) {
  Lanes<uint32_t> at(address);
  for (int m = 0; m < 4; ++m) memcpy(&a[m], arena() + at[m * 8 + lane_() / 4] + lane_() % 4 * 4, 4);
}
inline float e4m3(unsigned char c) { const int e = c >> 3 & 15, m = c & 7; if (e == 15 && m == 7) return NAN; const float v = e ? ldexpf(1 + m / 8.f, e - 7) : ldexpf(m / 8.f, -6); return c & 128 ? -v : v; }
struct Frag { uint32_t a[4]; };
inline void wgmma_e4m3(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  Lanes<Frag> l(Frag{a[0], a[1], a[2], a[3]}); float row[2][32]; const int g = lane_() / 4;
  for (int t = 0; t < 4; ++t) { const Frag f = l[g * 4 + t]; for (int i = 0; i < 4; ++i) for (int h = 0; h < 2; ++h) for (int half = 0; half < 2; ++half) row[h][16 * half + 4 * t + i] = e4m3(f.a[2 * half + h] >> (8 * i) & 255); }
  for (int j = 0; j < 8; ++j) for (int e = 0; e < 2; ++e) {
    const int n = 8 * j + lane_() % 4 * 2 + e; float s0 = 0, s1 = 0;
    for (int k = 0; k < 32; ++k) { uint32_t at = uint32_t(b << 4) + n / 8 * 1024 + n % 8 * 128 + k; at ^= (at >> 7 & 7) << 4; const float q = e4m3(arena()[at]); s0 += row[0][k] * q; s1 += row[1][k] * q; }
    float& x = d[4 * j + e]; float& y = d[4 * j + 2 + e]; x = (accumulate ? x : 0) + s0; y = (accumulate ? y : 0) + s1;
  }
}
// Both factors in shared memory: 2 * kCount columns.
template <int kCount> void wgmma_e4m3(float (&d)[kCount], uint64_t a, uint64_t b, int accumulate) {
  const auto byte = [](uint64_t from, int row, int k) { uint32_t at = uint32_t(from << 4) + row / 8 * 1024 + row % 8 * 128 + k; return e4m3(arena()[at ^ (at >> 7 & 7) << 4]); };
  const int first = M.current / 32 % 4 * 16 + lane_() / 4;
  for (int i = 0; i < kCount; ++i) {
    const int row = first + i / 2 % 2 * 8, column = i / 4 * 8 + lane_() % 4 * 2 + i % 2; float sum = 0;
    for (int k = 0; k < 32; ++k) sum += byte(a, row, k) * byte(b, column, k);
    d[i] = (accumulate ? d[i] : 0) + sum;
  }
}
}  // namespace sm90
}  // namespace attnops
