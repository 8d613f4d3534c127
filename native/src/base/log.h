// Log lines of the native threads, in the form that the Python side's logging has, to one descriptor.
// Nobody owns it: one configuration for the process; the descriptor stays the caller's and open.
// Any thread may call any function; a line is one write(2), so lines never mix.
#pragma once

#include <string_view>

namespace gpufs {

enum class LogLevel : int { kDebug = 10, kInfo = 20, kWarning = 30, kError = 40 };

// Lines of at least `level` go to fd from now on; -1: nowhere, which is how the process starts.
void log_configure(int fd, LogLevel level);

// True if a line of this level would be written: ask before composing a text in a hot place.
[[nodiscard]] bool log_enabled(LogLevel level);

// "2026-01-02 03:04:05.678 WARNING gpufs.native: [thread's name] text". Never fails, never changes errno; line ends
// inside the text become spaces. A text that comes again and again within seconds is counted; the next line says so.
void log_line(LogLevel level, std::string_view text);

inline void log_debug(std::string_view text) { log_line(LogLevel::kDebug, text); }
inline void log_info(std::string_view text) { log_line(LogLevel::kInfo, text); }
inline void log_warning(std::string_view text) { log_line(LogLevel::kWarning, text); }
inline void log_error(std::string_view text) { log_line(LogLevel::kError, text); }

}  // namespace gpufs
