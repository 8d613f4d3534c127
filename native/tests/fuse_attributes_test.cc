// Attributes, extended attributes and access control lists, as the kernel asks for them.

#include <gtest/gtest.h>
#include <sys/xattr.h>

#include <string>

#include "fuse_fakes.h"

namespace gpufs::fuse {
namespace {

class AttributesTest : public MountTest {
 protected:
  void SetUp() override {
    MountOptions options;
    options.attribute_timeout = 1.5;
    open_and_initialize(options);
  }

  struct Entry {
    std::uint16_t tag;
    std::uint16_t permissions;
    std::uint32_t id = UINT32_MAX;
  };
  static Bytes acl(std::initializer_list<Entry> entries) {
    Bytes value = bytes_of(std::uint32_t{2});
    for (const Entry& entry : entries) append(value, entry);
    return value;
  }
  static Bytes text(std::string_view value) {
    const auto raw = std::as_bytes(std::span(value));
    return {raw.begin(), raw.end()};
  }
  int set(std::uint64_t ino, std::string_view name, const Bytes& value, std::uint32_t flags = 0,
          std::uint32_t extra = 0) {
    Bytes body = bytes_of(SetxattrIn{static_cast<std::uint32_t>(value.size()), flags, extra, 0});
    append_text(body, name);
    body.insert(body.end(), value.begin(), value.end());
    return kernel->call(FUSE_SETXATTR, ino, body).error();
  }
  Reply get(std::uint64_t ino, std::string_view name, std::uint32_t room = 4096) {
    Bytes body = bytes_of(fuse_getxattr_in{room, 0});
    append_text(body, name);
    return kernel->call(FUSE_GETXATTR, ino, body);
  }
  int remove(std::uint64_t ino, std::string_view name) {
    Bytes body;
    append_text(body, name);
    return kernel->call(FUSE_REMOVEXATTR, ino, body).error();
  }
  std::string list(std::uint64_t ino, std::uint32_t pid = 0) {
    Bytes message =
        FakeKernel::message(FUSE_LISTXATTR, kernel->next_unique(), ino, bytes_of(fuse_getxattr_in{4096, 0}));
    fuse_in_header header{};
    EXPECT_TRUE(read_struct(std::span<const std::byte>(message), 0, &header));
    header.pid = pid;
    write_struct(std::span(message), 0, header);
    kernel->send_raw(message);
    const Reply reply = kernel->wait(header.unique);
    return {reinterpret_cast<const char*>(reply.body.data()), reply.body.size()};
  }
  fuse_attr_out change(std::uint64_t ino, std::uint32_t valid, const std::function<void(fuse_setattr_in&)>& fill) {
    fuse_setattr_in in{};
    in.valid = valid;
    fill(in);
    return kernel->call(FUSE_SETATTR, ino, bytes_of(in)).as<fuse_attr_out>();
  }
  std::uint32_t mode(std::uint64_t ino) { return table->find(ino)->attributes().mode; }
};

TEST_F(AttributesTest, StatxKnowsTheBirth) {
  gpufs_attributes attributes = file_attributes(2);
  attributes.ctime = 77;
  attributes.ctime_ns = 88;
  ASSERT_TRUE(table->add(attributes).ok());
  change(2, FATTR_MODE, [](fuse_setattr_in& in) { in.mode = 0600; });
  const StatxOut out = kernel->call(kOpcodeStatx, 2, bytes_of(StatxIn{})).as<StatxOut>();
  EXPECT_EQ(out.attr_valid, 1U);
  EXPECT_EQ(out.attr_valid_nsec, 500'000'000U);
  EXPECT_EQ(out.stat.mask, 0xfffU);
  EXPECT_EQ(out.stat.btime.seconds, 77);
  EXPECT_EQ(out.stat.btime.nanoseconds, 88U);
  EXPECT_GT(out.stat.ctime.seconds, 77);
  EXPECT_EQ(out.stat.mode, S_IFREG | 0600);
  EXPECT_EQ(out.stat.ino, 2U);
}

TEST_F(AttributesTest, RefusedSetattrs) {
  ASSERT_TRUE(table->add(file_attributes(1, S_IFDIR | 0555, -1)).ok());
  ASSERT_TRUE(table->add(file_attributes(2, S_IFDIR | 0755)).ok());
  ASSERT_TRUE(table->add(file_attributes(3)).ok());
  const auto attempt = [&](std::uint64_t ino, std::uint32_t valid, std::uint64_t size) {
    fuse_setattr_in in{};
    in.valid = valid;
    in.size = size;
    return kernel->call(FUSE_SETATTR, ino, bytes_of(in)).error();
  };
  EXPECT_EQ(attempt(1, FATTR_MODE, 0), EPERM);  // the mount's own
  EXPECT_EQ(attempt(2, FATTR_SIZE, 0), EISDIR);
  EXPECT_EQ(attempt(3, FATTR_SIZE, FakeBuffer::kMaximum + 1), EFBIG);
}

TEST_F(AttributesTest, SetIdBitsAreNotCached) {
  const auto lifetime = [&](std::uint64_t ino) {
    return kernel->call(FUSE_GETATTR, ino, bytes_of(fuse_getattr_in{})).as<fuse_attr_out>().attr_valid;
  };
  const std::uint64_t fh = add_file(2, S_IFREG | 06755);
  EXPECT_EQ(lifetime(2), 0U);
  kernel->write(2, fh, 0, pattern(10, 1), kWriteKillSetId);
  EXPECT_EQ(mode(2), S_IFREG | 0755U);
  EXPECT_GT(lifetime(2), 0U);
  ASSERT_TRUE(table->add(file_attributes(3, S_IFDIR | 02755)).ok());
  EXPECT_GT(lifetime(3), 0U);
}

TEST_F(AttributesTest, WritesAcrossTheLargestSizeAreCutShort) {
  const std::uint64_t fh = add_file(2);
  EXPECT_EQ(kernel->write(2, fh, FakeBuffer::kMaximum - 10, pattern(100, 1)).as<fuse_write_out>().size, 10U);
  EXPECT_EQ(kernel->write(2, fh, FakeBuffer::kMaximum, pattern(100, 1)).error(), EFBIG);
}

TEST_F(AttributesTest, RefusedExtendedAttributes) {
  add_file(2);
  ASSERT_TRUE(table->add(file_attributes(1, S_IFDIR | 0555, -1)).ok());
  EXPECT_EQ(set(2, "nonsense.a", {}), EOPNOTSUPP);
  EXPECT_EQ(get(2, "system.a").error(), EOPNOTSUPP);
  EXPECT_EQ(remove(2, "system.a"), EOPNOTSUPP);
  EXPECT_EQ(set(2, "user.", {}), EINVAL);
  EXPECT_EQ(set(2, "user.gpufs.reads", {}), EPERM);
  EXPECT_EQ(remove(2, "user.gpufs.reads"), EPERM);
  EXPECT_EQ(set(1, "user.a", {}), EPERM);
  EXPECT_EQ(set(2, "user.a", Bytes(65537)), E2BIG);
  for (int i = 0; i < 15; ++i) EXPECT_EQ(set(2, "user." + std::to_string(i), Bytes(65536)), 0);
  EXPECT_EQ(set(2, "user.more", Bytes(65536)), ENOSPC);
  EXPECT_EQ(set(2, "user.3", Bytes(1)), 0);  // in place of a longer one
  EXPECT_EQ(set(2, "user.more", Bytes(65536)), 0);
  EXPECT_EQ(kernel->call(FUSE_GETXATTR, 2, bytes_of(fuse_getxattr_in{})).error(), EINVAL);  // without a name
  EXPECT_EQ(kernel->call(FUSE_SETXATTR, 2, Bytes(20)).error(), EINVAL);
  EXPECT_FALSE(control->receive(kQuiet));
}

TEST_F(AttributesTest, AnAccessListAndTheModeFollowEachOther) {
  add_file(2, S_IFREG | 02644);
  const Bytes value = acl({{1, 6}, {2, 7, 1000}, {4, 5}, {16, 4}, {32, 0}});
  EXPECT_EQ(set(2, "system.posix_acl_access", value), 0);
  EXPECT_EQ(mode(2), S_IFREG | 02640U);
  EXPECT_EQ(get(2, "system.posix_acl_access").body, value);
  EXPECT_EQ(list(2), std::string("system.posix_acl_access\0", 24));
  change(2, FATTR_MODE, [](fuse_setattr_in& in) { in.mode = 02771; });
  EXPECT_EQ(get(2, "system.posix_acl_access").body, acl({{1, 7}, {2, 7, 1000}, {4, 5}, {16, 7}, {32, 1}}));
  EXPECT_EQ(set(2, "system.posix_acl_access", value, 0, kSetxattrAclKillSgid), 0);
  EXPECT_EQ(mode(2), S_IFREG | 0640U);
  // One that says no more than the mode is none.
  EXPECT_EQ(set(2, "system.posix_acl_access", acl({{1, 7}, {4, 1}, {32, 1}})), 0);
  EXPECT_EQ(mode(2), S_IFREG | 0711U);
  EXPECT_EQ(get(2, "system.posix_acl_access").error(), ENODATA);
  EXPECT_EQ(remove(2, "system.posix_acl_access"), 0);
  EXPECT_EQ(set(2, "system.posix_acl_default", value), EACCES);
  for (const Bytes& bad : {Bytes(3), Bytes(4), Bytes(11), acl({{1, 6}, {4, 5}}), acl({{1, 6}, {4, 5}, {32, 8}}),
                           acl({{1, 6}, {1, 6}, {4, 5}, {32, 0}}), acl({{1, 6}, {2, 6, 1}, {4, 5}, {32, 0}}),
                           acl({{1, 6}, {4, 5}, {32, 0}, {64, 0}})}) {
    EXPECT_EQ(set(2, "system.posix_acl_access", bad), EINVAL);
  }
}

TEST_F(AttributesTest, AccessListsNeedTheKernelsChecks) {
  TearDown();
  open();
  initialize(kKernelFlags & ~kInitPosixAcl);
  add_file(2);
  EXPECT_EQ(set(2, "system.posix_acl_access", acl({{1, 6}, {4, 4}, {32, 4}})), EOPNOTSUPP);
  EXPECT_EQ(get(2, "system.posix_acl_access").error(), EOPNOTSUPP);
  EXPECT_EQ(remove(2, "system.posix_acl_access"), EOPNOTSUPP);
  EXPECT_EQ(set(2, "user.a", text("1")), 0);
}

TEST_F(AttributesTest, TheShortFormOfSetxattr) {
  TearDown();
  open();
  initialize(kKernelFlags & ~kInitSetxattrExt);
  add_file(2);
  Bytes body = bytes_of(std::array<std::uint32_t, 2>{1, 0});
  append_text(body, "user.a");
  body.push_back(std::byte{'x'});
  EXPECT_EQ(kernel->call(FUSE_SETXATTR, 2, body).error(), 0);
  EXPECT_EQ(get(2, "user.a").body, text("x"));
}

TEST_F(AttributesTest, AccessTimesByTheMountsOptions) {
  const std::uint64_t fh = add_file(2);
  kernel->write(2, fh, 0, pattern(10, 1));
  const auto atime = [&] { return table->find(2)->attributes().atime; };
  const auto read_at = [&](std::int64_t second) {
    change(2, FATTR_ATIME, [&](fuse_setattr_in& in) { in.atime = static_cast<std::uint64_t>(second); });
    kernel->read(2, fh, 0, 10);
    return atime();
  };
  constexpr std::int64_t kFuture = std::int64_t{1} << 40;
  table->set_access_times(AccessTimes::kNever, false);
  EXPECT_EQ(read_at(1), 1);
  table->set_access_times(AccessTimes::kAlways, true);
  EXPECT_LT(read_at(kFuture), kFuture);
  table->set_access_times(AccessTimes::kRelative, true);
  EXPECT_EQ(read_at(kFuture), kFuture);
  EXPECT_GT(read_at(1), 1);
  ASSERT_TRUE(table->add(file_attributes(3, S_IFDIR | 0755)).ok());
  table->was_read(*table->find(3));
  EXPECT_EQ(table->find(3)->attributes().atime, 1'000'000);
}

}  // namespace
}  // namespace gpufs::fuse
