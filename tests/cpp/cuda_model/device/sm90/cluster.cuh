#pragma once

// The model's CTAs run one after another, so a cluster's have nothing to wait for.
namespace attnops::sm90 {

inline void cluster_arrive_relaxed() {}
inline void cluster_wait() {}

}  // namespace attnops::sm90
