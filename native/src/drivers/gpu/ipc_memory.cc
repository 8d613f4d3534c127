#include "drivers/gpu/ipc_memory.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <string>
#include <utility>

#include "base/math.h"

namespace gpufs::gpu {

Result<std::unique_ptr<ForeignMapping>> IpcMemory::open(const std::shared_ptr<GpuDevice>& device,
                                                        const ForeignMemory& memory) {
  const Functions& functions = device->functions();
  for (const char* missing : {functions.ipc_open ? nullptr : functions.ipc_open.symbol(),
                              functions.ipc_close ? nullptr : functions.ipc_close.symbol(),
                              functions.address_range ? nullptr : functions.address_range.symbol()}) {
    if (missing != nullptr) return device->lacks("cannot open memory of other programs", missing);
  }
  const Current current(*device);
  if (!current.status().ok()) return current.status();
  api::IpcHandle handle{};
  static_assert(sizeof handle.bytes == ForeignMemory::kHandleBytes);
  std::copy(memory.handle.begin(), memory.handle.end(), std::begin(handle.bytes));
  DeviceAddress base = 0;
  Status status = device->call_for_others(functions.ipc_open, &base, handle, unsigned{api::kIpcLazyPeerAccess});
  if (!status.ok()) return Status{EINVAL, "the handle cannot be opened: " + status.message(), status.device_code()};
  std::unique_ptr<IpcMemory> opened(new IpcMemory(device, base, memory.offset));

  DeviceAddress start = 0;
  std::size_t bytes = 0;
  status = device->call(functions.address_range, &start, &bytes, base);
  if (!status.ok()) return status;
  std::uint64_t end = 0;
  if (memory.bytes == 0 || add_overflows(memory.offset, memory.bytes, &end) || end > bytes - (base - start)) {
    return Status{EINVAL, "the memory is " + std::to_string(memory.bytes) + " bytes at offset " +
                              std::to_string(memory.offset) + " of an allocation of " + std::to_string(bytes) +
                              " bytes"};
  }
  if (!device->holds(base)) return Status{EXDEV, "the memory is not known to be that of this device"};
  return std::unique_ptr<ForeignMapping>(std::move(opened));
}

IpcMemory::~IpcMemory() {
  const Current current(*device_);
  device_->functions().ipc_close(base_);
}

}  // namespace gpufs::gpu
