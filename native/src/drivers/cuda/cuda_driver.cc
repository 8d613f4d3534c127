#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "drivers/cuda/cuda_api.h"
#include "drivers/gpu/gpu_device.h"

namespace gpufs::cuda {
namespace {

using gpu::Function;

Status unavailable(const std::string& why, int code = 0) { return {ENODEV, "cuda is not available: " + why, code}; }

// libcuda, and the functions that only CUDA has.
class Library final : public gpu::VendorLibrary, public std::enable_shared_from_this<Library> {
 public:
  // Opens the library and initialises it. ENODEV if there is none, it is too old, or it finds no working device.
  static Result<std::shared_ptr<const Library>> load(const std::string& path);

  [[nodiscard]] std::string uuid(int ordinal) const override;
  [[nodiscard]] const char* software() const override { return "this NVIDIA driver"; }
  [[nodiscard]] std::string describe(api::Code code) const override;
  [[nodiscard]] bool is_fatal(api::Code code) const override;

  Function<CuDevice*, int> device_get;
  Function<CuContext*, CuDevice> primary_context_retain;
  Function<CuDevice> primary_context_release;
  Function<CuContext*> context_get;
  Function<CuContext> context_set;
  Function<CuContext> context_push;
  Function<CuContext*> context_pop;
  Function<CuContext, unsigned> context_enable_peer;
  Function<CuAddress, CuContext, CuAddress, CuContext, std::size_t, api::Stream> copy_to_peer;
  Function<api::Code, const char**> error_name;
  Function<api::Code, const char**> error_text;
  // Optional.
  Function<api::Stream, CuAddress, std::uint32_t, unsigned> stream_wait_value;
  Function<api::Stream, CuContext*> stream_context;
  // Since CUDA 12.8; later ones have a second form as well, without the place of the failure.
  Function<CuAddress*, CuAddress*, std::size_t*, std::size_t, CuCopyAttributes*, std::size_t*, std::size_t,
           std::size_t*, api::Stream>
      copy_batch;
  Function<CuUuid*, CuDevice> device_uuid;      // of the whole GPU
  Function<CuUuid*, CuDevice> device_own_uuid;  // of the MIG instance, where the device is one
};

Result<std::shared_ptr<const Library>> Library::load(const std::string& path) {
  std::string why;
  void* const handle = gpu::open_library(path, &why);
  if (handle == nullptr) return unavailable(path + " was not found (" + why + ")");
  auto library = std::make_shared<Library>();
  Library& l = *library;
  const char* missing = l.resolve(handle, Vendor::kCuda);
  const auto required = [&](auto& function, const char* symbol) {
    if (!function.resolve(handle, symbol)) missing = symbol;
  };
  required(l.device_get, "cuDeviceGet");
  required(l.primary_context_retain, "cuDevicePrimaryCtxRetain");
  required(l.primary_context_release, "cuDevicePrimaryCtxRelease_v2");
  required(l.context_get, "cuCtxGetCurrent");
  required(l.context_set, "cuCtxSetCurrent");
  required(l.context_push, "cuCtxPushCurrent_v2");
  required(l.context_pop, "cuCtxPopCurrent_v2");
  required(l.context_enable_peer, "cuCtxEnablePeerAccess");
  required(l.copy_to_peer, "cuMemcpyPeerAsync");
  required(l.error_name, "cuGetErrorName");
  required(l.error_text, "cuGetErrorString");
  l.stream_wait_value.resolve(handle, "cuStreamWaitValue32_v2");
  l.stream_context.resolve(handle, "cuStreamGetCtx");
  l.copy_batch.resolve(handle, "cuMemcpyBatchAsync");
  l.device_uuid.resolve(handle, "cuDeviceGetUuid");
  l.device_own_uuid.resolve(handle, "cuDeviceGetUuid_v2");
  if (missing != nullptr) return unavailable(path + " has no " + missing + "; a newer NVIDIA driver is needed");

  const api::Code code = l.functions().init(0);
  if (code != api::kSuccess) return unavailable("cuInit: " + l.describe(code), code);
  gpu::watch_process_end();
  return std::shared_ptr<const Library>(std::move(library));
}

std::string Library::uuid(int ordinal) const {
  CuUuid whole{};
  if (!device_uuid || device_uuid(&whole, ordinal) != api::kSuccess) return "";
  CuUuid own = whole;
  if (device_own_uuid && device_own_uuid(&own, ordinal) != api::kSuccess) own = whole;
  std::string text = own == whole ? "GPU" : "MIG";
  for (std::size_t at = 0; at < own.size(); ++at) {
    constexpr std::array<std::size_t, 5> kGroups{0, 4, 6, 8, 10};
    if (std::find(kGroups.begin(), kGroups.end(), at) != kGroups.end()) text += '-';
    constexpr const char* kDigits = "0123456789abcdef";
    text += kDigits[own[at] >> 4];
    text += kDigits[own[at] & 15];
  }
  return text;
}

std::string Library::describe(api::Code code) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (error_name(code, &name) != api::kSuccess || name == nullptr) name = "unknown CUDA error";
  std::string description = std::string(name) + " (" + std::to_string(code) + ")";
  if (error_text(code, &text) == api::kSuccess && text != nullptr) description += std::string(": ") + text;
  return description;
}

bool Library::is_fatal(api::Code code) const {
  switch (code) {
    case api::kEccUncorrectable:
    case kCuNvlinkUncorrectable:
    case kCuContained:
    case api::kIllegalAddress:
    case api::kLaunchTimeout:
    case api::kContextIsDestroyed:
    case api::kAssert:
    case api::kUnknown:
      return true;
    default:
      return code >= kCuHardwareStackError && code <= api::kLaunchFailed;
  }
}

// Keeps the device's primary context, which is the one that the program's CUDA runtime uses.
class CudaDevice final : public gpu::GpuDevice {
 public:
  static Result<std::shared_ptr<GpuDevice>> open(const std::shared_ptr<const Library>& library, int index, int ordinal,
                                                 const DriverOptions& options) {
    CuDevice device = 0;
    const api::Code code = library->device_get(&device, ordinal);
    if (code != api::kSuccess) {
      return Status{ENODEV, "gpu " + std::to_string(index) + ": cuDeviceGet: " + library->describe(code), code};
    }
    std::shared_ptr<CudaDevice> opened(new CudaDevice(library, device, options));
    TRY(opened->retain(index));
    return std::shared_ptr<GpuDevice>(std::move(opened));
  }
  ~CudaDevice() override {
    if (context_ == nullptr) return;
    close();
    library_.primary_context_release(ordinal_);
  }

  // The thread's stack of contexts remembers what was current.
  Result<bool> make_current(std::uint64_t* /*before*/) override {
    CuContext current = nullptr;
    TRY(call(library_.context_get, &current));
    if (current == context_) return false;
    TRY(call(library_.context_push, context_));
    return true;
  }
  void restore(std::uint64_t /*before*/) override {
    CuContext popped = nullptr;
    library_.context_pop(&popped);
  }
  Status bind() override {
    CuContext current = nullptr;
    Status status = call(library_.context_get, &current);
    if (!status.ok() || current == context_) return status;
    return call(library_.context_set, context_);
  }

  // CUDA names peers by their contexts, HIP by their numbers.
  Status queue_copy_to_peer(GpuDevice& peer, DeviceAddress destination, DeviceAddress source, std::size_t bytes,
                            api::Stream stream) override {
    CuContext theirs = static_cast<CudaDevice&>(peer).context_;
    return call(library_.copy_to_peer, destination, theirs, source, context_, bytes, stream);
  }
  Status enable_peer(GpuDevice& peer) override {
    const api::Code code = library_.context_enable_peer(static_cast<CudaDevice&>(peer).context_, 0);
    if (code == api::kPeerAccessAlreadyEnabled) return {};
    return check(library_.context_enable_peer.symbol(), code);
  }

  Status wait_for_value(api::Stream stream, DeviceAddress cell, std::uint32_t value) override {
    const auto& wait = library_.stream_wait_value;
    if (!wait) return lacks("has no streams that wait for a value", wait.symbol());
    return call(wait, stream, cell, value, api::kWaitValueNotLess);
  }

  Result<std::shared_ptr<GpuDevice>> open_host_tier(int index, std::uint64_t bytes) override {
    if (!virtual_memory() || !functions().memory_export || !attribute(kCuAttributeHostVirtualMemory)) {
      return Status(EOPNOTSUPP, "this NVIDIA driver cannot share host memory as a GPU's: CUDA 12.2 or later can");
    }
    int node = 0;
    functions().device_attribute(&node, kCuAttributeHostNode, ordinal_);
    std::shared_ptr<CudaDevice> opened(new CudaDevice(library_.shared_from_this(), ordinal_, {.memory_bytes = bytes}));
    TRY(opened->retain_host_tier(index, std::max(node, 0), bytes));
    return std::shared_ptr<GpuDevice>(std::move(opened));
  }

  Status queue_batch(CopyDirection direction, std::span<const HostCopy> copies, api::Stream stream) override;

  [[nodiscard]] bool reports_streams() const override { return bool{library_.stream_context}; }
  Result<bool> owns(api::Stream stream, bool default_stream) override;
  bool holds(DeviceAddress address) override;

  Status pin_read_only(const void* address, std::size_t bytes) override {
    if (!read_only_pinning_) return GpuDevice::pin_read_only(address, bytes);
    const gpu::Current current(*this);
    TRY(current.status());
    return call(functions().host_register, const_cast<void*>(address), bytes,
                unsigned{api::kHostRegisterPortable} | kCuHostRegisterReadOnly);
  }

 private:
  CudaDevice(const std::shared_ptr<const Library>& library, CuDevice device, const DriverOptions& options)
      : GpuDevice(library, device, options), library_(*library) {}

  Status retain(int index) {
    TRY(describe(index));
    read_only_pinning_ = attribute(kCuAttributeReadOnlyHostRegister);
    same_host_addresses_ = attribute(kCuAttributeSameHostAddresses);
    TRY(retain_context());
    return choose_memory(library_.has_virtual_memory() && attribute(kCuAttributeVirtualMemory),
                         functions().memory_export && attribute(kCuAttributeExportDescriptor),
                         attribute(kCuAttributeDirectRdmaWithVirtualMemory));
  }

  Status retain_host_tier(int index, int node, std::uint64_t bytes) {
    Status status = describe(index);
    if (status.ok()) status = retain_context();
    return status.ok() ? choose_host_memory(node, bytes) : status;
  }

  Status retain_context() {
    CuContext retained = nullptr;
    Status status = call(library_.primary_context_retain, &retained, ordinal_);
    if (status.ok()) context_ = retained;
    return status;
  }

  const Library& library_;
  CuContext context_ = nullptr;  // constant once retained
  bool read_only_pinning_ = false;
  // Pinned memory has the same address for the device as for the CPU. Batches take no others; on WSL2 they differ.
  bool same_host_addresses_ = false;
};

Status CudaDevice::queue_batch(CopyDirection direction, std::span<const HostCopy> copies, api::Stream stream) {
  const auto& batch = library_.copy_batch;
  if (!batch || !same_host_addresses_) return GpuDevice::queue_batch(direction, copies, stream);
  std::vector<CuAddress> hosts;
  std::vector<CuAddress> devices;
  std::vector<std::size_t> sizes;
  for (const HostCopy& copy : copies) {
    hosts.push_back(reinterpret_cast<std::uintptr_t>(copy.host));
    devices.push_back(copy.device);
    sizes.push_back(copy.bytes);
  }
  std::vector<CuAddress>& to = direction == CopyDirection::kToDevice ? devices : hosts;
  std::vector<CuAddress>& from = direction == CopyDirection::kToDevice ? hosts : devices;
  CuCopyAttributes attributes{kCuSourceInStreamOrder, {}, {}, 0};
  std::size_t attributes_from = 0;  // the first copy that they apply to
  std::size_t failed = 0;
  const api::Code code =
      batch(to.data(), from.data(), sizes.data(), sizes.size(), &attributes, &attributes_from, 1, &failed, stream);
  return check(batch.symbol(), code);
}

Result<bool> CudaDevice::owns(api::Stream stream, bool default_stream) {
  CuContext owner = nullptr;
  if (default_stream) {
    TRY(call(library_.context_get, &owner));
    if (owner == nullptr) {
      return Status{EINVAL, "a default stream, and no CUDA device is current: say which device it is"};
    }
  } else if (const api::Code code = library_.stream_context(stream, &owner); code != api::kSuccess) {
    return Status{EINVAL, "this is not a CUDA stream: " + library_.describe(code), code};
  }
  return owner == context_;
}

// Managed memory may be anywhere, so it is not the device's own.
bool CudaDevice::holds(DeviceAddress address) {
  const auto& attribute_of = functions().pointer_attribute;
  const gpu::Current current(*this);
  if (!current.status().ok() || !attribute_of) return false;
  unsigned kind = 0;
  unsigned managed = 0;  // the driver writes one byte of it
  int ordinal = -1;
  return attribute_of(&kind, kCuPointerMemoryType, address) == api::kSuccess && kind == api::kMemoryTypeDevice &&
         attribute_of(&managed, kCuPointerIsManaged, address) == api::kSuccess && managed == 0 &&
         attribute_of(&ordinal, kCuPointerDeviceOrdinal, address) == api::kSuccess && ordinal == ordinal_;
}

}  // namespace
}  // namespace gpufs::cuda

namespace gpufs {

Result<std::unique_ptr<Driver>> open_cuda_driver(const DriverOptions& options, const std::string& path) {
  const std::shared_ptr<const cuda::Library> library = TRY(cuda::Library::load(path));
  int found = 0;
  const gpu::api::Code code = library->functions().device_count(&found);
  if (code != gpu::api::kSuccess) {
    return cuda::unavailable("cuDeviceGetCount: " + library->describe(code), code);
  }
  if (found == 0) return cuda::unavailable("the driver shows no device");
  return gpu::open_devices("cuda", *library, found, options, [&](int index, int ordinal) {
    return cuda::CudaDevice::open(library, index, ordinal, options);
  });
}

Result<std::shared_ptr<Device>> open_cuda_device(const std::string& pci_address, const std::string& path) {
  const std::shared_ptr<const cuda::Library> library = TRY(cuda::Library::load(path));
  if (pci_address == kHostTierAddress) {
    std::shared_ptr<gpu::GpuDevice> first = TRY(cuda::CudaDevice::open(library, 0, 0, {}));
    std::shared_ptr<gpu::GpuDevice> tier = TRY(first->open_host_tier(0, UINT64_MAX));
    return std::shared_ptr<Device>(std::move(tier));
  }
  return gpu::open_device_at(*library, pci_address, "CUDA_VISIBLE_DEVICES", [&](int index, int ordinal) {
    return cuda::CudaDevice::open(library, index, ordinal, {});
  });
}

}  // namespace gpufs
