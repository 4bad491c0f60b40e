#pragma once
#include <cstdint>

#include "core/math.h"

// Prefill from rows of 656 bytes that many tokens list: each row that is listed becomes bf16 once, in scratch, and the
// kernel of 16-bit rows attends to these, by lists with new numbers. docs/kernels/sparse_mla_sm90.md.
namespace attnops::sparse_mla {

inline constexpr int kConvertedBytes = 1152;         // 576 bf16
inline constexpr int kRowsPerWord = 32;              // of the pool, whose bits are in one word
inline constexpr int64_t kMostListable = 1LL << 31;  // rows that an index can name

// What the first bytes of scratch count.
struct ConvertCounts {
  unsigned long long listed;  // entries of all lists that are rows
  uint32_t rows;              // different ones
  uint32_t blocks_done;       // of the kernel that counts these
  int32_t turn;               // 1: the converted rows are attended to; 0: those of the pool
};

// Bits of listed rows, and the number of the first of them.
struct alignas(8) ListedRows {
  uint32_t bits;
  uint32_t first;
};

// Where things lie in scratch, from a boundary of 256 bytes on.
struct ConvertLayout {
  static constexpr int64_t kAlignment = 256, kCounts = 0;
  int64_t words;  // of listed rows, and of bytes of them 32 times as many
  int64_t entries;
  int64_t flags, listed, lists, rows;  // bytes; rows is where all else ends

  ATTNOPS_HOST_DEVICE static int64_t align(int64_t bytes) { return round_up(bytes, kAlignment); }

  ATTNOPS_HOST_DEVICE ConvertLayout(int64_t num_rows, int64_t num_tokens, int64_t topk)
      : words(ceil_div(min_of(num_rows, kMostListable), int64_t{kRowsPerWord})), entries(num_tokens * topk) {
    flags = align(sizeof(ConvertCounts));
    listed = flags + align(words * kRowsPerWord);
    lists = listed + align(words * static_cast<int64_t>(sizeof(ListedRows)));
    rows = lists + align(entries * 4);
  }

  // Rows that scratch of `bytes` holds, wherever it begins; below 1: none.
  int64_t capacity(int64_t bytes) const { return (bytes - kAlignment - rows) / kConvertedBytes; }
  int64_t least_bytes() const { return kAlignment + rows + kConvertedBytes; }
};

// Entries of lists that each different row must have in the mean, so that converting it gains. A row costs some 0.6 ns
// on an H200 (1808 bytes), an entry is 0.2 ns of 128 heads faster, and 0.05 to 0.1 of one block.
inline constexpr int least_entries_per_row(int num_q_heads) { return num_q_heads > 64 ? 4 : 12; }

}  // namespace attnops::sparse_mla
