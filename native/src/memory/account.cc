#include "memory/account.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstdio>

#include "base/log.h"

namespace gpufs {
namespace {

// A number of bytes as the commands print it: "1.5 GiB".
std::string size_text(std::uint64_t bytes) {
  constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  auto size = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; size >= 1023.95 && unit + 1 < kUnits.size(); ++unit) size /= 1024;
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.*f %s", unit == 0 || size >= 99.95 ? 0 : 1, size, kUnits[unit]);
  return text.data();
}

}  // namespace

AddressSpace::AddressSpace(std::uint64_t descriptors) : most_descriptors_(descriptors) {}

std::uint64_t AddressSpace::descriptors_of_process() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return UINT64_MAX;
  return limit.rlim_cur / 4 * 3;
}

Status AddressSpace::check_bytes_locked(const Share& share, std::uint64_t bytes) const {
  std::uint64_t most = kForFiles - std::min(used_ - share.used_, kForFiles);
  if (share.plain_ && bytes > kSmallRange) {
    const std::uint64_t others = plain_used_ - share.used_;
    most = std::min(most, (kForPlainUsers - std::min(others, kForPlainUsers)) / 2);
  }
  if (share.used_ <= most && bytes <= most - share.used_) return {};
  return Status(share.plain_ ? EDQUOT : ENOSPC,
                std::string(share.plain_ ? "Disk quota exceeded: user " : "No space left on device: user ") +
                    std::to_string(share.user_) + " may reserve " + std::to_string(most) +
                    " bytes of device addresses now, has reserved " + std::to_string(share.used_) + ", and needs " +
                    std::to_string(bytes) +
                    " more. Sparse files reserve their whole length: remove some, or make them shorter");
}

Status AddressSpace::check_descriptors_locked(const Share& share, std::uint64_t descriptors) const {
  std::uint64_t most = most_descriptors_ - std::min(descriptors_ - share.descriptors_, most_descriptors_);
  if (share.plain_) {
    const std::uint64_t for_plain = most_descriptors_ / 3 * 2;
    const std::uint64_t others = plain_descriptors_ - share.descriptors_;
    most = std::min(most, (for_plain - std::min(others, for_plain)) / 2);
  }
  if (descriptors == 0 || share.descriptors_ + descriptors <= most) return {};
  return Status(share.plain_ ? EDQUOT : ENOSPC,
                std::string(share.plain_ ? "Disk quota exceeded: user " : "No space left on device: user ") +
                    std::to_string(share.user_) + " has " + std::to_string(share.descriptors_) + " of the " +
                    std::to_string(most) +
                    " descriptors that it may have now. Each file above slab_file_bytes takes one, on a GPU one for "
                    "each piece of "
                    "its memory. Remove some, or mount with a higher hard limit on descriptors (ulimit -Hn)");
}

Status AddressSpace::take(Share& share, std::uint64_t bytes, std::uint64_t descriptors) {
  Status refused;
  {
    const std::lock_guard lock(mutex_);
    refused = check_bytes_locked(share, bytes);
    if (refused.ok()) refused = check_descriptors_locked(share, descriptors);
    if (refused.ok()) {
      used_ += bytes;
      share.used_ += bytes;
      descriptors_ += descriptors;
      share.descriptors_ += descriptors;
      if (share.plain_) plain_used_ += bytes;
      if (share.plain_) plain_descriptors_ += descriptors;
      return {};
    }
    if (share.reported_) return refused;
    share.reported_ = true;
    share.used_at_refusal_ = share.used_;
  }
  log_user_warning(share.user_, refused.message());
  return refused;
}

void AddressSpace::add(Share& share, std::uint64_t bytes, std::uint64_t descriptors) {
  const std::lock_guard lock(mutex_);
  used_ += bytes;  // modulo 2^64: it may be negative, as may the next ones
  share.used_ += bytes;
  descriptors_ += descriptors;
  share.descriptors_ += descriptors;
  if (share.plain_) plain_used_ += bytes;
  if (share.plain_) plain_descriptors_ += descriptors;
  if (share.used_ <= share.used_at_refusal_ / 2) share.reported_ = false;
}

Status Account::charge(std::uint64_t bytes) {
  if (take(bytes)) return {};
  return Status(EDQUOT, "Disk quota exceeded: " + holder_ + " may hold " + size_text(limit()) + ", holds " +
                            size_text(used()) + ", and needs " + size_text(bytes) + " more");
}

Status Charge::grow(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  for (std::size_t payer = 0; payer < accounts_.size(); ++payer) {
    if (accounts_[payer] == nullptr) continue;
    Status status = accounts_[payer]->charge(bytes);
    if (status.ok()) continue;
    for (std::size_t earlier = 0; earlier < payer; ++earlier) {
      if (accounts_[earlier] != nullptr) accounts_[earlier]->release(bytes);
    }
    return status;
  }
  bytes_ += bytes;
  return {};
}

void Charge::settle(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  for (const std::shared_ptr<Account>& account : accounts_) {
    if (account != nullptr) account->add(bytes - bytes_);  // modulo 2^64
  }
  bytes_ = bytes;
}

void Charge::move(Payer payer, std::shared_ptr<Account> account) {
  const std::lock_guard lock(mutex_);
  if (payer == kOwner && share_locked() != nullptr) share_locked()->release(address_bytes_, descriptors_);
  accounts_[payer].swap(account);
  if (account != nullptr) account->release(bytes_);
  if (accounts_[payer] != nullptr) accounts_[payer]->add(bytes_);
  if (payer == kOwner && share_locked() != nullptr) share_locked()->add(address_bytes_, descriptors_);
}

void Charge::move_to_accounts_of(const Charge& other) {
  Accounts theirs = other.accounts();
  move(kOwner, std::move(theirs[kOwner]));
  move(kDirectory, std::move(theirs[kDirectory]));
}

AddressSpace::Share* Charge::share_locked() const {
  return accounts_[kOwner] == nullptr ? nullptr : accounts_[kOwner]->addresses_.get();
}

Status Charge::take_addresses(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (share_locked() != nullptr) {
    TRY(share_locked()->take(bytes, 0));
  }
  address_bytes_ += bytes;
  return {};
}

void Charge::release_addresses(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (share_locked() != nullptr) share_locked()->release(bytes, 0);
  address_bytes_ -= bytes;
}

Status Charge::take_descriptors(std::uint64_t more) {
  const std::lock_guard lock(mutex_);
  if (share_locked() != nullptr) {
    TRY(share_locked()->take(0, more));
  }
  descriptors_ += more;
  return {};
}

void Charge::settle_descriptors(std::uint64_t now) {
  const std::lock_guard lock(mutex_);
  if (share_locked() != nullptr && now != descriptors_) share_locked()->add(0, now - descriptors_);  // modulo 2^64
  descriptors_ = now;
}

std::uint64_t Charge::available() const {
  std::uint64_t least = Account::kNoLimit;
  for (const std::shared_ptr<Account>& account : accounts()) {
    if (account != nullptr) least = std::min(least, account->available());
  }
  return least;
}

bool Charge::shares_account(const Charge& other) const {
  const Accounts theirs = other.accounts();
  const Accounts ours = accounts();
  return std::ranges::any_of(ours, [&](const auto& account) {
    return account != nullptr && std::ranges::find(theirs, account) != theirs.end();
  });
}

Charge::Accounts Charge::accounts() const {
  const std::lock_guard lock(mutex_);
  return accounts_;
}

}  // namespace gpufs
