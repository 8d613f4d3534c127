// Threads that read, write, grow, shrink, punch and move a buffer, and take slots and shares of a limit, at the same
// time.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <random>
#include <string>
#include <thread>

#include "base/thread.h"
#include "buffer_fixture.h"
#include "memory/account.h"

namespace gpufs::testing {
namespace {

constexpr int kRounds = kSanitized ? 200 : 600;

struct RaceSetting {
  const char* name;
  std::uint64_t slab_file_bytes;
  bool reserve_copies;
  std::uint64_t span;
};

class BufferConcurrencyTest : public BufferFixture, public ::testing::WithParamInterface<RaceSetting> {
 protected:
  void SetUp() override {
    plan->reserve_copies = GetParam().reserve_copies;
    plan->span = GetParam().span;
    start(128 * kMiB, GetParam().slab_file_bytes);
  }
  void TearDown() override { expect_nothing_left(); }
};

TEST_P(BufferConcurrencyTest, WritesThatOverlapDoNotMix) {
  const auto buffer = make();
  constexpr std::size_t kBytes = 256 << 10;
  std::barrier together(3);
  std::vector<std::thread> writers;
  for (const std::byte value : {std::byte{1}, std::byte{2}}) {
    writers.emplace_back([&, value] {
      const std::vector<std::byte> data(kBytes, value);
      for (int round = 0; round < kRounds; ++round) {
        together.arrive_and_wait();
        EXPECT_TRUE(buffer->write(0, data).ok());
        together.arrive_and_wait();
      }
    });
  }
  std::vector<std::byte> got(kBytes);
  for (int round = 0; round < kRounds; ++round) {
    together.arrive_and_wait();
    together.arrive_and_wait();
    EXPECT_EQ(buffer->read(0, got).value(), kBytes);
    EXPECT_EQ(std::count(got.begin(), got.end(), got[0]), static_cast<std::ptrdiff_t>(kBytes));
  }
  for (std::thread& writer : writers) writer.join();
}

TEST_P(BufferConcurrencyTest, SomeCallsNeverWait) {
  const auto buffer = make();
  const auto data = pattern(3000, 1);
  ASSERT_TRUE(buffer->write(0, data, Wait::kForbidden).ok());
  {
    Result<Buffer::Pin> pinned = buffer->pin_for_read(0, 3000);  // by a transfer that stalls
    ASSERT_TRUE(pinned.ok());
    EXPECT_EQ(buffer->resize(0, Wait::kForbidden).error(), EAGAIN);
    EXPECT_EQ(buffer->size(), 3000U);
    EXPECT_TRUE(buffer->resize(4000, Wait::kForbidden).ok());
    std::thread shrinking([&] { EXPECT_TRUE(buffer->resize(0).ok()); });
    while (buffer->size() != 0) std::this_thread::yield();
    EXPECT_EQ(buffer->write(0, data, Wait::kForbidden).error(), EAGAIN);
    EXPECT_EQ(buffer->resize(4000, Wait::kForbidden).error(), EAGAIN);
    EXPECT_EQ(buffer->seek_data(0).error(), ENXIO);
    EXPECT_GT(buffer->limit(), 0U);
    pinned.value() = {};
    shrinking.join();
  }
  ASSERT_TRUE(buffer->write(0, data, Wait::kForbidden).ok());
  std::vector<std::byte> got(3000);
  EXPECT_EQ(buffer->read(0, got, Wait::kForbidden).value(), 3000U);
  EXPECT_EQ(got, data);
}

// Each writer has its own part of the file and always reads there what it wrote, while another thread grows the file,
// and allocates, punches and shrinks above all parts.
TEST_P(BufferConcurrencyTest, WritersKeepTheirBytes) {
  constexpr std::uint64_t kWriters = 4;
  const std::uint64_t part = GetParam().slab_file_bytes > 0 ? 3000 : 700'000;
  const auto buffer = make();
  std::atomic<bool> end{false};
  std::vector<std::thread> threads;
  for (std::uint64_t writer = 0; writer < kWriters; ++writer) {
    threads.emplace_back([&, writer] {
      std::mt19937 random(static_cast<unsigned>(writer));
      std::vector<std::byte> mine(part, std::byte{0});
      const std::uint64_t base = writer * part;
      for (int round = 0; round < kRounds; ++round) {
        const std::uint64_t offset = random() % part;
        const std::uint64_t bytes = 1 + random() % std::min<std::uint64_t>(part - offset, 5000);
        const auto data = pattern(bytes, static_cast<unsigned>(random()));
        std::memcpy(mine.data() + offset, data.data(), bytes);
        ASSERT_TRUE(buffer->write(base + offset, data).ok());
        const std::uint64_t from = random() % part;
        const std::uint64_t length = std::min<std::uint64_t>(part - from, 5000);
        const std::vector<std::byte> seen = contents(*buffer, base + from, length);
        // The file may end below, but never below what was written.
        ASSERT_TRUE(same_bytes(seen, std::span(mine).subspan(from, seen.size())));
      }
      std::vector<std::byte> seen = contents(*buffer, base, part);
      seen.resize(part);
      ASSERT_TRUE(same_bytes(seen, mine));
    });
  }
  std::thread disturbing([&] {
    std::mt19937 random(99);
    const std::uint64_t above = std::max<std::uint64_t>(kWriters * part, 8 * kMiB) + kGranule;
    while (!end) {
      const std::uint64_t offset = above + random() % (20 * kMiB);
      switch (random() % 5) {
        case 0:
          ASSERT_TRUE(buffer->resize(offset).ok());
          break;
        case 1:
          ASSERT_TRUE(buffer->punch(above, 30 * kMiB).ok());
          break;
        case 2:
          ASSERT_TRUE(buffer->allocate(offset, 1 + random() % kMiB, random() % 2 == 0).ok());
          break;
        case 3:
          ASSERT_TRUE(buffer->resize(above).ok());
          break;
        default:
          ASSERT_TRUE(buffer->write(offset, pattern(1000, 1)).ok());
      }
      std::this_thread::sleep_for(std::chrono::microseconds(500));
    }
  });
  for (std::thread& thread : threads) thread.join();
  end = true;
  disturbing.join();
}

// Writers at the end of a file that is truncated again and again: after the last truncation it reads as zeros.
TEST_P(BufferConcurrencyTest, TruncationsAndAppends) {
  const auto buffer = make();
  std::atomic<bool> end{false};
  std::vector<std::thread> threads;
  for (std::uint64_t writer = 0; writer < 3; ++writer) {
    threads.emplace_back([&, writer] {
      std::mt19937 random(static_cast<unsigned>(writer));
      const auto data = pattern(64, static_cast<unsigned>(writer) + 1);
      for (int round = 0; round < kRounds; ++round) {
        // Each writes to places of its own.
        const std::uint64_t place = (random() % (random() % 2 == 0 ? 300 : 20'000)) * 3 + writer;
        ASSERT_TRUE(buffer->write(place * data.size(), data).ok());
      }
    });
  }
  threads.emplace_back([&] {
    std::mt19937 random(7);
    while (!end) {
      ASSERT_TRUE(buffer->resize(random() % 3 == 0 ? 0 : random() % kMiB).ok());
      ASSERT_TRUE(buffer->punch(random() % 2 * kGranule, (1 + random() % 2) * kGranule).ok());
      std::this_thread::yield();
    }
  });
  for (std::size_t index = 0; index < 3; ++index) threads[index].join();
  end = true;
  threads[3].join();
  ASSERT_TRUE(buffer->resize(0).ok());
  EXPECT_EQ(buffer->bytes_held(), 0U);
  ASSERT_TRUE(buffer->resize(16 * kMiB).ok());
  EXPECT_TRUE(all_zero(contents(*buffer)));
  ASSERT_TRUE(buffer->allocate(0, 16 * kMiB, false).ok());
  EXPECT_TRUE(all_zero(contents(*buffer)));
}

// Copies in both directions between two buffers that are punched and resized at the same time: no deadlock.
TEST_P(BufferConcurrencyTest, CopiesInBothDirections) {
  const auto left = make();
  const auto right = make();
  std::atomic<bool> end{false};
  std::vector<std::thread> threads;
  for (int direction = 0; direction < 2; ++direction) {
    threads.emplace_back([&, direction] {
      std::mt19937 random(static_cast<unsigned>(direction));
      Buffer& to = direction == 0 ? *left : *right;
      Buffer& from = direction == 0 ? *right : *left;
      for (int round = 0; round < kRounds / 5; ++round) {
        // Halves of their own, so that no byte is read and written at once.
        const std::uint64_t half = direction == 0 ? 0 : 5 * kMiB;
        ASSERT_TRUE(to.copy_from(from, half + random() % 1000, half, 1 + random() % (4 * kMiB), nullptr).ok());
      }
    });
  }
  for (Buffer* buffer : {left.get(), right.get()}) {
    threads.emplace_back([&, buffer] {
      std::mt19937 random(17);
      while (!end) {
        ASSERT_TRUE(buffer->resize(random() % 4 == 0 ? 0 : 12 * kMiB).ok());
        ASSERT_TRUE(buffer->allocate(10 * kMiB, kMiB, false).ok());
        ASSERT_TRUE(buffer->punch(random() % 4 * kGranule, 2 * kGranule).ok());
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    });
  }
  threads[0].join();
  threads[1].join();
  end = true;
  threads[2].join();
  threads[3].join();
}

class SharedMemoryTest : public BufferFixture {
 protected:
  void TearDown() override { expect_nothing_left(); }
};

TEST_F(SharedMemoryTest, ThreadsNeverExceedALimitTogether) {
  start(256 * kGranule);
  const auto account = std::make_shared<Account>("somebody", 20 * kGranule);
  std::atomic<bool> exceeded{false};
  std::vector<std::shared_ptr<ExtentBuffer>> buffers;
  for (int number = 0; number < 6; ++number) {
    buffers.push_back(make());
    buffers.back()->charge().move(Charge::kOwner, account);
  }
  std::vector<std::jthread> threads;
  for (const auto& buffer : buffers) {
    threads.emplace_back([&] {
      for (unsigned round = 0; round < 300; ++round) {
        const Status status = buffer->allocate((round % 7) * kGranule, 2 * kGranule, true);
        if (!status.ok() && status.error() != EDQUOT) exceeded = true;
        if (account->used() > account->limit()) exceeded = true;
        if (round % 3 == 0 && !buffer->punch(0, 5 * kGranule).ok()) exceeded = true;
      }
    });
  }
  threads.clear();
  EXPECT_FALSE(exceeded);
  std::uint64_t held = 0;
  for (const auto& buffer : buffers) held += buffer->bytes_held();
  EXPECT_EQ(account->used(), held);
  buffers.clear();
  EXPECT_EQ(account->used(), 0U);
}

TEST_F(SharedMemoryTest, NoTwoThreadsGetTheSameSlot) {
  start(16 * kMiB, 65536);
  SlabPool& slabs = *contexts[0]->slabs();
  std::vector<std::thread> threads;
  for (unsigned thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937 random(thread);
      std::vector<std::shared_ptr<const SlabPool::Slot>> held;
      for (int step = 0; step < 2000; ++step) {
        if (held.size() < 20 && random() % 2 == 0) {
          held.push_back(slabs.take(1 + random() % 4096).take());
          const std::uint64_t mark = (std::uint64_t{thread} << 32) + static_cast<std::uint64_t>(step);
          std::uint64_t seen = 1;
          ASSERT_TRUE(contexts[0]->device().copy_out(&seen, held.back()->address, sizeof seen).ok());
          ASSERT_EQ(seen, 0U);
          ASSERT_TRUE(contexts[0]->device().copy_in(held.back()->address, &mark, sizeof mark).ok());
        } else if (!held.empty()) {
          held.erase(held.begin() + static_cast<std::ptrdiff_t>(random() % held.size()));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Each thread has files of its own, which hold what it wrote, while another one moves all that can be moved.
TEST_F(SharedMemoryTest, SmallFilesMoveWhileTheyAreUsed) {
  start(64 * kMiB, 65536);
  SlabPool& slabs = *contexts[0]->slabs();
  std::atomic<bool> end{false};
  std::vector<std::thread> threads;
  for (unsigned thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937 random(thread);
      struct File {
        std::shared_ptr<ExtentBuffer> buffer;
        std::vector<std::byte> bytes;
      };
      std::vector<File> files;
      for (int step = 0; step < 10 * kRounds; ++step) {
        if (files.size() < 50) files.push_back({make(), {}});
        File& file = files[random() % files.size()];
        if (random() % 4 == 0) {
          file = {make(), {}};
          continue;
        }
        const std::uint64_t offset = random() % (file.bytes.size() + 1);
        const auto data = pattern(1 + random() % 9000, static_cast<unsigned>(random()));
        ASSERT_TRUE(file.buffer->write(offset, data).ok());
        file.bytes.resize(std::max(file.bytes.size(), offset + data.size()));
        std::copy(data.begin(), data.end(), file.bytes.begin() + static_cast<std::ptrdiff_t>(offset));
        const File& other = files[random() % files.size()];
        ASSERT_TRUE(same_bytes(contents(*other.buffer, 0, other.bytes.size()), other.bytes));
        ASSERT_EQ(other.buffer->size(), other.bytes.size());
      }
    });
  }
  std::thread compacting([&] {
    while (!end) slabs.compact(std::chrono::steady_clock::now() + std::chrono::seconds(1));
  });
  for (std::thread& thread : threads) thread.join();
  end = true;
  compacting.join();
}

// A file without holes that leaves its device and comes back: writers, readers, seekers and copies notice nothing.
TEST_F(SharedMemoryTest, AFileLeavesAndComesBackWhileItIsUsed) {
  start(64 * kMiB, 0, 2);
  constexpr std::uint64_t kPart = kMiB;
  constexpr std::uint64_t kSize = 4 * kPart;
  const auto buffer = make();
  write(*buffer, 0, pattern(kSize, 1));
  const auto fixed = pattern(kPart, 2);  // of the last part
  write(*buffer, 3 * kPart, fixed);
  std::atomic<bool> end{false};
  std::vector<std::thread> threads;
  for (std::uint64_t writer = 0; writer < 2; ++writer) {
    threads.emplace_back([&, writer] {
      std::mt19937 random(static_cast<unsigned>(writer));
      for (int round = 0; round < kRounds / 2; ++round) {
        const std::uint64_t offset = writer * kPart + random() % (kPart - 5000);
        const auto data = pattern(1 + random() % 5000, static_cast<unsigned>(random()));
        ASSERT_TRUE(buffer->write(offset, data).ok());
        ASSERT_TRUE(same_bytes(contents(*buffer, offset, data.size()), data));
      }
    });
  }
  threads.emplace_back([&] {
    while (!end) {
      ASSERT_EQ(buffer->seek_data(kPart).value(), kPart);
      ASSERT_EQ(buffer->seek_hole(kPart).value(), kSize);
    }
  });
  threads.emplace_back([&] {
    const auto copy = make();
    while (!end) {
      const std::uint64_t bytes = kSize - 1;  // the copy stays in the way of no writer
      ASSERT_EQ(copy->copy_from(*buffer, 3 * kPart, 0, bytes, nullptr).value(), kPart);
      ASSERT_TRUE(same_bytes(contents(*copy), fixed));
    }
  });
  threads.emplace_back([&] {
    int moves = 0;
    while (!end || moves == 0) {
      const Result<bool> parked = buffer->park(contexts[1], nullptr);
      ASSERT_TRUE(parked.ok() || parked.error() == EBUSY) << parked.status().message();
      if (parked.ok()) ++moves;
      if (moves % 2 == 0) {
        ASSERT_TRUE(buffer->bring_back(Wait::kAllowed).ok());
      }
    }
  });
  threads[0].join();
  threads[1].join();
  end = true;
  for (std::size_t index = 2; index < threads.size(); ++index) threads[index].join();
}

INSTANTIATE_TEST_SUITE_P(Settings, BufferConcurrencyTest,
                         ::testing::Values(RaceSetting{"slabs", 65536, false, 0}, RaceSetting{"copying", 0, true, 0},
                                           RaceSetting{"pieces", 0, false, 2 * kGranule}),
                         [](const ::testing::TestParamInfo<RaceSetting>& setting) {
                           return std::string(setting.param.name);
                         });

}  // namespace
}  // namespace gpufs::testing
