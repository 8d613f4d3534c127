// The extended attributes of one inode: named values of user.*, trusted.* and security.*, and access control lists.
// Owned by an Inode, whose mutex guards it.
// Any thread that holds that mutex.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "fuse/acl.h"

namespace gpufs::fuse {

inline constexpr std::string_view kAccessAcl = "system.posix_acl_access";
inline constexpr std::string_view kDefaultAcl = "system.posix_acl_default";
// Read-only ones that describe a file: the control plane's, and stored nowhere.
inline constexpr std::string_view kVirtualAttributes = "user.gpufs.";

// 0, or why there can be no attribute of this name: EOPNOTSUPP for another namespace, EINVAL for a namespace alone.
// Access control lists are not meant.
[[nodiscard]] int attribute_name_error(std::string_view name);

class ExtendedAttributes {
 public:
  using Value = std::vector<std::byte>;

  static constexpr std::size_t kLargestValue = std::size_t{1} << 16;  // the kernel's limit
  static constexpr std::size_t kAllNames = std::size_t{1} << 16;      // what listxattr(2) can return
  static constexpr std::size_t kAllBytes = std::size_t{1} << 20;      // of names and values

  // flags: as setxattr(2). E2BIG for a value, ENOSPC for attributes that are too large together.
  Status set(std::string_view name, std::span<const std::byte> value, std::uint32_t flags);
  // Null where there is none.
  [[nodiscard]] const Value* find(std::string_view name) const;
  // False where there was none.
  bool remove(std::string_view name);
  // What listxattr(2) returns.
  [[nodiscard]] std::string names(bool trusted) const;
  [[nodiscard]] bool has_trusted() const;
  // The rights that a program file gives its process go with any change of its contents or owner.
  void drop_capability();
  // Of memory, with access control lists.
  [[nodiscard]] std::size_t bytes() const;
  // What an attribute takes beside its name and value, at most.
  static constexpr std::size_t kOverhead = 256;

  std::optional<Acl> access;
  std::optional<Acl> inherited;  // the default list of a directory

 private:
  std::map<std::string, Value, std::less<>> values_;
  std::size_t names_bytes_ = 0;
  std::size_t values_bytes_ = 0;
};

}  // namespace gpufs::fuse
