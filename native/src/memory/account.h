// Accounts of device memory with a limit, and what a buffer charges to them: memory, and addresses.
// Ownership: accounts are shared by whoever sets their limits and the buffers that charge them.
// Thread-safe. The mutex of a Charge is a leaf.
#pragma once

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base/status.h"
#include "drivers/ledger.h"
#include "memory/address_space.h"

namespace gpufs {

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

  Charge() = default;
  ~Charge() {
    settle(0);
    give_addresses(address_bytes_);
  }
  Charge(const Charge&) = delete;
  Charge& operator=(const Charge&) = delete;

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
  void give_addresses(std::uint64_t bytes);
  // The bytes that grow() takes at most.
  [[nodiscard]] std::uint64_t room() const;
  [[nodiscard]] bool shares_account(const Charge& other) const;

 private:
  using Accounts = std::array<std::shared_ptr<Account>, 2>;  // by Payer
  [[nodiscard]] Accounts accounts() const;
  // The owner's share; null without an owner.
  [[nodiscard]] AddressSpace::Share* share_locked() const;

  mutable std::mutex mutex_;  // guards all below
  Accounts accounts_;
  std::uint64_t bytes_ = 0;
  std::uint64_t address_bytes_ = 0;  // counted to the owner
};

}  // namespace gpufs
