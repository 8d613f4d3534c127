#include "fuse/extended_attributes.h"

#include <sys/xattr.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>

namespace gpufs::fuse {
namespace {

constexpr std::string_view kTrusted = "trusted.";
constexpr std::string_view kCapability = "security.capability";
constexpr std::array<std::string_view, 3> kNamespaces{"user.", kTrusted, "security."};

static_assert(std::endian::native == std::endian::little, "the lists are little-endian");

constexpr std::uint32_t kVersion = 2;
constexpr std::size_t kAclHeaderBytes = 4;

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
  return {reinterpret_cast<const AclEntry*>(acl.data() + kAclHeaderBytes),
          (acl.size() - kAclHeaderBytes) / sizeof(AclEntry)};
}

std::span<AclEntry> entries_of(std::span<std::byte> acl) {
  return {reinterpret_cast<AclEntry*>(acl.data() + kAclHeaderBytes), (acl.size() - kAclHeaderBytes) / sizeof(AclEntry)};
}

std::uint16_t bits(std::uint32_t mode, int shift) { return static_cast<std::uint16_t>((mode >> shift) & kRwxMask); }

// In an image, before each name and its value.
struct Lengths {
  std::uint32_t name;
  std::uint32_t value;
};

// The entry whose permissions are the group's bits of a mode: the mask or the owning group.
std::uint16_t group_class_of(std::span<const std::byte> acl) {
  const bool masked = std::ranges::any_of(entries_of(acl), [](const AclEntry& entry) { return entry.tag == kMask; });
  return masked ? kMask : kOwningGroup;
}

}  // namespace

int attribute_name_error(std::string_view name) {
  if (is_acl(name)) return 0;
  const auto* const found =
      std::ranges::find_if(kNamespaces, [&](std::string_view prefix) { return name.starts_with(prefix); });
  if (found == kNamespaces.end()) return EOPNOTSUPP;
  return name == *found ? EINVAL : 0;
}

Status ExtendedAttributes::set(std::string_view name, std::span<const std::byte> value, std::uint32_t flags) {
  const auto found = values_.find(name);
  const bool exists = found != values_.end();
  if ((flags & XATTR_CREATE) != 0 && exists) return Status(EEXIST, "the attribute exists");
  if ((flags & XATTR_REPLACE) != 0 && !exists) return Status(ENODATA, "the attribute does not exist");
  if (value.size() > kLargestValue) return Status(E2BIG, "the value is too large");
  const std::size_t names = names_bytes_ + (exists ? 0 : name.size() + 1);
  const std::size_t values = values_bytes_ - (exists ? found->second.size() : 0) + value.size();
  if (names > kAllNames || names + values > kAllBytes) return Status(ENOSPC, "no space for more attributes");
  Value copy(value.begin(), value.end());
  if (exists) {
    found->second = std::move(copy);
  } else {
    values_.emplace(name, std::move(copy));
  }
  names_bytes_ = names;
  values_bytes_ = values;
  ++changes_;
  return {};
}

const ExtendedAttributes::Value* ExtendedAttributes::find(std::string_view name) const {
  const auto found = values_.find(name);
  return found == values_.end() ? nullptr : &found->second;
}

bool ExtendedAttributes::remove(std::string_view name) {
  const auto found = values_.find(name);
  if (found == values_.end()) return false;
  names_bytes_ -= found->first.size() + 1;
  values_bytes_ -= found->second.size();
  values_.erase(found);
  ++changes_;
  return true;
}

void ExtendedAttributes::follow_mode(std::uint32_t mode) {
  const auto found = values_.find(kAccessAcl);
  if (found == values_.end()) return;
  acl_follow_mode(found->second, mode);
  ++changes_;
}

std::string ExtendedAttributes::names(bool trusted) const {
  std::string list;
  for (const auto& [name, value] : values_) {
    if (trusted || !name.starts_with(kTrusted)) list.append(name).push_back('\0');
  }
  return list;
}

bool ExtendedAttributes::has_trusted() const {
  const auto first = values_.lower_bound(kTrusted);
  return first != values_.end() && first->first.starts_with(kTrusted);
}

std::size_t ExtendedAttributes::bytes() const { return names_bytes_ + values_bytes_ + values_.size() * kOverhead; }

std::size_t ExtendedAttributes::image_bytes() const {
  return names_bytes_ - values_.size() + values_bytes_ + values_.size() * sizeof(Lengths);
}

std::vector<std::byte> ExtendedAttributes::image() const {
  std::vector<std::byte> image(image_bytes());
  std::byte* next = image.data();
  const auto append = [&next](const void* data, std::size_t bytes) {
    if (bytes != 0) std::memcpy(next, data, bytes);
    next += bytes;
  };
  for (const auto& [name, value] : values_) {
    const Lengths lengths{static_cast<std::uint32_t>(name.size()), static_cast<std::uint32_t>(value.size())};
    append(&lengths, sizeof lengths);
    append(name.data(), name.size());
    append(value.data(), value.size());
  }
  return image;
}

bool ExtendedAttributes::restore(std::span<const std::byte> image) {
  bool whole = true;
  while (!image.empty()) {
    Lengths lengths{};
    if (image.size() < sizeof lengths) return false;
    std::memcpy(&lengths, image.data(), sizeof lengths);
    image = image.subspan(sizeof lengths);
    if (image.size() < std::uint64_t{lengths.name} + lengths.value) return false;
    const std::string_view name(reinterpret_cast<const char*>(image.data()), lengths.name);
    const Value value(image.begin() + lengths.name, image.begin() + lengths.name + lengths.value);
    image = image.subspan(lengths.name + lengths.value);
    whole = whole && !name.empty() && (!is_acl(name) || acl_is_valid(value)) && set(name, value, 0).ok();
  }
  return whole;
}

void ExtendedAttributes::drop_capability() {
  const Value* value = find(kCapability);
  // The kernel ignores an empty one.
  if (value != nullptr && !value->empty()) remove(kCapability);
}

bool acl_is_valid(std::span<const std::byte> acl) {
  std::uint32_t version = 0;
  if (acl.size() < kAclHeaderBytes || (acl.size() - kAclHeaderBytes) % sizeof(AclEntry) != 0) return false;
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
