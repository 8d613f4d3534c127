// Notifies the kernel of contents and attributes that it must no longer cache. Of names it is never notified, since
// that waits for the lock of the directory, which any user can hold: a name that can go without the kernel's knowledge
// is not cached (NameOperations::entry_of()). Ownership: the Mount's. Thread-safe.
//
// The kernel blocks such a write until requests for pages of that inode have been answered: a thread that carries
// replies must not be the one that waits. So notifications are jobs of the executor, in a lane for each owner of files:
// who keeps the kernel from dropping pages of a file delays those alone that share the file, or its owner.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "base/status.h"
#include "fuse/executor.h"
#include "fuse/inode_table.h"
#include "fuse/transport.h"

namespace gpufs::fuse {

class Notifier {
 public:
  Notifier(Transport& transport, Executor& executor, const InodeTable& table)
      : transport_(transport), executor_(executor), table_(table) {}

  // Drops content and attributes before it returns, so whoever is told of a change afterwards sees it. Pages that the
  // kernel is still writing back or reading after ten seconds are dropped later. The kernel may wait for requests for
  // the inode meanwhile: a thread that answers requests must not call this. ESHUTDOWN once the executor has stopped.
  Status invalidate_inode(std::uint64_t ino);
  // Calls then(), soon, if the kernel does not have the inode.
  void if_forgotten(std::uint64_t ino, std::function<void()> then);

 private:
  // from: 0: the contents to the end and the attributes; -1: the attributes alone.
  // then: called in any case, with 0 or the kernel's errno.
  Status queue(Executor::Id id, std::uint64_t ino, std::int64_t from, std::function<void(int)> then);
  int write(std::uint64_t ino, std::int64_t from);

  Transport& transport_;
  Executor& executor_;
  const InodeTable& table_;
  std::atomic<std::uint64_t> last_{0};  // of the numbers of waiting jobs
};

}  // namespace gpufs::fuse
