#include "device/releases.h"

#include <algorithm>
#include <utility>

namespace gpufs {
namespace {

// How long after the removal of a file its memory is expected back: the kernel's FORGET comes within milliseconds. A
// file that still exists then is kept by somebody.
constexpr std::chrono::milliseconds kForgetTime{300};
// A request that fails otherwise may wait longer: a busy machine delays the FORGET.
constexpr std::chrono::milliseconds kLongestForgetTime{1000};
// Less than one part in so many of a device's memory is not worth waiting for.
constexpr std::uint64_t kSmallPart = 64;

}  // namespace

void Releases::list_trimmable(const ExtentBuffer* key, std::weak_ptr<ExtentBuffer> buffer) {
  const std::lock_guard lock(mutex_);
  trimmable_[key] = std::move(buffer);
}

void Releases::unlist_trimmable(const ExtentBuffer* key) {
  const std::lock_guard lock(mutex_);
  trimmable_.erase(key);
}

std::vector<std::weak_ptr<ExtentBuffer>> Releases::trimmable() const {
  std::vector<std::weak_ptr<ExtentBuffer>> buffers;
  const std::lock_guard lock(mutex_);
  buffers.reserve(trimmable_.size());
  for (const auto& [key, buffer] : trimmable_) buffers.push_back(buffer);
  return buffers;
}

Releases::Expected::Expected(Releases& releases, std::function<std::uint64_t()> bytes) : releases_(releases) {
  const std::lock_guard lock(releases_.mutex_);
  place_ = releases_.pending_.insert(releases_.pending_.end(),
                                     {std::move(bytes), std::chrono::steady_clock::now(), /*certain=*/false});
}

Releases::Expected::~Expected() {
  const std::lock_guard lock(releases_.mutex_);
  releases_.pending_.erase(place_);
  // Also if the file is in use again: what waits for it must look for other memory.
  releases_.released_locked();
}

void Releases::Expected::confirm() {
  const std::lock_guard lock(releases_.mutex_);
  place_->certain = true;
}

void Releases::Expected::begin_release() {
  const std::lock_guard lock(releases_.mutex_);
  place_->certain = true;
  place_->bytes = [bytes = place_->bytes()] { return bytes; };
}

std::optional<Releases::TimePoint> Releases::expected_until() const {
  const TimePoint now = std::chrono::steady_clock::now();
  std::optional<TimePoint> until;
  const std::lock_guard lock(mutex_);
  for (const Pending& pending : pending_) {
    const TimePoint end = pending.certain ? TimePoint::max() : pending.since + kLongestForgetTime;
    if (end > now && pending.bytes() > 0) until = std::max(until.value_or(end), end);
  }
  return until;
}

std::uint64_t Releases::expected_bytes() const {
  std::uint64_t bytes = 0;
  const std::lock_guard lock(mutex_);
  for (const Pending& pending : pending_) bytes += pending.bytes();
  return bytes;
}

std::size_t Releases::expected_files() const {
  const std::lock_guard lock(mutex_);
  return pending_.size();
}

bool Releases::expects_since(TimePoint before) const {
  const TimePoint now = std::chrono::steady_clock::now();
  std::uint64_t bytes = 0;
  const std::lock_guard lock(mutex_);
  for (const Pending& pending : pending_) {
    if (pending.since <= before && (pending.certain || now - pending.since <= kForgetTime)) bytes += pending.bytes();
  }
  return bytes != 0 && bytes >= device_bytes_ / kSmallPart;
}

void Releases::released() {
  const std::lock_guard lock(mutex_);
  released_locked();
}

void Releases::released_locked() {
  ++count_;
  for (const std::function<void()>& listener : listeners_) listener();
  changed_.notify_all();
}

std::uint64_t Releases::count() const {
  const std::lock_guard lock(mutex_);
  return count_;
}

void Releases::wait_for_next(std::uint64_t seen, TimePoint deadline) const {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, deadline, [&] { return count_ != seen; });
}

void Releases::wait_for_expected(TimePoint deadline, const std::function<bool()>& enough) const {
  for (;;) {
    // The count first: a release after it ends the wait below.
    const std::uint64_t seen = count();
    const std::optional<TimePoint> until = expected_until();
    if (enough() || !until || std::chrono::steady_clock::now() >= deadline) return;
    wait_for_next(seen, std::min(deadline, *until));
  }
}

std::shared_ptr<void> Releases::on_release(std::function<void()> action) {
  const std::lock_guard lock(mutex_);
  const auto place = listeners_.insert(listeners_.end(), std::move(action));
  return {this, [place](Releases* releases) {
            const std::lock_guard removal(releases->mutex_);
            releases->listeners_.erase(place);
          }};
}

void Releases::set_evictor(std::function<bool(std::uint64_t)> evict) {
  const std::lock_guard lock(evictor_mutex_);
  evictor_ = std::move(evict);
}

bool Releases::evict(std::uint64_t needed) {
  const std::lock_guard lock(evictor_mutex_);
  return evictor_ && evictor_(needed);
}

}  // namespace gpufs
