// The counters: buckets, stripes, and their file.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "observe/counters.h"

namespace gpufs::observe {
namespace {

class CountersTest : public ::testing::Test {
 protected:
  CountersTest() {
    char name[] = "/tmp/gpufs-counters-XXXXXX";
    folder_ = ::mkdtemp(name);
    path = folder_ + "/counters";
  }
  ~CountersTest() override { std::filesystem::remove_all(folder_); }

  std::shared_ptr<Region> make(std::size_t devices = 2) {
    Result<std::shared_ptr<Region>> made = Region::create(devices, path);
    EXPECT_TRUE(made.ok()) << made.status().message();
    return made.ok() ? made.take() : nullptr;
  }
  [[nodiscard]] bool locked() const {
    const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    struct flock lock {};
    lock.l_type = F_RDLCK;
    EXPECT_EQ(::fcntl(fd.get(), F_OFD_GETLK, &lock), 0);
    return lock.l_type != F_UNLCK;
  }
  [[nodiscard]] std::string contents() const {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }

  std::string path;

 private:
  std::string folder_;
};

TEST(Buckets, ArePowersOfTwo) {
  EXPECT_EQ(bucket_of(0), 0U);
  EXPECT_EQ(bucket_of(1), 0U);
  EXPECT_EQ(bucket_of(2), 1U);
  EXPECT_EQ(bucket_of(3), 2U);
  EXPECT_EQ(bucket_of(4), 2U);
  EXPECT_EQ(bucket_of(4096), 12U);
  EXPECT_EQ(bucket_of(4097), 13U);
  EXPECT_EQ(bucket_of(~std::uint64_t{0}), kBuckets - 1);
  for (std::uint64_t value = 1; value < (std::uint64_t{1} << 40); value = value * 3 + 1) {
    const std::size_t bucket = bucket_of(value);
    EXPECT_LE(value, std::uint64_t{1} << bucket);
    if (bucket > 0) {
      EXPECT_GT(value, std::uint64_t{1} << (bucket - 1));
    }
  }
}

TEST_F(CountersTest, ThreadsLoseNoCounts) {
  const std::shared_ptr<Region> region = make();
  const DeviceCounters counters(region, 1);
  constexpr int kThreads = 40;  // more than there are stripes
  constexpr std::uint64_t kTimes = 2000;
  std::vector<std::thread> threads;
  for (int number = 0; number < kThreads; ++number) {
    threads.emplace_back([&, number] {
      for (std::uint64_t time = 0; time < kTimes; ++time) {
        counters.begin(Backend::kMount, Flow::kOut);
        counters.end(Backend::kMount, Flow::kOut, 4096, number == 0, 1000);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(region->sum(1, Backend::kMount, Flow::kOut, &Block::started), kThreads * kTimes);
  EXPECT_EQ(region->sum(1, Backend::kMount, Flow::kOut, &Block::ended), kThreads * kTimes);
  EXPECT_EQ(region->sum(1, Backend::kMount, Flow::kOut, &Block::errors), kTimes);
  EXPECT_EQ(region->sum(1, Backend::kMount, Flow::kOut, &Block::bytes), kThreads * kTimes * 4096);
  EXPECT_EQ(region->sum(1, Backend::kMount, Flow::kIn, &Block::started), 0U);
  EXPECT_EQ(region->sum(0, Backend::kMount, Flow::kOut, &Block::started), 0U);
}

TEST_F(CountersTest, MeasuredCountsEachOperationOnce) {
  const std::shared_ptr<Region> region = make(1);
  const DeviceCounters counters(region, 0);
  const auto sum = [&](Counter Block::*member) { return region->sum(0, Backend::kFastpath, Flow::kIn, member); };
  { Measured failed(counters, Backend::kFastpath, Flow::kIn); }
  {
    Measured good(counters, Backend::kFastpath, Flow::kIn);
    EXPECT_EQ(sum(&Block::started), 2U);
    EXPECT_EQ(sum(&Block::ended), 1U);
    good.done(7);
  }
  {
    Measured elsewhere(counters, Backend::kFastpath, Flow::kIn);
    elsewhere.dismiss();
  }
  EXPECT_EQ(sum(&Block::started), 2U);
  EXPECT_EQ(sum(&Block::ended), 2U);
  EXPECT_EQ(sum(&Block::errors), 1U);
  EXPECT_EQ(sum(&Block::bytes), 7U);
  counters.refuse(Backend::kFastpath, Flow::kIn, 0b101);
  EXPECT_EQ(region->refusals(0, Backend::kFastpath, Flow::kIn, 0), 1U);
  EXPECT_EQ(region->refusals(0, Backend::kFastpath, Flow::kIn, 1), 0U);
  EXPECT_EQ(region->refusals(0, Backend::kFastpath, Flow::kIn, 2), 1U);
  const DeviceCounters nowhere;
  { Measured uncounted(nowhere, Backend::kMount, Flow::kIn); }
  nowhere.refuse(Backend::kMount, Flow::kIn, 1);
}

TEST_F(CountersTest, TheFileIsPrivateAndLockedWhileTheRegionLives) {
  std::shared_ptr<Region> region = make();
  struct stat status {};
  ASSERT_EQ(::stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777U, 0600U);
  EXPECT_EQ(static_cast<std::size_t>(status.st_size), region->bytes().size());
  EXPECT_TRUE(locked());
  EXPECT_EQ(contents().substr(0, 8), "GPUFSTAT");
  ASSERT_TRUE(region->describe(R"({"driver": "host"})").ok());
  EXPECT_THAT(contents().substr(256, 64), ::testing::StartsWith(R"({"driver": "host"})"));
  EXPECT_EQ(region->describe(std::string(kTextBytes + 1, ' ')).error(), EFBIG);
  region.reset();
  EXPECT_FALSE(locked());
}

}  // namespace
}  // namespace gpufs::observe
