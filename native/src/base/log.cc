#include "base/log.h"

#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

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

}  // namespace

void log_configure(int fd, LogLevel level) {
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

  // On the stack: a line about running out of memory must not need any.
  char line[2048];
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  tm parts{};
  ::localtime_r(&now.tv_sec, &parts);
  char stamp[32] = {};
  ::strftime(stamp, sizeof stamp, "%Y-%m-%d %H:%M:%S", &parts);
  char name[16] = {};
  if (::pthread_getname_np(::pthread_self(), name, sizeof name) != 0) name[0] = '\0';
  const int head = std::snprintf(line, sizeof line, "%s.%03d %s gpufs.native: [%s] ", stamp,
                                 static_cast<int>(now.tv_nsec / 1'000'000), level_name(level), name);
  std::size_t used = head < 0 ? 0 : std::min(static_cast<std::size_t>(head), sizeof line - 1);
  const std::size_t room = sizeof line - 1 - used;
  const std::size_t count = std::min(room, text.size());
  std::replace_copy_if(
      text.data(), text.data() + count, line + used, [](char c) { return c == '\n' || c == '\r' || c == '\0'; }, ' ');
  used += count;
  line[used++] = '\n';

  const int fd = log_fd.load(std::memory_order_acquire);
  while (fd >= 0 && ::write(fd, line, used) < 0 && errno == EINTR) {
  }
  errno = saved_errno;
}

}  // namespace gpufs
