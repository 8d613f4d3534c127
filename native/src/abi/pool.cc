// Pools of addresses in the C interface.
#include <memory>
#include <utility>

#include "abi/barrier.h"
#include "abi/handles.h"
#include "gpufs.h"
#include "memory/address_pool.h"

using gpufs::AddressPool;
using gpufs::guarded;
using gpufs::HandleTable;
using gpufs::Result;
using gpufs::Status;

gpufs_status gpufs_pool_open(uint64_t address, uint64_t bytes, gpufs_handle* pool) {
  return guarded([&]() -> Status {
    if (pool == nullptr) return gpufs::null_argument();
    auto made = std::make_shared<AddressPool>(address, bytes);
    Result<gpufs_handle> handle = HandleTable::instance().put<AddressPool>(made);
    if (!handle.ok()) return handle.status();
    gpufs::address_pools::add(std::move(made));
    *pool = handle.value();
    return {};
  });
}

gpufs_status gpufs_pool_enter(gpufs_handle pool) {
  return guarded([&]() -> Status {
    if (pool == 0) {
      gpufs::address_pools::enter(nullptr);
      return {};
    }
    Result<std::shared_ptr<AddressPool>> found = HandleTable::instance().get<AddressPool>(pool);
    if (found.ok()) gpufs::address_pools::enter(found.take());
    return found.status();
  });
}

gpufs_status gpufs_pool_usage(gpufs_handle pool, uint64_t* used, uint64_t* largest_free) {
  return gpufs::with<AddressPool>(pool, [&](AddressPool& found) -> Status {
    if (used == nullptr || largest_free == nullptr) return gpufs::null_argument();
    const AddressPool::Usage usage = found.usage();
    *used = usage.used;
    *largest_free = usage.largest_free;
    return {};
  });
}

gpufs_status gpufs_pool_close(gpufs_handle pool) {
  return guarded([&]() -> Status {
    Result<std::shared_ptr<AddressPool>> found = HandleTable::instance().get<AddressPool>(pool);
    if (!found.ok()) return found.status();
    if (Status status = gpufs::address_pools::remove(found.value()); !status.ok()) return status;
    return HandleTable::instance().take<AddressPool>(pool).status();
  });
}
