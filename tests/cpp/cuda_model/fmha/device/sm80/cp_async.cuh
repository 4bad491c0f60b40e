#pragma once
#include <map>

#include "device/sm80/mma.cuh"

// Copies land when the thread that began them waits, and their destination holds NaN until then.
namespace attnops {

inline uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - memory);
}

struct PendingCopy {
  uint32_t destination;
  int bytes;
  unsigned char data[16];
};
using CopyGroups = std::vector<std::vector<PendingCopy>>;
inline std::map<int, CopyGroups> pending_copies;  // of a thread: groups, of which the last is not committed

inline CopyGroups& own_copies() {
  CopyGroups& groups = pending_copies[static_cast<int>(threadIdx.x)];
  if (groups.empty()) groups.emplace_back();
  return groups;
}

inline void begin_copy(uint32_t destination, const void* source, int bytes, bool take) {
  if (destination % bytes != 0 || destination + bytes > sizeof(memory)) std::abort();
  if (take && reinterpret_cast<uintptr_t>(source) % bytes != 0) std::abort();
  PendingCopy copy{destination, bytes, {}};
  if (take) std::memcpy(copy.data, source, bytes);
  std::memset(memory + destination, 0xff, bytes);
  own_copies().back().push_back(copy);
}

inline void cp_async_16(uint32_t destination, const void* source, bool take) {
  begin_copy(destination, source, 16, take);
}
inline void cp_async_16_if(bool go, uint32_t destination, const void* source, bool take) {
  if (go) begin_copy(destination, source, 16, take);
}
inline void cp_async_commit() { own_copies().emplace_back(); }
template <int kPending>
void cp_async_wait() {
  CopyGroups& groups = own_copies();
  while (static_cast<int>(groups.size()) - 1 > kPending) {
    for (const PendingCopy& copy : groups.front()) std::memcpy(memory + copy.destination, copy.data, copy.bytes);
    groups.erase(groups.begin());
  }
}

}  // namespace attnops
