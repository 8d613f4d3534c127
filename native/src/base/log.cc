#include "base/log.h"

#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <map>
#include <mutex>
#include <utility>

namespace gpufs {
namespace {

// A text that is logged again and again, for example by each request to a failed device, must not fill the disk.
constexpr std::int64_t kQuietSeconds = 5;
constexpr std::size_t kLongestLine = 2048;
// The limits are those of the control plane's log (daemon/logs.py).
constexpr std::uint64_t kUserLines = 50;
constexpr std::int64_t kUserSeconds = 10;

std::atomic<int> log_fd{-1};
std::atomic<int> log_level{static_cast<int>(LogLevel::kInfo)};
// Lines that a non-blocking descriptor had no space for.
std::atomic<std::uint64_t> dropped{0};

// The last line, and how often it was repeated since.
struct Repetitions {
  std::mutex mutex;  // guards all below
  std::string text;
  LogLevel level = LogLevel::kDebug;
  std::int64_t since = 0;  // seconds of the monotonic clock
  std::uint64_t count = 0;
};

Repetitions& repetitions() {
  static Repetitions& instance = *new Repetitions;  // never destroyed: threads may log until the process ends
  return instance;
}

// The lines that each user has caused since a time.
struct UserLines {
  std::mutex mutex;  // guards all below
  std::map<uid_t, std::uint64_t> counts;
  std::int64_t since = 0;  // seconds of the monotonic clock
};

UserLines& user_lines() {
  static UserLines& instance = *new UserLines;  // as above
  return instance;
}

std::int64_t seconds_now() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec;
}

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

// "DATE TIME.mmm LEVEL gpufs.native: [thread] "
std::string head_of_line(LogLevel level) {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  tm parts{};
  ::localtime_r(&now.tv_sec, &parts);
  std::array<char, 32> stamp{};
  ::strftime(stamp.data(), stamp.size(), "%Y-%m-%d %H:%M:%S", &parts);
  std::array<char, 16> name{};
  if (::pthread_getname_np(::pthread_self(), name.data(), name.size()) != 0) name[0] = '\0';
  std::array<char, 128> head{};
  std::snprintf(head.data(), head.size(), "%s.%03d %s gpufs.native: [%s] ", stamp.data(),
                static_cast<int>(now.tv_nsec / 1'000'000), level_name(level), name.data());
  return head.data();
}

// False if the descriptor is non-blocking and has no space.
bool write_line(LogLevel level, std::string_view text) {
  std::string line = head_of_line(level);
  line += text.substr(0, kLongestLine - line.size() - 1);
  std::replace_if(
      line.begin(), line.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, ' ');
  line += '\n';
  const int fd = log_fd.load(std::memory_order_acquire);
  while (fd >= 0 && ::write(fd, line.data(), line.size()) < 0) {
    if (errno == EAGAIN) return false;
    if (errno != EINTR) return true;  // a full disk: the line is lost
  }
  return true;
}

}  // namespace

void log_configure(int fd, LogLevel level) {
  {
    Repetitions& last = repetitions();
    const std::lock_guard lock(last.mutex);
    last.text.clear();
    last.count = 0;
  }
  log_level.store(static_cast<int>(level), std::memory_order_relaxed);
  log_fd.store(fd, std::memory_order_release);
}

bool log_enabled(LogLevel level) {
  return log_fd.load(std::memory_order_acquire) >= 0 &&
         static_cast<int>(level) >= log_level.load(std::memory_order_relaxed);
}

bool log_permitted(uid_t user) {
  if (user == 0 || user == ::geteuid()) return true;
  const std::int64_t now = seconds_now();
  std::map<uid_t, std::uint64_t> ended;
  std::uint64_t count = 0;
  {
    UserLines& lines = user_lines();
    const std::lock_guard lock(lines.mutex);
    if (now - lines.since >= kUserSeconds) {
      ended.swap(lines.counts);
      lines.since = now;
    }
    count = ++lines.counts[user];
  }
  for (const auto& [other, caused] : ended) {
    if (caused > kUserLines) log_warning(caused - kUserLines, " more lines about user ", other, " left out");
  }
  return count <= kUserLines;
}

void log_line(LogLevel level, std::string_view text) {
  if (!log_enabled(level)) return;
  const int saved_errno = errno;
  const std::int64_t now = seconds_now();
  std::uint64_t repeated = 0;
  LogLevel repeated_level = level;
  {
    Repetitions& last = repetitions();
    const std::lock_guard lock(last.mutex);
    if (text == last.text && now - last.since < kQuietSeconds) {
      ++last.count;
      return;
    }
    repeated = std::exchange(last.count, 0);
    repeated_level = std::exchange(last.level, level);
    last.text = text;
    last.since = now;
  }
  if (const std::uint64_t count = dropped.exchange(0);
      count != 0 && !write_line(level, std::to_string(count) + " lines dropped")) {
    dropped += count;
  }
  if (repeated != 0) {
    (void)write_line(repeated_level, "the line before was repeated " + std::to_string(repeated) + " times");
  }
  if (!write_line(level, text)) ++dropped;
  errno = saved_errno;
}

}  // namespace gpufs
