// Log lines of the native threads, in the form that the Python side's logging has, to one descriptor.
// Nobody owns it: one configuration for the process; the descriptor stays the caller's and open.
// Any thread may call any function; a line is one write(2), so lines never mix.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <concepts>
#include <cstddef>
#include <string_view>

namespace gpufs {

enum class LogLevel : int { kDebug = 10, kInfo = 20, kWarning = 30, kError = 40 };

// Lines of at least `level` go to fd from now on; -1: nowhere, which is how the process starts.
void log_configure(int fd, LogLevel level);

// True if a line of this level would be written: ask before composing a text in a hot place.
[[nodiscard]] bool log_enabled(LogLevel level);

// "2026-01-02 03:04:05.678 WARNING gpufs.native: [thread's name] text". Never fails, never changes errno; line ends
// inside the text become spaces. A text that comes again and again within seconds is counted, and so are lines for
// which a non-blocking descriptor has no space; the next line says so.
void log_line(LogLevel level, std::string_view text);

// A line's text put together without memory: what has none left must be able to say so.
class LogText {
 public:
  void add(std::string_view part) {
    const std::size_t count = std::min(part.size(), room_.size() - used_);
    std::copy_n(part.data(), count, room_.data() + used_);
    used_ += count;
  }
  void add(std::integral auto number) {
    const auto written = std::to_chars(room_.data() + used_, room_.data() + room_.size(), number);
    if (written.ec == std::errc()) used_ = static_cast<std::size_t>(written.ptr - room_.data());
  }
  [[nodiscard]] std::string_view view() const { return {room_.data(), used_}; }

 private:
  std::array<char, 1900> room_;  // not initialised: only what is used is read
  std::size_t used_ = 0;
};

// The parts of the text, texts and numbers, one after the other.
template <typename... Parts>
void log_parts(LogLevel level, const Parts&... parts) {
  if (!log_enabled(level)) return;
  LogText text;
  (text.add(parts), ...);
  log_line(level, text.view());
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
template <typename... Parts>
void log_error(const Parts&... parts) {
  log_parts(LogLevel::kError, parts...);
}

}  // namespace gpufs
