// The mount, inode and file functions of the C interface.

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "abi/barrier.h"
#include "abi/engine.h"
#include "abi/handles.h"
#include "base/log.h"
#include "base/unique_fd.h"
#include "device/device_context.h"
#include "fuse/attributes.h"
#include "fuse/buffer_source.h"
#include "fuse/inode_table.h"
#include "fuse/mount.h"
#include "fuse/quotas.h"
#include "fuse/relay.h"
#include "fuse/statistics.h"
#include "gpufs.h"
#include "memory/account.h"
#include "memory/buffer.h"
#include "memory/host_locks.h"
#include "memory/registered_buffer.h"

namespace gpufs {
namespace {

// For longer waits sleeping costs less than spinning, whatever the machine.
constexpr double kLongestSpin = 0.01;

// Requests' payloads are locked if a vendor's runtime copies from and to them.
fuse::PinHooks pin_hooks(const Engine& engine) {
  const auto& devices = engine.devices();
  const std::shared_ptr<HostLocks>& locks = engine.host_locks();
  const bool mandatory = locks->policy() == LockPolicy::kMandatory;
  if (locks->policy() == LockPolicy::kOff) return {};
  if (std::all_of(devices.begin(), devices.end(), [](const auto& device) { return device->info().cpu_addressable; })) {
    return {};  // no device copies
  }
  return {[locks, mandatory](void* address, std::size_t bytes) -> Status {
            Status status = locks->lock(address, bytes, HostLocks::Access::kBoth, HostLocks::Owner::kMount);
            if (status.ok()) return status;
            if (mandatory) return status.with_context("locking the memory for requests is mandatory");
            log_warning("request memory is not locked: ", status.message());
            return {};
          },
          [locks](void* address, std::size_t bytes) {
            const Status status = locks->unlock(address, bytes);
            // ENOENT: it was never locked.
            if (!status.ok() && status.error() != ENOENT) log_warning(status.message());
          }};
}

// A text for a caller's buffer of this capacity.
Status hand_out(const std::string& json, char* text, std::uint64_t capacity, std::uint64_t* needed) {
  if (needed == nullptr || (text == nullptr && capacity > 0)) return null_argument();
  *needed = json.size() + 1;
  if (text == nullptr || capacity < *needed)
    return Status(ERANGE, "the text needs " + std::to_string(*needed) + " bytes");
  std::memcpy(text, json.c_str(), json.size() + 1);
  return {};
}

// body(mount, inode), a Status; ENOENT without this inode.
template <typename Body>
gpufs_status with_inode(gpufs_handle mount, std::uint64_t ino, Body body) {
  return with<fuse::Mount>(mount, [&](fuse::Mount& found) -> Status {
    const std::shared_ptr<fuse::Inode> inode = found.table().find(ino);
    return inode ? body(found, *inode) : Status(ENOENT, "no inode " + std::to_string(ino));
  });
}

}  // namespace
}  // namespace gpufs

using gpufs::guarded;
using gpufs::HandleTable;
using gpufs::Result;
using gpufs::Status;
using gpufs::fuse::Inode;
using gpufs::fuse::Mount;

extern "C" {

gpufs_status gpufs_relay_pair(int32_t* native_fd, int32_t* control_fd) {
  return guarded([&]() -> Status {
    if (native_fd == nullptr || control_fd == nullptr) return gpufs::null_argument();
    Result<gpufs::fuse::RelayPair> pair = gpufs::fuse::make_relay_pair();
    if (!pair.ok()) return pair.status();
    *native_fd = pair.value().native.release();
    *control_fd = pair.value().control.release();
    return {};
  });
}

gpufs_status gpufs_mount_open(gpufs_handle engine, const gpufs_mount_options* options, gpufs_handle* mount) {
  return guarded([&]() -> Status {
    if (options == nullptr) return gpufs::null_argument();
    gpufs::UniqueFd device(options->fuse_fd);
    gpufs::UniqueFd relay(options->relay_fd);
    if (mount == nullptr) return gpufs::null_argument();
    if (options->reader_threads < 0 || options->worker_threads < 0) {
      return Status(EINVAL, "a negative number of threads");
    }
    if (!(options->reader_spin >= 0 && options->reader_spin <= gpufs::kLongestSpin)) {
      return Status(EINVAL, "readers may spin for 0 to 0.01 seconds");
    }
    Result<std::shared_ptr<gpufs::Engine>> owner = HandleTable::instance().get<gpufs::Engine>(engine);
    if (!owner.ok()) return owner.status();

    gpufs::fuse::MountOptions chosen;
    chosen.reader_threads = static_cast<std::size_t>(options->reader_threads);
    chosen.worker_threads = static_cast<std::size_t>(options->worker_threads);
    chosen.reader_spin = std::chrono::nanoseconds(static_cast<std::int64_t>(options->reader_spin * 1e9));
    chosen.max_write = options->max_write;
    chosen.mask_flags = options->mask_flags;
    chosen.entry_timeout = options->entry_timeout;
    chosen.attribute_timeout = options->attribute_timeout;
    chosen.metadata_bytes = options->metadata_bytes;
    chosen.rings = options->rings != 0;
    chosen.user_bytes = options->user_bytes;
    chosen.pin_hooks = gpufs::pin_hooks(*owner.value());
    Result<std::shared_ptr<gpufs::TransferEngine>> transfers = owner.value()->transfers();
    if (!transfers.ok()) return transfers.status();
    chosen.transfers = transfers.take();
    auto buffers = std::make_shared<gpufs::fuse::BufferSource>(owner.value()->devices());
    Result<std::shared_ptr<Mount>> opened =
        Mount::create(std::move(device), std::move(relay), std::move(buffers), chosen);
    if (!opened.ok()) return opened.status();
    Result<gpufs_handle> handle =
        HandleTable::instance().put<Mount>(opened.take(), engine, [](Mount& open) { open.close(); });
    if (!handle.ok()) return handle.status();
    *mount = handle.value();
    return {};
  });
}

gpufs_status gpufs_mount_start(gpufs_handle mount) {
  return gpufs::with<Mount>(mount, [&](Mount& found) -> Status { return found.start(); });
}

gpufs_status gpufs_mount_ended_fd(gpufs_handle mount, int* fd) {
  return gpufs::with<Mount>(mount, [&](Mount& found) -> Status {
    if (fd == nullptr) return gpufs::null_argument();
    *fd = found.ended_fd();
    return {};
  });
}

gpufs_status gpufs_mount_close(gpufs_handle mount) {
  return guarded([&]() -> Status {
    Result<std::shared_ptr<Mount>> taken = HandleTable::instance().take<Mount>(mount);
    if (!taken.ok()) return taken.status();
    taken.value()->close();
    HandleTable::instance().close_owned(mount);
    return {};
  });
}

gpufs_status gpufs_mount_statistics(gpufs_handle mount, char* text, uint64_t capacity, uint64_t* needed) {
  return gpufs::with<Mount>(
      mount, [&](Mount& found) -> Status { return gpufs::hand_out(found.statistics(), text, capacity, needed); });
}

gpufs_status gpufs_mount_busiest(gpufs_handle mount, gpufs_file_activity* files, uint64_t* count) {
  return gpufs::with<Mount>(mount, [&](Mount& found) -> Status {
    if (count == nullptr || (files == nullptr && *count > 0)) return gpufs::null_argument();
    const auto busiest = found.table().busiest(*count);
    *count = busiest.size();
    std::transform(busiest.begin(), busiest.end(), files, [](const auto& inode) -> gpufs_file_activity {
      const gpufs::observe::FileActivity& activity = inode->buffer()->activity();
      return {inode->ino(), activity.bytes(gpufs::observe::Flow::kOut), activity.bytes(gpufs::observe::Flow::kIn)};
    });
    return {};
  });
}

gpufs_status gpufs_mount_access_times(gpufs_handle mount, int32_t policy, int32_t not_directories) {
  return gpufs::with<Mount>(mount, [&](Mount& found) -> Status {
    gpufs::fuse::AccessTimes wanted{};
    switch (policy) {
      case GPUFS_RELATIME:
        wanted = gpufs::fuse::AccessTimes::kRelative;
        break;
      case GPUFS_STRICTATIME:
        wanted = gpufs::fuse::AccessTimes::kAlways;
        break;
      case GPUFS_NOATIME:
        wanted = gpufs::fuse::AccessTimes::kNever;
        break;
      default:
        return Status(EINVAL, "unknown policy of access times");
    }
    found.table().set_access_times(wanted, not_directories != 0);
    return {};
  });
}

gpufs_status gpufs_inode_add(gpufs_handle mount, const gpufs_attributes* attributes, uint64_t parent, uint32_t umask) {
  return gpufs::with<Mount>(mount, [&](Mount& found) -> Status {
    if (attributes == nullptr) return gpufs::null_argument();
    return found.table().add(*attributes, parent, umask);
  });
}

gpufs_status gpufs_inode_remove(gpufs_handle mount, uint64_t ino) {
  return gpufs::with<Mount>(mount, [&](Mount& found) -> Status { return found.table().remove(ino); });
}

gpufs_status gpufs_inode_hold(gpufs_handle mount, uint64_t ino) {
  return gpufs::with<Mount>(mount, [&](Mount& found) -> Status { return found.table().hold(ino); });
}

gpufs_status gpufs_inode_drop(gpufs_handle mount, uint64_t ino, uint64_t count) {
  return gpufs::with<Mount>(mount, [&](Mount& found) -> Status { return found.table().drop(ino, count); });
}

gpufs_status gpufs_name_set(gpufs_handle mount, uint64_t directory, const char* name, uint64_t name_bytes,
                            uint64_t ino) {
  return gpufs::with<Mount>(mount, [&](Mount& found) -> Status {
    if (name == nullptr) return gpufs::null_argument();
    return found.table().set_name(directory, std::string_view(name, static_cast<std::size_t>(name_bytes)), ino);
  });
}

gpufs_status gpufs_name_remove(gpufs_handle mount, uint64_t directory, const char* name, uint64_t name_bytes) {
  return gpufs::with<Mount>(mount, [&](Mount& found) -> Status {
    if (name == nullptr) return gpufs::null_argument();
    return found.table().remove_name(directory, std::string_view(name, static_cast<std::size_t>(name_bytes)));
  });
}

gpufs_status gpufs_inode_get(gpufs_handle mount, uint64_t ino, gpufs_attributes* attributes) {
  return gpufs::with_inode(mount, ino, [&](Mount&, Inode& inode) -> Status {
    if (attributes == nullptr) return gpufs::null_argument();
    *attributes = inode.attributes();
    return {};
  });
}

gpufs_status gpufs_inode_links(gpufs_handle mount, uint64_t ino, uint32_t links) {
  return gpufs::with<Mount>(mount, [&](Mount& found) -> Status {
    gpufs_attributes wanted{};
    wanted.nlink = links;
    return found.table().set(ino, gpufs::fuse::kSetNlink | gpufs::fuse::kSetCtimeNow, &wanted);
  });
}

gpufs_status gpufs_inode_read(gpufs_handle mount, uint64_t ino) {
  return gpufs::with_inode(mount, ino, [](Mount& found, Inode& inode) -> Status {
    found.table().was_read(inode);
    return {};
  });
}

gpufs_status gpufs_inode_written(gpufs_handle mount, uint64_t ino) {
  return gpufs::with_inode(mount, ino, [ino](Mount& found, Inode& inode) -> Status {
    inode.was_written(gpufs::fuse::SetIdLoss::kExecutable);
    return found.notifier().invalidate_inode(ino);
  });
}

gpufs_status gpufs_file_open(gpufs_handle mount, uint64_t ino, int32_t flags, uint64_t* fh) {
  return gpufs::with<Mount>(mount, [&](Mount& found) -> Status {
    if (fh == nullptr) return gpufs::null_argument();
    return gpufs::give(found.table().open(ino, flags), fh);
  });
}

gpufs_status gpufs_backing_file_open(gpufs_handle mount, int32_t fd, uint64_t* fh) {
  return gpufs::with<Mount>(mount, [&](Mount& found) -> Status {
    if (fh == nullptr) return gpufs::null_argument();
    return gpufs::give(found.backing_files().open(fd), fh);
  });
}

gpufs_status gpufs_file_release(gpufs_handle mount, uint64_t fh) {
  return gpufs::with<Mount>(mount, [&](Mount& found) -> Status {
    if (gpufs::fuse::is_backing(fh)) return found.backing_files().release(fh);
    return found.table().release(fh);
  });
}

gpufs_status gpufs_mount_buffer(gpufs_handle mount, uint64_t ino, gpufs_handle* buffer) {
  return gpufs::with_inode(mount, ino, [&](Mount&, Inode& inode) -> Status {
    if (buffer == nullptr) return gpufs::null_argument();
    if (!inode.buffer()) {
      const bool directory = (inode.attributes().mode & 0170000) == 0040000;
      return Status(directory ? EISDIR : EINVAL, "inode " + std::to_string(ino) + " has no buffer");
    }
    return gpufs::give(HandleTable::instance().put<gpufs::Buffer>(inode.buffer(), mount), buffer);
  });
}

gpufs_status gpufs_quota_user(gpufs_handle mount, int32_t device, uint32_t uid, int64_t limit) {
  return gpufs::with<Mount>(mount, [&](Mount& found) -> Status {
    if (limit < GPUFS_DEFAULT_LIMIT) return Status(EINVAL, "a negative limit");
    if (limit == GPUFS_DEFAULT_LIMIT) return found.table().limit_user(device, uid, std::nullopt);
    return found.table().limit_user(
        device, uid, limit == GPUFS_NO_LIMIT ? gpufs::Account::kNoLimit : static_cast<std::uint64_t>(limit));
  });
}

gpufs_status gpufs_quota_directory(gpufs_handle mount, uint64_t ino, int64_t limit) {
  return gpufs::with<Mount>(mount, [&](Mount& found) -> Status {
    if (limit < GPUFS_NO_LIMIT) return Status(EINVAL, "a negative limit");
    if (limit == GPUFS_NO_LIMIT) return found.table().limit_directory(ino, std::nullopt);
    return found.table().limit_directory(ino, static_cast<std::uint64_t>(limit));
  });
}

gpufs_status gpufs_quota_charge(gpufs_handle mount, uint64_t ino, uint64_t directory) {
  return gpufs::with<Mount>(mount, [&](Mount& found) -> Status {
    if (directory == 0) return found.table().charge_to(ino, nullptr);
    const std::shared_ptr<Inode> payer = found.table().find(directory);
    if (!payer) return Status(ENOENT, "no inode " + std::to_string(directory));
    return found.table().charge_to(ino, payer->directory_account());
  });
}

gpufs_status gpufs_quota_list(gpufs_handle mount, char* text, uint64_t capacity, uint64_t* needed) {
  return gpufs::with<Mount>(mount, [&](Mount& found) -> Status {
    gpufs::fuse::JsonWriter json;
    found.table().quotas().write(json);
    return gpufs::hand_out(json.finish(), text, capacity, needed);
  });
}

gpufs_status gpufs_inode_register(gpufs_handle mount, uint64_t ino, const gpufs_foreign_memory* memory) {
  return gpufs::with_inode(mount, ino, [&](Mount& found, Inode& inode) -> Status {
    if (memory == nullptr) return gpufs::null_argument();
    if (memory->kind < GPUFS_SHARE_FILE || memory->kind > GPUFS_SHARE_IPC) return Status(EINVAL, "no kind of memory");
    gpufs::ForeignMemory wanted;
    wanted.kind = static_cast<gpufs::ShareKind>(memory->kind);
    if (memory->kind != GPUFS_SHARE_IPC) {
      wanted.descriptor = gpufs::UniqueFd(::fcntl(memory->fd, F_DUPFD_CLOEXEC, 3));
      if (!wanted.descriptor.valid()) return Status::from_errno(errno, "duplicating the descriptor of the memory");
    }
    std::copy(std::begin(memory->handle), std::end(memory->handle), wanted.handle.begin());
    wanted.whole_bytes = memory->whole_bytes;
    wanted.offset = memory->offset;
    wanted.bytes = memory->bytes;
    wanted.writable = memory->writable != 0;
    Result<std::shared_ptr<gpufs::RegisteredBuffer>> buffer = found.table().source().import(inode.device(), wanted);
    if (!buffer.ok()) return buffer.status();
    Status status = found.table().replace_buffer(ino, buffer.take());
    if (status.ok()) found.notifier().invalidate_inode_now(ino);
    return status;
  });
}

gpufs_status gpufs_inode_revoke(gpufs_handle mount, uint64_t ino, uint32_t patience_ms) {
  return gpufs::with_inode(mount, ino, [&](Mount& found, Inode& inode) -> Status {
    auto* const registered = dynamic_cast<gpufs::RegisteredBuffer*>(inode.buffer().get());
    if (registered == nullptr) return Status(EINVAL, "inode " + std::to_string(ino) + " is not a registered file");
    const bool unused = registered->revoke(std::chrono::milliseconds(patience_ms));
    found.notifier().invalidate_inode_now(ino);
    return unused ? Status() : Status(ETIMEDOUT, "the memory is still in use");
  });
}

gpufs_status gpufs_mount_invalidate_entry(gpufs_handle mount, uint64_t parent, const char* name, uint64_t name_bytes) {
  return gpufs::with<Mount>(mount, [&](Mount& found) -> Status {
    if (name == nullptr) return gpufs::null_argument();
    return found.notifier().invalidate_entry(parent, std::string_view(name, static_cast<std::size_t>(name_bytes)));
  });
}
}
