#pragma once
#include <cstdint>
#include <memory>

#include "fmha/cpu/work.h"

namespace attnops::fmha::cpu {

// The tiled kernel of one thread: its buffers, and one work item after the other on them. A tile of keys is packed once
// and then meets all rows of the item, which stay in the caches: as float or bf16 with a float accumulator.
class Kernel {
 public:
  Kernel(const Params& params, const attnops::cpu::TileOps& ops);

  void run(const Work& work);

 private:
  void load_queries(const Work& work);
  void attend(const Work& work, int first_row, int num_rows, int first_key, int num_columns);
  void set_visible(const Work& work, int first_row, int num_rows, int begin_key, int num_columns, int first_key);
  void store(const Work& work);

  const Params& p_;
  const attnops::cpu::TileOps& ops_;
  int dim_qk_, dim_v_;   // padded
  float scale_ = 0.f;    // of the current item's scores, not negative
  bool faulty_ = false;  // the current tile has null rows

  std::unique_ptr<char[]> storage_;
  void* queries_;  // [kMaxRows, dim_qk_]
  void* keys_;     // panels of one tile
  void* values_;
  float* scores_;  // [kRowBlock, kTileKeys]
  void* probs_;    // the same, in the compute type; float: the scores themselves
  float* acc_;     // [kMaxRows, dim_v_]
  float* row_max_;
  float* row_sum_;
  uint64_t* visible_;  // [kRowBlock, kTileWords]
  const void** k_rows_;
  const void** v_rows_;
};

}  // namespace attnops::fmha::cpu
