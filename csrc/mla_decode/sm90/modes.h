#pragma once
#include <cuda.h>

#include "core/divisor.h"

namespace attnops::mla_decode::sm90 {

// Where rows of the pool begin, in units that divide both strides: 32 bits then reach as far as pools do.
struct RowUnits {
  uint32_t bytes = 0;  // of a unit; 0: they do not reach
  uint32_t per_page = 0, per_token = 0;
};

// What the host has found out about the arguments.
struct Modes {
  bool use_boxes;       // whole tiles come by the copy engine
  bool queries_by_map;  // and so do queries
  bool out_aligned;     // rows of the output start on 16-byte boundaries
  int tiles_per_page;   // of boxes, at least one
  int box_shift;        // a tile comes as 2^box_shift boxes, one of each page
  Divisor by_page_size;
  RowUnits units;
  Divisor by_extra_size;  // of a second pool
  RowUnits extra_units;
  bool out_by_map = false;  // of lists: whole rows of the output go by the copy engine
};

// Of lists, whose rows come without maps: q is the latent part of all 64 rows, q_pe always the rope part, and kv is the
// output, in boxes of 16 rows.
struct Maps {
  CUtensorMap kv, q, q_pe;
  CUtensorMap kv_half;  // boxes of half as many rows, of common calls
};

}  // namespace attnops::mla_decode::sm90
