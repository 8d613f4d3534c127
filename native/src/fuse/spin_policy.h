// Whether a reader that has nothing to do looks at the device for a while before it sleeps in read().
// Owned by one reader of a transport.
// Used by that reader's thread alone.
#pragma once

#include <chrono>

namespace gpufs::fuse {

// To be woken costs more than the whole service of a small request, most of all in a virtual machine, and the next
// request of a client that works through a file comes soon after the reply. So a reader looks for it, for as long as
// its requests do come that soon: two long waits in a row end it, one short wait starts it again.
class SpinPolicy {
 public:
  explicit SpinPolicy(std::chrono::nanoseconds longest) : longest_(longest) {}

  // How long to look before sleeping; zero: not at all.
  [[nodiscard]] std::chrono::nanoseconds window() const {
    return misses_ < kMisses ? longest_ : std::chrono::nanoseconds{0};
  }
  // A request came after so long a wait, in whatever way it was waited for.
  void waited(std::chrono::nanoseconds time) {
    if (time <= longest_) {
      misses_ = 0;
    } else if (misses_ < kMisses) {
      ++misses_;
    }
  }

 private:
  static constexpr unsigned kMisses = 2;

  std::chrono::nanoseconds longest_;
  unsigned misses_ = kMisses;
};

}  // namespace gpufs::fuse
