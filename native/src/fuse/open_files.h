// Open files by handle. Handles have a bit that says which kind of file they name.
// Ownership: an open file is shared with the requests under way on it.
// Thread-safe; nothing is closed under the lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "base/log.h"
#include "fuse/records.h"

namespace gpufs::fuse {

// The control plane's own handles have none of these bits.
inline constexpr std::uint64_t kBufferHandle = std::uint64_t{1} << 62;
inline constexpr std::uint64_t kBackingHandle = std::uint64_t{1} << 61;
// Directories, except those of the host.
inline constexpr std::uint64_t kDirectoryHandle = std::uint64_t{1} << 60;
// The control plane numbers inodes of the host from here on: it alone knows the names in such a directory.
inline constexpr std::uint64_t kFirstHostInode = std::uint64_t{1} << 48;
[[nodiscard]] constexpr bool is_directory_handle(std::uint64_t fh) { return (fh & kDirectoryHandle) != 0; }
[[nodiscard]] constexpr bool is_buffer(std::uint64_t fh) { return (fh & kBufferHandle) != 0; }
[[nodiscard]] constexpr bool is_backing(std::uint64_t fh) { return (fh & kBackingHandle) != 0; }

// Each change of the files is recorded, if the file says how: FileRecord record() const.
template <typename File, std::uint64_t kKind>
class OpenFiles {
 public:
  // For files of this process alone.
  OpenFiles() : numbers_(nullptr, {}, 1) {}
  OpenFiles(Records& records, journal::NumbersOf of) : records_(&records), numbers_(records.journal(), of, 1) {}

  std::uint64_t add(std::shared_ptr<File> file) {
    const std::uint64_t fh = kKind | numbers_.next();
    if constexpr (requires { file->record(); }) records_->put_file(fh, file->record());
    const std::unique_lock lock(mutex_);
    files_.emplace(fh, std::move(file));
    return fh;
  }
  // Null if unknown, as below.
  [[nodiscard]] std::shared_ptr<File> find(std::uint64_t fh) const {
    const std::shared_lock lock(mutex_);
    const auto found = files_.find(fh);
    return found == files_.end() ? nullptr : found->second;
  }
  std::shared_ptr<File> remove(std::uint64_t fh) {
    std::shared_ptr<File> file;
    {
      const std::unique_lock lock(mutex_);
      const auto found = files_.find(fh);
      if (found == files_.end()) return nullptr;
      file = std::move(found->second);
      files_.erase(found);
    }
    if constexpr (requires { file->record(); }) records_->remove({journal::kOpenFile, fh});
    return file;
  }
  // The files of the last process, with the handles that they had. make(record): the file; null if it is lost.
  template <typename Make>
  void restore(Make make) {
    for (const auto& [fh, record] : records_->files()) {
      if ((fh & kKind) == 0) continue;
      if (std::shared_ptr<File> file = make(record)) {
        const std::unique_lock lock(mutex_);
        files_.emplace(fh, std::move(file));
      } else {
        log_error("an open file is lost with inode ", record.inode);
        records_->remove({journal::kOpenFile, fh});
      }
    }
  }
  [[nodiscard]] std::size_t size() const {
    const std::shared_lock lock(mutex_);
    return files_.size();
  }

 private:
  Records* const records_ = nullptr;
  journal::Numbers numbers_;
  mutable std::shared_mutex mutex_;  // guards all below; order 5 of docs/design/requests.md#locks
  std::unordered_map<std::uint64_t, std::shared_ptr<File>> files_;
};

}  // namespace gpufs::fuse
