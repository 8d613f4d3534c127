// Accounts of the addresses of this process, of which it has 2^47 bytes, those of CUDA and HIP included: an H100 gave
// 126 TiB. A file reserves addresses up to the end of its last memory, so a sparse file takes many with little memory.
// Without a bound one user would leave none for stacks and mappings, and so stop the mount.
// Ownership: shared by its shares, and those by the accounts of their users.
// Thread-safe. The mutex is a leaf.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base/status.h"

namespace gpufs {

class AddressSpace : public std::enable_shared_from_this<AddressSpace> {
 public:
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
    Status take(std::uint64_t bytes) { return space_->take(*this, bytes); }
    // Regardless of all bounds: the owner of a file has changed.
    void add(std::uint64_t bytes) { space_->add(*this, bytes); }
    void give(std::uint64_t bytes) { space_->add(*this, -bytes); }

   private:
    friend class AddressSpace;
    Share(std::shared_ptr<AddressSpace> space, std::string holder, bool plain)
        : space_(std::move(space)), holder_(std::move(holder)), plain_(plain) {}

    const std::shared_ptr<AddressSpace> space_;
    const std::string holder_;
    const bool plain_;
    std::uint64_t used_ = 0;  // guarded by the space's mutex, as is the next one
    bool reported_ = false;   // a refusal was logged since less than half of what was allowed was in use
  };

  // holder: what messages call the user. plain: neither root nor the user who mounted.
  std::shared_ptr<Share> share(std::string holder, bool plain) {
    return std::shared_ptr<Share>(new Share(shared_from_this(), std::move(holder), plain));
  }

 private:
  Status take(Share& share, std::uint64_t bytes);
  void add(Share& share, std::uint64_t bytes);

  std::mutex mutex_;  // guards all below, and what it says in the shares
  std::uint64_t used_ = 0;
  std::uint64_t plain_used_ = 0;
};

}  // namespace gpufs
