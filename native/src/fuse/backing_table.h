// The host's files that are open in the mount below backing/: handles of their own, apart from those of buffers.
// Owned by the Session; an open file is shared with the operations under way on it.
// Any thread may call any function; open() may block for as long as the file's server does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <unordered_map>

#include "base/status.h"
#include "base/unique_fd.h"
#include "io/backing_file.h"

namespace gpufs::fuse {

struct OpenBacking {
  std::uint64_t ino = 0;
  UniqueFd fd;                        // with the flags of the opening, O_SYNC among them
  std::shared_ptr<BackingFile> file;  // the same file as transfers see it
};

class BackingTable {
 public:
  // Handles that the table gives have this bit; those of buffers and of the control plane do not.
  static constexpr std::uint64_t kHandleBit = std::uint64_t{1} << 61;
  static constexpr bool is_backing(std::uint64_t fh) { return (fh & kHandleBit) != 0; }

  // fd stays the caller's. Fails as BackingFile::open() does.
  Result<std::uint64_t> open(std::uint64_t ino, int fd);
  // EBADF if unknown. Operations under way keep the file until they end.
  Status release(std::uint64_t fh);
  // Null if unknown.
  [[nodiscard]] std::shared_ptr<OpenBacking> find(std::uint64_t fh) const;
  [[nodiscard]] std::size_t size() const;

 private:
  // Guards all below; nothing is closed under it.
  mutable std::shared_mutex mutex_;
  std::unordered_map<std::uint64_t, std::shared_ptr<OpenBacking>> files_;
  std::uint64_t next_ = 1;
};

}  // namespace gpufs::fuse
