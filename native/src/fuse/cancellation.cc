#include "fuse/cancellation.h"

namespace gpufs::fuse {

std::shared_ptr<Operation> Cancellations::begin(std::uint64_t unique) {
  auto operation = std::make_shared<Operation>();
  operation->unique = unique;
  const std::lock_guard lock(mutex_);
  const bool interrupted = std::erase(early_, unique) != 0;
  operation->cancelled = closed_ || interrupted;
  running_[unique] = operation;
  return operation;
}

void Cancellations::end(std::uint64_t unique) {
  const std::lock_guard lock(mutex_);
  running_.erase(unique);
}

bool Cancellations::interrupt(std::uint64_t unique) {
  const std::lock_guard lock(mutex_);
  const auto found = running_.find(unique);
  if (found != running_.end()) {
    found->second->cancelled = true;
    return true;
  }
  if (early_.size() == kRemembered) early_.pop_front();
  early_.push_back(unique);
  return false;
}

void Cancellations::cancel_all() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  for (auto& [unique, operation] : running_) operation->cancelled = true;
}

}  // namespace gpufs::fuse
