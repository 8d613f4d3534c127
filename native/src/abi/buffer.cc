// The buffer functions of the C interface.

#include "memory/buffer.h"

#include <cerrno>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include "abi/barrier.h"
#include "abi/engine.h"
#include "abi/handles.h"
#include "gpufs.h"
#include "memory/host_transfer.h"

using gpufs::Buffer;
using gpufs::guarded;
using gpufs::HandleTable;
using gpufs::Result;
using gpufs::Status;

extern "C" {

gpufs_status gpufs_buffer_create(gpufs_handle engine, int32_t device, gpufs_handle* buffer) {
  return gpufs::with<gpufs::Engine>(engine, [&](gpufs::Engine& owner) -> Status {
    if (buffer == nullptr) return gpufs::null_argument();
    Result<std::shared_ptr<gpufs::DeviceContext>> context = owner.device(device);
    if (!context.ok()) return context.status();
    Result<std::shared_ptr<Buffer>> created = Buffer::create(context.take());
    if (!created.ok()) return created.status();
    return gpufs::give(HandleTable::instance().put<Buffer>(created.take(), engine), buffer);
  });
}

gpufs_status gpufs_buffer_close(gpufs_handle buffer) {
  return guarded([&]() -> Status { return HandleTable::instance().take<Buffer>(buffer).status(); });
}

gpufs_status gpufs_buffer_info_get(gpufs_handle buffer, gpufs_buffer_info* info) {
  return gpufs::with<Buffer>(buffer, [&](Buffer& found) -> Status {
    if (info == nullptr) return gpufs::null_argument();
    *info = {found.size(), found.bytes_held(), found.charge().room(), found.device()->info().index};
    return {};
  });
}

gpufs_status gpufs_buffer_resize(gpufs_handle buffer, uint64_t size) {
  return gpufs::with<Buffer>(buffer, [&](Buffer& found) { return found.resize(size); });
}

gpufs_status gpufs_buffer_allocate(gpufs_handle buffer, uint32_t mode, uint64_t offset, uint64_t bytes) {
  return gpufs::with<Buffer>(buffer, [&](Buffer& found) -> Status {
    const bool keep_size = (mode & GPUFS_KEEP_SIZE) != 0;
    switch (mode & ~static_cast<std::uint32_t>(GPUFS_KEEP_SIZE)) {
      case 0:
        return found.allocate(offset, bytes, keep_size);
      case GPUFS_PUNCH_HOLE:
        if (!keep_size) return Status(EOPNOTSUPP, "punching needs KEEP_SIZE");
        return found.punch(offset, bytes);
      case GPUFS_ZERO_RANGE:
        return found.zero_range(offset, bytes, keep_size);
      default:
        return Status(EOPNOTSUPP, "this mode of fallocate is not supported");
    }
  });
}

gpufs_status gpufs_buffer_seek(gpufs_handle buffer, int32_t whence, uint64_t offset, uint64_t* position) {
  return gpufs::with<Buffer>(buffer, [&](Buffer& found) -> Status {
    if (position == nullptr) return gpufs::null_argument();
    if (whence != GPUFS_SEEK_DATA && whence != GPUFS_SEEK_HOLE) return Status(EINVAL, "not SEEK_DATA or SEEK_HOLE");
    return gpufs::give(whence == GPUFS_SEEK_DATA ? found.seek_data(offset) : found.seek_hole(offset), position);
  });
}

gpufs_status gpufs_buffer_read(gpufs_handle buffer, uint64_t offset, void* destination, uint64_t bytes,
                               uint64_t* done) {
  return gpufs::with<Buffer>(buffer, [&](Buffer& found) -> Status {
    if (done == nullptr || (destination == nullptr && bytes > 0)) return gpufs::null_argument();
    *done = 0;
    return gpufs::give(gpufs::read_to_host(found, offset, std::span(static_cast<std::byte*>(destination), bytes)),
                       done);
  });
}

gpufs_status gpufs_buffer_write(gpufs_handle buffer, uint64_t offset, const void* source, uint64_t bytes,
                                uint64_t* done) {
  return gpufs::with<Buffer>(buffer, [&](Buffer& found) -> Status {
    if (done == nullptr || (source == nullptr && bytes > 0)) return gpufs::null_argument();
    *done = 0;
    return gpufs::give(gpufs::write_from_host(found, offset, std::span(static_cast<const std::byte*>(source), bytes)),
                       done);
  });
}

gpufs_status gpufs_buffer_copy(gpufs_handle source, uint64_t source_offset, gpufs_handle buffer, uint64_t offset,
                               uint64_t bytes, uint64_t* done) {
  return gpufs::with<Buffer>(buffer, [&](Buffer& found) -> Status {
    if (done == nullptr) return gpufs::null_argument();
    *done = 0;
    const Result<std::shared_ptr<Buffer>> from = HandleTable::instance().get<Buffer>(source);
    if (!from.ok()) return from.status();
    return gpufs::give(found.copy_from(*from.value(), source_offset, offset, bytes, nullptr), done);
  });
}
}
