// The mount, inode and file functions of the C interface.

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "abi/barrier.h"
#include "abi/engine.h"
#include "abi/handles.h"
#include "base/thread.h"
#include "base/unique_fd.h"
#include "device/device_context.h"
#include "fuse/attributes.h"
#include "fuse/inode_table.h"
#include "fuse/mount.h"
#include "fuse/relay.h"
#include "gpufs.h"
#include "journal/journal.h"
#include "journal/keeper_link.h"
#include "memory/account.h"
#include "memory/buffer.h"
#include "memory/host_locks.h"
#include "memory/kept_memory.h"
#include "memory/registered_buffer.h"

namespace gpufs {
namespace {

static_assert(static_cast<int>(fuse::AccessTimes::kNever) == GPUFS_NOATIME);

// Calls body(mount, inode), see status_of(). ENOENT without this inode.
template <typename Body>
gpufs_status with_inode(gpufs_handle mount, std::uint64_t ino, Body body) {
  return with_handle<fuse::Mount>(mount, [&](fuse::Mount& found) -> Status {
    const std::shared_ptr<fuse::Inode> inode = found.table().find(ino);
    return inode ? status_of([&] { return body(found, *inode); }) : Status(ENOENT, "no inode " + std::to_string(ino));
  });
}

}  // namespace

using fuse::Inode;
using fuse::Mount;

extern "C" {

gpufs_status gpufs_relay_pair(int32_t* native_fd, int32_t* control_fd) {
  return catch_all([&]() -> Status {
    fuse::RelayPair pair = TRY(fuse::make_relay_pair());
    *native_fd = pair.native.release();
    *control_fd = pair.control.release();
    return {};
  });
}

gpufs_status gpufs_mount_open(gpufs_handle engine, const gpufs_mount_options* options, gpufs_handle* mount) {
  return catch_all([&]() -> Status {
    UniqueFd device(options->fuse_fd);
    UniqueFd relay(options->relay_fd);
    std::shared_ptr<Engine> owner = TRY(HandleTable::instance().get<Engine>(engine));

    fuse::MountOptions chosen;
    chosen.mask_flags = options->mask_flags;
    chosen.metadata_bytes = options->metadata_bytes;
    chosen.user_bytes = options->user_bytes;
    // The memory of requests is locked if a vendor's runtime copies from and to it.
    const std::vector<std::shared_ptr<DeviceContext>>& devices = owner->devices();
    const bool by_cpu =
        std::all_of(devices.begin(), devices.end(), [](const auto& each) { return each->info().cpu_addressable; });
    const std::shared_ptr<HostLocks>& locks = owner->host_locks();
    if (!by_cpu && locks->policy() != LockPolicy::kOff) chosen.locks = locks;
    chosen.transfers = TRY(owner->transfers());
    if (options->keeper != 0) {
      std::shared_ptr<KeeperLink> keeper = TRY(HandleTable::instance().get<KeeperLink>(options->keeper));
      const std::vector<KeeperLink::Held> held = keeper->held_from(KeeperLink::kJournal);
      const bool continues = !held.empty() && held.front().key == KeeperLink::kJournal;
      const int own = continues ? ::fcntl(held.front().descriptor, F_DUPFD_CLOEXEC, 0) : -1;
      chosen.journal = TRY(continues ? journal::Journal::restore(UniqueFd(own)) : journal::Journal::create());
      chosen.kept = std::make_shared<KeptMemory>(chosen.journal, std::move(keeper));
    }
    std::shared_ptr<Mount> opened = TRY(Mount::create(std::move(device), std::move(relay), devices, std::move(chosen)));
    owner->publish_of(opened);
    return open_handle<Mount>(std::move(opened), engine, mount, close_of<Mount>);
  });
}

uint32_t gpufs_journal_format(void) { return journal::Journal::kFormat; }

gpufs_status gpufs_mount_release_forgotten(gpufs_handle mount) {
  return with_handle<Mount>(mount, [&](Mount& found) { found.release_forgotten(); });
}

gpufs_status gpufs_mount_close_handles(gpufs_handle mount, const uint64_t* handles, uint64_t count) {
  return with_handle<Mount>(mount, [&](Mount& found) {
    for (const std::uint64_t handle : std::span(handles, count)) found.close_handle(handle);
  });
}

gpufs_status gpufs_mount_survives(gpufs_handle mount) {
  return with_handle<Mount>(mount, [&](Mount& found) -> Status { return found.survives(); });
}

gpufs_status gpufs_mount_start(gpufs_handle mount) {
  return with_handle<Mount>(mount, [&](Mount& found) -> Status { return found.start(); });
}

gpufs_status gpufs_mount_read_ahead(gpufs_handle mount, const char* directory, uint64_t piece) {
  return with_handle<Mount>(mount, [&](Mount& found) -> Status { return found.read_ahead(directory, piece); });
}

gpufs_status gpufs_await_answer(const char* path) {
  return catch_all([&] {
    return run_apart("gpufs-look", [&]() -> Status {
      struct stat found {};
      return ::stat(path, &found) == 0 ? Status() : Status::from_errno(errno, path);
    });
  });
}

gpufs_status gpufs_mount_ended_fd(gpufs_handle mount, int* fd) {
  return with_handle<Mount>(mount, [&](Mount& found) { *fd = found.ended_fd(); });
}

gpufs_status gpufs_mount_busiest(gpufs_handle mount, gpufs_file_activity* files, uint64_t* count) {
  return with_handle<Mount>(mount, [&](Mount& found) -> Status {
    const auto busiest = found.table().busiest(*count);
    *count = busiest.size();
    std::transform(busiest.begin(), busiest.end(), files, [](const auto& inode) -> gpufs_file_activity {
      const observe::FileActivity& activity = inode->buffer()->activity();
      return {inode->ino(), activity.bytes(observe::Flow::kFromDevice), activity.bytes(observe::Flow::kToDevice)};
    });
    return {};
  });
}

gpufs_status gpufs_mount_access_times(gpufs_handle mount, int32_t policy, int32_t not_directories) {
  return with_handle<Mount>(mount, [&](Mount& found) -> Status {
    found.table().set_access_times(static_cast<fuse::AccessTimes>(policy), not_directories != 0);
    return {};
  });
}

gpufs_status gpufs_mount_files(gpufs_handle mount, int32_t device, uint64_t* count) {
  return with_handle<Mount>(mount, [&](Mount& found) { *count = found.table().file_count(device); });
}

gpufs_status gpufs_name_place(gpufs_handle mount, uint64_t directory, const char* name,
                              const gpufs_attributes* attributes, const char* target, uint64_t* ino) {
  return with_handle<Mount>(mount, [&](Mount& found) -> Status {
    const auto placed = found.names().place(directory, name, *attributes, target != nullptr ? target : "");
    if (placed.ok()) *ino = placed.value()->ino();
    return placed.status();
  });
}

gpufs_status gpufs_name_find(gpufs_handle mount, const char* path, uint64_t* ino) {
  return with_handle<Mount>(mount, [&](Mount& found) -> Status {
    const std::shared_ptr<Inode> inode = found.names().find(path);
    if (!inode) return Status(ENOENT, "no such name");
    *ino = inode->ino();
    return {};
  });
}

gpufs_status gpufs_name_path(gpufs_handle mount, uint64_t ino, const char** path) {
  return with_inode(mount, ino, [&](Mount& found, Inode& inode) -> Status {
    std::optional<std::string> text = found.names().path_of(inode);
    if (!text) return Status(ENOENT, "inode " + std::to_string(ino) + " has no name");
    thread_local std::string last;
    last = std::move(*text);
    *path = last.c_str();
    return {};
  });
}

gpufs_status gpufs_name_remove_all(gpufs_handle mount, uint64_t ino) {
  return with_inode(mount, ino, [](Mount& found, Inode& inode) { found.names().remove_names(inode); });
}

gpufs_status gpufs_inode_hold(gpufs_handle mount, uint64_t ino) {
  return with_handle<Mount>(mount, [&](Mount& found) -> Status { return found.table().hold(ino); });
}

gpufs_status gpufs_inode_release(gpufs_handle mount, uint64_t ino) {
  return with_handle<Mount>(mount, [&](Mount& found) -> Status {
    return found.table().release_hold(ino) ? Status() : Status(ENOENT, "no inode " + std::to_string(ino));
  });
}

gpufs_status gpufs_inode_get(gpufs_handle mount, uint64_t ino, gpufs_attributes* attributes) {
  return with_inode(mount, ino, [&](Mount&, Inode& inode) { *attributes = inode.attributes(); });
}

gpufs_status gpufs_inode_written(gpufs_handle mount, uint64_t ino) {
  return with_inode(mount, ino, [ino](Mount& found, Inode& inode) -> Status {
    inode.was_written(fuse::SetIdLoss::kExecutable);
    return found.notifier().invalidate_inode(ino);
  });
}

gpufs_status gpufs_backing_file_open(gpufs_handle mount, int32_t fd, uint64_t* fh) {
  return with_handle<Mount>(mount,
                            [&](Mount& found) -> Status { return store_result(found.backing_files().open(fd), fh); });
}

gpufs_status gpufs_file_release(gpufs_handle mount, uint64_t fh) {
  return with_handle<Mount>(mount, [&](Mount& found) -> Status {
    if (!fuse::is_backing(fh)) return found.table().release(fh);
    return found.backing_files().remove(fh) != nullptr ? Status() : Status(EBADF, "unknown handle");
  });
}

gpufs_status gpufs_mount_buffer(gpufs_handle mount, uint64_t ino, gpufs_handle* buffer) {
  return with_inode(mount, ino, [&](Mount&, Inode& inode) -> Status {
    if (!inode.buffer()) {
      const bool directory = (inode.attributes().mode & 0170000) == 0040000;
      return Status(directory ? EISDIR : EINVAL, "inode " + std::to_string(ino) + " has no buffer");
    }
    return open_handle<Buffer>(inode.buffer(), mount, buffer);
  });
}

gpufs_status gpufs_quota_user(gpufs_handle mount, int32_t device, uint32_t uid, int64_t limit) {
  return with_handle<Mount>(mount, [&](Mount& found) -> Status {
    if (limit == GPUFS_DEFAULT_LIMIT) return found.table().limit_user(device, uid, std::nullopt);
    return found.table().limit_user(device, uid,
                                    limit == GPUFS_NO_LIMIT ? Account::kNoLimit : static_cast<std::uint64_t>(limit));
  });
}

gpufs_status gpufs_quota_directory(gpufs_handle mount, uint64_t ino, int64_t limit) {
  return with_handle<Mount>(mount, [&](Mount& found) -> Status {
    if (limit == GPUFS_NO_LIMIT) return found.names().limit_directory(ino, std::nullopt);
    return found.names().limit_directory(ino, static_cast<std::uint64_t>(limit));
  });
}

gpufs_status gpufs_quota_buffer(gpufs_handle mount, gpufs_handle buffer, uint32_t uid) {
  return with_handle<Mount>(mount, [&](Mount& found) -> Status {
    std::shared_ptr<Buffer> charged = TRY(HandleTable::instance().get<Buffer>(buffer));
    found.table().charge_to_user(*charged, uid);
    return {};
  });
}

gpufs_status gpufs_quota_list(gpufs_handle mount, const gpufs_account** accounts, uint64_t* count) {
  return with_handle<Mount>(mount, [&](Mount& found) {
    thread_local std::vector<gpufs_account> last;
    last = found.table().quotas().list();
    *accounts = last.data();
    *count = last.size();
  });
}

gpufs_status gpufs_inode_register(gpufs_handle mount, uint64_t ino, const gpufs_foreign_memory* memory) {
  return with_inode(mount, ino, [&](Mount& found, Inode& inode) -> Status {
    ForeignMemory wanted;
    wanted.kind = static_cast<ShareKind>(memory->kind);
    if (memory->kind == GPUFS_SHARE_FILE) {
      wanted.descriptor = UniqueFd(::fcntl(memory->fd, F_DUPFD_CLOEXEC, 3));
      if (!wanted.descriptor.valid()) return Status::from_errno(errno, "duplicating the descriptor of the memory");
    }
    for (const gpufs_shared_piece& piece : std::span(memory->pieces, memory->piece_count)) {
      wanted.pieces.push_back({piece.offset, piece.bytes, UniqueFd(::fcntl(piece.fd, F_DUPFD_CLOEXEC, 3))});
      if (wanted.pieces.back().descriptor.valid()) continue;
      return Status::from_errno(errno, "duplicating a descriptor of the memory");
    }
    std::copy(std::begin(memory->handle), std::end(memory->handle), wanted.handle.begin());
    wanted.offset = memory->offset;
    wanted.bytes = memory->bytes;
    wanted.writable = memory->writable != 0;
    if (!inode.buffer()) return Status(EINVAL, "inode " + std::to_string(ino) + " has no buffer");
    if (wanted.bytes > Buffer::kMaximumBytes) return Status(EFBIG, "beyond the largest size of a buffer");
    const std::shared_ptr<Buffer>& empty = inode.buffer();
    std::shared_ptr<RegisteredBuffer> mapped = TRY(RegisteredBuffer::map(empty->device(), wanted, empty->charge()));
    // Until the mount is started, the kernel knows the file as it was before the takeover.
    const bool again = !found.started();
    Status status = found.table().replace_buffer(ino, std::move(mapped), again);
    if (status.ok() && !again) (void)found.notifier().invalidate_inode(ino);
    return status;
  });
}

gpufs_status gpufs_mount_evict(gpufs_handle mount) {
  return with_handle<Mount>(mount, [&](Mount& found) { found.table().evict_when_full(); });
}

gpufs_status gpufs_inode_park(gpufs_handle mount, uint64_t ino, int32_t* parked) {
  return with_inode(mount, ino, [&](Mount& found, Inode& inode) -> Status {
    const Result<bool> moved = found.table().park(inode);
    if (moved.ok()) *parked = moved.value() ? 1 : 0;
    return moved.status();
  });
}

gpufs_status gpufs_inode_bring_back(gpufs_handle mount, uint64_t ino) {
  return with_inode(mount, ino, [&](Mount&, Inode& inode) -> Status {
    if (!inode.buffer()) return Status(EINVAL, "inode " + std::to_string(ino) + " has no buffer");
    ExtentBuffer* const own = inode.buffer()->growing();
    return own != nullptr ? own->bring_back(Wait::kAllowed) : Status();
  });
}

gpufs_status gpufs_inodes_space(gpufs_handle mount, const uint64_t* inos, uint64_t count, int32_t parks,
                                uint64_t* needed, uint64_t* free) {
  return with_handle<Mount>(mount, [&](Mount& found) -> Status {
    const fuse::InodeTable::Space space = TRY(found.table().space_for(std::span(inos, count), parks != 0));
    *needed = space.needed;
    *free = space.free;
    return {};
  });
}

gpufs_status gpufs_inode_revoke(gpufs_handle mount, uint64_t ino, uint32_t timeout_ms) {
  return with_inode(mount, ino, [&](Mount& found, Inode& inode) -> Status {
    auto* const registered = dynamic_cast<RegisteredBuffer*>(inode.buffer().get());
    if (registered == nullptr) return Status(EINVAL, "inode " + std::to_string(ino) + " is not a registered file");
    const bool unused = registered->revoke(std::chrono::milliseconds(timeout_ms));
    (void)found.notifier().invalidate_inode(ino);
    return unused ? Status() : Status(ETIMEDOUT, "the memory is still in use");
  });
}

}  // extern "C"

}  // namespace gpufs
