// Notifies the kernel of what it must no longer cache.
// Ownership: the Mount's. Thread-safe; nothing here waits, except what says so.
//
// Notifications have a lane of the executor with one thread, because the kernel may block such a write until another
// request of the same inode has been answered: a thread that carries replies must not be the one that waits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "fuse/executor.h"
#include "fuse/request.h"
#include "fuse/transport.h"

namespace gpufs::fuse {

class Notifier {
 public:
  Notifier(Transport& transport, Executor& executor) : transport_(transport), executor_(executor) {}

  // Drops content and attributes before it returns, so whoever is told of a change afterwards sees it. The kernel may
  // wait for requests for the inode meanwhile: a thread that answers requests must not call this. ESHUTDOWN once the
  // executor has stopped.
  Status invalidate_inode(std::uint64_t ino);
  // Calls then(), soon, if the kernel does not have the inode.
  void if_forgotten(std::uint64_t ino, std::function<void()> then);
  // EINVAL for a name that no entry can have.
  Status invalidate_entry(std::uint64_t parent, std::string_view name);

 private:
  // then: called in any case, with 0 or the kernel's errno.
  Status queue(std::int32_t code, std::vector<std::byte> body, std::function<void(int)> then);
  int write(std::int32_t code, std::span<const std::byte> body);

  Transport& transport_;
  Executor& executor_;
};

}  // namespace gpufs::fuse
