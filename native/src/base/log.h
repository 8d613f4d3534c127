// Log lines of the native threads, in the form of the Python side's logging, to one descriptor.
// Ownership: one configuration for the process; the descriptor stays the caller's and must stay open.
// Thread-safe: a line is one write(2), so lines never mix.
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>
#include <type_traits>

namespace gpufs {

enum class LogLevel : int { kDebug = 10, kInfo = 20, kWarning = 30, kError = 40 };

// Writes lines of at least `level` to fd; -1: nowhere, which is the default.
void log_configure(int fd, LogLevel level);

// Whether a line of this level would be written.
[[nodiscard]] bool log_enabled(LogLevel level);

// Writes "2026-01-02 03:04:05.678 WARNING gpufs.native: [thread's name] text". Never fails, never changes errno;
// control characters within the text become spaces. Repetitions of the last line within seconds are counted, and so are
// lines for which a non-blocking descriptor has no space; the next line reports both.
void log_line(LogLevel level, std::string_view text);

// Whether a line that a request of this user causes may be written: a user other than root and this process's own may
// cause 50 lines in 10 seconds. Counts it, and reports those that were left out before.
[[nodiscard]] bool log_permitted(uid_t user);

// Writes a line of the parts, texts and numbers, one after the other.
template <typename... Parts>
void log_parts(LogLevel level, const Parts&... parts) {
  if (!log_enabled(level)) return;
  std::string text;
  const auto add = [&text](const auto& part) {
    if constexpr (std::is_integral_v<std::remove_cvref_t<decltype(part)>>) {
      text += std::to_string(part);
    } else {
      text += part;
    }
  };
  (add(parts), ...);
  log_line(level, text);
}

template <typename... Parts>
void log_debug(const Parts&... parts) {
  log_parts(LogLevel::kDebug, parts...);
}
template <typename... Parts>
void log_info(const Parts&... parts) {
  log_parts(LogLevel::kInfo, parts...);
}
template <typename... Parts>
void log_warning(const Parts&... parts) {
  log_parts(LogLevel::kWarning, parts...);
}
// Logs what users can cause as often as they like: see log_permitted().
template <typename... Parts>
void log_user_warning(uid_t user, const Parts&... parts) {
  if (log_enabled(LogLevel::kWarning) && log_permitted(user)) log_parts(LogLevel::kWarning, parts...);
}
template <typename... Parts>
void log_error(const Parts&... parts) {
  log_parts(LogLevel::kError, parts...);
}

}  // namespace gpufs
