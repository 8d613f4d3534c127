#include "base/log.h"

#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <mutex>
#include <utility>

namespace gpufs {
namespace {

std::atomic<int> log_fd{-1};
std::atomic<int> log_level{static_cast<int>(LogLevel::kInfo)};

const char* level_name(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "DEBUG";
    case LogLevel::kInfo:
      return "INFO";
    case LogLevel::kWarning:
      return "WARNING";
    case LogLevel::kError:
      return "ERROR";
  }
  return "ERROR";
}

// A text that is logged again and again, as by each request while memory is short, must not fill the disk.
constexpr std::int64_t kQuietSeconds = 5;

// A line that was left out because it repeats the one before it.
struct LeftOut {
  std::uint64_t count = 0;
  LogLevel level = LogLevel::kDebug;
};

class Repetitions {
 public:
  // Whether the line is to be written now. *left_out: the repetitions of the line before, to be reported first.
  bool admit(LogLevel level, std::string_view text, std::int64_t now, LeftOut* left_out) {
    const std::size_t hash = std::hash<std::string_view>()(text);
    const std::lock_guard lock(mutex_);
    if (hash == hash_ && now >= since_ && now - since_ < kQuietSeconds) {
      ++count_;
      return false;
    }
    *left_out = {std::exchange(count_, 0), level_};
    level_ = level;
    hash_ = hash;
    since_ = now;
    return true;
  }
  void reset() {
    const std::lock_guard lock(mutex_);
    hash_ = 0;
    count_ = 0;
  }

 private:
  std::mutex mutex_;  // guards all below
  std::size_t hash_ = 0;
  LogLevel level_ = LogLevel::kDebug;
  std::int64_t since_ = 0;   // seconds of the monotonic clock
  std::uint64_t count_ = 0;  // lines left out since
};

Repetitions& repetitions() {
  static Repetitions& instance = *new Repetitions;  // never destroyed: threads may log to the very end
  return instance;
}

// Lines that a non-blocking descriptor had no space for.
std::atomic<std::uint64_t> dropped{0};

// False if the descriptor is non-blocking and has no space.
bool write_whole(const char* line, std::size_t bytes) {
  const int fd = log_fd.load(std::memory_order_acquire);
  while (fd >= 0 && ::write(fd, line, bytes) < 0) {
    if (errno == EAGAIN) return false;
    if (errno != EINTR) return true;  // a full disk: the line is lost
  }
  return true;
}

// "DATE TIME.mmm LEVEL gpufs.native: [thread] "; its length.
std::size_t write_head(char* line, std::size_t room, LogLevel level) {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  tm parts{};
  ::localtime_r(&now.tv_sec, &parts);
  char stamp[32] = {};
  ::strftime(stamp, sizeof stamp, "%Y-%m-%d %H:%M:%S", &parts);
  char name[16] = {};
  if (::pthread_getname_np(::pthread_self(), name, sizeof name) != 0) name[0] = '\0';
  const int head = std::snprintf(line, room, "%s.%03d %s gpufs.native: [%s] ", stamp,
                                 static_cast<int>(now.tv_nsec / 1'000'000), level_name(level), name);
  return head < 0 ? 0 : std::min(static_cast<std::size_t>(head), room - 1);
}

}  // namespace

void log_configure(int fd, LogLevel level) {
  repetitions().reset();
  log_level.store(static_cast<int>(level), std::memory_order_relaxed);
  log_fd.store(fd, std::memory_order_release);
}

bool log_enabled(LogLevel level) {
  return log_fd.load(std::memory_order_acquire) >= 0 &&
         static_cast<int>(level) >= log_level.load(std::memory_order_relaxed);
}

void log_line(LogLevel level, std::string_view text) {
  if (!log_enabled(level)) return;
  const int saved_errno = errno;
  timespec monotonic{};
  ::clock_gettime(CLOCK_MONOTONIC, &monotonic);
  LeftOut left_out;
  if (!repetitions().admit(level, text, monotonic.tv_sec, &left_out)) return;

  // On the stack: a line about running out of memory must not need any.
  char line[2048];
  const auto write_count = [&line](LogLevel at, const char* before, std::uint64_t count, const char* after) {
    const std::size_t head = write_head(line, sizeof line, at);
    const int tail = std::snprintf(line + head, sizeof line - head, "%s%llu%s\n", before,
                                   static_cast<unsigned long long>(count), after);  // NOLINT(google-runtime-int): %llu
    return write_whole(line, head + static_cast<std::size_t>(std::max(tail, 0)));
  };
  if (const std::uint64_t count = dropped.exchange(0); count != 0 && !write_count(level, "", count, " lines dropped")) {
    dropped += count;
  }
  if (left_out.count != 0) (void)write_count(left_out.level, "the line before was repeated ", left_out.count, " times");
  std::size_t used = write_head(line, sizeof line, level);
  const std::size_t room = sizeof line - 1 - used;
  const std::size_t count = std::min(room, text.size());
  std::replace_copy_if(
      text.data(), text.data() + count, line + used, [](char c) { return c == '\n' || c == '\r' || c == '\0'; }, ' ');
  used += count;
  line[used++] = '\n';

  if (!write_whole(line, used)) ++dropped;
  errno = saved_errno;
}

}  // namespace gpufs
