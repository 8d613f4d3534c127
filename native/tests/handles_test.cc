// The handle table: stale, foreign and closed handles, owners, races between closing and using.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "abi/barrier.h"
#include "abi/handles.h"

namespace gpufs {
namespace {

TEST(HandleTableTest, RefusesClosedHandlesOtherNumbersAndTypes) {
  HandleTable table;
  const gpufs_handle closed = table.put(std::make_shared<int>(1)).take();
  EXPECT_EQ(*table.take<int>(closed).value(), 1);
  const gpufs_handle handle = table.put(std::make_shared<int>(2)).take();
  for (const gpufs_handle wrong : {gpufs_handle{0}, closed, handle + 1, ~gpufs_handle{0}}) {
    EXPECT_EQ(table.get<int>(wrong).error(), EBADF);
    EXPECT_EQ(table.take<int>(wrong).error(), EBADF);
  }
  EXPECT_EQ(table.get<std::string>(handle).error(), EBADF);
  EXPECT_EQ(table.take<std::string>(handle).error(), EBADF);
  EXPECT_EQ(*table.get<int>(handle).value(), 2);
}

TEST(HandleTableTest, ClosesTheHandlesOfAnOwnerYoungestFirst) {
  HandleTable table;
  std::vector<int> closed;
  const gpufs_handle owner = table.put(std::make_shared<std::string>("engine")).take();
  const auto note = [&closed](int& value) {
    closed.push_back(value);
    return Status();
  };
  const gpufs_handle first = table.put<int>(std::make_shared<int>(1), owner, note).take();
  const gpufs_handle second = table.put<int>(std::make_shared<int>(2), owner, note).take();
  const gpufs_handle nested = table.put<int>(std::make_shared<int>(3), first, note).take();
  const gpufs_handle taken = table.put<int>(std::make_shared<int>(4), owner, note).take();
  const gpufs_handle other = table.put(std::make_shared<int>(5)).take();
  ASSERT_TRUE(table.take<int>(taken).ok());
  ASSERT_TRUE(table.take<std::string>(owner).ok());
  table.close_owned(owner);
  EXPECT_EQ(closed, (std::vector<int>{2, 1, 3}));
  for (const gpufs_handle handle : {first, second, nested}) EXPECT_EQ(table.get<int>(handle).error(), EBADF);
  EXPECT_TRUE(table.get<int>(other).ok());
  EXPECT_EQ(table.put(std::make_shared<int>(6), owner).error(), EBADF);
}

TEST(BarrierTest, TurnsExceptionsIntoErrorsAndKeepsTheText) {
  const gpufs_status failed = catch_all([]() -> Status { return Status(ENOSPC, "the device is full", 2); });
  EXPECT_EQ(failed.error, ENOSPC);
  EXPECT_EQ(failed.device_code, 2);
  EXPECT_STREQ(gpufs_message(), "the device is full");
  EXPECT_EQ(catch_all([]() -> Status { return {}; }).error, 0);
  EXPECT_STREQ(gpufs_message(), "the device is full");  // of the last failure
  EXPECT_EQ(catch_all([]() -> Status { throw std::bad_alloc(); }).error, ENOMEM);
  EXPECT_EQ(catch_all([]() -> Status { throw std::runtime_error("odd"); }).error, EIO);
  EXPECT_STREQ(gpufs_message(), "internal failure: odd");
  std::thread([] { EXPECT_STREQ(gpufs_message(), ""); }).join();
}

}  // namespace
}  // namespace gpufs
