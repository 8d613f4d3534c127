// The host's files that are open in the mount below backing/.
// Ownership: the Mount's.
// Thread-safe; open() may block for as long as the file's server does.
#pragma once

#include <fcntl.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/status.h"
#include "base/unique_fd.h"
#include "fuse/open_files.h"
#include "io/backing_file.h"

namespace gpufs::fuse {

struct OpenBacking {
  UniqueFd fd;                        // with the flags of open(2), O_SYNC among them
  std::shared_ptr<BackingFile> file;  // the same file as transfers see it
};

class BackingTable : public OpenFiles<OpenBacking, kBackingHandle> {
 public:
  // fd stays the caller's. Fails as BackingFile::open() does.
  Result<std::uint64_t> open(int fd) {
    // First: it refuses files that must not even be duplicated.
    Result<std::shared_ptr<BackingFile>> file = BackingFile::open(fd);
    if (!file.ok()) return file.status();
    UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 3));
    if (!copy.valid()) return Status::from_errno(errno, "the backing file's descriptor");
    return add(std::make_shared<OpenBacking>(OpenBacking{std::move(copy), file.take()}));
  }
};

}  // namespace gpufs::fuse
