"""Takes instructions of PTX out of a copy of csrc, for the software model."""

import re
import sys
from pathlib import Path

CSRC = Path(sys.argv[1])
CLUSTER = """#pragma once
#include <cstdint>
namespace attnops::sparse_indexer {
// Letters between CTAs come at random times. A barrier of theirs is what is missing, and its phase.
struct LetterBarrier { int32_t bytes; int16_t pending, phase; };
static_assert(sizeof(LetterBarrier) == 8);
struct Cluster {
  int rank, size;
  static int own_rank() { return cta_(); }
  static int launched() { return M.size; }
  static void make(uint64_t* first, uint64_t* second) {
    for (auto* b : {first, second}) *(LetterBarrier*)b = {0, 1, 0};
  }
  void meet() const { if (size > 1) await_(M.cluster, arrive_(M.cluster)); }
  static void turn_(LetterBarrier& b) { if (b.pending == 0 && b.bytes == 0) b = {0, 1, int16_t(b.phase ^ 1)}; }
  static void expect(uint64_t* barrier, uint32_t bytes) {
    auto& b = *(LetterBarrier*)barrier;
    if (b.pending != 1) abort();
    b.bytes += bytes, --b.pending, turn_(b);
  }
  static void await(uint64_t* barrier, uint32_t parity) {
    while (uint32_t(((LetterBarrier*)barrier)->phase) == parity) yield_();
  }
  template <typename T> static T* in_(const void* own, int other) {
    const size_t at = reinterpret_cast<const unsigned char*>(own) - aligned_of_(cta_());
    if (at >= M.memory[other].size() || at % sizeof(T)) abort();
    return (T*)(aligned_of_(other) + at);
  }
  template <typename T> static void send(uint32_t* to, const T& value, uint64_t* barrier, int other) {
    if (other >= M.size || M.ended(other)) { printf("a letter to a CTA that is not there\\n"); abort(); }
    T* place = in_<T>(to, other);
    auto* b = in_<LetterBarrier>(barrier, other);
    M.letters.push_back([=] {
      if (M.ended(other)) { printf("a letter comes too late\\n"); abort(); }
      *place = value, b->bytes -= sizeof(T), turn_(*b);
    });
  }
  static const unsigned char* aligned_of_(int c) {
    return (const unsigned char*)(((uintptr_t)M.memory[c].data() + 15) & ~uintptr_t{15});
  }
};
}
"""
LAUNCH = """#pragma once
#include "device/common/launch.h"
namespace attnops {
struct LaunchShape {
  int blocks, threads, shared_bytes, max_shared_bytes;
  int blocks_y = 1, blocks_z = 1, cluster = 1;
};
template <auto kKernel, typename... A>
void launch_dependent(const char*, const LaunchShape& s, CUstream_st*, const A&... a) {
  gridDim.x = s.blocks;
  if (s.shared_bytes > kArenaDynamic) abort();
  for (int b = 0; b < s.blocks; ++b) {
    new_cta();
    run_cluster(b, 1, s.threads, 0, [&] { kKernel(a...); }, 0);
    finish_cta();
  }
}
}
"""


def change(path: str, *pairs: tuple[str, str]) -> None:
    file = CSRC / path
    text = file.read_text()
    for pattern, by in pairs:
        text, count = re.subn(pattern, by, text, flags=re.S)
        if not count:
            sys.exit(f"{path}: nothing like {pattern}")
    file.write_text(text)


def put(path: str, text: str) -> None:
    (CSRC / path).write_text(text)


HEADERS = {
    "pdl.cuh": "inline void wait_for_earlier_kernels() {} inline void let_next_kernel_start() {}",
    "arch.h": "inline int device_sms(const char*) { return g_sms; }",
}
for name, code in HEADERS.items():
    put(f"device/common/{name}", "#pragma once\nnamespace attnops { " + code + " }\n")
put("device/common/launch_dependent.cuh", LAUNCH)
put("sparse_indexer/cuda/row_cluster.cuh", CLUSTER)
for name in ("barrier.cuh", "copy.cuh", "wgmma_few.cuh", "wgmma_fp8.cuh", "wgmma.cuh", "tensor_map.h"):
    put(f"device/sm90/{name}", "#pragma once\n")
change("device/common/block_scan.cuh", ("__shared__ T", "static T"))
for name in ("topk_select", "stream"):
    change(
        f"sparse_indexer/cuda/{name}.cuh",
        (
            r"extern __shared__ __align__\(16\) uint8_t memory\[\];",
            "uint8_t* memory = (uint8_t*)Cluster::aligned_of_(cta_());",
        ),
    )
for name in ("logits", "prompt_logits", "token_logits"):
    change(
        f"sparse_indexer/sm90/{name}.cuh",
        (r"extern __shared__ __align__\(1024\) uint8_t dynamic\[\];", "uint8_t* dynamic = arena();"),
        (r"__shared__ (\w*Shared(?:<\w+>)?) shared;", r"\1& shared = *(\1*)(arena() + kArenaDynamic);"),
    )
change(
    "sparse_indexer/sm90/copy_boxes.cuh",
    (r'asm volatile\("cp\.async.*?\);', "model_cp(attnops::sm90::smem_address(to), from, 4, valid);"),
    (r'asm volatile\("mbarrier\.expect_tx.*?\);', "model_expect(barrier, bytes);"),
    (r'asm volatile\("st\.shared\.v4.*?\);', "memset(arena() + to + i, 0, 16);"),
)
change(
    "sparse_indexer/sm90/token_logits.cuh",
    (r'asm volatile\("st\.shared\.v4.*?\);', "memset(arena() + tile + i, 0, 16);"),
)
change(
    "sparse_indexer/sm90/copy_rows.cuh",
    (
        r'asm volatile\("cp\.async.*?\);',
        "model_cp(to + i, source != nullptr ? source + i : p.q, 4, source != nullptr);",
    ),
)
