#include "fuse/extended_attributes.h"

#include <sys/xattr.h>

#include <algorithm>
#include <array>
#include <cerrno>

namespace gpufs::fuse {

namespace {

constexpr std::string_view kTrusted = "trusted.";
constexpr std::string_view kCapability = "security.capability";
constexpr std::array<std::string_view, 3> kNamespaces{"user.", kTrusted, "security."};

}  // namespace

int attribute_name_error(std::string_view name) {
  const auto* const found =
      std::ranges::find_if(kNamespaces, [&](std::string_view prefix) { return name.starts_with(prefix); });
  if (found == kNamespaces.end()) return EOPNOTSUPP;
  return name == *found ? EINVAL : 0;
}

Status ExtendedAttributes::set(std::string_view name, std::span<const std::byte> value, std::uint32_t flags) {
  const auto found = values_.find(name);
  const bool there = found != values_.end();
  if ((flags & XATTR_CREATE) != 0 && there) return Status(EEXIST, "the attribute is there already");
  if ((flags & XATTR_REPLACE) != 0 && !there) return Status(ENODATA, "the attribute is not there");
  if (value.size() > kLargestValue) return Status(E2BIG, "the value is too large");
  const std::size_t names = names_bytes_ + (there ? 0 : name.size() + 1);
  const std::size_t values = values_bytes_ - (there ? found->second.size() : 0) + value.size();
  if (names > kAllNames || names + values > kAllBytes) return Status(ENOSPC, "no space for more attributes");
  Value copy(value.begin(), value.end());
  if (there) {
    found->second = std::move(copy);
  } else {
    values_.emplace(name, std::move(copy));
  }
  names_bytes_ = names;
  values_bytes_ = values;
  return {};
}

ExtendedAttributes::Value* ExtendedAttributes::find(std::string_view name) {
  const auto found = values_.find(name);
  return found == values_.end() ? nullptr : &found->second;
}

bool ExtendedAttributes::remove(std::string_view name) {
  const auto found = values_.find(name);
  if (found == values_.end()) return false;
  names_bytes_ -= found->first.size() + 1;
  values_bytes_ -= found->second.size();
  values_.erase(found);
  return true;
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

void ExtendedAttributes::drop_capability() {
  const Value* value = find(kCapability);
  // The kernel ignores an empty one.
  if (value != nullptr && !value->empty()) remove(kCapability);
}

}  // namespace gpufs::fuse
