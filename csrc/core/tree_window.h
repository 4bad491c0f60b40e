#pragma once
#include <cstdint>

#include "core/math.h"

namespace attnops {

// Windows beside a tree mask count steps of the tree, not rows: a draft stands at its depth, the bits set in its row
// less one. `row` has a bit for each of `count` drafts, which stand behind `prefix` keys. Returns the first key in the
// row's window, which holds the last window_left + 1 drafts that the row sees, or all of them and the prefix's last
// keys. It is `prefix` - window_left at least.
ATTNOPS_HOST_DEVICE inline int64_t tree_window_begin(const uint8_t* row, int64_t count, int64_t prefix,
                                                     int64_t window_left) {
  int64_t room = window_left + 1;  // for keys ahead of those drafts that are counted already
  for (int64_t byte = (count + 7) / 8 - 1; byte >= 0; --byte) {
    const unsigned bits = row[byte];
    if (bits == 0) continue;
    for (int bit = static_cast<int>(min_of<int64_t>(count - 8 * byte, 8)) - 1; bit >= 0; --bit) {
      if ((bits >> bit & 1) != 0 && --room == 0) return prefix + 8 * byte + bit;
    }
  }
  return prefix - min_of(room, window_left);  // a row that sees no draft stands at the first
}

}  // namespace attnops
