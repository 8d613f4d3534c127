// POSIX access control lists: their form in extended attributes, and how a list and mode bits follow each other.
// Values; whoever holds one guards it.
// Any thread may call any function.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"

namespace gpufs::fuse {

class Acl {
 public:
  // The value of a system.posix_acl_* attribute. EINVAL for what is no list; the order of the entries the kernel has
  // checked.
  static Result<Acl> parse(std::span<const std::byte> value);
  [[nodiscard]] std::vector<std::byte> serialize() const;
  [[nodiscard]] std::size_t bytes() const { return entries_.size() * sizeof(Entry); }  // of memory

  // True if it says no more than mode bits do.
  [[nodiscard]] bool minimal() const;
  // `mode` with the permission bits that the list stands for: the group's are the mask's where there is one.
  [[nodiscard]] std::uint32_t applied_to(std::uint32_t mode) const;
  // chmod(2): the owner's, the others' and the mask's (or the group's) entry become those of the mode.
  void follow(std::uint32_t mode);
  // What a new file gets of its directory's default list: neither the mode asked for nor the list gives more than the
  // other. Changes both.
  void inherit(std::uint32_t& mode);

 private:
  struct Entry {
    std::uint16_t tag = 0;
    std::uint16_t permissions = 0;
    std::uint32_t id = 0;
  };

  // The entry whose permissions are the group's bits of a mode.
  Entry& group_class();

  std::vector<Entry> entries_;
};

}  // namespace gpufs::fuse
