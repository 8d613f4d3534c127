#include "memory/account.h"

#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <utility>

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

AddressSpace::AddressSpace(std::uint64_t files) : most_files_(files) {}

std::uint64_t AddressSpace::files_of_process() {
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
                std::string(share.plain_ ? "Disk quota exceeded: " : "No space left on device: ") + share.holder_ +
                    " may reserve " + std::to_string(most) + " bytes of device addresses now, has reserved " +
                    std::to_string(share.used_) + ", and needs " + std::to_string(bytes) +
                    " more. Sparse files reserve their whole length: remove some, or make them shorter");
}

Status AddressSpace::check_files_locked(const Share& share, std::uint64_t files) const {
  std::uint64_t most = most_files_ - std::min(files_ - share.files_, most_files_);
  if (share.plain_) {
    const std::uint64_t for_plain = most_files_ / 3 * 2;
    const std::uint64_t others = plain_files_ - share.files_;
    most = std::min(most, (for_plain - std::min(others, for_plain)) / 2);
  }
  if (files == 0 || share.files_ + files <= most) return {};
  return Status(
      share.plain_ ? EDQUOT : ENOSPC,
      std::string(share.plain_ ? "Disk quota exceeded: " : "No space left on device: ") + share.holder_ + " has " +
          std::to_string(share.files_) + " files of the " + std::to_string(most) +
          " that it may have now above slab_file_bytes: each takes a descriptor of the daemon. Remove some, or "
          "mount with a higher hard limit on descriptors (ulimit -Hn)");
}

Status AddressSpace::take(Share& share, std::uint64_t bytes, std::uint64_t files) {
  Status refused;
  {
    const std::lock_guard lock(mutex_);
    refused = check_bytes_locked(share, bytes);
    if (refused.ok()) refused = check_files_locked(share, files);
    if (refused.ok()) {
      used_ += bytes;
      share.used_ += bytes;
      files_ += files;
      share.files_ += files;
      if (share.plain_) plain_used_ += bytes;
      if (share.plain_) plain_files_ += files;
      return {};
    }
    if (share.reported_) return refused;
    share.reported_ = true;
    share.used_at_refusal_ = share.used_;
  }
  log_warning(refused.message());
  return refused;
}

void AddressSpace::add(Share& share, std::uint64_t bytes, std::uint64_t files) {
  const std::lock_guard lock(mutex_);
  used_ += bytes;  // modulo 2^64: it may be negative, as may the next ones
  share.used_ += bytes;
  files_ += files;
  share.files_ += files;
  if (share.plain_) plain_used_ += bytes;
  if (share.plain_) plain_files_ += files;
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
  const std::uint64_t files = files_of(address_bytes_);
  if (payer == kOwner && share_locked() != nullptr) share_locked()->release(address_bytes_, files);
  accounts_[payer].swap(account);
  if (account != nullptr) account->release(bytes_);
  if (accounts_[payer] != nullptr) accounts_[payer]->add(bytes_);
  if (payer == kOwner && share_locked() != nullptr) share_locked()->add(address_bytes_, files);
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
    const std::uint64_t files = files_of(address_bytes_ + bytes) - files_of(address_bytes_);
    if (Status status = share_locked()->take(bytes, files); !status.ok()) return status;
  }
  address_bytes_ += bytes;
  return {};
}

void Charge::release_addresses(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t files = files_of(address_bytes_) - files_of(address_bytes_ - bytes);
  if (share_locked() != nullptr) share_locked()->release(bytes, files);
  address_bytes_ -= bytes;
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
