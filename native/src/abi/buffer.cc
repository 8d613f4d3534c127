// The functions of the C interface for buffers, and for pools of addresses.

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <memory>
#include <span>

#include "abi/barrier.h"
#include "abi/engine.h"
#include "abi/handles.h"
#include "gpufs.h"
#include "memory/address_pool.h"
#include "memory/extent_buffer.h"
#include "memory/host_transfer.h"

namespace gpufs {

extern "C" {

gpufs_status gpufs_buffer_create(gpufs_handle engine, int32_t device, gpufs_handle* buffer) {
  return with_handle<Engine>(engine, [&](Engine& owner) -> Status {
    std::shared_ptr<DeviceContext> context = TRY(owner.device(device));
    std::shared_ptr<Buffer> made = std::make_shared<ExtentBuffer>(std::move(context));
    return open_handle<Buffer>(std::move(made), engine, buffer);
  });
}

gpufs_status gpufs_buffer_info_get(gpufs_handle buffer, gpufs_buffer_info* info) {
  return with_handle<Buffer>(buffer, [&](Buffer& found) {
    *info = {found.size(),      found.bytes_held(),  found.charge().available(), found.device()->info().index,
             found.placement(), found.bytes_parked()};
  });
}

gpufs_status gpufs_buffer_await_memory(gpufs_handle buffer, uint64_t bytes, uint32_t timeout_ms) {
  return with_handle<Buffer>(buffer, [&](Buffer& found) -> Status {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    Status status;
    found.device()->releases().wait_for_expected(deadline, [&] {
      const Result<MemoryInfo> memory = found.device()->memory();
      status = memory.status();
      return !memory.ok() || std::min(memory.value().free_bytes, found.charge().available()) >= bytes;
    });
    return status;
  });
}

gpufs_status gpufs_buffer_resize(gpufs_handle buffer, uint64_t size) {
  return with_handle<Buffer>(buffer, [&](Buffer& found) { return found.resize(size); });
}

gpufs_status gpufs_buffer_allocate(gpufs_handle buffer, uint32_t mode, uint64_t offset, uint64_t bytes) {
  return with_handle<Buffer>(buffer, [&](Buffer& found) { return found.fallocate(mode, offset, bytes); });
}

gpufs_status gpufs_buffer_seek(gpufs_handle buffer, int32_t whence, uint64_t offset, uint64_t* position) {
  return with_handle<Buffer>(buffer, [&](Buffer& found) -> Status {
    if (whence != GPUFS_SEEK_DATA && whence != GPUFS_SEEK_HOLE) return Status(EINVAL, "not SEEK_DATA or SEEK_HOLE");
    return store_result(whence == GPUFS_SEEK_DATA ? found.seek_data(offset) : found.seek_hole(offset), position);
  });
}

gpufs_status gpufs_buffer_read(gpufs_handle buffer, uint64_t offset, void* destination, uint64_t bytes,
                               uint64_t* done) {
  return with_handle<Buffer>(buffer, [&](Buffer& found) -> Status {
    *done = 0;
    return store_result(read_to_host(found, offset, std::span(static_cast<std::byte*>(destination), bytes)), done);
  });
}

gpufs_status gpufs_buffer_write(gpufs_handle buffer, uint64_t offset, const void* source, uint64_t bytes,
                                uint64_t* done) {
  return with_handle<Buffer>(buffer, [&](Buffer& found) -> Status {
    *done = 0;
    return store_result(write_from_host(found, offset, std::span(static_cast<const std::byte*>(source), bytes)), done);
  });
}

gpufs_status gpufs_buffer_copy(gpufs_handle source, uint64_t source_offset, gpufs_handle buffer, uint64_t offset,
                               uint64_t bytes, uint64_t* done) {
  return with_handle<Buffer>(buffer, [&](Buffer& found) -> Status {
    *done = 0;
    const std::shared_ptr<Buffer> from = TRY(HandleTable::instance().get<Buffer>(source));
    return store_result(found.copy_from(*from, source_offset, offset, bytes, nullptr), done);
  });
}

gpufs_status gpufs_pool_open(uint64_t address, uint64_t bytes, gpufs_handle* pool) {
  return catch_all([&]() -> Status {
    auto made = std::make_shared<AddressPool>(address, bytes);
    address_pools::add(made);
    const auto remove = [made](AddressPool& /*pool*/) { return address_pools::remove(made); };
    return open_handle<AddressPool>(made, 0, pool, remove);
  });
}

gpufs_status gpufs_pool_enter(gpufs_handle pool) {
  return catch_all([&]() -> Status {
    if (pool == 0) {
      address_pools::enter(nullptr);
      return {};
    }
    Result<std::shared_ptr<AddressPool>> found = HandleTable::instance().get<AddressPool>(pool);
    if (found.ok()) address_pools::enter(found.take());
    return found.status();
  });
}

gpufs_status gpufs_pool_usage(gpufs_handle pool, uint64_t* used, uint64_t* largest_free) {
  return with_handle<AddressPool>(pool, [&](AddressPool& found) {
    const AddressPool::Usage usage = found.usage();
    *used = usage.used;
    *largest_free = usage.largest_free;
  });
}

}  // extern "C"

}  // namespace gpufs
