#include "drivers/device_waits.h"

namespace gpufs {

DeviceWaits::Wait::Wait(DeviceWaits* waits) : waits_(waits) {
  if (waits_ == nullptr) return;
  const std::lock_guard lock(waits_->mutex_);
  since_ = Clock::now();
  before_ = waits_->youngest_;
  (before_ == nullptr ? waits_->oldest_ : before_->after_) = this;
  waits_->youngest_ = this;
}

DeviceWaits::Wait::~Wait() {
  if (waits_ == nullptr) return;
  const std::lock_guard lock(waits_->mutex_);
  (before_ == nullptr ? waits_->oldest_ : before_->after_) = after_;
  (after_ == nullptr ? waits_->youngest_ : after_->before_) = before_;
}

std::chrono::milliseconds DeviceWaits::longest() const {
  const std::lock_guard lock(mutex_);
  if (oldest_ == nullptr) return {};
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - oldest_->since_);
}

}  // namespace gpufs
