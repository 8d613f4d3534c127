// INIT: what the kernel is asked for.

#include <gtest/gtest.h>

#include "fuse_fakes.h"

namespace gpufs::fuse {
namespace {

using InitTest = MountTest;

std::uint64_t flags_of(const fuse_init_out& out) { return out.flags | (std::uint64_t{out.flags2} << 32); }

TEST_F(InitTest, RequestsFlagsThatTheKernelOffers) {
  open();
  const fuse_init_out out = initialize();
  const std::uint64_t flags = flags_of(out);
  for (const std::uint64_t flag : std::initializer_list<std::uint64_t>{
           FUSE_PARALLEL_DIROPS, FUSE_ASYNC_DIO, FUSE_MAX_PAGES, kInitDirectIoAllowMmap, FUSE_INIT_EXT, FUSE_BIG_WRITES,
           FUSE_ASYNC_READ, FUSE_DO_READDIRPLUS, FUSE_POSIX_ACL, FUSE_DONT_MASK, FUSE_SETXATTR_EXT}) {
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
  for (const std::uint64_t flag : std::initializer_list<std::uint64_t>{
           FUSE_SPLICE_READ, FUSE_SPLICE_WRITE, FUSE_SPLICE_MOVE, FUSE_HANDLE_KILLPRIV, FUSE_HANDLE_KILLPRIV_V2,
           FUSE_WRITEBACK_CACHE, FUSE_READDIRPLUS_AUTO, FUSE_POSIX_LOCKS, FUSE_FLOCK_LOCKS}) {
    EXPECT_EQ(flags & flag, 0U) << std::hex << flag;
  }
  // What changes the layout of messages or needs a server that knows it.
  for (const std::uint64_t flag :
       {std::uint64_t{1} << 32, std::uint64_t{1} << 34, kInitPassthrough, kInitOverIoUring}) {
    EXPECT_EQ(flags & flag, 0U) << std::hex << flag;
  }
}

TEST_F(InitTest, KernelsThatAreTooOldAreRefused) {
  open();
  const fuse_init_in in = init_request(kKernelFlags & ~std::uint64_t{FUSE_INIT_EXT});
  EXPECT_EQ(kernel->call(FUSE_INIT, 0, bytes_of(in)).error(), EPROTO);
}

TEST_F(InitTest, AnotherMajorProtocolIsRefused) {
  open();
  fuse_init_in in = init_request(0);
  in.major = 8;
  EXPECT_EQ(kernel->call(FUSE_INIT, 0, bytes_of(in)).error(), EPROTO);
  EXPECT_EQ(kernel->call(FUSE_INIT, 0, {}).error(), EPROTO);
}

}  // namespace
}  // namespace gpufs::fuse
