#include "fuse/notifier.h"

#include <cerrno>
#include <climits>
#include <future>
#include <memory>
#include <utility>

#include "base/log.h"
#include "fuse/protocol.h"

namespace gpufs::fuse {

namespace {

template <typename T>
std::vector<std::byte> bytes_of(const T& value) {
  const auto bytes = std::as_bytes(std::span(&value, 1));
  return {bytes.begin(), bytes.end()};
}

// from: 0: the contents to the end and the attributes; -1: the attributes alone.
std::vector<std::byte> inode_from(std::uint64_t ino, std::int64_t from) {
  return bytes_of(fuse_notify_inval_inode_out{ino, from, 0});
}

}  // namespace

// On the executor as well: only there is the transport sure to be open.
Status Notifier::invalidate_inode(std::uint64_t ino) {
  const auto done = std::make_shared<std::promise<void>>();
  Status queued = queue(FUSE_NOTIFY_INVAL_INODE, inode_from(ino, 0), [done](int) { done->set_value(); });
  done->get_future().wait();
  return queued;
}

void Notifier::if_forgotten(std::uint64_t ino, std::function<void()> then) {
  (void)queue(FUSE_NOTIFY_INVAL_INODE, inode_from(ino, -1), [then = std::move(then)](int error) {
    if (error == ENOENT) then();
  });
}

Status Notifier::invalidate_entry(std::uint64_t parent, std::string_view name) {
  if (name.empty() || name.size() > NAME_MAX || name.find('\0') != std::string_view::npos ||
      name.find('/') != std::string_view::npos) {
    return Status(EINVAL, "no entry can have this name");
  }
  fuse_notify_inval_entry_out out{};
  out.parent = parent;
  out.namelen = static_cast<std::uint32_t>(name.size());
  std::vector<std::byte> body = bytes_of(out);
  const auto text = std::as_bytes(std::span(name));
  body.insert(body.end(), text.begin(), text.end());
  body.push_back(std::byte{0});
  return queue(FUSE_NOTIFY_INVAL_ENTRY, std::move(body), [](int) {});
}

Status Notifier::queue(std::int32_t code, std::vector<std::byte> body, std::function<void(int)> then) {
  const bool queued =
      executor_.submit({Executor::Lane::Kind::kNotifications, -1, 0}, nullptr, 0,
                       [this, code, body = std::move(body), then = std::move(then)](int refusal, Cancellation&) {
                         then(refusal == 0 ? write(code, body) : refusal);
                       });
  return queued ? Status() : Status(ESHUTDOWN, "the mount is closing");
}

int Notifier::write(std::int32_t code, std::span<const std::byte> body) {
  const int error = transport_.notify(code, body);
  // ENOENT: the kernel has nothing cached. ENODEV: it is gone, and so is its cache.
  if (error == 0 || error == ENOENT || error == ENODEV || error == ENOTDIR || error == ENOTEMPTY) {
    return error;
  }
  log_warning("the kernel refused a notification (code ", code, ", errno ", error, ")");
  return error;
}

}  // namespace gpufs::fuse
