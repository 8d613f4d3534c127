#include "fuse/notifier.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <string>
#include <utility>

#include "base/log.h"
#include "base/thread.h"
#include "fuse/protocol.h"

namespace gpufs::fuse {

namespace {

template <typename T>
void append(std::vector<std::byte>& bytes, const T& value) {
  const auto* raw = reinterpret_cast<const std::byte*>(&value);
  bytes.insert(bytes.end(), raw, raw + sizeof(T));
}

}  // namespace

Status Notifier::start() {
  Result<std::thread> thread = start_thread("gpufs-notify", [this] { write_loop(); });
  if (thread.ok()) thread_ = thread.take();
  return thread.status();
}

void Notifier::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    queue_.clear();
  }
  wanted_.notify_all();
  if (thread_.joinable()) thread_.join();
}

Status Notifier::invalidate_inode(std::uint64_t ino) {
  fuse_notify_inval_inode_out out{};
  out.ino = ino;
  out.off = 0;
  out.len = 0;  // to the end
  Notification notification{FUSE_NOTIFY_INVAL_INODE, {}};
  append(notification.body, out);
  return queue(std::move(notification));
}

Status Notifier::invalidate_entry(std::uint64_t parent, std::string_view name) {
  if (name.empty() || name.size() > NAME_MAX || name.find('\0') != std::string_view::npos ||
      name.find('/') != std::string_view::npos) {
    return Status(EINVAL, "no entry can have this name");
  }
  fuse_notify_inval_entry_out out{};
  out.parent = parent;
  out.namelen = static_cast<std::uint32_t>(name.size());
  Notification notification{FUSE_NOTIFY_INVAL_ENTRY, {}};
  append(notification.body, out);
  for (const char c : name) notification.body.push_back(static_cast<std::byte>(c));
  notification.body.push_back(std::byte{0});
  return queue(std::move(notification));
}

void Notifier::forward(std::span<const std::byte> message) {
  fuse_out_header header{};
  if (!read_struct(message, 0, &header) || header.len != message.size()) {
    statistics_.notifications_dropped.add();
    return;
  }
  switch (header.error) {
    case FUSE_NOTIFY_INVAL_INODE:
    case FUSE_NOTIFY_INVAL_ENTRY:
    case FUSE_NOTIFY_DELETE:
      break;
    default:  // STORE and RETRIEVE would put pages beside the buffers, POLL has no files here
      statistics_.notifications_dropped.add();
      return;
  }
  const std::span<const std::byte> body = message.subspan(sizeof(header));
  if (!queue({header.error, {body.begin(), body.end()}}).ok()) statistics_.notifications_dropped.add();
}

std::size_t Notifier::queued() const {
  const std::lock_guard lock(mutex_);
  return queue_.size();
}

Status Notifier::queue(Notification notification) {
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return Status(ESHUTDOWN, "the mount is closing");
    // Saying it twice in a row is saying it once; one that is being written is no longer in the queue.
    if (!queue_.empty() && queue_.back() == notification) return {};
    queue_.push_back(std::move(notification));
  }
  wanted_.notify_one();
  return {};
}

void Notifier::write_loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wanted_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (stopping_) return;
    const Notification notification = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    const int error = transport_.notify(notification.code, notification.body);
    statistics_.notifications.add();
    // ENOENT: the kernel has nothing cached. ENODEV: it is gone, and so is its cache.
    if (error != 0 && error != ENOENT && error != ENODEV && error != ENOTDIR && error != ENOTEMPTY) {
      statistics_.notification_errors.add();
      log_warning("the kernel refused a notification (code ", notification.code, ", errno ", error, ")");
    }
    lock.lock();
  }
}

}  // namespace gpufs::fuse
