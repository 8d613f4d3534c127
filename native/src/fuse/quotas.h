// The accounts of a mount: one for each user on each device, and one for each directory that has a limit.
// Ownership: the inode table's; accounts are shared with the buffers that charge them.
// Thread-safe; the mutex is a leaf.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "gpufs.h"
#include "memory/account.h"

namespace gpufs::fuse {

class Quotas {
 public:
  // plain_limit: bytes on each device for each user without a limit of their own, except root and this process's user.
  explicit Quotas(std::uint64_t plain_limit) : plain_limit_(plain_limit) {}

  [[nodiscard]] std::shared_ptr<Account> user(std::int32_t device, std::uint32_t uid);
  // nullopt: as for users without a limit of their own.
  void limit_user(std::int32_t device, std::uint32_t uid, std::optional<std::uint64_t> bytes);
  // The account of a limited directory; null: it has no limit.
  [[nodiscard]] std::shared_ptr<Account> directory(std::uint64_t ino) const;
  // Lists the account of a directory's inode; null: no longer.
  void set_directory(std::uint64_t ino, std::shared_ptr<Account> account);

  // Accounts that are used or have a limit.
  [[nodiscard]] std::vector<gpufs_account> list() const;

 private:
  [[nodiscard]] static bool is_plain(std::uint32_t uid);
  [[nodiscard]] std::uint64_t default_limit(std::uint32_t uid) const;

  const std::uint64_t plain_limit_;
  const std::shared_ptr<AddressSpace> addresses_ = std::make_shared<AddressSpace>();
  mutable std::mutex mutex_;  // guards all below
  std::map<std::pair<std::int32_t, std::uint32_t>, std::shared_ptr<Account>> users_;
  std::map<std::uint32_t, std::shared_ptr<AddressSpace::Share>> shares_;  // by user
  std::map<std::uint64_t, std::shared_ptr<Account>> directories_;
};

}  // namespace gpufs::fuse
