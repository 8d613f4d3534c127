// A CUDA device: its primary context and the driver's calls on it.
// Owned by shared pointers of the device, its memory, its streams and its events; the primary context is let go with
// the last of them.
// Any thread.
#pragma once

#include <cstdint>
#include <memory>

#include "base/status.h"
#include "drivers/cuda/cuda_library.h"
#include "drivers/driver.h"
#include "drivers/gpu/vendor_context.h"

namespace gpufs::cuda {

class CudaContext final : public gpu::VendorContext<Library> {
 public:
  // Retains the primary context of the driver's device `index`. cap: the most bytes populated at a time, 0 for no cap.
  static Result<std::shared_ptr<CudaContext>> open(const std::shared_ptr<const Library>& library, int index,
                                                   const DriverOptions& options);
  ~CudaContext() override;

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

 private:
  using VendorContext::VendorContext;
  Status retain(int index);

  CuContext context_ = nullptr;
  bool read_only_pinning_ = false;
};

}  // namespace gpufs::cuda
