#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <utility>

#include "base/log.h"
#include "drivers/gpu/gpu_device.h"
#include "drivers/gpu/virtual_memory.h"
#include "drivers/hip/hip_library.h"

namespace gpufs::hip {
namespace {

constexpr const char* kKernelNodes = "/sys/class/kfd/kfd/topology/nodes";
// In a node's "capability": the kernel's driver has set up transfers between files and this device.
constexpr std::uint64_t kMovesFiles = 0x40;

// "0000:c1:00.0" as the kernel's location_id without the function, which partitions of one device count up; -1: none.
std::int64_t location_of(const std::string& pci_address) {
  unsigned domain = 0;
  unsigned bus = 0;
  unsigned device = 0;
  if (std::sscanf(pci_address.c_str(), "%x:%x:%x", &domain, &bus, &device) != 3) return -1;
  return static_cast<std::int64_t>(domain) << 16 | bus << 8 | device << 3;
}

// Whether the kernel's driver moves files to and from the memory of a device. No: a virtual function, a device whose
// memory the bus does not show as a whole, or a kernel without the interface.
bool kernel_moves_files(const std::string& pci_address) {
  const std::int64_t wanted = location_of(pci_address);
  for (int node = 0; wanted >= 0; ++node) {
    std::ifstream properties(std::string(kKernelNodes) + "/" + std::to_string(node) + "/properties");
    if (!properties) break;
    std::uint64_t capability = 0;
    std::uint64_t location = 0;
    std::uint64_t domain = 0;
    std::string name;
    for (std::uint64_t value = 0; properties >> name >> value;) {
      if (name == "capability") capability = value;
      if (name == "location_id") location = value;
      if (name == "domain") domain = value;
    }
    if (static_cast<std::int64_t>(domain << 16 | (location & ~std::uint64_t{7})) == wanted) {
      return (capability & kMovesFiles) != 0;
    }
  }
  return false;
}

// Whether ranges can grow. Some versions of ROCm refuse access to a range's tail once there are several ranges, which
// depends on their addresses. So this grows several ranges, as those of files grow.
bool ranges_grow(const std::shared_ptr<gpu::GpuDevice>& device) {
  constexpr int kRanges = 3;
  constexpr std::uint64_t kGranules = 2;
  const std::uint64_t granule = device->info().granule;
  std::vector<std::unique_ptr<DeviceMemory>> memories;
  Status status;
  for (int range = 0; range < kRanges && status.ok(); ++range) {
    memories.push_back(gpu::VirtualMemory::create(device));
    status = memories.back()->reserve(kGranules * granule).status();
  }
  for (std::uint64_t at = 0; at < kGranules && status.ok(); ++at) {
    for (const auto& memory : memories) {
      if (status.ok()) status = memory->populate(at * granule, granule);
    }
  }
  // A full device proves nothing.
  if (status.ok() || status.error() == ENOSPC) return true;
  log_warning("the runtime's virtual memory cannot grow, so each buffer is one allocation: ", status.message());
  return false;
}

class HipDevice final : public gpu::GpuDevice {
 public:
  static Result<std::shared_ptr<GpuDevice>> open(const std::shared_ptr<const Library>& library, int index, int ordinal,
                                                 const DriverOptions& options) {
    std::shared_ptr<HipDevice> opened(new HipDevice(library, ordinal, options));
    Status status = opened->describe(index);
    // The runtime has no name for chips that its tables do not know.
    if (opened->info_.name.empty()) opened->info_.name = "AMD GPU";
    if (status.ok()) status = opened->choose_memory(options.hip_memory);
    if (status.ok() && opened->virtual_memory() && !ranges_grow(opened)) {
      status = opened->choose_memory(HipMemory::kPlain);
      opened->plain_reason_ = "the virtual memory of this version of ROCm cannot grow";
    }
    if (!status.ok()) return status;
    return std::shared_ptr<GpuDevice>(std::move(opened));
  }
  ~HipDevice() override { close(); }

  // HIP has a current device for each thread, but no stack of them as CUDA has of contexts.
  Result<bool> make_current(std::uint64_t* before) override {
    int current = 0;
    TRY(find_current(&current));
    if (current == ordinal_) return false;
    TRY(call(library_.device_set, ordinal_));
    *before = static_cast<std::uint64_t>(current);
    return true;
  }
  void restore(std::uint64_t before) override { library_.device_set(static_cast<int>(before)); }
  Status bind() override {
    std::uint64_t before = 0;
    return make_current(&before).status();
  }

  Status queue_copy_to_peer(GpuDevice& peer, DeviceAddress destination, DeviceAddress source, std::size_t bytes,
                            api::Stream stream) override {
    return call(library_.copy_to_peer, destination, static_cast<HipDevice&>(peer).ordinal_, source, ordinal_, bytes,
                stream);
  }
  Status enable_peer(GpuDevice& peer) override {
    const api::Code code = library_.device_enable_peer(static_cast<HipDevice&>(peer).ordinal_, 0);
    if (code == api::kPeerAccessAlreadyEnabled) return {};
    return check(library_.device_enable_peer.symbol(), code);
  }

  // HIP's function has a mask besides, of the bits to compare. HIP's documents ask for memory that was allocated for
  // signals. A runtime that insists on it refuses other memory with an error, so trying it out on pinned memory shows
  // it.
  Status wait_for_value(api::Stream stream, DeviceAddress cell, std::uint32_t value) override {
    const auto& wait = library_.stream_wait_value;
    if (!wait) return lacks("has no streams that wait for a value", wait.symbol());
    return call(wait, stream, cell, value, api::kWaitValueNotLess, kHipWholeValue);
  }

  Status import_physical(int descriptor, gpu::PhysicalHandle* handle) override {
    if (library_.version() >= kHipVersion71) return GpuDevice::import_physical(descriptor, handle);
    return call_for_others(functions().memory_import, handle, &descriptor, api::kHandleDescriptor);
  }

  [[nodiscard]] bool reports_streams() const override { return bool{library_.stream_device}; }
  Result<bool> owns(api::Stream stream, bool default_stream) override;
  bool holds(DeviceAddress address) override;

  // pin_read_only() is the base's refusal: the flag that CUDA has for it stands for something else in HIP.

 private:
  HipDevice(const std::shared_ptr<const Library>& library, int ordinal, const DriverOptions& options)
      : GpuDevice(library, ordinal, options), library_(*library) {
    access_remedy_ = "; hip_memory = plain does without the runtime's virtual memory";
  }

  Status find_current(int* ordinal) {
    Status status = check(functions().init.symbol(), library_.prepare_thread());
    return status.ok() ? call(library_.device_current, ordinal) : status;
  }

  Status choose_memory(HipMemory wish) {
    if (wish == HipMemory::kPlain) plain_reason_ = "the knob hip_memory is plain: set it to virtual";
    bool virtual_memory =
        wish != HipMemory::kPlain && library_.has_virtual_memory() && attribute(kHipAttributeVirtualMemory);
    if (virtual_memory && wish == HipMemory::kAuto && library_.moves_files() && kernel_moves_files(info_.pci_address)) {
      log_info(name(), ": the kernel moves files to and from plain memory, so each buffer is one allocation");
      plain_reason_ =
          "it is plain memory, which the kernel moves files to and from: set the knob hip_memory to virtual";
      virtual_memory = false;
    }
    // The runtime maps, unmaps and opens one piece at a time, and its calls for files reach plain memory alone.
    spans_pieces_ = !virtual_memory;
    info_.files_reach_memory = !virtual_memory;
    return GpuDevice::choose_memory(virtual_memory, bool{functions().memory_export}, false);
  }

  const Library& library_;
};

Result<bool> HipDevice::owns(api::Stream stream, bool default_stream) {
  int owner = -1;
  if (default_stream) {
    TRY(find_current(&owner));
  } else if (const api::Code code = library_.stream_device(stream, &owner); code != api::kSuccess) {
    return Status{EINVAL, "this is not a HIP stream: " + library_.describe(code), code};
  }
  return owner == ordinal_;
}

bool HipDevice::holds(DeviceAddress address) {
  const gpu::Current current(*this);
  // Before ROCm 6 the kinds of memory had other numbers.
  if (!current.status().ok() || !library_.pointer_attributes || library_.version() < kHipVersion6) return false;
  HipPointerAttributes found{};
  if (library_.pointer_attributes(&found, address) != api::kSuccess) return false;
  return found.type == api::kMemoryTypeDevice && found.device == ordinal_;
}

// The fault on the kernel's side, as far as this process can see it.
std::string kernel_side() {
  if (::access(kKernelDriver, R_OK | W_OK) == 0) return "";
  if (errno == ENOENT)
    return std::string(" (there is no ") + kKernelDriver + ": the kernel's amdgpu driver is not loaded)";
  return std::string(" (") + kKernelDriver + " cannot be opened: is this user in the groups render and video?)";
}

}  // namespace
}  // namespace gpufs::hip

namespace gpufs {

Result<std::unique_ptr<Driver>> open_hip_driver(const DriverOptions& options,
                                                const std::vector<std::string>& candidates) {
  const std::shared_ptr<const hip::Library> library = TRY(hip::Library::load(candidates));
  int found = 0;
  const gpu::api::Code code = library->functions().device_count(&found);
  if (code != gpu::api::kSuccess && code != gpu::api::kNoDevice) {
    return Status{ENODEV,
                  "hip is not available: " + library->name() + ": hipGetDeviceCount: " + library->describe(code), code};
  }
  if (code == gpu::api::kNoDevice || found == 0) {
    return Status{ENODEV, "hip is not available: no device: " + library->name() + " shows none" + hip::kernel_side(),
                  code};
  }
  return gpu::open_devices("hip", *library, found, options, [&](int index, int ordinal) {
    return hip::HipDevice::open(library, index, ordinal, options);
  });
}

Result<std::shared_ptr<Device>> open_hip_device(const std::string& pci_address,
                                                const std::vector<std::string>& candidates) {
  const std::shared_ptr<const hip::Library> library = TRY(hip::Library::load(candidates));
  // Memory that was exported is virtual memory, however this process would take its own.
  DriverOptions options;
  options.hip_memory = HipMemory::kVirtual;
  return gpu::open_device_at(*library, pci_address, "HIP_VISIBLE_DEVICES", [&](int index, int ordinal) {
    return hip::HipDevice::open(library, index, ordinal, options);
  });
}

}  // namespace gpufs
