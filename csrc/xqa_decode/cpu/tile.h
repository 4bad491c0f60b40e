#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/types.h"

// What an instruction set has to supply to the CPU decode: the arithmetic of one tile of KV tokens. Everything about
// requests, pages, masks and plans is in driver.cpp, once for all of them.
namespace attnops::xqa_decode::cpu {

inline constexpr int kTileTokens = 64;  // as in the plan: one bit of a uint64 per token
inline constexpr int kPackedRows = 16;  // packed queries have room for a multiple of

// One tile of tokens against the query rows of one (request, KV head), and the online softmax state of these rows.
struct Tile {
  int num_rows, head_dim;
  int group;       // rows of a query token: heads that share this KV head
  int num_tokens;  // 1 .. kTileTokens

  // Addresses of the tokens' keys and values for this head. The arrays have kTileTokens cells; those from num_tokens on
  // point to zeros, as do tokens that no row may see.
  const char* const* k_rows;
  const char* const* v_rows;
  const uint64_t* visible;  // [num_rows], bit t: the row sees token t; null: every row sees all num_tokens

  // What will be read after this tile and should be fetched meanwhile: fetch_bytes from each address.
  const char* const* fetch_rows;
  int num_fetch, fetch_bytes;

  const char* q;      // packed rows, q_row_bytes each
  float* acc;         // [num_rows, acc_stride]: sum of p * v, in the kernel's own column order
  float* row_max;     // [num_rows], in units of log2: of the scores so far
  float* row_sum;     // [num_rows]: sum of 2^(score - row_max)
  char* scratch;      // scratch_bytes, aligned to 64
  float score_scale;  // times <q, k>: the score in units of log2; with a cap: the argument of tanh
  float score_cap;    // 0: no cap; else score = score_cap * tanh(...)
};

struct TileKernel {
  int (*q_row_bytes)(int head_dim);
  int (*acc_stride)(int head_dim);
  int (*scratch_bytes)(int head_dim);
  void (*pack_q)(const void* q_row, int head_dim, char* packed);
  void (*attend)(const Tile& tile);
  void (*store)(const float* acc, int head_dim, float factor, void* out);           // in the op's dtype
  void (*store_partial)(const float* acc, int head_dim, float factor, float* out);  // float32
  void (*round)(const float* row, int head_dim, void* out);                         // float32, in order, to the dtype

  // Null where a kernel has nothing to do: around all calls of `attend` in a thread, and once the rows are packed.
  void (*begin)() = nullptr;
  void (*end)() = nullptr;
  void (*arrange_q)(char* q, int num_rows, int head_dim) = nullptr;
};

// A row of the table of impls.cpp.
struct ImplKey {
  Isa isa;
  DType dtype, kv_dtype;
  int head_dim;
};

struct Impl {
  const char* name;
  Isa isa;
  DType dtype;
  int head_dim_multiple;
  const TileKernel* plain;  // KV of the query's dtype
  const TileKernel* fp8;    // KV float8_e4m3fn
  const TileKernel* e5m2;   // KV float8_e5m2; null: not served

  std::string reject(const ImplKey& key) const;
};

const TileKernel& select_tile_kernel(const ImplKey& key);

}  // namespace attnops::xqa_decode::cpu
