#pragma once

namespace attnops::sm90 {

inline void fence_async_proxy() {}

}  // namespace attnops::sm90
