#pragma once

namespace attnops::sm90 {

inline int swizzled(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

}  // namespace attnops::sm90
