// Memory of other programs as a GPU maps it.

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <string>
#include <utility>

#include "base/math.h"
#include "drivers/gpu/gpu_device.h"
#include "drivers/gpu/virtual_memory.h"

namespace gpufs::gpu {
namespace {

class ImportedMemory final : public ImportedRange {
 public:
  ImportedMemory(std::shared_ptr<GpuDevice> device, std::shared_ptr<MappedRange> range, bool writable)
      : ImportedRange(range->base(), range->bytes()),
        device_(std::move(device)),
        range_(std::move(range)),
        writable_(writable) {}
  ~ImportedMemory() override { device_->unmap_when_idle(std::move(range_)); }

 private:
  Status map(const ExportedMemory& piece) override {
    const Current current(*device_);
    TRY(current.status());
    std::shared_ptr<PhysicalMemory> physical =
        TRY(PhysicalMemory::import(device_, piece.descriptor.get(), piece.bytes));
    TRY(range_->show(piece.offset, std::move(physical)));
    Status status = device_->allow_own(base() + piece.offset, piece.bytes, writable_);
    if (!status.ok()) (void)range_->hide(piece.offset);
    return status;
  }

  Status unmap_all() override {
    const Current current(*device_);
    TRY(current.status());
    TRY(device_->complete_all());
    return range_->hide_all();
  }

  const std::shared_ptr<GpuDevice> device_;
  std::shared_ptr<MappedRange> range_;
  const bool writable_;
};

class DescriptorMemory final : public ForeignMapping {
 public:
  DescriptorMemory(std::unique_ptr<ImportedRange> range, std::uint64_t offset)
      : ForeignMapping(range->base() + offset), range_(std::move(range)) {}

 private:
  const std::unique_ptr<ImportedRange> range_;
};

class IpcMemory final : public ForeignMapping {
 public:
  IpcMemory(std::shared_ptr<GpuDevice> device, DeviceAddress base, std::uint64_t offset)
      : ForeignMapping(base + offset), device_(std::move(device)), base_(base) {}
  ~IpcMemory() override {
    const Current current(*device_);
    device_->functions().ipc_close(base_);
  }

 private:
  const std::shared_ptr<GpuDevice> device_;
  const DeviceAddress base_;
};

// EINVAL unless the memory is a part of `whole` bytes.
Status check_part(const ForeignMemory& memory, std::uint64_t whole) {
  std::uint64_t end = 0;
  if (memory.bytes != 0 && !add_overflows(memory.offset, memory.bytes, &end) && end <= whole) return {};
  return {EINVAL, "the memory is " + std::to_string(memory.bytes) + " bytes at offset " +
                      std::to_string(memory.offset) + " of " + std::to_string(whole) + " bytes"};
}

}  // namespace

Result<std::unique_ptr<ImportedRange>> import_memory(std::shared_ptr<GpuDevice> device, std::uint64_t capacity,
                                                     bool writable) {
  const auto& import = device->functions().memory_import;
  if (!device->virtual_memory() || !import) {
    return device->lacks("cannot map memory of other programs", import.symbol());
  }
  const std::uint64_t granule = device->info().granule;
  if (capacity == 0 || capacity > UINT64_MAX - granule) return Status{EINVAL, "a mapping of size zero, or too large"};
  const Current current(*device);
  TRY(current.status());
  std::shared_ptr<MappedRange> range = TRY(MappedRange::reserve(device, round_up(capacity, granule)));
  return std::unique_ptr<ImportedRange>(
      std::make_unique<ImportedMemory>(std::move(device), std::move(range), writable));
}

Result<std::unique_ptr<ForeignMapping>> map_descriptor(const std::shared_ptr<GpuDevice>& device,
                                                       const ForeignMemory& memory) {
  const std::uint64_t whole = memory.whole_bytes();
  TRY(check_part(memory, whole));
  const std::uint64_t granule = device->info().granule;
  for (const ExportedMemory& piece : memory.pieces) {
    if (piece.bytes % granule == 0) continue;
    return Status{EINVAL, "memory of " + std::to_string(piece.bytes) + " bytes is not whole granules"};
  }
  std::unique_ptr<ImportedRange> range = TRY(import_memory(device, whole, memory.writable));
  for (const ExportedMemory& piece : memory.pieces) {
    const Status status = range->add(piece);
    if (!status.ok()) {
      return Status{EINVAL, "the descriptor cannot be mapped: " + status.message(), status.device_code()};
    }
  }
  return std::unique_ptr<ForeignMapping>(std::make_unique<DescriptorMemory>(std::move(range), memory.offset));
}

Result<std::unique_ptr<ForeignMapping>> open_ipc_handle(const std::shared_ptr<GpuDevice>& device,
                                                        const ForeignMemory& memory) {
  const Functions& functions = device->functions();
  for (const char* missing : {functions.ipc_open ? nullptr : functions.ipc_open.symbol(),
                              functions.ipc_close ? nullptr : functions.ipc_close.symbol(),
                              functions.address_range ? nullptr : functions.address_range.symbol()}) {
    if (missing != nullptr) return device->lacks("cannot open memory of other programs", missing);
  }
  const Current current(*device);
  TRY(current.status());
  api::IpcHandle handle{};
  static_assert(sizeof handle.bytes == ForeignMemory::kHandleBytes);
  std::copy(memory.handle.begin(), memory.handle.end(), std::begin(handle.bytes));
  DeviceAddress base = 0;
  Status status = device->call_for_others(functions.ipc_open, &base, handle, unsigned{api::kIpcLazyPeerAccess});
  if (!status.ok()) return Status{EINVAL, "the handle cannot be opened: " + status.message(), status.device_code()};
  auto opened = std::make_unique<IpcMemory>(device, base, memory.offset);

  DeviceAddress start = 0;
  std::size_t bytes = 0;
  TRY(device->call(functions.address_range, &start, &bytes, base));
  TRY(check_part(memory, bytes - (base - start)));
  if (!device->holds(base)) return Status{EXDEV, "the memory is not known to be that of this device"};
  return std::unique_ptr<ForeignMapping>(std::move(opened));
}

}  // namespace gpufs::gpu
