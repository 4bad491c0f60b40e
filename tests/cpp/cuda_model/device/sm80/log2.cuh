#pragma once
#include <cmath>

namespace attnops {

inline float log2_approx(float x) { return std::log2(x); }

}  // namespace attnops
