#include "observe/timeline.h"

#include <algorithm>
#include <cstddef>
#include <iterator>

#include "observe/counters.h"
#include "observe/tick_clock.h"

namespace gpufs::observe {
namespace {

constexpr int kTries = 8;
// Enough for an hour at fifty readings a second. Beyond that every second old one goes: paces hardly differ.
constexpr std::size_t kMostMoments = std::size_t{1} << 18;

}  // namespace

Timeline::Moment Timeline::now() {
  // The try during which least time passed: in others the thread may have been put aside.
  Moment best;
  std::uint64_t least = ~std::uint64_t{0};
  for (int number = 0; number < kTries; ++number) {
    const std::uint64_t before = read_ticks();
    const std::uint64_t ns = now_ns();
    const std::uint64_t passed = read_ticks() - before;
    if (passed >= least) continue;
    least = passed;
    best = {before + passed / 2, ns};
  }
  return best;
}

void Timeline::add(const Moment& moment) {
  if (!moments_.empty() && (moment.ticks <= moments_.back().ticks || moment.ns <= moments_.back().ns)) return;
  if (moments_.size() >= kMostMoments) {
    std::size_t kept = 1;
    for (std::size_t place = 2; place < moments_.size(); place += 2) moments_[kept++] = moments_[place];
    moments_.resize(kept);
  }
  moments_.push_back(moment);
}

std::uint64_t Timeline::to_ns(std::uint64_t ticks) const {
  if (moments_.empty()) return 0;
  if (moments_.size() == 1) return moments_.front().ns;
  // The end of the interval that has them; the first or the last one for what lies outside.
  auto end = std::upper_bound(moments_.begin(), moments_.end(), ticks,
                              [](std::uint64_t value, const Moment& moment) { return value < moment.ticks; });
  if (end == moments_.begin()) ++end;
  if (end == moments_.end()) --end;
  const Moment& to = *end;
  const Moment& from = *std::prev(end);
  const double pace = static_cast<double>(to.ns - from.ns) / static_cast<double>(to.ticks - from.ticks);
  // In doubles, which hold a second's nanoseconds exactly: intervals are short.
  if (ticks >= from.ticks) return from.ns + static_cast<std::uint64_t>(static_cast<double>(ticks - from.ticks) * pace);
  return from.ns - std::min(from.ns, static_cast<std::uint64_t>(static_cast<double>(from.ticks - ticks) * pace));
}

}  // namespace gpufs::observe
