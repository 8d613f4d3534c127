#include "abi/barrier.h"

#include <system_error>

#include "base/log.h"

namespace gpufs {
namespace {

thread_local std::string last_message;

}  // namespace

gpufs_status report(const Status& status) noexcept {
  if (!status.ok())
    last_message = status.message().empty() ? std::generic_category().message(status.error()) : status.message();
  return gpufs_status{status.error(), status.device_code()};
}

}  // namespace gpufs

extern "C" {

const char* gpufs_message(void) { return gpufs::last_message.c_str(); }

const char* gpufs_version(void) { return GPUFS_VERSION; }

gpufs_status gpufs_log_configure(int fd, int level) {
  return gpufs::catch_all([&] {
    if (fd < -1) return gpufs::Status(EBADF, "the log's descriptor is negative");
    if (level < GPUFS_LOG_DEBUG || level > GPUFS_LOG_ERROR) {
      return gpufs::Status(EINVAL, "log level " + std::to_string(level) + " is not in 10..40");
    }
    gpufs::log_configure(fd, static_cast<gpufs::LogLevel>(level));
    return gpufs::Status();
  });
}
}
