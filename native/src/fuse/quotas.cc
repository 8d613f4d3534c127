#include "fuse/quotas.h"

#include <unistd.h>

namespace gpufs::fuse {
namespace {

gpufs_account describe(const Account& account, std::uint64_t directory, std::int32_t device, std::uint32_t uid) {
  const std::uint64_t limit = account.limit();
  constexpr std::int64_t kNone = GPUFS_NO_LIMIT;
  return {directory, device, uid, account.used(),
          limit == Account::kNoLimit ? kNone : static_cast<std::int64_t>(limit)};
}

}  // namespace

bool Quotas::is_plain(std::uint32_t uid) { return uid != 0 && uid != ::geteuid(); }

std::uint64_t Quotas::default_limit(std::uint32_t uid) const {
  return is_plain(uid) ? plain_limit_ : Account::kNoLimit;
}

std::shared_ptr<Account> Quotas::user(std::int32_t device, std::uint32_t uid) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Account>& account = users_[{device, uid}];
  if (account == nullptr) {
    const std::string holder = "user " + std::to_string(uid);
    std::shared_ptr<AddressSpace::Share>& share = shares_[uid];
    if (share == nullptr) share = addresses_->share(uid, is_plain(uid));
    account = std::make_shared<Account>(holder + " on " + name_of_(device), default_limit(uid), share);
  }
  return account;
}

void Quotas::limit_user(std::int32_t device, std::uint32_t uid, std::optional<std::uint64_t> bytes) {
  user(device, uid)->set_limit(bytes.value_or(default_limit(uid)));
  records_.put_limit({journal::kUserLimit, journal::user_key(device, uid)}, bytes);
}

void Quotas::restore_users() {
  for (const auto& [user, bytes] : records_.limits(journal::kUserLimit)) {
    this->user(journal::device_of(user), journal::uid_of(user))->set_limit(bytes);
  }
}

std::shared_ptr<Account> Quotas::directory(std::uint64_t ino) const {
  const std::lock_guard lock(mutex_);
  const auto found = directories_.find(ino);
  return found == directories_.end() ? nullptr : found->second;
}

void Quotas::limit_directory(std::uint64_t ino, std::shared_ptr<Account> account) {
  std::optional<std::uint64_t> bytes;
  if (account != nullptr) bytes = account->limit();
  records_.put_limit({journal::kDirectoryLimit, ino}, bytes);
  const std::lock_guard lock(mutex_);
  if (account == nullptr) {
    directories_.erase(ino);
  } else {
    directories_[ino] = std::move(account);
  }
}

std::vector<gpufs_account> Quotas::list() const {
  std::vector<gpufs_account> accounts;
  const std::lock_guard lock(mutex_);
  for (const auto& [key, account] : users_) {
    if (account->used() == 0 && account->limit() == Account::kNoLimit) continue;
    accounts.push_back(describe(*account, 0, key.first, key.second));
  }
  for (const auto& [ino, account] : directories_) accounts.push_back(describe(*account, ino, -1, 0));
  return accounts;
}

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
    plain_.release(bytes);
  }
  all_.release(bytes);
  return false;
}

void Metadata::add(Share* share, std::uint64_t bytes) {
  all_.add(bytes);
  move(nullptr, share, bytes);
}

void Metadata::release(Share* share, std::uint64_t bytes) {
  all_.release(bytes);
  if (share == nullptr) return;
  plain_.release(bytes);
  share->release(bytes);
}

void Metadata::move(Share* from, Share* to, std::uint64_t bytes) {
  if (to != nullptr) {
    plain_.add(bytes);
    to->add(bytes);
  }
  if (from != nullptr) {
    plain_.release(bytes);
    from->release(bytes);
  }
}

}  // namespace gpufs::fuse
