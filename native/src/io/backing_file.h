// A file or block device that transfers read and write: two descriptors, and what is known about the file behind them.
// Thread-safe. open() may block for as long as the file's server does.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "base/status.h"
#include "base/unique_fd.h"
#include "io/fastpath.h"

namespace gpufs {

// Probed once, so that planning a request needs no system call.
struct BackingFacts {
  std::string file_system;  // "ext4"; "" if the mount is not visible to this process
  bool block_device = false;
  bool readable = false;
  bool writable = false;
  bool append = false;                // every write would go to the end, so no store is possible
  bool always_hot = false;            // the file exists in the page cache alone (tmpfs)
  bool may_hang = false;              // behind a network or a user's process
  std::uint64_t disk = 0;             // st_dev, or st_rdev of a block device: files on the same disk stall together
  std::uint32_t offset_align = 4096;  // of O_DIRECT, both powers of two; this one is at most kSmallestChunk
  std::uint32_t memory_align = 4096;
  // What requests by O_DIRECT are aligned to: offset_align and at least a page, so that buffered and direct writes of
  // one request never share a page.
  std::uint32_t unit = 4096;
  RefusalMask fastpath_refusals = 0;  // the reasons that depend on the file alone
};

class FileOps;  // io/file_io.h

class BackingFile {
 public:
  // Opens descriptors of its own, so that nobody who shares `fd` can change their flags; with the access mode of `fd`,
  // never a wider one. If that is not permitted, it uses a duplicate of `fd` and no O_DIRECT.
  // EBADF: not open, O_PATH, or open for neither reading nor writing. EISDIR, EINVAL: neither a regular file nor a
  // block device. EDEADLK: on a mount of gpufs (detected without a request to that mount).
  static Result<std::shared_ptr<BackingFile>> open(int fd, FileOps& operations);
  static Result<std::shared_ptr<BackingFile>> open(int fd);  // with the system's calls

  // For tests: takes ownership of descriptors, with facts of the test's own. direct may be invalid.
  static std::shared_ptr<BackingFile> adopt(UniqueFd buffered, UniqueFd direct, BackingFacts facts,
                                            FileOps& operations);

  [[nodiscard]] const BackingFacts& facts() const { return facts_; }
  [[nodiscard]] FileOps& operations() const { return operations_; }
  [[nodiscard]] int buffered_fd() const { return buffered_.get(); }
  [[nodiscard]] int direct_fd() const { return direct_.get(); }  // -1 where there is none

  // The vendor's handle of this file, registered by the first call.
  Result<FastpathFile*> fastpath_file(Fastpath& path);

 private:
  BackingFile(UniqueFd buffered, UniqueFd direct, BackingFacts facts, FileOps& operations)
      : operations_(operations), facts_(std::move(facts)), buffered_(std::move(buffered)), direct_(std::move(direct)) {}

  FileOps& operations_;
  const BackingFacts facts_;
  const UniqueFd buffered_;
  const UniqueFd direct_;

  // Guards the two below. The file is registered with the vendor's library under it, once.
  std::mutex fastpath_mutex_;
  std::unique_ptr<FastpathFile> fastpath_file_;
  Status fastpath_status_;
};

// A part of open(), for tests: the facts that follow from a file system's type and options.
void judge_file_system(const std::string& type, const std::string& super_options, BackingFacts& facts);

}  // namespace gpufs
