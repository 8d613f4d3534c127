#include "drivers/hip/hip_context.h"

#include <cerrno>

namespace gpufs::hip {

using gpu::Purpose;
using gpu::StreamHandle;

Result<std::shared_ptr<HipContext>> HipContext::open(const std::shared_ptr<const Library>& library, int index,
                                                     std::uint64_t cap) {
  std::shared_ptr<HipContext> context(new HipContext(library, index, cap));
  Status status = context->describe(index);
  // Chips that the runtime's tables do not know have no name.
  if (context->info_.name.empty()) context->info_.name = "AMD GPU";
  const bool virtual_memory = library->has_virtual_memory() && context->attribute(kHipAttributeVirtualMemory);
  if (status.ok()) status = context->choose_memory(virtual_memory, library->has<&Functions::memory_export>(), false);
  if (!status.ok()) return status;
  context->spans_pieces_ = !virtual_memory;
  return context;
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
