// POSIX access control lists in the form of their extended attribute (version 2, then entries, little-endian), and how
// a list and mode bits follow each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace gpufs::fuse {

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
