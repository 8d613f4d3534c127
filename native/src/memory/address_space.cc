#include "memory/address_space.h"

#include <algorithm>
#include <cerrno>

#include "base/log.h"

namespace gpufs {

Status AddressSpace::take(Share& share, std::uint64_t bytes) {
  Status refused;
  {
    const std::lock_guard lock(mutex_);
    std::uint64_t most = kForFiles - std::min(used_ - share.used_, kForFiles);
    if (share.plain_ && bytes > kSmallRange) {
      const std::uint64_t others = plain_used_ - share.used_;
      most = std::min(most, (kForPlainUsers - std::min(others, kForPlainUsers)) / 2);
    }
    if (share.used_ <= most && bytes <= most - share.used_) {
      used_ += bytes;
      share.used_ += bytes;
      if (share.plain_) plain_used_ += bytes;
      if (share.used_ < most / 2) share.reported_ = false;
      return {};
    }
    refused = Status(share.plain_ ? EDQUOT : ENOSPC,
                     std::string(share.plain_ ? "Disk quota exceeded: " : "No space left on device: ") + share.holder_ +
                         " may reserve " + std::to_string(most) + " bytes of device addresses now, has reserved " +
                         std::to_string(share.used_) + ", and needs " + std::to_string(bytes) +
                         " more. Sparse files reserve their whole length: remove some, or make them shorter");
    if (share.reported_) return refused;
    share.reported_ = true;
  }
  log_warning(refused.message());
  return refused;
}

void AddressSpace::add(Share& share, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  used_ += bytes;  // modulo 2^64: it may be negative
  share.used_ += bytes;
  if (share.plain_) plain_used_ += bytes;
}

}  // namespace gpufs
