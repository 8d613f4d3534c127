#include "fuse/notifier.h"

#include <cerrno>
#include <chrono>
#include <future>
#include <span>
#include <utility>

#include "base/log.h"
#include "fuse/protocol.h"

namespace gpufs::fuse {

namespace {

// The kernel drops 100 GiB in less. Longer waits are for a program that keeps pages from being written back.
constexpr std::chrono::seconds kPatience{10};
// Numbers of jobs that no request has.
constexpr std::uint64_t kFirstId = std::uint64_t{1} << 62;

}  // namespace

// On the executor as well: only there is the transport sure to be open.
Status Notifier::invalidate_inode(std::uint64_t ino) {
  const auto done = std::make_shared<std::promise<void>>();
  const std::uint64_t id = kFirstId + ++last_;
  Status queued = queue(id, ino, 0, [done](int) { done->set_value(); });
  if (done->get_future().wait_for(kPatience) == std::future_status::timeout) {
    static_cast<void>(executor_.cancel(id));  // one that waits for others
    const std::shared_ptr<Inode> inode = table_.find(ino);
    log_user_warning(inode ? inode->attributes().uid : 0, "the kernel does not drop the pages of inode ", ino,
                     ": mappings of it may show old contents for some time");
  }
  return queued;
}

void Notifier::if_forgotten(std::uint64_t ino, std::function<void()> then) {
  (void)queue(0, ino, -1, [then = std::move(then)](int error) {
    if (error == ENOENT) then();
  });
}

Status Notifier::queue(Executor::Id id, std::uint64_t ino, std::int64_t from, std::function<void(int)> then) {
  const std::shared_ptr<Inode> inode = table_.find(ino);
  const std::uint32_t owner = inode ? inode->attributes().uid : 0;
  const bool queued = executor_.submit({Executor::Lane::Kind::kNotifications, -1, owner}, inode.get(), id,
                                       [this, inode, ino, from, then = std::move(then)](int refusal, Cancellation&) {
                                         then(refusal == 0 ? write(ino, from) : refusal);
                                       });
  return queued ? Status() : Status(ESHUTDOWN, "the mount is closing");
}

int Notifier::write(std::uint64_t ino, std::int64_t from) {
  const fuse_notify_inval_inode_out body{ino, from, 0};
  const int error = transport_.notify(FUSE_NOTIFY_INVAL_INODE, std::as_bytes(std::span(&body, 1)));
  // ENOENT: the kernel has nothing cached. ENODEV: it is gone, and so is its cache.
  if (error != 0 && error != ENOENT && error != ENODEV) {
    log_warning("the kernel refused a notification (errno ", error, ")");
  }
  return error;
}

}  // namespace gpufs::fuse
