// INIT: what the kernel is asked for.

#include <gtest/gtest.h>

#include <array>

#include "fuse_fakes.h"

namespace gpufs::fuse {
namespace {

using InitTest = MountTest;

std::uint64_t flags_of(const fuse_init_out& out) { return out.flags | (std::uint64_t{out.flags2} << 32); }

TEST_F(InitTest, RequestsFlagsThatTheKernelOffers) {
  open();
  const fuse_init_out out = initialize();
  const std::uint64_t flags = flags_of(out);
  for (const std::uint64_t flag : {kInitParallelDirops, kInitAsyncDio, kInitMaxPages, kInitDirectIoAllowMmap,
                                   kInitExtended, kInitBigWrites, kInitAsyncRead, kInitDoReaddirplus}) {
    EXPECT_EQ(flags & flag, flag) << std::hex << flag;
  }
  EXPECT_EQ(out.max_pages, 256);
  EXPECT_EQ(out.max_write, 1U << 20);
  EXPECT_GE(out.max_background, 64);
  EXPECT_GT(out.congestion_threshold, 0);
}

TEST_F(InitTest, DoesNotRequestFlagsThatItCannotServe) {
  open();
  const std::uint64_t flags = flags_of(initialize());
  for (const std::uint64_t flag :
       {kInitSpliceRead, kInitSpliceWrite, kInitSpliceMove, kInitHandleKillpriv, kInitHandleKillprivV2,
        kInitWritebackCache, kInitReaddirplusAuto, std::uint64_t{FUSE_POSIX_LOCKS}, std::uint64_t{FUSE_FLOCK_LOCKS}}) {
    EXPECT_EQ(flags & flag, 0U) << std::hex << flag;
  }
  // What changes the layout of messages or needs a server that knows it.
  for (const std::uint64_t flag : {std::uint64_t{1} << 32, std::uint64_t{1} << 34, kInitHandleKillpriv,
                                   kInitHandleKillprivV2, kInitPassthrough, kInitOverIoUring}) {
    EXPECT_EQ(flags & flag, 0U) << std::hex << flag;
  }
}

TEST_F(InitTest, AccessControlListsNeedTheUmaskToo) {
  open();
  EXPECT_EQ(flags_of(initialize()) & (kInitPosixAcl | kInitDontMask | kInitSetxattrExt),
            kInitPosixAcl | kInitDontMask | kInitSetxattrExt);
  TearDown();
  open();
  EXPECT_EQ(flags_of(initialize(kKernelFlags & ~kInitDontMask)) & (kInitPosixAcl | kInitDontMask), 0U);
}

TEST_F(InitTest, OldKernelsSendAShortRequest) {
  open();
  const fuse_init_in in = init_request(kKernelFlags & UINT32_MAX & ~kInitExtended);
  Bytes body = bytes_of(in);
  body.resize(16);
  const auto out = kernel->call(FUSE_INIT, 0, body).as<fuse_init_out>();
  EXPECT_EQ(out.flags & kInitDoReaddirplus, kInitDoReaddirplus);
  EXPECT_EQ(out.flags2, 0U);
}

TEST_F(InitTest, AnotherMajorProtocolIsRefused) {
  open();
  fuse_init_in in = init_request(0);
  in.major = 8;
  EXPECT_EQ(kernel->call(FUSE_INIT, 0, bytes_of(in)).error(), EPROTO);
  EXPECT_EQ(kernel->call(FUSE_INIT, 0, {}).error(), EPROTO);
}

// Kernels that lack a feature.
class FeatureTest : public MountTest {
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

TEST_F(FeatureTest, AccessListsNeedTheKernelsChecks) {
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

TEST_F(FeatureTest, TheShortFormOfSetxattr) {
  start_without(kInitSetxattrExt);
  Bytes body = bytes_of(std::array<std::uint32_t, 2>{1, 0});
  append_text(body, "user.a");
  body.push_back(std::byte{'x'});
  EXPECT_EQ(kernel->call(FUSE_SETXATTR, 2, body).error(), 0);
  EXPECT_EQ(get("user.a").body, Bytes{std::byte{'x'}});
}

}  // namespace
}  // namespace gpufs::fuse
