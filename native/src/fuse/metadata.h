// The memory that names and attributes take: with a limit, a share of it for each user, and a reserve for root.
// Ownership: the inode table's; inodes refer to the share of their owner, and shares live as long as the table.
// Thread-safe; the mutex is a leaf.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "drivers/ledger.h"

namespace gpufs::fuse {

class Metadata {
 public:
  // What the inodes of one user take. Only a Metadata changes it.
  using Share = Ledger;

  explicit Metadata(std::uint64_t limit) : all_(limit), plain_(limit - limit / kReservePart) {}

  [[nodiscard]] std::uint64_t used() const { return all_.used(); }
  [[nodiscard]] std::uint64_t limit() const { return all_.limit(); }
  // Bytes that a user may still take.
  [[nodiscard]] std::uint64_t room(std::uint32_t uid) {
    const Share* share = share_of(uid);
    return share == nullptr ? all_.room() : std::min({all_.room(), plain_.room(), share->room()});
  }
  // Null for root and this process's user: they have no share, and may take all.
  [[nodiscard]] Share* share_of(std::uint32_t uid);

  // False, and nothing is taken, beyond a limit.
  [[nodiscard]] bool take(Share* share, std::uint64_t bytes);
  void give(Share* share, std::uint64_t bytes);
  // The owner of an inode has changed: moves what it takes, whatever the limits.
  void move(Share* from, Share* to, std::uint64_t bytes);

 private:
  static constexpr std::uint64_t kReservePart = 8;  // one of so many parts of the limit is for root alone
  static constexpr std::uint64_t kUserPart = 2;

  Ledger all_;
  Ledger plain_;  // of all shares together
  std::mutex mutex_;
  std::map<std::uint32_t, std::unique_ptr<Share>> shares_;  // guarded by mutex_
};

}  // namespace gpufs::fuse
