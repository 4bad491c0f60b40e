#pragma once

namespace attnops::sm90 {

inline void fence_async_proxy_everywhere() {}

}  // namespace attnops::sm90
