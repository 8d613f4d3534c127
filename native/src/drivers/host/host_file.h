// A memfd with the memory of one buffer, and the memfds that other programs may write to.
//
// Such a program can make its memfd larger and allocate any part of it, which no seal prevents while the buffer may
// still grow. What it takes there would stay until the file is removed, and appear when the file grows. So whoever asks
// how much memory is left first releases what is not the buffer's, and growth starts from zeros.
// Ownership: shared by the buffer's memory and the ranges that show it; its charge lasts as long.
// Thread-safe, as far as it says so.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "drivers/driver.h"
#include "drivers/ledger.h"

namespace gpufs {

class SharedHostFiles;

class HostFile : public std::enable_shared_from_this<HostFile> {
 public:
  // keeper: null if nobody keeps the memfd.
  static Result<std::shared_ptr<HostFile>> create(std::shared_ptr<Ledger> limit,
                                                  std::shared_ptr<SharedHostFiles> shared,
                                                  std::shared_ptr<MemoryKeeper> keeper);
  // The one that the last process kept under this number, with these granules. ENOENT: there is none.
  static Result<std::shared_ptr<HostFile>> restore(std::shared_ptr<Ledger> limit,
                                                   std::shared_ptr<SharedHostFiles> shared,
                                                   std::shared_ptr<MemoryKeeper> keeper, std::uint64_t number,
                                                   std::span<const Extent> populated);
  ~HostFile();
  HostFile(const HostFile&) = delete;
  HostFile& operator=(const HostFile&) = delete;

  [[nodiscard]] int fd() const { return fd_.get(); }
  [[nodiscard]] std::uint64_t number() const { return number_; }  // see DeviceMemory

  // Whole granules. allocate(): ENOSPC; they are zeros. release(): the errno if the file keeps the memory.
  Status allocate(std::uint64_t offset, std::uint64_t bytes);
  int release(std::uint64_t offset, std::uint64_t bytes);

  // Other programs may write to it from now on.
  void share();
  // Releases what they have allocated beside the buffer's granules. Any thread.
  void release_foreign();

 private:
  HostFile(UniqueFd fd, std::shared_ptr<Ledger> limit, std::shared_ptr<SharedHostFiles> shared,
           std::shared_ptr<MemoryKeeper> keeper, std::uint64_t number, std::uint64_t key);

  const std::shared_ptr<MemoryKeeper> keeper_;
  const std::uint64_t number_;  // 0: not kept
  const std::uint64_t key_;     // of its descriptor
  const UniqueFd fd_;
  const std::shared_ptr<Ledger> limit_;
  const std::shared_ptr<SharedHostFiles> all_shared_;

  std::mutex mutex_;  // guards all below; held over changes of the file's memory
  bool shared_ = false;
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

}  // namespace gpufs
