// Extended attributes with kernels that lack a feature. What all kernels have is tested on mounts:
// tests/test_contract_*.

#include <gtest/gtest.h>

#include <array>
#include <string_view>

#include "fuse_fakes.h"

namespace gpufs::fuse {
namespace {

class AttributesTest : public MountTest {
 protected:
  void start_without(std::uint64_t flag) {
    open();
    initialize(kKernelFlags & ~flag);
    add_file(2);
  }
  Reply get(std::string_view name) {
    Bytes body = bytes_of(fuse_getxattr_in{4096, 0});
    append_text(body, name);
    return kernel->call(FUSE_GETXATTR, 2, body);
  }
};

TEST_F(AttributesTest, AccessListsNeedTheKernelsChecks) {
  start_without(kInitPosixAcl);
  Bytes list = bytes_of(std::uint32_t{2});
  for (const std::uint16_t tag : std::array<std::uint16_t, 3>{1, 4, 32}) {
    append(list, std::array<std::uint16_t, 4>{tag, 4, 0xffff, 0xffff});
  }
  Bytes body = bytes_of(SetxattrIn{static_cast<std::uint32_t>(list.size()), 0, 0, 0});
  append_text(body, "system.posix_acl_access");
  body.insert(body.end(), list.begin(), list.end());
  EXPECT_EQ(kernel->call(FUSE_SETXATTR, 2, body).error(), EOPNOTSUPP);
  EXPECT_EQ(get("system.posix_acl_access").error(), EOPNOTSUPP);
}

TEST_F(AttributesTest, TheShortFormOfSetxattr) {
  start_without(kInitSetxattrExt);
  Bytes body = bytes_of(std::array<std::uint32_t, 2>{1, 0});
  append_text(body, "user.a");
  body.push_back(std::byte{'x'});
  EXPECT_EQ(kernel->call(FUSE_SETXATTR, 2, body).error(), 0);
  EXPECT_EQ(get("user.a").body, Bytes{std::byte{'x'}});
}

}  // namespace
}  // namespace gpufs::fuse
