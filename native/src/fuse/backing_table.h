// The host's files that are open in the mount below backing/.
// Ownership: the Mount's.
// Thread-safe; open() may block for as long as the file's server does. So may close(2), which the executor therefore
// calls when the last reference ends.
#pragma once

#include <fcntl.h>

#include <cerrno>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>

#include "base/log.h"
#include "base/status.h"
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
  explicit BackingTable(Executor& executor) : closer_(std::make_shared<Closer>(executor)) {}
  ~BackingTable() { closer_->detach(); }

  // fd stays the caller's. Fails as BackingFile::open() does.
  Result<std::uint64_t> open(int fd) {
    // First: it refuses files that must not even be duplicated.
    Result<std::shared_ptr<BackingFile>> file = BackingFile::open(fd);
    if (!file.ok()) return file.status();
    UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 3));
    if (!copy.valid()) return Status::from_errno(errno, "the backing file's descriptor");
    return add({new OpenBacking{std::move(copy), file.take()},
                [closer = closer_](OpenBacking* open) { closer->close(open); }});
  }

 private:
  // Closes files. A thread that was left behind in one may come back when the executor is gone; it closes its file
  // itself, since nothing depends on it any more.
  class Closer {
   public:
    explicit Closer(Executor& executor) : executor_(&executor) {}

    void detach() {
      const std::lock_guard lock(mutex_);
      executor_ = nullptr;
    }

    void close(OpenBacking* open) {
      std::unique_lock lock(mutex_);
      if (executor_ == nullptr) {
        lock.unlock();
        delete open;
        return;
      }
      const Executor::Lane lane{Executor::Lane::Kind::kFiles, -1, open->file->facts().disk};
      try {
        executor_->submit(lane, nullptr, 0, [open](int refusal, Cancellation&) {
          if (refusal == 0) delete open;  // else the mount has ended, and the end of the process closes the file
        });
      } catch (const std::exception& failure) {
        log_error("a file below backing/ stays open: ", failure.what());
      }
    }

   private:
    std::mutex mutex_;  // guards what is below; the executor's mutex is taken under it
    Executor* executor_;
  };

  const std::shared_ptr<Closer> closer_;
};

}  // namespace gpufs::fuse
