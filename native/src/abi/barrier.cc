#include "abi/barrier.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <string_view>

#include "base/log.h"
#include "base/thread.h"

namespace gpufs {
namespace {

// An array: a string would need memory, and a thread that fails for the first time may have none.
constinit thread_local std::array<char, 600> last_message{};  // one text a thread is what the interface promises

}  // namespace

gpufs_status report(const Status& status) noexcept {
  if (!status.ok()) {
    std::array<char, 128> room{};
    const std::string_view text = status.message().empty()
                                      ? std::string_view(::strerror_r(status.error(), room.data(), room.size()))
                                      : std::string_view(status.message());
    const std::size_t bytes = std::min(text.size(), last_message.size() - 1);
    std::copy_n(text.data(), bytes, last_message.data());
    last_message[bytes] = '\0';
  }
  return gpufs_status{status.error(), status.device_code()};
}

}  // namespace gpufs

extern "C" {

const char* gpufs_message(void) { return gpufs::last_message.data(); }

const char* gpufs_version(void) { return GPUFS_VERSION; }

int32_t gpufs_prepare_thread(void) { return gpufs::make_room_for_own_variables() ? 0 : ENOMEM; }

gpufs_status gpufs_log_configure(int fd, int level) {
  return gpufs::guarded([&] {
    if (fd < -1) return gpufs::Status(EBADF, "the log's descriptor is negative");
    if (level < GPUFS_LOG_DEBUG || level > GPUFS_LOG_ERROR) {
      return gpufs::Status(EINVAL, "log level " + std::to_string(level) + " is not in 10..40");
    }
    gpufs::log_configure(fd, static_cast<gpufs::LogLevel>(level));
    return gpufs::Status();
  });
}
}
