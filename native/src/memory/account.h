// Accounts of device memory with a limit, and what a buffer charges to them.
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

namespace gpufs {

// Whether a call failed because the device is full or because a limit is reached.
constexpr bool lacks_memory(int error) { return error == ENOSPC || error == EDQUOT; }

class Account : public Ledger {
 public:
  // holder: what messages call it.
  explicit Account(std::string holder, std::uint64_t limit = kNoLimit) : Ledger(limit), holder_(std::move(holder)) {}

 private:
  friend class Charge;

  // EDQUOT, and nothing is charged, beyond the limit.
  Status charge(std::uint64_t bytes);

  const std::string holder_;
};

// What one buffer charges: to its owner's account, and to that of a directory. Both may be missing.
class Charge {
 public:
  enum Payer : std::uint8_t { kOwner, kDirectory };

  Charge() = default;
  ~Charge() { settle(0); }
  Charge(const Charge&) = delete;
  Charge& operator=(const Charge&) = delete;

  // Before memory is taken: charges so many bytes more to every account. EDQUOT changes nothing.
  Status grow(std::uint64_t bytes);
  // After memory was taken or released: the buffer holds so many bytes now.
  void settle(std::uint64_t bytes);
  // All that is charged goes to another account (or none), whatever its limit.
  void move(Payer payer, std::shared_ptr<Account> account);
  // The bytes that grow() takes at most.
  [[nodiscard]] std::uint64_t room() const;
  [[nodiscard]] bool shares_account(const Charge& other) const;

 private:
  using Accounts = std::array<std::shared_ptr<Account>, 2>;  // by Payer
  [[nodiscard]] Accounts accounts() const;

  mutable std::mutex mutex_;  // guards all below
  Accounts accounts_;
  std::uint64_t bytes_ = 0;
};

}  // namespace gpufs
