// Pools of addresses in the C interface.
#include <memory>
#include <utility>

#include "abi/barrier.h"
#include "abi/handles.h"
#include "gpufs.h"
#include "memory/address_pool.h"

namespace gpufs {

extern "C" {

gpufs_status gpufs_pool_open(uint64_t address, uint64_t bytes, gpufs_handle* pool) {
  return guarded([&]() -> Status {
    auto made = std::make_shared<AddressPool>(address, bytes);
    address_pools::add(made);
    const auto remove = [made](AddressPool& /*pool*/) { return address_pools::remove(made); };
    return give(HandleTable::instance().put<AddressPool>(made, 0, remove), pool);
  });
}

gpufs_status gpufs_pool_enter(gpufs_handle pool) {
  return guarded([&]() -> Status {
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
  return with<AddressPool>(pool, [&](AddressPool& found) -> Status {
    const AddressPool::Usage usage = found.usage();
    *used = usage.used;
    *largest_free = usage.largest_free;
    return {};
  });
}

}  // extern "C"

}  // namespace gpufs
