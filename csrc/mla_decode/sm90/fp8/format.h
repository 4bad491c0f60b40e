#pragma once

namespace attnops::mla_decode::sm90::fp8 {

// The two FP8 formats of a cached token.
enum class Format {
  kDense,  // 576 e4m3; one scale for all, applied to scores and outputs, so that conversion is exact
  kRow,    // 512 e4m3, 4 float32 scales (one per 128), 64 bf16 rope
};

}  // namespace attnops::mla_decode::sm90::fp8
