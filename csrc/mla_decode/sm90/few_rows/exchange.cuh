#pragma once
#include "device/sm90/cluster.cuh"
#include "mla_decode/sm90/few_rows/epilogue.cuh"
#include "mla_decode/sm90/few_rows/load.cuh"

// Where the two splits of a request are the last work of the two CTAs of a cluster, these merge them without memory:
// CTA r of the two finishes group r's columns of V, and gets what the other one has of them.
namespace attnops::mla_decode::sm90::few_rows {

// Whether the parts of a pair, whose rows of the plan these are, end with the two splits of a request. Both CTAs ask
// that of both rows: who would wait for a peer that does not come, whatever the rows hold, would wait for ever.
__device__ inline bool shares_with_peer(const SplitKvEntry& even, const SplitKvEntry& odd) {
  return odd.begin_num_splits == 2 && odd.begin_split == 1 && last_work_of(odd) == odd.begin_work &&
         last_work_of(even) == odd.begin_work && even.begin_work <= odd.begin_work;
}

// What comes lies in the place of the queries: accumulators of 128 threads, then RowState of all rows.
template <class At>
class Exchange {
  static constexpr int kVecs = 4 * At::kRowBlocks;
  static constexpr int kRowsAt = kVecs * kGroupThreads * 16, kBytes = kRowsAt + At::kRows * 8;
  static_assert(kBytes <= At::kKv);

 public:
  using Output = float[4][At::kRows / 2];

  __device__ explicit Exchange(uint32_t shared)
      : shared_(shared), rank_(attnops::sm90::cluster_rank()), thread_(threadIdx.x % kGroupThreads) {}

  __device__ int rank() const { return rank_; }

  // Both barriers are used once.
  __device__ void init() const {
    attnops::sm90::mbarrier_init(may_send(), 1);
    attnops::sm90::mbarrier_init(arrived(), 1);
    attnops::sm90::mbarrier_arrive_expect(may_send(), 16);
    attnops::sm90::mbarrier_arrive_expect(arrived(), kBytes);
  }

  // The queries are not needed any more: by one thread, for all.
  __device__ void let_peer_send() const {
    attnops::sm90::store_async(of_peer(sign()), make_float4(0.f, 0.f, 0.f, 0.f), of_peer(may_send()));
  }

  __device__ void send(const uint8_t* base, const Output& o) const {
    attnops::sm90::mbarrier_wait_cluster(may_send(), 0);
    const uint32_t remote = of_peer(shared_ + At::kQ), barrier = of_peer(arrived());
    if (thread_ < At::kRows) {
      const RowState row = row_state<At>(base, thread_);
      attnops::sm90::store_async(remote + kRowsAt + thread_ * 8, make_float2(row.reference, row.sum), barrier);
    }
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int j = 0; j < At::kRowBlocks; ++j) {
        attnops::sm90::store_async(remote + ((m * At::kRowBlocks + j) * kGroupThreads + thread_) * 16,
                                   make_float4(o[m][4 * j], o[m][4 * j + 1], o[m][4 * j + 2], o[m][4 * j + 3]),
                                   barrier);
      }
    }
  }

  __device__ void receive() const { attnops::sm90::mbarrier_wait_cluster(arrived(), 0); }

  // Block j of accumulator m, and the states of a lane's two rows of blocks j.
  __device__ float4 block(const uint8_t* base, int m, int j) const {
    return reinterpret_cast<const float4*>(base + At::kQ)[(m * At::kRowBlocks + j) * kGroupThreads + thread_];
  }
  __device__ float4 rows(const uint8_t* base, int j) const {
    return reinterpret_cast<const float4*>(base + At::kQ + kRowsAt)[4 * j + threadIdx.x % 4];
  }

 private:
  __device__ uint32_t may_send() const { return full_barrier<At>(shared_, kQuarters); }
  __device__ uint32_t arrived() const { return may_send() + 8; }
  __device__ uint32_t sign() const { return may_send() + 16; }  // where the word that lets the peer send goes
  __device__ uint32_t of_peer(uint32_t address) const { return attnops::sm90::address_in(address, rank_ ^ 1); }

  const uint32_t shared_;
  const int rank_, thread_;
};

}  // namespace attnops::mla_decode::sm90::few_rows
