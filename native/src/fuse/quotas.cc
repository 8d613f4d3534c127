#include "fuse/quotas.h"

#include <unistd.h>

#include <string>

namespace gpufs::fuse {

namespace {

void write_account(JsonWriter& json, const std::string& name, const Account& account) {
  const std::uint64_t limit = account.limit();
  json.open(name);
  json.number("used_bytes", account.used());
  if (limit != Account::kNoLimit) json.number("limit_bytes", limit);
  json.close();
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
    if (share == nullptr) share = addresses_->share(holder, is_plain(uid));
    account = std::make_shared<Account>(holder + " on gpu" + std::to_string(device), default_limit(uid), share);
  }
  return account;
}

void Quotas::limit_user(std::int32_t device, std::uint32_t uid, std::optional<std::uint64_t> bytes) {
  user(device, uid)->set_limit(bytes.value_or(default_limit(uid)));
}

std::shared_ptr<Account> Quotas::directory(std::uint64_t ino) const {
  const std::lock_guard lock(mutex_);
  const auto found = directories_.find(ino);
  return found == directories_.end() ? nullptr : found->second;
}

void Quotas::set_directory(std::uint64_t ino, std::shared_ptr<Account> account) {
  const std::lock_guard lock(mutex_);
  if (account == nullptr) {
    directories_.erase(ino);
  } else {
    directories_[ino] = std::move(account);
  }
}

void Quotas::write(JsonWriter& json) const {
  const std::lock_guard lock(mutex_);
  json.open("users");
  for (const auto& [key, account] : users_) {
    if (account->used() == 0 && account->limit() == Account::kNoLimit) continue;
    write_account(json, std::to_string(key.first) + ":" + std::to_string(key.second), *account);
  }
  json.close();
  json.open("directories");
  for (const auto& [ino, account] : directories_) write_account(json, std::to_string(ino), *account);
  json.close();
}

}  // namespace gpufs::fuse
