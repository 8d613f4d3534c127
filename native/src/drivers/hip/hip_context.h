// A HIP device: what it can, and the runtime's calls on it.
// Owned by shared pointers of the device, its memory, its streams and its events.
// Any thread.
#pragma once

#include <cstdint>
#include <memory>

#include "base/status.h"
#include "drivers/driver.h"
#include "drivers/gpu/vendor_context.h"
#include "drivers/hip/hip_library.h"

namespace gpufs::hip {

class HipContext final : public gpu::VendorContext<Library> {
 public:
  // Reads what the runtime reports about device `index`, and decides how its memory is taken (HipMemory).
  static Result<std::shared_ptr<HipContext>> open(const std::shared_ptr<const Library>& library, int index,
                                                  const DriverOptions& options);
  ~HipContext() override;

  Result<bool> make_current(std::uint64_t* before) override;
  void restore(std::uint64_t before) override;
  Status bind_thread() override;

  Status copy_to_peer(gpu::Context& peer, DeviceAddress destination, DeviceAddress source, std::size_t bytes,
                      gpu::StreamHandle stream) override;
  Status wait_for_value(gpu::StreamHandle stream, DeviceAddress cell, std::uint32_t value) override;
  Status check_stream(gpu::StreamHandle stream, bool certain) override;
  bool holds(DeviceAddress address) override;
  Status pin_read_only(const void* address, std::size_t bytes) override;
  Status enable_peer(gpu::Context& peer) override;

  Status allow(DeviceAddress address, std::uint64_t bytes) override;

 private:
  using VendorContext::VendorContext;
  Status choose_memory(HipMemory wish);
};

}  // namespace gpufs::hip
