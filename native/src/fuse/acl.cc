#include "fuse/acl.h"

#include <endian.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace gpufs::fuse {

namespace {

// The attribute: a version, then entries, little-endian.
constexpr std::uint32_t kVersion = 2;
constexpr std::size_t kHeaderBytes = 4;
constexpr std::size_t kEntryBytes = 8;

constexpr std::uint16_t kOwner = 0x01;
constexpr std::uint16_t kUser = 0x02;
constexpr std::uint16_t kOwningGroup = 0x04;
constexpr std::uint16_t kGroup = 0x08;
constexpr std::uint16_t kMask = 0x10;
constexpr std::uint16_t kOther = 0x20;

constexpr std::uint32_t kAllPermissions = 0777;
constexpr std::uint16_t kThree = 7;

std::uint16_t bits(std::uint32_t mode, int shift) { return static_cast<std::uint16_t>((mode >> shift) & kThree); }

template <typename T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

template <typename T>
void store(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof(value));
}

}  // namespace

Result<Acl> Acl::parse(std::span<const std::byte> value) {
  const Status invalid(EINVAL, "not an access control list");
  if (value.size() < kHeaderBytes || (value.size() - kHeaderBytes) % kEntryBytes != 0) return invalid;
  if (le32toh(load<std::uint32_t>(value.data())) != kVersion) return invalid;
  Acl acl;
  std::uint32_t seen = 0;
  for (const std::byte* at = value.data() + kHeaderBytes; at != value.data() + value.size(); at += kEntryBytes) {
    const Entry entry{le16toh(load<std::uint16_t>(at)), le16toh(load<std::uint16_t>(at + 2)),
                      le32toh(load<std::uint32_t>(at + 4))};
    switch (entry.tag) {
      case kOwner:
      case kOwningGroup:
      case kMask:
      case kOther:
        if ((seen & entry.tag) != 0) return invalid;
        break;
      case kUser:
      case kGroup:
        break;
      default:
        return invalid;
    }
    if (entry.permissions > kThree) return invalid;
    seen |= entry.tag;
    acl.entries_.push_back(entry);
  }
  constexpr std::uint32_t kNeeded = kOwner | kOwningGroup | kOther;
  if ((seen & kNeeded) != kNeeded) return invalid;
  if ((seen & (kUser | kGroup)) != 0 && (seen & kMask) == 0) return invalid;
  return acl;
}

std::vector<std::byte> Acl::serialize() const {
  std::vector<std::byte> value(kHeaderBytes + entries_.size() * kEntryBytes);
  store(value.data(), htole32(kVersion));
  std::byte* at = value.data() + kHeaderBytes;
  for (const Entry& entry : entries_) {
    store(at, htole16(entry.tag));
    store(at + 2, htole16(entry.permissions));
    store(at + 4, htole32(entry.id));
    at += kEntryBytes;
  }
  return value;
}

bool Acl::minimal() const {
  return std::ranges::none_of(entries_, [](const Entry& entry) { return (entry.tag & (kUser | kGroup | kMask)) != 0; });
}

Acl::Entry& Acl::group_class() {
  Entry* found = nullptr;
  for (Entry& entry : entries_) {
    if (entry.tag == kMask) return entry;
    if (entry.tag == kOwningGroup) found = &entry;
  }
  return *found;  // parse() has seen to it
}

std::uint32_t Acl::applied_to(std::uint32_t mode) const {
  std::uint32_t permissions = 0;
  std::uint32_t group = 0;
  bool masked = false;
  for (const Entry& entry : entries_) {
    if (entry.tag == kOwner) permissions |= std::uint32_t{entry.permissions} << 6;
    if (entry.tag == kOther) permissions |= entry.permissions;
    if (entry.tag == kMask || (entry.tag == kOwningGroup && !masked)) group = entry.permissions;
    if (entry.tag == kMask) masked = true;
  }
  return (mode & ~kAllPermissions) | permissions | group << 3;
}

void Acl::follow(std::uint32_t mode) {
  for (Entry& entry : entries_) {
    if (entry.tag == kOwner) entry.permissions = bits(mode, 6);
    if (entry.tag == kOther) entry.permissions = bits(mode, 0);
  }
  group_class().permissions = bits(mode, 3);
}

void Acl::inherit(std::uint32_t& mode) {
  for (Entry& entry : entries_) {
    if (entry.tag == kOwner) entry.permissions &= bits(mode, 6);
    if (entry.tag == kOther) entry.permissions &= bits(mode, 0);
  }
  Entry& group = group_class();
  group.permissions &= bits(mode, 3);
  mode = applied_to(mode);
}

}  // namespace gpufs::fuse
