// The system calls that transfers make on files, of which a test can plan some. Plans are made before threads use them.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "io/file_io.h"

namespace gpufs::testing {

// Calls the system, after the test's own functions if there are any.
class PlannedFileOps : public FileOps {
 public:
  // Returns true if it has done the call itself, with *result and errno.
  using ReadHook = std::function<bool(int fd, void* memory, std::size_t bytes, std::uint64_t offset, ssize_t* result)>;
  using WriteHook =
      std::function<bool(int fd, const void* memory, std::size_t bytes, std::uint64_t offset, ssize_t* result)>;
  ReadHook on_read;
  WriteHook on_write;
  std::atomic<int> page_writes{0};
  std::function<int(bool)> on_sync;  // data only?
  std::function<int(int, std::uint64_t, std::uint64_t)> on_allocate;
  std::function<int(std::uint64_t*)> on_size;
  std::function<int(std::uint64_t, std::uint64_t*)> on_cached;  // bytes asked, bytes found
  std::function<int(std::uint64_t, int, std::uint64_t*)> on_seek;
  std::atomic<int> seeks{0};

  ssize_t read_at(int fd, void* destination, std::size_t bytes, std::uint64_t offset) override {
    ssize_t result = 0;
    if (on_read && on_read(fd, destination, bytes, offset, &result)) return result;
    return FileOps::read_at(fd, destination, bytes, offset);
  }
  ssize_t write_at(int fd, const void* source, std::size_t bytes, std::uint64_t offset) override {
    ssize_t result = 0;
    if (on_write && on_write(fd, source, bytes, offset, &result)) return result;
    return FileOps::write_at(fd, source, bytes, offset);
  }
  ssize_t write_pages_at(int fd, const void* source, std::size_t bytes, std::uint64_t offset) override {
    ++page_writes;
    ssize_t result = 0;
    if (on_write && on_write(fd, source, bytes, offset, &result)) return result;
    return FileOps::write_pages_at(fd, source, bytes, offset);
  }
  int sync(int fd, bool data_only) override { return on_sync ? on_sync(data_only) : FileOps::sync(fd, data_only); }
  int allocate(int fd, int mode, std::uint64_t offset, std::uint64_t bytes) override {
    return on_allocate ? on_allocate(mode, offset, bytes) : FileOps::allocate(fd, mode, offset, bytes);
  }
  int size(int fd, std::uint64_t* bytes) override { return on_size ? on_size(bytes) : FileOps::size(fd, bytes); }
  int seek(int fd, std::uint64_t offset, int whence, std::uint64_t* found) override {
    ++seeks;
    return on_seek ? on_seek(offset, whence, found) : FileOps::seek(fd, offset, whence, found);
  }
  int cached_bytes(int fd, std::uint64_t offset, std::uint64_t bytes, std::uint64_t* cached) override {
    return on_cached ? on_cached(bytes, cached) : FileOps::cached_bytes(fd, offset, bytes, cached);
  }
};

}  // namespace gpufs::testing
