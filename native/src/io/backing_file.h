// A file or block device that transfers read and write: two descriptors, and what is known about what is behind them.
// Shared by its handle and the transfers under way.
// Any thread may call any function; open() may block for as long as the file's server does.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "base/status.h"
#include "base/unique_fd.h"
#include "io/direct_path.h"
#include "io/file_ops.h"
#include "io/refusal.h"

namespace gpufs {

// Probed once, so that scoring a request asks the system nothing.
struct BackingFacts {
  std::string file_system;  // "ext4"; "" where the mount is not visible to this process
  bool block_device = false;
  bool readable = false;
  bool writable = false;
  bool append = false;                // every write would go to the end: no destination for us
  bool always_hot = false;            // the page cache is the file (tmpfs)
  bool may_hang = false;              // behind a network or a user's process
  std::uint64_t device = 0;           // st_dev: files that hang together have the same
  std::uint32_t offset_align = 4096;  // of O_DIRECT, both powers of two
  std::uint32_t memory_align = 4096;
  // What O_DIRECT requests are cut to: offset_align, and at least a page, so that buffered and direct writes of one
  // request never meet in a page.
  std::uint32_t unit = 4096;
  RefusalMask fastpath_refusals = 0;  // those that the file alone decides
};

class BackingFile {
 public:
  // Takes descriptors of its own: `fd` stays the caller's. Both are opened anew with the mode of `fd` and never wider,
  // so that nobody who shares `fd` can change their flags; where that is not permitted a duplicate of `fd` serves, and
  // there is no O_DIRECT.
  // EBADF: not open, O_PATH, or open for neither reading nor writing. EISDIR, EINVAL: neither a regular file nor a
  // block device. EDEADLK: on a mount of gpufs (found without asking that mount anything).
  static Result<std::shared_ptr<BackingFile>> open(int fd, FileOps& operations = FileOps::system());

  // For tests: takes over descriptors that the caller opened, with facts that it states. direct may be invalid.
  static std::shared_ptr<BackingFile> adopt(UniqueFd buffered, UniqueFd direct, BackingFacts facts,
                                            FileOps& operations);

  [[nodiscard]] const BackingFacts& facts() const { return facts_; }
  [[nodiscard]] FileOps& operations() const { return operations_; }
  [[nodiscard]] int buffered_fd() const { return buffered_.get(); }
  [[nodiscard]] int direct_fd() const { return direct_.get(); }  // -1 where there is none

  // The vendor's view of this file, made at the first call.
  Result<DirectFile*> direct_file(DirectPath& path);

 private:
  BackingFile(UniqueFd buffered, UniqueFd direct, BackingFacts facts, FileOps& operations)
      : operations_(operations), facts_(std::move(facts)), buffered_(std::move(buffered)), direct_(std::move(direct)) {}

  FileOps& operations_;
  const BackingFacts facts_;
  const UniqueFd buffered_;
  const UniqueFd direct_;

  // Guards the two below; the vendor's registration runs under it, once for each file.
  std::mutex direct_mutex_;
  std::unique_ptr<DirectFile> direct_file_;
  Status direct_status_;
};

// The probing of open(), for tests: facts from a file system's type and options.
void judge_file_system(const std::string& type, const std::string& super_options, BackingFacts& facts);

}  // namespace gpufs
