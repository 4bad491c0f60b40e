#pragma once
#include <type_traits>

#include "device/common/arch.h"
#include "device/common/launch_dependent.cuh"
#include "device/common/vec.h"
#include "device/sm90/tensor_map.h"
#include "sparse_indexer/sm90/logits.cuh"
#include "sparse_indexer/sm90/prompt_logits.cuh"
#include "sparse_indexer/sm90/token_logits.cuh"

namespace attnops::sparse_indexer::sm90 {

inline constexpr int kTilesOfSm = 2;  // at least, before groups share keys
inline constexpr int kMostBytes = kMaxStages * (kKeyBytes + 2 * kBlockBytes);

// Between neighbours that there are; else any number that a map takes.
inline int64_t map_stride(int64_t count, int64_t stride) { return count > 1 ? stride : 128; }
inline bool map_takes(const void* base, int64_t stride) {
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && stride % 16 == 0 && stride > 0;
}

// Rows of a box of keys; 0 where boxes do not fit.
inline int box_rows_of(const LogitsParams& p) {
  const int64_t stride_head = map_stride(p.num_heads, p.stride_head);
  const int64_t stride_token = map_stride(p.num_rows, p.stride_token);
  if (p.num_heads == 0 || !map_takes(p.q, stride_head) || !map_takes(p.q, stride_token)) return 0;
  if (p.ragged) return p.num_keys > 0 && map_takes(p.k, map_stride(p.num_keys, p.stride_k)) ? 64 : 0;
  const int rows = min_of(p.pages.page_size & -p.pages.page_size, kTileKeys);
  const bool fits =
      p.pages.num_pages > 0 && map_takes(p.pages.data, map_stride(p.pages.num_pages, p.pages.stride_page));
  return fits && rows >= 8 ? rows : 0;
}

template <int kHeads>
Maps make_maps(const LogitsParams& p, const Memory& memory) {
  const auto extent = [](int64_t n) { return static_cast<uint64_t>(n); };
  constexpr DType kBytes = DType::kFloat8E4M3;
  const uint64_t dim = extent(p.dim);
  const uint64_t extents[3] = {dim, extent(p.num_heads), extent(p.num_rows)};
  const uint64_t strides[2] = {extent(map_stride(p.num_heads, p.stride_head)),
                               extent(map_stride(p.num_rows, p.stride_token))};
  const uint32_t box[3] = {128, kHeads, kBlockColumns / kHeads};
  const uint64_t stride_k = extent(map_stride(p.num_keys, p.stride_k));
  const MapGeometry ragged{
      kBytes, p.k, {dim, extent(p.num_keys), 1}, {stride_k, stride_k}, static_cast<uint32_t>(memory.box_rows)};
  const MapGeometry paged{kBytes,
                          p.pages.data,
                          {dim, extent(p.pages.page_size), extent(p.pages.num_pages)},
                          {dim, extent(map_stride(p.pages.num_pages, p.pages.stride_page))},
                          static_cast<uint32_t>(memory.box_rows)};
  return {make_tensor_map(p.ragged ? ragged : paged), encode_tensor_map(kBytes, p.q, 3, extents, strides, box)};
}

template <int kHeads, bool kAhead, template <int> class Copier>
void launch_kernel(const LogitsParams& p, const Memory& memory, const Maps& maps, cudaStream_t stream) {
  const int bytes = memory.stages * (kKeyBytes + memory.blocks * kBlockBytes);
  launch_dependent<&index_logits_kernel<kHeads, kAhead, Copier>>(
      "index_logits", {device_sms("index_logits"), kThreads, bytes, kMostBytes}, stream, p, memory, maps);
}

// Whether groups are full, but for one in ten tokens; scales come 16 bytes at a time.
inline bool is_prompt(const LogitsParams& p, const Memory& memory) {
  const int64_t places = int64_t{memory.groups_together} * memory.tokens;
  return memory.blocks == kMaxBlocks && places * 9 <= int64_t{memory.rows_together} * 10 &&
         (!p.ragged || rows_aligned(p.k_scale, 4, 16));
}

template <int kHeads>
void launch_prompt(const LogitsParams& p, Memory memory, cudaStream_t stream) {
  memory.box_rows = p.ragged ? 64 : min_of(memory.box_rows, 64);
  memory.box_shift = 0;
  while (1 << memory.box_shift < memory.box_rows) ++memory.box_shift;
  const Maps maps = make_maps<kHeads>(p, memory);
  const auto launch = [&]<typename Out>(Out) {
    launch_dependent<&prompt_logits_kernel<kHeads, Out>>(
        "index_logits",
        {device_sms("index_logits"), PromptMultiplier<kHeads, Out>::kThreads + kCopy, kPromptBytes, kPromptBytes},
        stream, p, memory, maps);
  };
  p.bf16 ? launch(__nv_bfloat16{}) : launch(float{});
}

// Calls `launch` with the number of blocks of columns that a kernel is compiled for, of those that a request needs.
template <int kHeads, class Launch>
void with_token_blocks(int blocks, const Launch& launch) {
  if (blocks == 1) return launch(std::integral_constant<int, 1>{});
  if constexpr (kMostTokenBlocks<kHeads> >= 2) {
    if (blocks == 2) return launch(std::integral_constant<int, 2>{});
  }
  if constexpr (kMostTokenBlocks<kHeads> >= 4) return launch(std::integral_constant<int, 4>{});
}

// Whether the tokens of each request are few blocks, and tiles boxes.
template <int kHeads>
bool is_few(const LogitsParams& p, const Memory& memory) {
  const int64_t most_keys = p.max_pages * p.pages.page_size;
  if (p.ragged || memory.groups_together != 1 || memory.blocks > kMostTokenBlocks<kHeads>) return false;
  int64_t most_rows = 0;
  with_token_blocks<kHeads>(memory.blocks, [&](auto blocks) { most_rows = TokenRoom<decltype(blocks)::value>::kRows; });
  return memory.box_rows >= kStepKeys && p.num_rows <= most_rows && most_keys * memory.groups < INT32_MAX;
}

template <int kHeads>
void launch_tokens(const LogitsParams& p, Memory memory, cudaStream_t stream) {
  memory.box_rows = kStepKeys;
  Maps maps = make_maps<kHeads>(p, memory);
  memory.wide = p.pages.page_size == kStepKeys && p.dim == 128;  // a page is one box, scales too
  if (memory.wide) {
    constexpr uint32_t kRows = kStepKeys + kStepKeys * 4 / 128;
    const auto pages = static_cast<uint64_t>(p.pages.num_pages);
    const auto stride_page = static_cast<uint64_t>(map_stride(p.pages.num_pages, p.pages.stride_page));
    maps.keys = make_tensor_map({DType::kFloat8E4M3, p.pages.data, {128, kRows, pages}, {128, stride_page}, kRows});
  }
  with_token_blocks<kHeads>(memory.blocks, [&](auto blocks) {
    constexpr int kBlocks = decltype(blocks)::value, kBytes = TokenRoom<kBlocks>::kBytes;
    const auto launch = [&]<typename Out>(Out) {
      launch_dependent<&token_logits_kernel<kHeads, kBlocks, Out>>(
          "index_logits", {kTokenCtas * device_sms("index_logits"), kTokenThreads, kBytes, kBytes}, stream, p, memory,
          maps);
    };
    p.bf16 ? launch(__nv_bfloat16{}) : launch(float{});
  });
}

// Of a group: as many as there is room for, but prompts of few rows and keys leave no multiprocessor idle for it.
template <int kTokens>
int blocks_of(const LogitsParams& p, int64_t together) {
  int blocks = static_cast<int>(min_of<int64_t>(kMaxBlocks, ceil_div<int64_t>(together, kTokens)));
  if (!p.ragged) return blocks;
  const int64_t tiles = ceil_div<int64_t>(p.num_keys, kTileKeys), enough = kTilesOfSm * device_sms("index_logits");
  while (blocks > 1 && ceil_div<int64_t>(together, blocks * kTokens) * tiles < enough) blocks = ceil_div(blocks, 2);
  return blocks;
}

template <int kHeads>
void launch_heads(const LogitsParams& p, cudaStream_t stream) {
  constexpr int kTokens = kBlockColumns / kHeads;
  const int64_t together = !p.ragged ? p.seqlen_q : p.num_rows;
  if (p.num_rows == 0 || together == 0) return;
  Memory memory{};
  memory.blocks = blocks_of<kTokens>(p, together);
  memory.stages = min_of(kMaxStages, kMostBytes / (kKeyBytes + memory.blocks * kBlockBytes));
  memory.tokens = memory.blocks * kTokens;
  memory.rows_together = static_cast<int>(together);
  memory.groups_together = ceil_div(memory.rows_together, memory.tokens);
  memory.groups = static_cast<int>(p.num_rows / together) * memory.groups_together;
  memory.box_rows = box_rows_of(p);
  while (1 << memory.box_shift < memory.box_rows) ++memory.box_shift;
  if (memory.box_rows > 0) {
    if constexpr (kHeads >= 32) {
      if (is_prompt(p, memory)) return launch_prompt<kHeads>(p, memory, stream);
    }
    if (is_few<kHeads>(p, memory)) return launch_tokens<kHeads>(p, memory, stream);
    const Maps maps = make_maps<kHeads>(p, memory);
    memory.blocks > 1 ? launch_kernel<kHeads, true, BoxCopier>(p, memory, maps, stream)
                      : launch_kernel<kHeads, false, BoxCopier>(p, memory, maps, stream);
    return;
  }
  const bool aligned_keys =
      !p.ragged ? rows_aligned(p.pages.data, 1, 16, p.pages.stride_page) : rows_aligned(p.k, 1, 16, p.stride_k);
  memory.wide = aligned_keys && rows_aligned(p.q, 1, 16, p.stride_token, p.stride_head);
  launch_kernel<kHeads, false, RowCopier>(p, memory, Maps{}, stream);
}

}  // namespace attnops::sparse_indexer::sm90
