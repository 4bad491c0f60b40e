#pragma once
#include <cstdint>

#include "core/types.h"

// What a chunk of tokens of a linear recurrence takes beside its products: rows of floats, one table per instruction
// set. Rows start on 64-byte boundaries, leading dimensions are in elements.
namespace attnops::cpu {

// How much each token of a chunk has of what earlier ones wrote. `decay` and `key_norm` are factors of the tokens;
// decays between tokens are products of them, so that no exponent is above 0.
struct ChunkWeights {
  const float *keys, *queries;    // [count, ld]: k_t k_s, and q_t k_s, for s up to t
  const float *decay, *key_norm;  // [count]
  const float* coefficient;       // [count], of L
  float* l;                       // [count, ld], or null: coefficient_t key_norm_t D_ts k_t k_s, for s < t
  float* p;                       // [count, ld]: D_ts q_t k_s, for s up to t, and zeros
  float* left;                    // [ld]: key_norm_s and the decays of all tokens behind s; zeros from `count` on
  int64_t ld;                     // a multiple of 16
  int count;
};

// U of (1 + L) U = v_factor V - state_factor KS, in V's place. With `written` it is what the products write: rows times
// `written`, rounded to bf16 before later rows see them. So these take back what rounding did.
struct ChunkSolve {
  float* u;                              // [count, n]: V; overwritten
  const float* ks;                       // [count, n]: what the state at the chunk's begin says to the keys
  const float* l;                        // [count, ld], below the diagonal
  const float *v_factor, *state_factor;  // [count]
  const float *written, *unwritten;      // [ld], or null: factors of rows, and one by them
  int64_t ld;
  int count, n;  // n: a multiple of 16
};

// A row of the output: (factor acc + skip v) z sigmoid(z).
struct ChunkOut {
  const float* acc;      // [count, n]
  const float* factor;   // [count]
  void* const* rows;     // of dtype
  const void* const* v;  // of dtype, or null
  const void* const* z;  // of dtype, or null
  float skip;
  int count, n;
  DType dtype;
};

// What gates become. With a rate, logits x: the decay is exp(-rate softplus(x)), or exp(lower_bound sigmoid(rate x))
// where lower_bound is below 0. Without one x is the log of the decay.
struct ChunkGates {
  float* x;           // [n]; overwritten
  const float* bias;  // [n], or null
  int n;              // a multiple of 16
  bool has_rate;
  float rate, lower_bound;  // the rate finite
};

// A chunk whose tokens have a decay for each key channel, in blocks of kChunkBlock tokens. Rows of [n, keys], those
// from `count` on are zero.
inline constexpr int kChunkBlock = 16;
struct ChunkChannels {
  const float *keys, *queries, *decay;
  float* fade;                         // [keys]: in and out, the decay from the chunk's begin to the block's
  float *by_block, *queries_by_block;  // keys and queries, decayed from the block's begin to the token
  float *by_chunk, *queries_by_chunk;  // and from the chunk's begin
  float* ahead;              // keys, decayed from behind the token to the block's end; earlier blocks' as well
  float *dots, *query_dots;  // [n, n]: of tokens of the block, decays included
  int num_keys, n;
};

struct ChunkKernels {
  // As TileOps::load_rows, into floats.
  void (*load_rows)(void* dst, int64_t ld, const void* const* rows, int m, int k, int k_padded, DType dtype,
                    float scale);
  void (*find_decays)(const ChunkGates& gates);
  void (*sigmoid)(float* x, int n);
  void (*softplus)(float* x, int n);
  void (*spread_block)(const ChunkChannels& channels, int first);   // all but the dots
  void (*meet_in_block)(const ChunkChannels& channels, int first);  // the dots
  void (*weigh)(const ChunkWeights& weights);
  void (*solve)(const ChunkSolve& solve);
  void (*scale_rows)(float* rows, int64_t ld, const float* factors, int m, int n);
  void (*finish)(const ChunkOut& out);
};

const ChunkKernels& avx2_chunk_kernels();
const ChunkKernels& avx512_chunk_kernels();

}  // namespace attnops::cpu
