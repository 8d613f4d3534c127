// The thread that tells the kernel what is no longer as it has cached it.
// Owned by the Session.
// Any thread may queue, and never waits. A thread of its own, because the kernel may hold such a write until another
// request of the same inode has been answered: the thread that answers must not be the one that waits.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <string_view>
#include <thread>
#include <vector>

#include "base/status.h"
#include "fuse/statistics.h"
#include "fuse/transport.h"

namespace gpufs::fuse {

class Notifier {
 public:
  Notifier(Transport& transport, Statistics& statistics) : transport_(transport), statistics_(statistics) {}
  ~Notifier() { stop(); }
  Notifier(const Notifier&) = delete;
  Notifier& operator=(const Notifier&) = delete;

  Status start();
  // Drops what is queued; what is being written is waited for, so requests must still be answered.
  void stop();

  // Content and attributes. ESHUTDOWN after stop().
  Status invalidate_inode(std::uint64_t ino);
  // EINVAL for a name that no entry can have.
  Status invalidate_entry(std::uint64_t parent, std::string_view name);
  // A notification of the control plane's, header included. Other kinds than invalidations are dropped.
  void forward(std::span<const std::byte> message);

  [[nodiscard]] std::size_t queued() const;

 private:
  struct Notification {
    std::int32_t code = 0;
    std::vector<std::byte> body;
    friend bool operator==(const Notification&, const Notification&) = default;
  };

  Status queue(Notification notification);
  void write_loop();

  Transport& transport_;
  Statistics& statistics_;
  std::thread thread_;  // the Session's start and stop alone touch it

  // Guards all below; nothing is written under it.
  mutable std::mutex mutex_;
  std::condition_variable wanted_;
  std::deque<Notification> queue_;
  bool stopping_ = false;
};

}  // namespace gpufs::fuse
