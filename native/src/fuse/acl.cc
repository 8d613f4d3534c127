#include "fuse/acl.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace gpufs::fuse {

namespace {

static_assert(std::endian::native == std::endian::little, "the lists are little-endian");

constexpr std::uint32_t kVersion = 2;
constexpr std::size_t kHeaderBytes = 4;

constexpr std::uint16_t kOwner = 0x01;
constexpr std::uint16_t kUser = 0x02;
constexpr std::uint16_t kOwningGroup = 0x04;
constexpr std::uint16_t kGroup = 0x08;
constexpr std::uint16_t kMask = 0x10;
constexpr std::uint16_t kOther = 0x20;

constexpr std::uint32_t kAllPermissions = 0777;
constexpr std::uint16_t kRwxMask = 7;

struct AclEntry {
  std::uint16_t tag;
  std::uint16_t permissions;
  std::uint32_t id;
};

std::span<const AclEntry> entries_of(std::span<const std::byte> acl) {
  return {reinterpret_cast<const AclEntry*>(acl.data() + kHeaderBytes), (acl.size() - kHeaderBytes) / sizeof(AclEntry)};
}

std::span<AclEntry> entries_of(std::span<std::byte> acl) {
  return {reinterpret_cast<AclEntry*>(acl.data() + kHeaderBytes), (acl.size() - kHeaderBytes) / sizeof(AclEntry)};
}

std::uint16_t bits(std::uint32_t mode, int shift) { return static_cast<std::uint16_t>((mode >> shift) & kRwxMask); }

// The entry whose permissions are the group's bits of a mode: the mask or the owning group.
std::uint16_t group_class_of(std::span<const std::byte> acl) {
  const bool masked = std::ranges::any_of(entries_of(acl), [](const AclEntry& entry) { return entry.tag == kMask; });
  return masked ? kMask : kOwningGroup;
}

}  // namespace

bool acl_is_valid(std::span<const std::byte> acl) {
  std::uint32_t version = 0;
  if (acl.size() < kHeaderBytes || (acl.size() - kHeaderBytes) % sizeof(AclEntry) != 0) return false;
  std::memcpy(&version, acl.data(), sizeof(version));
  if (version != kVersion) return false;
  std::uint32_t seen = 0;
  for (const AclEntry& entry : entries_of(acl)) {
    const bool once = entry.tag == kOwner || entry.tag == kOwningGroup || entry.tag == kMask || entry.tag == kOther;
    if (!once && entry.tag != kUser && entry.tag != kGroup) return false;
    if ((once && (seen & entry.tag) != 0) || entry.permissions > kRwxMask) return false;
    seen |= entry.tag;
  }
  constexpr std::uint32_t kNeeded = kOwner | kOwningGroup | kOther;
  return (seen & kNeeded) == kNeeded && ((seen & (kUser | kGroup)) == 0 || (seen & kMask) != 0);
}

bool acl_is_minimal(std::span<const std::byte> acl) {
  return std::ranges::none_of(entries_of(acl),
                              [](const AclEntry& entry) { return (entry.tag & (kUser | kGroup | kMask)) != 0; });
}

std::uint32_t mode_with_acl(std::uint32_t mode, std::span<const std::byte> acl) {
  const std::uint16_t group_class = group_class_of(acl);
  mode &= ~kAllPermissions;
  for (const AclEntry& entry : entries_of(acl)) {
    if (entry.tag == kOwner) mode |= std::uint32_t{entry.permissions} << 6;
    if (entry.tag == group_class) mode |= std::uint32_t{entry.permissions} << 3;
    if (entry.tag == kOther) mode |= entry.permissions;
  }
  return mode;
}

void acl_follow_mode(std::span<std::byte> acl, std::uint32_t mode) {
  const std::uint16_t group_class = group_class_of(acl);
  for (AclEntry& entry : entries_of(acl)) {
    if (entry.tag == kOwner) entry.permissions = bits(mode, 6);
    if (entry.tag == group_class) entry.permissions = bits(mode, 3);
    if (entry.tag == kOther) entry.permissions = bits(mode, 0);
  }
}

void acl_inherit(std::span<std::byte> acl, std::uint32_t& mode) {
  mode = (mode & ~kAllPermissions) | (mode & mode_with_acl(0, acl));
  acl_follow_mode(acl, mode);
}

}  // namespace gpufs::fuse
