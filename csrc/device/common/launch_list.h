#pragma once
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "device/common/launch.h"

namespace attnops {

// Kernel launches written down with copies of their arguments. While a list is active in a thread, launch_dependent
// adds to it instead of launching: so the launches of several functions can be submitted together.
class LaunchList {
 public:
  static constexpr int kMost = 2, kMostArguments = 8, kMostAttributes = 2, kArgumentBytes = 4096;

  struct Launch {
    const void* kernel;
    cudaLaunchConfig_t config;  // `attrs` is set when it is launched
    cudaLaunchAttribute attributes[kMostAttributes];
    int num_arguments;
    int begins[kMostArguments];
    int bytes;
    alignas(64) std::byte memory[kArgumentBytes];

    void point_to(void** arguments) {
      for (int i = 0; i < num_arguments; ++i) arguments[i] = memory + begins[i];
    }
  };

  class Active {
   public:
    explicit Active(LaunchList& list) : before_(active()) { active() = &list; }
    ~Active() { active() = before_; }
    Active(const Active&) = delete;
    Active& operator=(const Active&) = delete;

   private:
    LaunchList* before_;
  };

  static LaunchList*& active() {
    static thread_local LaunchList* list = nullptr;
    return list;
  }

  template <typename... Arguments>
  void add(const char* what, const void* kernel, const cudaLaunchConfig_t& config, const Arguments&... arguments) {
    static_assert(sizeof...(Arguments) <= kMostArguments && (std::is_trivially_copyable_v<Arguments> && ...));
    static_assert(((sizeof(Arguments) + 63) + ... + 0) <= kArgumentBytes);
    if (count_ == kMost)
      throw std::logic_error(std::string("attnops: ") + what + ": a call of more launches than a list holds");
    Launch& launch = launches_[count_++];
    launch.kernel = kernel;
    launch.config = config;
    std::copy_n(config.attrs, config.numAttrs, launch.attributes);
    launch.num_arguments = 0;
    launch.bytes = 0;
    (keep(launch, &arguments, sizeof(Arguments), alignof(Arguments)), ...);
  }

  int count() const { return count_; }
  Launch& operator[](int i) { return launches_[i]; }
  const Launch& operator[](int i) const { return launches_[i]; }

  void launch(cudaStream_t stream) {
    for (int i = 0; i < count_; ++i) {
      Launch& each = launches_[i];
      each.config.stream = stream;
      each.config.attrs = each.attributes;
      void* arguments[kMostArguments];
      each.point_to(arguments);
      check_cuda(cudaLaunchKernelExC(&each.config, each.kernel, arguments), "launch");
    }
  }

 private:
  static void keep(Launch& launch, const void* argument, size_t size, size_t alignment) {
    const int begin = static_cast<int>((launch.bytes + alignment - 1) / alignment * alignment);
    std::memset(launch.memory + launch.bytes, 0, begin - launch.bytes);
    std::memcpy(launch.memory + begin, argument, size);
    launch.begins[launch.num_arguments++] = begin;
    launch.bytes = begin + static_cast<int>(size);
  }

  int count_ = 0;
  Launch launches_[kMost];
};

}  // namespace attnops
