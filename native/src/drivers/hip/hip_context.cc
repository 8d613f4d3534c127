#include "drivers/hip/hip_context.h"

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "base/log.h"
#include "drivers/gpu/virtual_memory.h"

namespace gpufs::hip {

using gpu::Purpose;
using gpu::StreamHandle;

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

// Whether ranges can grow. Some versions of ROCm refuse to open a range's tail once there are several ranges, which
// depends on where they lie: so several grow here, as those of files do.
bool ranges_grow(const std::shared_ptr<gpu::Context>& context) {
  constexpr int kRanges = 3;
  constexpr std::uint64_t kGranules = 2;
  const std::uint64_t granule = context->info().granule;
  std::vector<std::unique_ptr<gpu::VirtualMemory>> memories;
  Status status;
  for (int range = 0; range < kRanges && status.ok(); ++range) {
    memories.push_back(std::make_unique<gpu::VirtualMemory>(context));
    status = memories.back()->reserve(kGranules * granule).status();
  }
  for (std::uint64_t at = 0; at < kGranules && status.ok(); ++at) {
    for (const auto& memory : memories) {
      if (status.ok()) status = memory->populate(at * granule, granule);
    }
  }
  // A device that is full answers nothing.
  if (status.ok() || status.error() == ENOSPC) return true;
  log_warning("the runtime's virtual memory cannot grow, so each buffer is one allocation: ", status.message());
  return false;
}

}  // namespace

Result<std::shared_ptr<HipContext>> HipContext::open(const std::shared_ptr<const Library>& library, int index,
                                                     const DriverOptions& options) {
  std::shared_ptr<HipContext> context(new HipContext(library, index, options.memory_bytes));
  Status status = context->describe(index);
  // Chips that the runtime's tables do not know have no name.
  if (context->info_.name.empty()) context->info_.name = "AMD GPU";
  if (status.ok()) status = context->choose_memory(options.hip_memory);
  if (status.ok() && context->virtual_memory() && !ranges_grow(context)) {
    status = context->choose_memory(HipMemory::kPlain);
  }
  if (!status.ok()) return status;
  return context;
}

Status HipContext::choose_memory(HipMemory wish) {
  bool virtual_memory =
      wish != HipMemory::kPlain && library_->has_virtual_memory() && attribute(kHipAttributeVirtualMemory);
  if (virtual_memory && wish == HipMemory::kAuto && library_->moves_files() && kernel_moves_files(info_.pci_address)) {
    log_info(name(), ": the kernel moves files to and from plain memory, so each buffer is one allocation");
    virtual_memory = false;
  }
  spans_pieces_ = !virtual_memory;
  info_.files_reach_memory = !virtual_memory;
  return VendorContext::choose_memory(virtual_memory, library_->has<&Functions::memory_export>(), false);
}

Status HipContext::allow(DeviceAddress address, std::uint64_t bytes) {
  const Status status = VendorContext::allow(address, bytes);
  if (status.device_code() != api::kInvalidValue) return status;
  return {status.error(), status.message() + "; hip_memory = plain does without the runtime's virtual memory",
          status.device_code()};
}

HipContext::~HipContext() { give_up_pools(); }

Result<bool> HipContext::make_current(std::uint64_t* before) {
  Status status = check(library_->prepare_thread(), gpu::kSymbol<&Functions::init>, Purpose::kHost);
  if (!status.ok()) return status;
  int current = 0;
  status = call<&Functions::device_current>(Purpose::kHost, &current);
  if (!status.ok()) return status;
  if (current == device_) return false;
  status = call<&Functions::device_set>(Purpose::kHost, device_);
  if (!status.ok()) return status;
  *before = static_cast<std::uint64_t>(current);
  return true;
}

void HipContext::restore(std::uint64_t before) { library_->call<&Functions::device_set>(static_cast<int>(before)); }

Status HipContext::bind_thread() {
  std::uint64_t before = 0;
  return make_current(&before).status();
}

Status HipContext::copy_to_peer(gpu::Context& peer, DeviceAddress destination, DeviceAddress source, std::size_t bytes,
                                StreamHandle stream) {
  return call<&Functions::copy_to_peer>(Purpose::kMemory, gpu::as<void*>(destination),
                                        static_cast<HipContext&>(peer).device_, gpu::as<void*>(source), device_, bytes,
                                        gpu::as<api::Stream>(stream));
}

Status HipContext::wait_for_value(StreamHandle stream, DeviceAddress cell, std::uint32_t value) {
  if (!library_->has<&Functions::stream_wait_value>()) {
    return lacking("has no streams that wait for a value", gpu::kSymbol<&Functions::stream_wait_value>);
  }
  return call<&Functions::stream_wait_value>(Purpose::kMemory, gpu::as<api::Stream>(stream), gpu::as<void*>(cell),
                                             value, unsigned{api::kWaitValueNotLess}, std::uint32_t{kHipWholeValue});
}

Status HipContext::check_stream(StreamHandle stream, bool certain) {
  int owner = -1;
  if (reinterpret_cast<std::uintptr_t>(stream) <= api::kLastDefaultStream) {
    if (certain) return {};
    Status status = check(library_->prepare_thread(), gpu::kSymbol<&Functions::init>, Purpose::kHost);
    if (status.ok()) status = call<&Functions::device_current>(Purpose::kHost, &owner);
    if (!status.ok()) return status;
  } else if (library_->has<&Functions::stream_device>()) {
    const gpu::Current current(*this);
    if (!current.status().ok()) return current.status();
    const api::Code code = library_->call<&Functions::stream_device>(gpu::as<api::Stream>(stream), &owner);
    if (code != api::kSuccess) return {EINVAL, "this is no HIP stream: " + library_->describe(code), code};
  } else if (certain) {
    return {};
  } else {
    return {EINVAL, "this version of ROCm does not tell whose a stream is: say which device it is"};
  }
  return owner == device_ ? Status{} : Status{EXDEV, "the stream is not one of " + name()};
}

bool HipContext::holds(DeviceAddress address) {
  // Before, the kinds of memory had other numbers.
  if (!library_->has<&Functions::pointer_attributes>() || library_->version() < kHipVersion6) return false;
  HipPointerAttributes found{};
  if (library_->call<&Functions::pointer_attributes>(&found, gpu::as<void*>(address)) != api::kSuccess) return false;
  return found.type == api::kMemoryTypeDevice && found.device == device_;
}

Status HipContext::pin_read_only(const void* /*address*/, std::size_t /*bytes*/) {
  return {EOPNOTSUPP, "HIP cannot pin memory that may only be read"};
}

Status HipContext::enable_peer(gpu::Context& peer) {
  const api::Code code = library_->call<&Functions::device_enable_peer>(static_cast<HipContext&>(peer).device_, 0U);
  if (code == api::kPeerAccessAlreadyEnabled) return {};
  return check(code, gpu::kSymbol<&Functions::device_enable_peer>, Purpose::kMemory);
}

}  // namespace gpufs::hip
