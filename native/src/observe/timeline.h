// From ticks of the processor's counter to nanoseconds of the monotonic clock, between moments known in both.
// Owned by the trace.
// One thread at a time.
#pragma once

#include <cstdint>
#include <vector>

namespace gpufs::observe {

class Timeline {
 public:
  struct Moment {
    std::uint64_t ticks = 0;
    std::uint64_t ns = 0;
  };

  // This moment, in both clocks.
  [[nodiscard]] static Moment now();

  // Moments in order; one that is not after the last is left out.
  void add(const Moment& moment);
  void clear() { moments_.clear(); }
  // The ticks of the last moment: what is later cannot be told yet. 0 before the first.
  [[nodiscard]] std::uint64_t known_until() const { return moments_.empty() ? 0 : moments_.back().ticks; }
  // Never decreasing, and the same for the same ticks for as long as few moments are forgotten. What lies before the
  // first moment is put where the first interval's pace puts it.
  [[nodiscard]] std::uint64_t to_ns(std::uint64_t ticks) const;

 private:
  std::vector<Moment> moments_;
};

}  // namespace gpufs::observe
