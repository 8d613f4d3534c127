// A buffer's memory on the host driver: one memfd, whose offsets are the buffer's, shown in ranges of addresses.
// Ownership: the buffer's; the memfd and its charge live until the last range that shows them is gone.
// One thread at a time; any thread may destroy the ranges.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "drivers/driver.h"
#include "drivers/ledger.h"

namespace gpufs {

// The granule of GPUs, so that code behaves the same on both.
inline constexpr std::uint64_t kHostGranule = std::uint64_t{2} << 20;

class SharedHostFiles;

// What the memory of a device belongs to.
struct HostOwners {
  std::shared_ptr<Ledger> limit;
  std::shared_ptr<SharedHostFiles> shared;
  std::shared_ptr<MemoryKeeper> keeper;  // null if nobody keeps the memfds
};

// A memfd with the memory of one buffer. Shared by the buffer's memory and the ranges that show it; its charge lasts as
// long. Thread-safe, as far as it says so.
//
// Other programs may write to some of them. Such a program can make its memfd larger and allocate any part of it, which
// no seal prevents while the buffer may still grow. What it takes there would stay until the file is removed, and
// appear when the file grows. So whoever asks how much memory is left first releases what is not the buffer's, and
// growth starts from zeros.
class HostFile : public std::enable_shared_from_this<HostFile> {
 public:
  static Result<std::shared_ptr<HostFile>> create(HostOwners owners);
  // The one that the last process kept under this number, with these granules. ENOENT: there is none.
  static Result<std::shared_ptr<HostFile>> restore(HostOwners owners, std::uint64_t number,
                                                   std::span<const Extent> populated);
  ~HostFile();

  [[nodiscard]] int fd() const { return fd_.get(); }
  [[nodiscard]] std::uint64_t number() const { return number_; }  // see DeviceMemory

  // Whole granules. allocate(): ENOSPC; they are zeros. release(): the errno if the file keeps the memory.
  Status allocate(std::uint64_t offset, std::uint64_t bytes);
  int release(std::uint64_t offset, std::uint64_t bytes);

  // Other programs may write to it from now on.
  void share();
  // Releases what they have allocated beside the buffer's granules. Any thread; waits for no allocation.
  void release_foreign();

 private:
  HostFile(UniqueFd fd, HostOwners owners, std::uint64_t number, std::uint64_t key)
      : owners_(std::move(owners)), number_(number), fd_(std::move(fd)), key_(key) {}

  void release_foreign_locked();

  const HostOwners owners_;
  const std::uint64_t number_;  // 0: not kept
  const UniqueFd fd_;

  std::mutex mutex_;  // guards all below; held over changes of the file's memory
  bool shared_ = false;
  std::uint64_t key_;            // of its descriptor
  std::set<std::uint64_t> own_;  // offsets of the buffer's granules, which are charged
};

// The shared ones of a device. Thread-safe.
class SharedHostFiles {
 public:
  void add(std::weak_ptr<HostFile> file);
  void release_foreign();

 private:
  std::mutex mutex_;  // guards files_
  std::vector<std::weak_ptr<HostFile>> files_;
};

class HostMemory : public DeviceMemory {
 public:
  static Result<std::unique_ptr<DeviceMemory>> create(HostOwners owners) {
    return show(HostFile::create(std::move(owners)));
  }
  // Of the last process: see Device::restore_memory().
  static Result<std::unique_ptr<DeviceMemory>> restore(HostOwners owners, std::uint64_t number,
                                                       std::span<const Extent> populated) {
    return show(HostFile::restore(std::move(owners), number, populated));
  }

  Result<std::shared_ptr<AddressRange>> reserve(std::uint64_t bytes, std::span<const Extent> populated) override;
  Status populate_all(std::span<const Extent> spans, Wait wait) override;
  void release_all(std::span<const Extent> spans) override;
  Result<std::vector<ExportedMemory>> export_memory(std::uint64_t from, std::uint64_t end, std::size_t capacity,
                                                    bool writable) override;
  [[nodiscard]] std::uint64_t descriptors() const override { return 1; }
  [[nodiscard]] std::uint64_t number() const override { return file_->number(); }

 private:
  class Range;

  explicit HostMemory(std::shared_ptr<HostFile> file) : file_(std::move(file)) {}
  static Result<std::unique_ptr<DeviceMemory>> show(Result<std::shared_ptr<HostFile>> file);

  const std::shared_ptr<HostFile> file_;
  std::shared_ptr<Range> range_;  // the current one; null before the first reserve()
};

// memcpy() for memory that is not in the cache and is not read again soon, such as a device's: 0.55 of memcpy's time
// for 1 MiB. Small blocks go through the cache, for their readers. The ranges must not overlap. Other threads see the
// result as after memcpy().
void copy_to_memory(void* destination, const void* source, std::size_t bytes);

}  // namespace gpufs
