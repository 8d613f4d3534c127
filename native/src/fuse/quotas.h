// The limits of a mount: on device memory, for each user on each device and for directories, and on the memory that
// names and attributes take.
// Ownership: the inode table's; accounts are shared with the buffers that charge them.
// Thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "drivers/ledger.h"
#include "fuse/records.h"
#include "gpufs.h"
#include "memory/account.h"

namespace gpufs::fuse {

// The accounts of device memory. Each change of a limit is recorded.
class Quotas {
 public:
  // plain_limit: bytes on each device for each user without a limit of their own, except root and this process's user.
  // name_of: returns the name of a device's directory, for messages.
  Quotas(Records& records, std::uint64_t plain_limit, std::function<std::string(std::int32_t)> name_of)
      : records_(records), plain_limit_(plain_limit), name_of_(std::move(name_of)) {}

  [[nodiscard]] std::shared_ptr<Account> user(std::int32_t device, std::uint32_t uid);
  // nullopt: as for users without a limit of their own.
  void limit_user(std::int32_t device, std::uint32_t uid, std::optional<std::uint64_t> bytes);
  // The account of a limited directory; null: it has no limit.
  [[nodiscard]] std::shared_ptr<Account> directory(std::uint64_t ino) const;
  // The account of a directory, with its limit; null: it has none any more.
  void limit_directory(std::uint64_t ino, std::shared_ptr<Account> account);
  // The limits of users that the last process had.
  void restore_users();

  // Accounts that are used or have a limit.
  [[nodiscard]] std::vector<gpufs_account> list() const;

 private:
  [[nodiscard]] static bool is_plain(std::uint32_t uid);
  [[nodiscard]] std::uint64_t default_limit(std::uint32_t uid) const;

  Records& records_;
  const std::uint64_t plain_limit_;
  const std::function<std::string(std::int32_t)> name_of_;
  const std::shared_ptr<AddressSpace> addresses_ = std::make_shared<AddressSpace>();
  mutable std::mutex mutex_;  // guards all below; order 5 of docs/design/requests.md#locks
  std::map<std::pair<std::int32_t, std::uint32_t>, std::shared_ptr<Account>> users_;
  std::map<std::uint32_t, std::shared_ptr<AddressSpace::Share>> shares_;  // by user
  std::map<std::uint64_t, std::shared_ptr<Account>> directories_;
};

// The memory that names and attributes take: with a limit, a share of it for each user, and a reserve for root. Inodes
// refer to the share of their owner, and shares live as long as the table.
class Metadata {
 public:
  // The memory that the inodes of one user take. Only a Metadata changes it.
  using Share = Ledger;

  explicit Metadata(std::uint64_t limit) : all_(limit), plain_(limit - limit / kReservePart) {}

  [[nodiscard]] std::uint64_t used() const { return all_.used(); }
  [[nodiscard]] std::uint64_t limit() const { return all_.limit(); }
  // Bytes that a user may still take.
  [[nodiscard]] std::uint64_t available(std::uint32_t uid) {
    const Share* share = share_of(uid);
    return share == nullptr ? all_.available() : std::min({all_.available(), plain_.available(), share->available()});
  }
  // Null for root and this process's user: they have no share, and may take all.
  [[nodiscard]] Share* share_of(std::uint32_t uid);

  // False, and nothing is taken, beyond a limit.
  [[nodiscard]] bool take(Share* share, std::uint64_t bytes);
  // Regardless of all limits: it is restored.
  void add(Share* share, std::uint64_t bytes);
  void release(Share* share, std::uint64_t bytes);
  // The owner of an inode has changed: moves what it takes, whatever the limits.
  void move(Share* from, Share* to, std::uint64_t bytes);

 private:
  static constexpr std::uint64_t kReservePart = 8;  // one of so many parts of the limit is for root alone
  static constexpr std::uint64_t kUserPart = 2;

  Ledger all_;
  Ledger plain_;      // of all shares together
  std::mutex mutex_;  // guards all below; order 5 of docs/design/requests.md#locks
  std::map<std::uint32_t, std::unique_ptr<Share>> shares_;
};

}  // namespace gpufs::fuse
