#pragma once

namespace attnops::sm90 {

// Orders ordinary accesses to all memory before those of the copy engine, or after them.
__device__ inline void fence_async_proxy_everywhere() { asm volatile("fence.proxy.async;" ::: "memory"); }

}  // namespace attnops::sm90
