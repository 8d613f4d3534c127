// A CUDA device: its primary context and the driver's calls on it.
// Owned by shared pointers of the device, its memory, its streams and its events; the primary context is let go with
// the last of them.
// Any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "drivers/cuda/cuda_library.h"
#include "drivers/driver.h"
#include "drivers/gpu/context.h"

namespace gpufs::cuda {

using gpu::EventHandle;
using gpu::PhysicalHandle;
using gpu::Purpose;
using gpu::StreamHandle;

class CudaContext final : public gpu::Context {
 public:
  // Retains the primary context of the driver's device `index`. cap: the most bytes populated at a time, 0 for no cap.
  static Result<std::shared_ptr<CudaContext>> open(std::shared_ptr<const Library> library, int index,
                                                   std::uint64_t cap);
  ~CudaContext() override;

  // Lets the peers that can reach memory of this device do so. Once, before anything is allocated.
  void open_to(const std::vector<std::shared_ptr<CudaContext>>& peers);

  Result<bool> make_current(std::uint64_t* before) override;
  void restore(std::uint64_t before) override;
  Status bind_thread() override;
  Status free_memory(std::uint64_t* bytes) override;

  Status create_physical(std::uint64_t bytes, PhysicalHandle* handle) override;
  void release_physical(PhysicalHandle handle) override;
  Status export_physical(PhysicalHandle handle, int* fd) override;
  Status reserve_range(std::uint64_t bytes, DeviceAddress* base) override;
  void free_range(DeviceAddress base, std::uint64_t bytes) override;
  Status map(DeviceAddress address, std::uint64_t bytes, PhysicalHandle handle) override;
  Status unmap(DeviceAddress address, std::uint64_t bytes) override;
  Status allow(DeviceAddress address, std::uint64_t bytes) override;

  Status allocate(std::uint64_t bytes, DeviceAddress* base) override;
  void free(DeviceAddress base) override;

  Status copy_in(DeviceAddress destination, const void* source, std::size_t bytes, StreamHandle stream) override;
  Status copy_out(void* destination, DeviceAddress source, std::size_t bytes, StreamHandle stream) override;
  Status copy_within(DeviceAddress destination, DeviceAddress source, std::size_t bytes, StreamHandle stream) override;
  Status copy_to_peer(gpu::Context& peer, DeviceAddress destination, DeviceAddress source, std::size_t bytes,
                      StreamHandle stream) override;
  Status fill_zero(DeviceAddress destination, std::size_t bytes, StreamHandle stream) override;

  Status create_stream(StreamHandle* stream) override;
  void destroy_stream(StreamHandle stream) override;
  Status synchronize_stream(StreamHandle stream) override;
  Status wait_for_event(StreamHandle stream, EventHandle event) override;
  Status call_host(StreamHandle stream, HostFunction function, void* argument) override;
  Status wait_for_value(StreamHandle stream, DeviceAddress cell, std::uint32_t value) override;
  Status check_stream(StreamHandle stream, bool certain) override;

  Status create_event(EventHandle* event) override;
  void destroy_event(EventHandle event) override;
  Status record_event(EventHandle event, StreamHandle stream) override;
  Result<bool> query_event(EventHandle event) override;
  Status synchronize_event(EventHandle event) override;

  bool holds(DeviceAddress address) override;

  Status pin(void* address, std::size_t bytes) override;
  Status pin_read_only(const void* address, std::size_t bytes) override;
  Status unpin(void* address) override;
  Status address_of_pinned(void* address, DeviceAddress* seen) override;
  Result<PinnedHostRange> pinned_range(const void* address) override;

  [[nodiscard]] bool same_vendor(const gpu::Context& other) const override;
  Result<bool> reaches(gpu::Context& peer) override;
  Status enable_peer(gpu::Context& peer) override;

 private:
  CudaContext(std::shared_ptr<const Library> library, CuDevice device, std::uint64_t cap)
      : Context(cap), library_(std::move(library)), device_(device) {}
  Status describe_device();

  // Calls, and turns the result into a Status: "gpu 0: cuMemCreate: CUDA_ERROR_... (2): out of memory". A fatal code
  // puts the device out of service.
  template <auto Function, typename... Arguments>
  Status call(const char* name, Purpose purpose, Arguments&&... arguments);
  Status check(CuResult code, const char* name, Purpose purpose);

  const std::shared_ptr<const Library> library_;
  const CuDevice device_;
  CuContext context_ = nullptr;
  CuAllocationProperties allocation_{};
  std::vector<CuAccess> access_;  // who may reach memory of this device
  bool read_only_pinning_ = false;
};

}  // namespace gpufs::cuda
