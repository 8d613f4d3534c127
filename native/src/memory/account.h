// Accounts of device memory and of addresses, with limits, and what a buffer charges to them.
// Ownership: accounts are shared by whoever sets their limits and the buffers that charge them.
// Thread-safe.
#pragma once

#include <sys/types.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base/status.h"
#include "drivers/ledger.h"

namespace gpufs {

// Accounts of the addresses of this process, of which it has 2^47 bytes, those of CUDA and HIP included: an H100 gave
// 126 TiB. A file reserves addresses up to the end of its last memory, so a sparse file takes many with little memory.
// Without a bound one user would leave none for stacks and mappings, and so stop the mount. Shared by its shares.
//
// A file with memory of its own also takes a descriptor of it, on a GPU one for each piece, of which the process may
// have RLIMIT_NOFILE. The same shares bound these: a quarter is for everything else, clients and copies, and for the
// process that takes over.
class AddressSpace : public std::enable_shared_from_this<AddressSpace> {
 public:
  // descriptors: of memory, how many there may be, by default what RLIMIT_NOFILE allows now.
  explicit AddressSpace(std::uint64_t descriptors = descriptors_of_process());

  static constexpr std::uint64_t kBytes = std::uint64_t{1} << 47;
  // The rest is for this process: stacks, slabs, host memory.
  static constexpr std::uint64_t kForFiles = kBytes / 4 * 3;
  // What all plain users together may take of that. One takes at most half of what the others have left.
  static constexpr std::uint64_t kForPlainUsers = kBytes / 2;
  // Ranges up to this are in nobody's share: each has memory, a granule at least, which is limited already.
  static constexpr std::uint64_t kSmallRange = std::uint64_t{64} << 20;

  class Share {
   public:
    // EDQUOT: beyond this user's share. ENOSPC: beyond what all files may take. Nothing is taken then.
    Status take(std::uint64_t bytes, std::uint64_t descriptors) { return space_->take(*this, bytes, descriptors); }
    // Regardless of all bounds: the owner of a file has changed.
    void add(std::uint64_t bytes, std::uint64_t descriptors) { space_->add(*this, bytes, descriptors); }
    void release(std::uint64_t bytes, std::uint64_t descriptors) { space_->add(*this, -bytes, -descriptors); }

   private:
    friend class AddressSpace;
    Share(std::shared_ptr<AddressSpace> space, uid_t user, bool plain)
        : space_(std::move(space)), user_(user), plain_(plain) {}

    const std::shared_ptr<AddressSpace> space_;
    const uid_t user_;
    const bool plain_;
    std::uint64_t used_ = 0;  // guarded by the space's mutex, as are the next three
    std::uint64_t descriptors_ = 0;
    bool reported_ = false;  // a refusal was logged, and half of what was used then has not been released since
    std::uint64_t used_at_refusal_ = 0;
  };

  // plain: neither root nor the user who mounted.
  std::shared_ptr<Share> share(uid_t user, bool plain) {
    return std::shared_ptr<Share>(new Share(shared_from_this(), user, plain));
  }

 private:
  [[nodiscard]] static std::uint64_t descriptors_of_process();
  Status take(Share& share, std::uint64_t bytes, std::uint64_t descriptors);
  // EDQUOT, ENOSPC, or OK: whether the share may have so many more descriptors.
  [[nodiscard]] Status check_descriptors_locked(const Share& share, std::uint64_t descriptors) const;
  [[nodiscard]] Status check_bytes_locked(const Share& share, std::uint64_t bytes) const;
  void add(Share& share, std::uint64_t bytes, std::uint64_t descriptors);

  const std::uint64_t most_descriptors_;
  std::mutex mutex_;  // guards all below, and what it says in the shares; order 9 of docs/design/requests.md#locks
  std::uint64_t used_ = 0;
  std::uint64_t plain_used_ = 0;
  std::uint64_t descriptors_ = 0;
  std::uint64_t plain_descriptors_ = 0;
};

// Whether a call failed because the device is full or because a limit is reached.
constexpr bool lacks_memory(int error) { return error == ENOSPC || error == EDQUOT; }

class Account : public Ledger {
 public:
  // holder: what messages call it.
  // addresses: the share of a user, for all devices; null for accounts of directories.
  explicit Account(std::string holder, std::uint64_t limit = kNoLimit,
                   std::shared_ptr<AddressSpace::Share> addresses = nullptr)
      : Ledger(limit), holder_(std::move(holder)), addresses_(std::move(addresses)) {}

 private:
  friend class Charge;

  // EDQUOT, and nothing is charged, beyond the limit.
  Status charge(std::uint64_t bytes);

  const std::string holder_;
  const std::shared_ptr<AddressSpace::Share> addresses_;
};

// What one buffer charges: to its owner's account, and to that of a directory. Both may be missing.
class Charge {
 public:
  enum Payer : std::uint8_t { kOwner, kDirectory };

  ~Charge() {
    settle(0);
    release_addresses(address_bytes_);
    settle_descriptors(0);
  }

  // Before memory is taken: charges so many bytes more to every account. EDQUOT changes nothing.
  Status grow(std::uint64_t bytes);
  // After memory was taken or released: the buffer holds so many bytes now.
  void settle(std::uint64_t bytes);
  // All that is charged goes to another account (or none), whatever its limit.
  void move(Payer payer, std::shared_ptr<Account> account);
  // The same for both, to the accounts that the other one charges.
  void move_to_accounts_of(const Charge& other);
  // Before addresses are reserved. EDQUOT, ENOSPC: see AddressSpace::Share. Nothing is taken then.
  Status take_addresses(std::uint64_t bytes);
  void release_addresses(std::uint64_t bytes);
  // Before memory is taken that has so many more descriptors, and after that: so many there are now.
  Status take_descriptors(std::uint64_t more);
  void settle_descriptors(std::uint64_t now);
  // The bytes that grow() takes at most.
  [[nodiscard]] std::uint64_t available() const;
  [[nodiscard]] bool shares_account(const Charge& other) const;

 private:
  using Accounts = std::array<std::shared_ptr<Account>, 2>;  // by Payer
  [[nodiscard]] Accounts accounts() const;
  // The owner's share; null without an owner.
  [[nodiscard]] AddressSpace::Share* share_locked() const;

  mutable std::mutex mutex_;  // guards all below; order 9 of docs/design/requests.md#locks
  Accounts accounts_;
  std::uint64_t bytes_ = 0;
  std::uint64_t address_bytes_ = 0;  // counted to the owner, as the next
  std::uint64_t descriptors_ = 0;
};

}  // namespace gpufs
