// Traces: spans, texts before their use, dropped records, threads that end, and one trace at a time.

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/thread.h"
#include "observe/trace.h"

namespace gpufs::observe {
namespace {

struct Drained {
  std::vector<TraceRecord> spans;
  std::map<std::uint32_t, std::string> names;
  std::map<std::uint32_t, std::string> threads;
  std::uint64_t lost = 0;
};

// Reads with room for `room` bytes at a time until there is nothing left.
void drain(Drained& into, std::size_t room = 1 << 20) {
  std::vector<std::byte> data;
  for (std::size_t bytes = 1; bytes != 0;) {
    const std::size_t used = data.size();
    data.resize(used + room);
    bytes = trace::read(std::span(data).subspan(used));
    ASSERT_EQ(bytes % sizeof(TraceRecord), 0U);
    data.resize(used + bytes);
  }
  for (std::size_t place = 0; place < data.size(); place += sizeof(TraceRecord)) {
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

class TraceTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(trace::start().ok()); }
  void TearDown() override { trace::stop(); }
};

TEST(TraceOff, NothingIsRecorded) {
  ASSERT_FALSE(trace::on());
  { const Span span(TraceKind::kPiece, 0, 0, 1); }
  EXPECT_EQ(trace::name("text"), 0U);
  std::vector<std::byte> room(1 << 16);
  EXPECT_EQ(trace::read(room), 0U);
}

TEST_F(TraceTest, SpansNestAndHaveTimesOfTheMonotonicClock) {
  const std::uint64_t before = now_ns();
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
  EXPECT_LE(before, outer.start);
  EXPECT_LE(outer.start, inner.start);
  EXPECT_LE(inner.start, inner.end);
  EXPECT_LE(inner.end, outer.end);
  EXPECT_LE(outer.end, now_ns());
}

TEST_F(TraceTest, ReportsHowManyRecordsWereDropped) {
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

TEST_F(TraceTest, RecordsOfEndedThreadsAreRead) {
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

TEST_F(TraceTest, RecordsAreCompleteAndInOrderWhileThreadsRecord) {
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

TEST_F(TraceTest, StopsAndStartsWhileThreadsRecordAndRead) {
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (int index = 0; index < 4; ++index) {
    threads.emplace_back([&, reads = index < 2] {
      std::vector<std::byte> data(64 << 10);
      while (!over) {
        const Span span(TraceKind::kPiece, 7, 0, 100, 0, trace::name("a name"));
        if (reads) (void)trace::read(data);
      }
    });
  }
  for (int round = 0; round < 200; ++round) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    trace::stop();
    ASSERT_TRUE(trace::start().ok());
  }
  over = true;
  for (std::thread& thread : threads) thread.join();
  trace::stop();
  ASSERT_TRUE(trace::start().ok());
  Drained found;
  drain(found);
  EXPECT_TRUE(found.spans.empty());
}

}  // namespace
}  // namespace gpufs::observe
