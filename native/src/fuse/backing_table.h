// The host's files that are open in the mount below backing/.
// Ownership: the Mount's.
// Thread-safe; open() may block for as long as the file's server does. So may the last reference's end, which closes
// the file: on a thread that must not wait, the executor does it.
#pragma once

#include <fcntl.h>

#include <cerrno>
#include <cstdint>
#include <exception>
#include <memory>
#include <utility>

#include "base/log.h"
#include "base/status.h"
#include "base/thread.h"
#include "base/unique_fd.h"
#include "fuse/executor.h"
#include "fuse/open_files.h"
#include "io/backing_file.h"

namespace gpufs::fuse {

struct OpenBacking {
  UniqueFd fd;                        // with the flags of open(2), O_SYNC among them
  std::shared_ptr<BackingFile> file;  // the same file as transfers see it
};

class BackingTable : public OpenFiles<OpenBacking, kBackingHandle> {
 public:
  explicit BackingTable(Executor& executor) : executor_(executor) {}

  // fd stays the caller's. Fails as BackingFile::open() does.
  Result<std::uint64_t> open(int fd) {
    // First: it refuses files that must not even be duplicated.
    Result<std::shared_ptr<BackingFile>> file = BackingFile::open(fd);
    if (!file.ok()) return file.status();
    UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 3));
    if (!copy.valid()) return Status::from_errno(errno, "the backing file's descriptor");
    return add({new OpenBacking{std::move(copy), file.take()},
                [executor = &executor_](OpenBacking* open) { close(open, executor); }});
  }

 private:
  // executor: gone when a thread that was left behind comes back, which may wait.
  static void close(OpenBacking* open, Executor* executor) {
    if (this_thread_may_wait()) {
      delete open;
      return;
    }
    const Executor::Lane lane{Executor::Lane::Kind::kFiles, -1, open->file->facts().device};
    try {
      executor->submit(lane, nullptr, 0, [open](int refusal, Cancellation&) {
        if (refusal == 0) delete open;  // else the mount has ended, and the end of the process closes the file
      });
    } catch (const std::exception& failure) {
      log_error("a file below backing/ stays open: ", failure.what());
    }
  }

  Executor& executor_;
};

}  // namespace gpufs::fuse
