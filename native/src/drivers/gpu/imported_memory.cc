#include "drivers/gpu/imported_memory.h"

#include <cerrno>
#include <utility>

#include "base/math.h"

namespace gpufs::gpu {

Result<std::unique_ptr<ImportedRange>> ImportedMemory::create(std::shared_ptr<GpuDevice> device, std::uint64_t capacity,
                                                              bool writable) {
  const auto& import = device->functions().memory_import;
  if (!device->virtual_memory() || !import) {
    return device->lacks("cannot map memory of other programs", import.symbol());
  }
  const std::uint64_t granule = device->info().granule;
  if (capacity == 0 || capacity > UINT64_MAX - granule) return Status{EINVAL, "a mapping of size zero, or too large"};
  capacity = round_up(capacity, granule);
  const Current current(*device);
  if (!current.status().ok()) return current.status();
  DeviceAddress base = 0;
  Status status = device->call(device->functions().address_reserve, &base, capacity, 0, 0, 0);
  if (!status.ok()) return status;
  return std::unique_ptr<ImportedRange>(new ImportedMemory(std::move(device), base, capacity, writable));
}

ImportedMemory::~ImportedMemory() {
  // Tensors are freed while kernels that read them are still queued, and unmapping does not wait for those.
  device_->synchronize();
  const Current current(*device_);
  const Functions& functions = device_->functions();
  // Failures have no remedy: the driver then keeps the addresses and the memory until the process ends.
  if (!device_->spans_pieces() || (bytes() > 0 && functions.memory_unmap(base_, bytes()) != api::kSuccess)) {
    for (const auto& [offset, bytes] : pieces_) functions.memory_unmap(base_ + offset, bytes);
  }
  functions.address_free(base_, capacity_);
}

Status ImportedMemory::map(const ExportedMemory& piece) {
  const Current current(*device_);
  if (!current.status().ok()) return current.status();
  const Functions& functions = device_->functions();
  PhysicalHandle handle = 0;
  Status status = device_->import_physical(piece.descriptor.get(), &handle);
  if (!status.ok()) return status;
  const DeviceAddress address = base_ + piece.offset;
  status = device_->map(address, piece.bytes, handle);
  functions.memory_release(handle);  // the mapping holds the memory
  if (!status.ok()) return status;
  status = device_->allow_own(address, piece.bytes, writable_);
  if (!status.ok()) {
    functions.memory_unmap(address, piece.bytes);
    return status;
  }
  pieces_.emplace(piece.offset, piece.bytes);
  return {};
}

}  // namespace gpufs::gpu
