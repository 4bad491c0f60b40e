#pragma once
#include <cstdint>
#include <memory>

#include "fmha/cpu/cuts.h"

namespace attnops::fmha::cpu {

// The tiled kernel of one thread: its buffers, and one work item after the other on them. A tile of keys is packed once
// and then meets all rows of the item, which stay in the caches: as float or bf16 with a float accumulator.
class Kernel {
 public:
  Kernel(const Params& params, const attnops::cpu::TileOps& ops);

  void run(const Work& work);

  // For threads that share the keys of a work: one cut of them; then, when all cuts are added up, the rows.
  void run_cut(const Work& work, int cut, const PartialRows& result);
  void store(const Work& work, const PartialRows& rows);
  int dim_v() const { return dim_v_; }

 private:
  // A tile of keys: column j is key first_key + j. Rows are null where no query row looks, and where the checked mode
  // met a page outside the pool.
  struct KeyTile {
    int first_key = 0, num_columns = 0;
    bool faulty = false;
    const void** k_rows = nullptr;
    const void** v_rows = nullptr;
  };

  void begin(const Work& work);
  void attend_keys(const Work& work, KeyRange keys);
  void load_queries(const Work& work);
  void gather(const Work& work, int begin, int end, KeyTile& tile);
  void drop_unseen(const Work& work, KeyTile& tile) const;
  void prefetch(const KeyTile& tile) const;
  void attend(const Work& work, int first_row, int num_rows, const KeyTile& tile);
  void seen_by(const Work& work, int token, int begin_key, int num_columns, uint64_t* bits) const;
  void set_visible(const Work& work, int first_row, int num_rows, int begin_key, int num_columns, const KeyTile& tile);

  const Params& p_;
  const attnops::cpu::TileOps& ops_;
  int dim_qk_, dim_v_;  // padded
  float scale_ = 0.f;   // of the current item's scores, not negative
  KeyTile tiles_[2];    // the one in work, and the next

  std::unique_ptr<char[]> storage_;
  void* queries_;  // [kMaxRows, dim_qk_]
  void* keys_;     // panels of one tile
  void* values_;
  float* scores_;            // [kRowBlock, kTileKeys]
  void* probs_;              // the same, in the compute type; float: the scores themselves
  PartialRows own_, total_;  // of the cut in work, and of those before
  uint64_t* visible_;        // [kRowBlock, kTileWords]
  const void** q_rows_;
};

}  // namespace attnops::fmha::cpu
