#include "fuse/backing_table.h"

#include <fcntl.h>

#include <cerrno>
#include <mutex>
#include <utility>

namespace gpufs::fuse {

Result<std::uint64_t> BackingTable::open(std::uint64_t ino, int fd) {
  // Looked at first: it refuses what must not even be duplicated.
  Result<std::shared_ptr<BackingFile>> file = BackingFile::open(fd);
  if (!file.ok()) return file.status();
  auto opened = std::make_shared<OpenBacking>();
  opened->ino = ino;
  opened->fd = UniqueFd(::fcntl(fd, F_DUPFD_CLOEXEC, 3));
  if (!opened->fd.valid()) return Status::from_errno(errno, "the backing file's descriptor");
  opened->file = file.take();
  const std::unique_lock lock(mutex_);
  const std::uint64_t fh = kHandleBit | next_++;
  files_.emplace(fh, std::move(opened));
  return fh;
}

Status BackingTable::release(std::uint64_t fh) {
  std::shared_ptr<OpenBacking> last;  // closed without the lock
  const std::unique_lock lock(mutex_);
  const auto found = files_.find(fh);
  if (found == files_.end()) return Status(EBADF, "no open backing file " + std::to_string(fh));
  last = std::move(found->second);
  files_.erase(found);
  return {};
}

std::shared_ptr<OpenBacking> BackingTable::find(std::uint64_t fh) const {
  const std::shared_lock lock(mutex_);
  const auto found = files_.find(fh);
  return found == files_.end() ? nullptr : found->second;
}

std::size_t BackingTable::size() const {
  const std::shared_lock lock(mutex_);
  return files_.size();
}

}  // namespace gpufs::fuse
