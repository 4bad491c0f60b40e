#pragma once
#include <cstddef>
#include <cstdint>

#include "core/types.h"

// Matrix vocabulary of the CPU attention kernels: a block of query rows against a tile of keys. An op walks pages,
// decides what is visible and owns the buffers, in portable code; the arithmetic is behind one table of functions per
// instruction set, so that no family is compiled per instruction set, and no shared inline function can be emitted
// with instructions that a processor lacks.
//
// A step over a key tile:  pack_keys, pack_values;  scores = Q K^T (gemm);  softmax;  out += P V (gemm).
namespace attnops::cpu {

inline constexpr int kKeyMultiple = 32;  // key tiles are processed in multiples of this; the rest is masked
inline constexpr int kPanel = 16;        // columns of a packed panel
inline constexpr int kRowMultiple = 16;  // row blocks are allocated in multiples of this
inline constexpr int kSumLanes = 16;     // partial sums kept per row

constexpr int64_t round_up_to(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// An online softmax step of `m` rows over `n` columns. Scores are scaled, capped, masked by selection and exponentiated
// against the row's reference, a maximum that moves only when a score exceeds it by far: then the row's sums and its
// row of `out` are rescaled.
struct SoftmaxTile {
  float* scores;  // [m, n] products; overwritten
  int64_t ld_scores;
  void* probs;  // [m, n] of the compute type, zero where not visible; may be `scores` when that is float
  int64_t ld_probs;
  int m, n;  // n: a multiple of kKeyMultiple

  const uint64_t* visible;  // per row, bit j: column j is visible; null: all are
  int64_t ld_visible;       // words per row; bit 0 of the first word is column 0

  float scale;      // >= 0, of the products
  float logit_cap;  // 0: off

  float* row_max;  // [m] reference in log2 units; -inf before the first visible key
  float* row_sum;  // [m, kSumLanes], zero at first; the sum of exponentials is the sum of the lanes
  float* out;      // [m, n_out] accumulated so far
  int64_t ld_out;
  int n_out;  // a multiple of kPanel
};

// Rows that are needed soon: whoever computes asks for a line of theirs now and then. All at once they would be more
// than a core keeps track of, and processors drop what is too much.
class RowsAhead {
 public:
  RowsAhead(const void* const* rows, int count, int row_bytes)
      : next_row_(rows), end_(rows + count), row_bytes_(row_bytes) {}

  // Asks for the next line, if there is one.
  void ask() {
    if (left_ <= 0) {
      if (next_row_ == end_) return;
      line_ = static_cast<const char*>(*next_row_++);
      left_ = row_bytes_;
    }
    __builtin_prefetch(line_, 0, 3);
    line_ += kLine;
    left_ -= kLine;
  }

 private:
  static constexpr int kLine = 64;
  const void* const* next_row_;
  const void* const* end_;
  const char* line_ = nullptr;
  int row_bytes_, left_ = 0;
};

// Compute type: float, or bf16 where the instruction set multiplies it. "Element" below is of that type. All buffers
// start on 64-byte boundaries, leading dimensions are in elements.
struct TileOps {
  const char* name;
  int element_size;  // 4: float, 2: bf16
  int k_multiple;    // gemm's k must be a multiple: pad head_dim with zeros (load_rows and pack_keys do)

  // Around any sequence of the calls below, on each thread: some instruction sets have state to set up.
  void (*begin)();
  void (*end)();

  // dst[m, k] = scale * rows[i][0..k), for rows of dtype float32, float16, bfloat16 or float8_e4m3fn; columns
  // [k, k_padded) become zero. A null row is all zeros.
  void (*load_rows)(void* dst, int64_t ld, const void* const* rows, int m, int k, int k_padded, DType dtype,
                    float scale);

  // Key rows into panels [n / kPanel][k_padded][kPanel] (pairs of k interleaved in bf16), value rows into panels
  // [d_padded / kPanel][n][kPanel] (pairs of n interleaved). n: a multiple of kKeyMultiple; null rows are zeros, and
  // so are the paddings k..k_padded and d..d_padded, of which d_padded is a multiple of kPanel. Rows are of an input's
  // dtype that the table serves, float8_e4m3fn or float32.
  void (*pack_keys)(void* dst, const void* const* rows, int n, int k, int k_padded, DType dtype);
  void (*pack_values)(void* dst, const void* const* rows, int n, int d, int d_padded, DType dtype);

  // c[m, n] = a[m, k] b[k, n], or += . b: panels of `panel_rows` rows each (k_padded above, or the n of pack_values);
  // a shorter k uses the first k rows of each panel. n: a multiple of kPanel. c and a have round_up(m, kRowMultiple)
  // rows, and rows beyond m may be written.
  void (*gemm)(float* c, int64_t ldc, const void* a, int64_t lda, const void* b, int64_t panel_rows, int m, int n,
               int k, bool accumulate);

  // gemm without accumulation, of an `a` that is not near yet: asks for rows meanwhile.
  void (*gemm_ahead)(float* c, int64_t ldc, const void* a, int64_t lda, const void* b, int64_t panel_rows, int m, int n,
                     int k, RowsAhead& ahead);

  // c[m, n] += a[m, k] b[k, n], b's rows of the compute type wherever they lie: for values that are multiplied once.
  // n and k: multiples of kKeyMultiple; c and a as above. Asks for rows meanwhile. Null where only packed panels are
  // multiplied.
  void (*gemm_rows)(float* c, int64_t ldc, const void* a, int64_t lda, const void* const* rows, int m, int n, int k,
                    RowsAhead& ahead);

  // high + rest = src[m, n], each rounded to elements: twice the digits, for two products. Columns are multiplied by
  // factors first unless those are null. n: a multiple of kKeyMultiple. Null where elements are floats.
  void (*split)(void* high, void* rest, const float* src, const float* factors, int m, int n);

  // dst[n, m] = transposed src[m, n]; m and n are multiples of kPanel.
  void (*transpose)(float* dst, int64_t ld_dst, const float* src, int64_t ld_src, int m, int n);

  void (*softmax)(const SoftmaxTile& tile);

  // rows[i][0..n) = factors[i] * acc[i][0..n), rounded once to dtype float32, float16 or bfloat16. A factor of zero
  // gives zeros whatever acc holds.
  void (*store_rows)(void* const* rows, const float* acc, int64_t ld, const float* factors, int m, int n, DType dtype);
};

// The table for inputs of `dtype` (of q) on `isa`; null for Isa::kScalar, where an op uses its reference.
const TileOps* tile_ops(Isa isa, DType dtype);

// Scope of begin() and end().
class TileScope {
 public:
  explicit TileScope(const TileOps& ops) : ops_(ops) { ops_.begin(); }
  ~TileScope() { ops_.end(); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

 private:
  const TileOps& ops_;
};

// One table per instruction set, each defined by the file that is compiled for it.
const TileOps& avx2_tile_ops();
const TileOps& avx512_tile_ops();
const TileOps& avx512bf16_tile_ops();
const TileOps& amx_tile_ops();

}  // namespace attnops::cpu
