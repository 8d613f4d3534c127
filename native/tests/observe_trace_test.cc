// Traces: rings that fill and drain, threads that end, texts before their use, and one trace at a time.

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/thread.h"
#include "observe/tick_clock.h"
#include "observe/timeline.h"
#include "observe/trace.h"

namespace gpufs::observe {
namespace {

struct Drained {
  std::vector<TraceRecord> spans;
  std::map<std::uint32_t, std::string> names;
  std::map<std::uint32_t, std::string> threads;
  std::uint64_t lost = 0;
};

void drain(Drained& into, std::size_t room = 1 << 20) {
  std::vector<std::byte> data(room);
  while (const std::size_t bytes = trace::read(data)) {
    ASSERT_EQ(bytes % sizeof(TraceRecord), 0U);
    for (std::size_t place = 0; place < bytes; place += sizeof(TraceRecord)) {
      TraceRecord record;
      std::memcpy(&record, data.data() + place, sizeof(record));
      if (record.kind == TraceKind::kLost) {
        into.lost += record.bytes;
      } else if (record.kind == TraceKind::kThread || record.kind == TraceKind::kName) {
        const std::string text(reinterpret_cast<const char*>(data.data() + place + sizeof(record)),
                               static_cast<std::size_t>(record.bytes));
        (record.kind == TraceKind::kThread ? into.threads[record.thread] : into.names[record.name]) = text;
        place += (text.size() + sizeof(record) - 1) / sizeof(record) * sizeof(record);
      } else {
        EXPECT_TRUE(into.threads.contains(record.thread));
        EXPECT_TRUE(record.name == 0 || into.names.contains(record.name));
        into.spans.push_back(record);
      }
    }
  }
}

class TraceTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(trace::start().ok()); }
  void TearDown() override { trace::stop(); }
};

TEST(Timeline, PutsTicksBetweenKnownMoments) {
  Timeline timeline;
  EXPECT_EQ(timeline.known_until(), 0U);
  timeline.add({1000, 500});
  EXPECT_EQ(timeline.to_ns(3000), 500U);
  timeline.add({3000, 1500});
  timeline.add({2000, 1600});  // not after the last
  timeline.add({4000, 1500});
  EXPECT_EQ(timeline.known_until(), 3000U);
  timeline.add({5000, 5500});  // the pace has changed
  EXPECT_EQ(timeline.to_ns(1000), 500U);
  EXPECT_EQ(timeline.to_ns(2000), 1000U);
  EXPECT_EQ(timeline.to_ns(3000), 1500U);
  EXPECT_EQ(timeline.to_ns(4000), 3500U);
  EXPECT_EQ(timeline.to_ns(5000), 5500U);
  EXPECT_EQ(timeline.to_ns(6000), 7500U);
  EXPECT_EQ(timeline.to_ns(800), 400U);
  EXPECT_EQ(Timeline().to_ns(5), 0U);
}

TEST(Timeline, FollowsTheMonotonicClock) {
  const std::uint64_t before = now_ns();
  Timeline timeline;
  timeline.add(Timeline::now());
  std::uint64_t last = 0;
  for (int number = 0; number < 100; ++number) {
    const std::uint64_t ticks = read_ticks();
    timeline.add(Timeline::now());
    const std::uint64_t ns = timeline.to_ns(ticks);
    EXPECT_GE(ns, last);
    EXPECT_GE(ns, before);
    EXPECT_LE(ns, now_ns());
    last = ns;
  }
}

TEST_F(TraceTest, TimesAreThoseOfTheMonotonicClock) {
  const std::uint64_t before = now_ns();
  { const Span span(TraceKind::kPiece, 0, 0, 0); }
  const std::uint64_t after = now_ns();
  Drained found;
  drain(found);
  ASSERT_EQ(found.spans.size(), 1U);
  EXPECT_GE(found.spans[0].start + 1000, before);  // each clock's reading takes a moment
  EXPECT_LE(found.spans[0].end, after + 1000);
  EXPECT_EQ(found.spans[0].in_ticks, 0U);
}

TEST(TraceOff, RecordsNothing) {
  ASSERT_FALSE(trace::on());
  { const Span span(TraceKind::kPiece, 0, 0, 1); }
  EXPECT_EQ(trace::name("text"), 0U);
  std::vector<std::byte> room(1 << 16);
  EXPECT_EQ(trace::read(room), 0U);
}

TEST_F(TraceTest, OneAtATime) {
  EXPECT_EQ(trace::start().error(), EBUSY);
  trace::stop();
  EXPECT_TRUE(trace::start().ok());
}

TEST_F(TraceTest, SpansNestAndSayWhatTheyAre) {
  {
    const Span outer(TraceKind::kPiece, 1, 4096, 100, 7, trace::name("/a/file"));
    Span inner(TraceKind::kFileRead, 1, 4096, 50, 7);
    inner.set_bytes(49);
    inner.set_error(EIO);
  }
  Drained found;
  drain(found);
  ASSERT_EQ(found.spans.size(), 2U);
  const TraceRecord& inner = found.spans[0];
  const TraceRecord& outer = found.spans[1];
  EXPECT_EQ(inner.kind, TraceKind::kFileRead);
  EXPECT_EQ(inner.bytes, 49U);
  EXPECT_EQ(inner.error, EIO);
  EXPECT_EQ(found.names[outer.name], "/a/file");
  EXPECT_EQ(outer.id, 7U);
  EXPECT_LE(outer.start, inner.start);
  EXPECT_LE(inner.start, inner.end);
  EXPECT_LE(inner.end, outer.end);
}

TEST_F(TraceTest, AFullRingDropsAndSaysHowMany) {
  constexpr std::uint64_t kMany = 20000;
  for (std::uint64_t number = 0; number < kMany; ++number) {
    TraceRecord record;
    record.id = number;
    trace::record(record);
  }
  Drained found;
  drain(found);
  EXPECT_EQ(found.spans.size() + found.lost, kMany);
  EXPECT_GT(found.lost, 0U);
  for (std::size_t place = 0; place < found.spans.size(); ++place) EXPECT_EQ(found.spans[place].id, place);
  { const Span again(TraceKind::kPiece, 0, 0, 0); }
  Drained after;
  after.threads = found.threads;
  drain(after);
  EXPECT_EQ(after.spans.size(), 1U);
}

TEST_F(TraceTest, ThreadsThatHaveEndedAreStillRead) {
  for (int number = 0; number < 50; ++number) {
    Result<std::thread> thread =
        start_thread("named-" + std::to_string(number), [] { const Span span(TraceKind::kReply, 0, 0, 0); });
    ASSERT_TRUE(thread.ok());
    thread.value().join();
  }
  Drained found;
  drain(found, 4096);
  EXPECT_EQ(found.spans.size(), 50U);
  std::set<std::string> names;
  for (const auto& [number, name] : found.threads) names.insert(name);
  EXPECT_TRUE(names.contains("named-49"));
}

TEST_F(TraceTest, NothingIsLostOrTornWhileItIsRead) {
  constexpr int kThreads = 4;
  constexpr std::uint64_t kEach = 50000;
  std::atomic<int> running{kThreads};
  std::vector<std::thread> threads;
  for (int number = 0; number < kThreads; ++number) {
    threads.emplace_back([&, number] {
      for (std::uint64_t count = 0; count < kEach; ++count) {
        TraceRecord record;
        record.id = static_cast<std::uint64_t>(number);
        record.offset = record.bytes = record.start = record.end = count;
        trace::record(record);
      }
      --running;
    });
  }
  Drained found;
  while (running > 0) drain(found);
  for (std::thread& thread : threads) thread.join();
  drain(found);
  EXPECT_EQ(found.spans.size() + found.lost, kThreads * kEach);
  std::map<std::uint64_t, std::uint64_t> next;
  for (const TraceRecord& record : found.spans) {
    EXPECT_EQ(record.offset, record.bytes);
    EXPECT_EQ(record.start, record.end);
    EXPECT_GE(record.offset, next[record.id]);
    next[record.id] = record.offset + 1;
  }
}

TEST_F(TraceTest, StoppingAndStartingWhileAnotherReads) {
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (int index = 0; index < 2; ++index) {
    threads.emplace_back([&] {
      while (!over) {
        const Span span(TraceKind::kPiece, 7, 0, 100);
      }
    });
  }
  for (int index = 0; index < 2; ++index) {
    threads.emplace_back([&] {
      while (!over) {
        std::vector<std::byte> data(64 << 10);
        const std::size_t bytes = trace::read(data);
        ASSERT_EQ(bytes % sizeof(TraceRecord), 0U);
        for (std::size_t place = 0; place < bytes; place += sizeof(TraceRecord)) {
          TraceRecord record;
          std::memcpy(&record, data.data() + place, sizeof(record));
          if (record.kind == TraceKind::kThread) {
            place += sizeof(record);  // its text
          } else if (record.kind != TraceKind::kLost) {
            ASSERT_EQ(record.kind, TraceKind::kPiece);
            ASSERT_EQ(record.device, 7);
            ASSERT_EQ(record.in_ticks, 0U);
            ASSERT_LE(record.start, record.end);
          }
        }
      }
    });
  }
  for (int round = 0; round < 500; ++round) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    trace::stop();
    ASSERT_TRUE(trace::start().ok());
  }
  over = true;
  for (std::thread& thread : threads) thread.join();
}

TEST_F(TraceTest, StoppingAndStartingWhileThreadsRecord) {
  std::atomic<bool> ending{false};
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([&] {
      while (!ending) {
        const Span span(TraceKind::kPiece, 0, 0, 0, 0, trace::name("a name"));
      }
    });
  }
  std::vector<std::byte> room(1 << 18);
  for (int time = 0; time < 200; ++time) {
    (void)trace::read(room);
    trace::stop();
    ASSERT_TRUE(trace::start().ok());
  }
  ending = true;
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace gpufs::observe
