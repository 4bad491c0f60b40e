#pragma once
#include "xqa_decode/params.h"

namespace attnops::xqa_decode::sm90::fp8 {

// Head dims up to 128; by boxes of the copy engine, and row by row for pages that are too small for boxes.
LaunchFunction launch_hd128, launch_gather_hd128;

}  // namespace attnops::xqa_decode::sm90::fp8
