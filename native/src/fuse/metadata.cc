#include "fuse/metadata.h"

#include <unistd.h>

namespace gpufs::fuse {

Metadata::Share* Metadata::share_of(std::uint32_t uid) {
  if (uid == 0 || uid == ::geteuid()) return nullptr;
  const std::lock_guard lock(mutex_);
  std::unique_ptr<Share>& share = shares_[uid];
  if (share == nullptr) share = std::make_unique<Share>(all_.limit() / kUserPart);
  return share.get();
}

bool Metadata::take(Share* share, std::uint64_t bytes) {
  if (bytes == 0) return true;
  if (!all_.take(bytes)) return false;
  if (share == nullptr) return true;
  if (plain_.take(bytes)) {
    if (share->take(bytes)) return true;
    plain_.give(bytes);
  }
  all_.give(bytes);
  return false;
}

void Metadata::give(Share* share, std::uint64_t bytes) {
  all_.give(bytes);
  if (share == nullptr) return;
  plain_.give(bytes);
  share->give(bytes);
}

void Metadata::move(Share* from, Share* to, std::uint64_t bytes) {
  if (to != nullptr) {
    plain_.add(bytes);
    to->add(bytes);
  }
  if (from != nullptr) {
    plain_.give(bytes);
    from->give(bytes);
  }
}

}  // namespace gpufs::fuse
