// The extended attributes of one inode: named values of user.*, trusted.* and security.*, and access control lists.
// Ownership: an Inode's, whose mutex guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace gpufs::fuse {

// Read-only ones that describe a file; stored nowhere.
inline constexpr std::string_view kVirtualAttributes = "user.gpufs.";

// 0, or why no attribute can have this name: EOPNOTSUPP for another namespace, EINVAL for a namespace alone.
[[nodiscard]] int attribute_name_error(std::string_view name);

class ExtendedAttributes {
 public:
  using Value = std::vector<std::byte>;

  static constexpr std::size_t kLargestValue = std::size_t{1} << 16;  // the kernel's limit
  static constexpr std::size_t kAllNames = std::size_t{1} << 16;      // what listxattr(2) can return
  static constexpr std::size_t kAllBytes = std::size_t{1} << 20;      // of names and values

  // flags: as setxattr(2). E2BIG for a value, ENOSPC for all attributes together.
  Status set(std::string_view name, std::span<const std::byte> value, std::uint32_t flags);
  // Null if there is none.
  [[nodiscard]] const Value* find(std::string_view name) const;
  // False if there was none.
  bool remove(std::string_view name);
  // chmod(2): the access control list, if there is one, gets the permissions of the mode.
  void follow_mode(std::uint32_t mode);
  // As listxattr(2) returns them.
  [[nodiscard]] std::string names(bool trusted) const;
  [[nodiscard]] bool has_trusted() const;
  // A file's capabilities are lost with any change of its contents.
  void drop_capability();
  // Bytes of memory.
  [[nodiscard]] std::size_t bytes() const;

  // How often any has changed.
  [[nodiscard]] std::uint64_t changes() const { return changes_; }
  // For the journal; empty without attributes.
  [[nodiscard]] std::vector<std::byte> image() const;
  [[nodiscard]] std::size_t image_bytes() const;
  // Sets those of an image. False: some of it is damaged, and left out.
  bool restore(std::span<const std::byte> image);
  // The most that an attribute takes beside its name and value.
  static constexpr std::size_t kOverhead = 256;

 private:
  std::map<std::string, Value, std::less<>> values_;
  std::size_t names_bytes_ = 0;
  std::size_t values_bytes_ = 0;
  std::uint64_t changes_ = 0;
};

// ---- POSIX access control lists in the form of their attribute (version 2, then entries, little-endian) ----

inline constexpr std::string_view kAccessAcl = "system.posix_acl_access";
inline constexpr std::string_view kDefaultAcl = "system.posix_acl_default";

[[nodiscard]] inline bool is_acl(std::string_view name) { return name == kAccessAcl || name == kDefaultAcl; }

// All lists begin at an address that 4 divides. The kernel has checked the order of the entries.
[[nodiscard]] bool acl_is_valid(std::span<const std::byte> acl);
// The functions below take valid lists only.
// True if the list grants the same as mode bits.
[[nodiscard]] bool acl_is_minimal(std::span<const std::byte> acl);
// `mode` with the list's permission bits: the group's are the mask's if there is one.
[[nodiscard]] std::uint32_t mode_with_acl(std::uint32_t mode, std::span<const std::byte> acl);
// chmod(2): sets the entries of the owner, the others and the mask (or the group) to the mode's bits.
void acl_follow_mode(std::span<std::byte> acl, std::uint32_t mode);
// What a new file gets of its directory's default list: both the list and the mode grant only what both grant.
void acl_inherit(std::span<std::byte> acl, std::uint32_t& mode);

}  // namespace gpufs::fuse
