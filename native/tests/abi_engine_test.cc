// The engine and buffer functions of the C interface: arguments, handles, lifetimes.

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "gpufs.h"

namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

class EngineTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const gpufs_engine_options options{"host", 2, 64 * kMiB, 65536, nullptr, 0, GPUFS_LOCK_AUTO, GPUFS_HIP_MEMORY_AUTO,
                                       nullptr};
    ASSERT_EQ(gpufs_engine_open(&options, &engine).error, 0) << gpufs_message();
  }
  void TearDown() override { (void)gpufs_engine_close(engine); }
  gpufs_handle buffer(int device = 0) {
    gpufs_handle handle = 0;
    EXPECT_EQ(gpufs_buffer_create(engine, device, &handle).error, 0);
    return handle;
  }
  gpufs_handle engine = 0;
};

TEST(EngineOpenTest, RefusesBadOptions) {
  gpufs_handle engine = 77;
  const auto opens = [&engine](gpufs_engine_options options) { return gpufs_engine_open(&options, &engine).error; };
  EXPECT_EQ(gpufs_engine_open(nullptr, &engine).error, EFAULT);
  EXPECT_EQ(opens({nullptr, 1, kMiB, 0, nullptr, 0, GPUFS_LOCK_AUTO, GPUFS_HIP_MEMORY_AUTO, nullptr}), EFAULT);
  EXPECT_EQ(opens({"nonsense", 1, 64 * kMiB, 0, nullptr, 0, GPUFS_LOCK_AUTO, GPUFS_HIP_MEMORY_AUTO, nullptr}), EINVAL);
  EXPECT_NE(std::string(gpufs_message()).find("nonsense"), std::string::npos);
  EXPECT_EQ(opens({"hip", 1, 64 * kMiB, 0, nullptr, 0, GPUFS_LOCK_AUTO, GPUFS_HIP_MEMORY_AUTO, nullptr}), ENODEV);
  EXPECT_EQ(opens({"host", 1, 0, 0, nullptr, 0, GPUFS_LOCK_AUTO, GPUFS_HIP_MEMORY_AUTO, nullptr}), EINVAL);
  EXPECT_EQ(opens({"host", -3, 64 * kMiB, 0, nullptr, 0, GPUFS_LOCK_AUTO, GPUFS_HIP_MEMORY_AUTO, nullptr}), EINVAL);
  EXPECT_EQ(opens({"host", 1, 64 * kMiB, kMiB + 1, nullptr, 0, GPUFS_LOCK_AUTO, GPUFS_HIP_MEMORY_AUTO, nullptr}),
            EINVAL);
  EXPECT_EQ(opens({"host", 1, 64 * kMiB, 0, nullptr, 0, 3, GPUFS_HIP_MEMORY_AUTO, nullptr}), EINVAL);
  EXPECT_EQ(opens({"host", 1, 64 * kMiB, 0, nullptr, 0, GPUFS_LOCK_AUTO, 3, nullptr}), EINVAL);
  EXPECT_EQ(engine, 77U);
  EXPECT_EQ(gpufs_engine_close(0).error, EBADF);
}

TEST_F(EngineTest, DescribesItsDevices) {
  std::int32_t count = 0;
  ASSERT_EQ(gpufs_engine_device_count(engine, &count).error, 0);
  EXPECT_EQ(count, 2);
  gpufs_device_info info{};
  ASSERT_EQ(gpufs_engine_device_info(engine, 1, &info).error, 0);
  EXPECT_STREQ(info.name, "host memory");
  EXPECT_EQ(info.index, 1);
  EXPECT_EQ(info.total_bytes, 64 * kMiB);
  EXPECT_EQ(info.granule, 2 * kMiB);
  EXPECT_EQ(info.cpu_addressable, 1);
  EXPECT_EQ(gpufs_engine_device_info(engine, 2, &info).error, EINVAL);
  EXPECT_EQ(gpufs_engine_device_info(engine, -1, &info).error, EINVAL);
  EXPECT_EQ(gpufs_engine_device_info(engine, 0, nullptr).error, EFAULT);
  gpufs_device_memory memory{};
  ASSERT_EQ(gpufs_engine_device_memory(engine, 0, &memory).error, 0);
  EXPECT_EQ(memory.free_bytes, 64 * kMiB);
  EXPECT_EQ(memory.health_error, 0);
}

TEST_F(EngineTest, BuffersReadAndWrite) {
  const gpufs_handle file = buffer(1);
  const std::string text = "the quick brown fox";
  std::uint64_t done = 0;
  ASSERT_EQ(gpufs_buffer_write(file, 10, text.data(), text.size(), &done).error, 0);
  EXPECT_EQ(done, text.size());
  gpufs_buffer_info info{};
  ASSERT_EQ(gpufs_buffer_info_get(file, &info).error, 0);
  EXPECT_EQ(info.size, 29U);
  EXPECT_EQ(info.held_bytes, 512U);
  EXPECT_EQ(info.device, 1);
  char seen[100] = {};
  ASSERT_EQ(gpufs_buffer_read(file, 14, seen, sizeof seen, &done).error, 0);
  EXPECT_EQ(done, 15U);
  EXPECT_EQ(std::string(seen, done), "quick brown fox");
  ASSERT_EQ(gpufs_buffer_resize(file, 5 * kMiB).error, 0);
  ASSERT_EQ(gpufs_buffer_allocate(file, 0, 0, 3 * kMiB).error, 0);
  EXPECT_EQ(gpufs_buffer_allocate(file, GPUFS_PUNCH_HOLE, 0, 10).error, EOPNOTSUPP);
  EXPECT_EQ(gpufs_buffer_allocate(file, 8, 0, 10).error, EOPNOTSUPP);
  ASSERT_EQ(gpufs_buffer_allocate(file, GPUFS_PUNCH_HOLE | GPUFS_KEEP_SIZE, 2 * kMiB, 2 * kMiB).error, 0);
  ASSERT_EQ(gpufs_buffer_allocate(file, GPUFS_ZERO_RANGE, 0, 12).error, 0);
  std::uint64_t found = 0;
  ASSERT_EQ(gpufs_buffer_seek(file, GPUFS_SEEK_HOLE, 0, &found).error, 0);
  EXPECT_EQ(found, 2 * kMiB);
  EXPECT_EQ(gpufs_buffer_seek(file, GPUFS_SEEK_DATA, 2 * kMiB, &found).error, ENXIO);
  EXPECT_EQ(gpufs_buffer_seek(file, 0, 0, &found).error, EINVAL);
  std::uint64_t address = 0;
  ASSERT_EQ(gpufs_buffer_address(file, 8 * kMiB, &address).error, 0);
  EXPECT_EQ(std::memcmp(reinterpret_cast<const char*>(address) + 12, "e quick", 7), 0);
  EXPECT_EQ(gpufs_buffer_write(file, 8 * kMiB, text.data(), 1, &done).error, EFBIG);
  EXPECT_EQ(done, 0U);
}

TEST_F(EngineTest, BadArgumentsAndStaleHandles) {
  gpufs_handle none = 0;
  EXPECT_EQ(gpufs_buffer_create(engine, 2, &none).error, EINVAL);
  EXPECT_EQ(gpufs_buffer_create(12345, 0, &none).error, EBADF);
  EXPECT_EQ(gpufs_buffer_create(engine, 0, nullptr).error, EFAULT);
  const gpufs_handle file = buffer();
  std::uint64_t done = 0;
  EXPECT_EQ(gpufs_buffer_read(file, 0, nullptr, 1, &done).error, EFAULT);
  EXPECT_EQ(gpufs_buffer_read(file, 0, nullptr, 0, &done).error, 0);
  EXPECT_EQ(gpufs_buffer_write(file, 0, nullptr, 1, &done).error, EFAULT);
  EXPECT_EQ(gpufs_buffer_write(file, 0, "x", 1, nullptr).error, EFAULT);
  EXPECT_EQ(gpufs_buffer_write(file, 0, "x", ~std::uint64_t{0}, &done).error, EFBIG);
  EXPECT_EQ(gpufs_buffer_info_get(engine, nullptr).error, EBADF);  // of another kind
  EXPECT_EQ(gpufs_engine_close(file).error, EBADF);
  ASSERT_EQ(gpufs_buffer_close(file).error, 0);
  EXPECT_EQ(gpufs_buffer_close(file).error, EBADF);
  EXPECT_EQ(gpufs_buffer_resize(file, 1).error, EBADF);
}

TEST_F(EngineTest, ClosingTheEngineClosesEverything) {
  const gpufs_handle first = buffer(0);
  const gpufs_handle second = buffer(1);
  std::uint64_t done = 0;
  ASSERT_EQ(gpufs_buffer_write(first, 0, "x", 1, &done).error, 0);
  std::thread using_it([&] {
    std::uint64_t count = 0;
    while (gpufs_buffer_write(second, 0, "y", 1, &count).error == 0) {
    }
  });
  ASSERT_EQ(gpufs_engine_close(engine).error, 0);
  using_it.join();
  EXPECT_EQ(gpufs_buffer_resize(first, 1).error, EBADF);
  EXPECT_EQ(gpufs_buffer_resize(second, 1).error, EBADF);
  EXPECT_EQ(gpufs_engine_close(engine).error, EBADF);
}

TEST(LogConfigureTest, ChecksItsArguments) {
  EXPECT_EQ(gpufs_log_configure(-2, GPUFS_LOG_INFO).error, EBADF);
  EXPECT_EQ(gpufs_log_configure(-1, 0).error, EINVAL);
  EXPECT_EQ(gpufs_log_configure(-1, 41).error, EINVAL);
  EXPECT_EQ(gpufs_log_configure(-1, GPUFS_LOG_INFO).error, 0);
  EXPECT_NE(std::string(gpufs_version()), "");
}

}  // namespace
