#include "memory/account.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <utility>

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
      if (accounts_[earlier] != nullptr) accounts_[earlier]->give(bytes);
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
  if (payer == kOwner && share_locked() != nullptr) share_locked()->give(address_bytes_);
  accounts_[payer].swap(account);
  if (account != nullptr) account->give(bytes_);
  if (accounts_[payer] != nullptr) accounts_[payer]->add(bytes_);
  if (payer == kOwner && share_locked() != nullptr) share_locked()->add(address_bytes_);
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
    if (Status status = share_locked()->take(bytes); !status.ok()) return status;
  }
  address_bytes_ += bytes;
  return {};
}

void Charge::give_addresses(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (share_locked() != nullptr) share_locked()->give(bytes);
  address_bytes_ -= bytes;
}

std::uint64_t Charge::room() const {
  std::uint64_t room = Account::kNoLimit;
  for (const std::shared_ptr<Account>& account : accounts()) {
    if (account != nullptr) room = std::min(room, account->room());
  }
  return room;
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
