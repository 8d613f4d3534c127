#include "drivers/gpu/gpu_device.h"

#include <strings.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <fstream>
#include <iterator>
#include <optional>
#include <typeinfo>

#include "base/log.h"
#include "base/math.h"
#include "base/thread.h"
#include "drivers/gpu/stream.h"
#include "drivers/gpu/virtual_memory.h"

namespace gpufs::gpu {
namespace {

// Smaller granules would be possible, but buffers want few and large pieces.
constexpr std::uint64_t kSmallestGranule = std::uint64_t{2} << 20;
// More than releasing all of a device's memory takes. memory() waits no longer for a release in progress, and not at
// all on a thread that must not wait.
constexpr std::chrono::seconds kReleaseTime{1};

// The errors that the caller of a failed call can act on.
int errno_of(api::Code code) {
  switch (code) {
    case api::kOutOfMemory:
      return ENOMEM;
    case api::kHostMemoryAlreadyRegistered:
      return EEXIST;
    case api::kHostMemoryNotRegistered:
      return ENOENT;
    case api::kNotSupported:
      return EOPNOTSUPP;
    default:
      return EIO;
  }
}

// Names the memory that ran out: calls that take device memory run out of that, not of host memory.
Status full_if_out_of_memory(Status status) {
  if (status.device_code() != api::kOutOfMemory) return status;
  return {ENOSPC, "No space left on device (" + status.message() + ")", status.device_code()};
}

// -1: the kernel gives none.
int numa_node_of(const std::string& pci_address) {
  std::ifstream file("/sys/bus/pci/devices/" + pci_address + "/numa_node");
  int node = -1;
  return file >> node ? node : -1;
}

}  // namespace

// ---- opening ----

Result<std::unique_ptr<Driver>> open_devices(const char* driver, const VendorLibrary& library, int found,
                                             const DriverOptions& options, const OpenDevice& open) {
  std::vector<int> chosen = TRY(choose_devices(driver, library, found, options));
  std::vector<std::shared_ptr<GpuDevice>> devices;
  for (int ordinal : chosen) {
    std::shared_ptr<GpuDevice> device = TRY(open(static_cast<int>(devices.size()), ordinal));
    devices.push_back(std::move(device));
    devices.back()->spares_.set_keep_time(options.keep_freed);
  }
  // Before anything is allocated: peers get access to virtual memory when it is mapped. Where asking fails there is no
  // direct way, and copy_to_peer() reports it.
  for (const auto& device : devices) {
    for (const auto& peer : devices) {
      if (peer == device) continue;
      Result<bool> reachable = peer->reaches(*device);
      if (reachable.ok() && reachable.value()) device->grant_access_to(peer->ordinal_);
    }
  }
  if (options.host_memory_bytes != 0) {
    std::shared_ptr<GpuDevice> tier =
        TRY(devices.front()->open_host_tier(static_cast<int>(devices.size()), options.host_memory_bytes));
    for (const auto& device : devices) tier->grant_access_to(device->ordinal_);
    TRY(tier->pinned_->start());
    devices.push_back(std::move(tier));
  }
  return std::make_unique<Driver>(driver, std::vector<std::shared_ptr<Device>>(devices.begin(), devices.end()));
}

Result<std::shared_ptr<Device>> open_device_at(const VendorLibrary& library, const std::string& pci_address,
                                               const char* hiding_variable, const OpenDevice& open) {
  const Functions& functions = library.functions();
  int count = 0;
  const api::Code code = functions.device_count(&count);
  if (code != api::kSuccess && code != api::kNoDevice) return Status{ENODEV, library.describe(code), code};
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    std::array<char, 64> text{};
    if (functions.device_pci_address(text.data(), int{text.size()}, ordinal) != api::kSuccess) continue;
    if (::strcasecmp(text.data(), pci_address.c_str()) != 0) continue;
    std::shared_ptr<GpuDevice> device = TRY(open(ordinal, ordinal));
    return std::shared_ptr<Device>(std::move(device));
  }
  return Status{ENODEV, "this process does not see the GPU at " + pci_address + " (it sees " + std::to_string(count) +
                            "): is it missing in " + hiding_variable + "?"};
}

GpuDevice::GpuDevice(std::shared_ptr<const VendorLibrary> library, int ordinal, const DriverOptions& options)
    : ordinal_(ordinal),
      library_(std::move(library)),
      taken_(options.memory_bytes != 0 ? options.memory_bytes : Ledger::kNoLimit) {}

void GpuDevice::close() {
  if (pinned_) pinned_->close();
  spares_.close();
  // Nothing can be done about failures here, and after a fatal one all of these fail.
  const Current current(*this);
  for (api::Stream stream : idle_streams_) functions().stream_destroy(stream);
  idle_streams_.clear();
}

Status GpuDevice::describe(int index) {
  info_.index = index;
  std::array<char, 256> text{};
  TRY(call(functions().device_name, text.data(), int{text.size()}, ordinal_));
  info_.name = text.data();

  text.fill('\0');
  TRY(call(functions().device_pci_address, text.data(), int{text.size()}, ordinal_));
  info_.pci_address = text.data();
  // The kernel writes "ffff:a0:00.0".
  for (char& letter : info_.pci_address) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  info_.uuid = library_->uuid(ordinal_);
  info_.numa_node = numa_node_of(info_.pci_address);

  std::size_t total = 0;
  TRY(call(functions().device_total_memory, &total, ordinal_));
  info_.total_bytes = std::min<std::uint64_t>(taken_.limit(), total);
  info_.granule = kSmallestGranule;
  return {};
}

bool GpuDevice::attribute(int which) {
  int value = 0;
  return functions().device_attribute(&value, which, ordinal_) == api::kSuccess && value != 0;
}

Status GpuDevice::choose_memory(bool virtual_memory, bool exports_descriptors, bool direct_rdma) {
  if (plain_reason_.empty()) plain_reason_ = std::string(library_->software()) + " has no virtual memory management";
  virtual_memory_ = virtual_memory;
  info_.reserve_copies = !virtual_memory;
  if (!virtual_memory) return {};
  exports_descriptors_ = exports_descriptors;
  allocation_.type = api::kAllocationPinned;
  allocation_.location = {api::kLocationDevice, ordinal_};
  if (exports_descriptors) allocation_.handle_types = api::kHandleDescriptor;
  if (direct_rdma) allocation_.flags.direct_rdma = 1;
  grant_access_to(ordinal_);

  const Current current(*this);
  TRY(current.status());
  std::size_t granule = 0;
  TRY(call(functions().granularity, &granule, &allocation_, api::kGranularityMinimum));
  info_.granule = std::max<std::uint64_t>(granule, kSmallestGranule);
  return {};
}

// The CPU gets no access: giving and taking it takes 70 ms for each GiB, the copy itself 19 ms (H100).
Status GpuDevice::choose_host_memory(int node, std::uint64_t bytes) {
  virtual_memory_ = true;
  exports_descriptors_ = true;
  allocation_.type = api::kAllocationPinned;
  allocation_.location = {api::kLocationHostNode, node};
  allocation_.handle_types = api::kHandleDescriptor;
  info_.name = "pinned host memory";
  info_.pci_address = kHostTierAddress;
  info_.uuid.clear();
  info_.numa_node = node;
  info_.granule = kSmallestGranule;
  info_.total_bytes = round_down(bytes, info_.granule);
  info_.files_reach_memory = false;
  info_.host_tier = true;
  pinned_ = std::make_unique<HostTierPool>(HostTierPool::Source{
      .create =
          [this](PhysicalHandle* handle) {
            const Current current(*this);
            TRY(current.status());
            return call(functions().memory_create, handle, HostTierPool::kPieceBytes, &allocation_, 0);
          },
      .zero = [this](PhysicalHandle handle, DeviceAddress address) { return zero_piece(handle, address); },
      .release = [this](PhysicalHandle handle) { release({handle}); },
      .unmap =
          [this](DeviceAddress address) {
            const Current current(*this);
            return call(functions().memory_unmap, address, HostTierPool::kPieceBytes);
          },
      .free_addresses =
          [this](const Extent& range) {
            const Current current(*this);
            functions().address_free(range.offset, range.bytes);
          },
      .wanted = [this] { return taken_.available(); }});
  return {};
}

Result<std::shared_ptr<GpuDevice>> GpuDevice::open_host_tier(int /*index*/, std::uint64_t /*bytes*/) {
  return Status(EOPNOTSUPP, std::string(library_->software()) + " has no host memory that can be shared as a device's");
}

// ---- failures ----

Status GpuDevice::check(const char* symbol, api::Code code) {
  if (code == api::kSuccess) return {};
  Status status = described(symbol, code);
  if (library_->is_fatal(code)) fail(status);
  return status;
}

Status GpuDevice::described(const char* symbol, api::Code code) const {
  if (code == api::kSuccess) return {};
  return {errno_of(code), name() + ": " + public_name(symbol) + ": " + library_->describe(code), code};
}

Status GpuDevice::lacks(const std::string& what, const char* symbol) const {
  return {EOPNOTSUPP, std::string(library_->software()) + " " + what + " (" + symbol + ")"};
}

void GpuDevice::fail(const Status& reason) {
  {
    const std::scoped_lock lock(failure_mutex_);
    if (!failure_.ok()) return;
    failure_ = Status{EIO, "out of service since " + reason.message(), reason.device_code()};
    failed_.store(true, std::memory_order_release);
  }
  log_error(name(), " is out of service: ", reason.message());
}

Status GpuDevice::health() {
  if (!failed_.load(std::memory_order_acquire)) return {};
  const std::scoped_lock lock(failure_mutex_);
  return failure_;
}

// ---- memory ----

Result<MemoryInfo> GpuDevice::memory(Wait wait) {
  const Current current(*this);
  TRY(current.status());
  if (info_.host_tier) return MemoryInfo{info_.total_bytes, taken_.available()};
  MemoryInfo info{info_.total_bytes, 0};
  Status status;
  const auto timeout = wait == Wait::kAllowed ? kReleaseTime : std::chrono::seconds{0};
  spares_.while_settled(timeout, [&](std::uint64_t cached) {
    std::size_t free_bytes = 0;
    std::size_t total = 0;
    status = call(functions().memory_info, &free_bytes, &total);
    info.free_bytes = std::min(free_bytes + cached, info.total_bytes);
  });
  if (!status.ok()) return status;
  info.free_bytes = std::min(info.free_bytes, taken_.available());
  return info;
}

Result<std::unique_ptr<DeviceMemory>> GpuDevice::create_memory() {
  TRY(health());
  auto self = shared_from_this();
  if (virtual_memory_) return VirtualMemory::create(std::move(self));
  return plain_memory(std::move(self));
}

Result<std::unique_ptr<DeviceMemory>> GpuDevice::restore_memory(std::uint64_t number,
                                                                std::span<const Extent> populated) {
  TRY(check_keeping());
  return VirtualMemory::restore(shared_from_this(), number, populated);
}

Result<std::unique_ptr<ForeignMapping>> GpuDevice::map_foreign(const ForeignMemory& memory) {
  if (memory.kind == ShareKind::kIpc) return open_ipc_handle(shared_from_this(), memory);
  if (memory.kind == ShareKind::kDescriptor) return map_descriptor(shared_from_this(), memory);
  return Status{EINVAL, "this is memory of the host, and the file is on a GPU"};
}

Status GpuDevice::check_sharing() {
  if (!virtual_memory_) return {EOPNOTSUPP, name() + ": memory cannot be shared with other programs: " + plain_reason_};
  if (!exports_descriptors_) {
    return {EOPNOTSUPP, name() + ": memory cannot be shared with other programs: " + library_->software() +
                            " cannot export it as file descriptors"};
  }
  return {};
}

Result<std::unique_ptr<ImportedRange>> GpuDevice::create_import(std::uint64_t capacity, ImportAccess access) {
  return import_memory(shared_from_this(), capacity, access != ImportAccess::kRead);
}

Status GpuDevice::take(std::uint64_t bytes) {
  if (taken_.take(bytes)) return {};
  return {ENOSPC, "No space left on device (" + name() + ": " + std::to_string(bytes) +
                      " more bytes would exceed the cap of " + std::to_string(taken_.limit()) + ")"};
}

std::uint64_t GpuDevice::largest_piece() const {
  return info_.host_tier ? HostTierPool::kPieceBytes : VirtualMemory::kLargestPiece;
}

Result<AcquiredMemory> GpuDevice::acquire_physical(std::uint64_t bytes, DeviceAddress address, bool wants_zeros,
                                                   Wait wait) {
  TRY(take(bytes));
  if (pinned_) {
    if (HostTierPool* const pool = pool_of(bytes)) {
      if (const std::optional<AcquiredMemory> piece = pool->take(address, wants_zeros)) return *piece;
    }
    pinned_->trim();
  }
  if (const std::optional<PhysicalHandle> spare = spares_.take(bytes)) return AcquiredMemory{.handle = *spare};
  AcquiredMemory created;
  const auto create = [&] {
    return full_if_out_of_memory(call(functions().memory_create, &created.handle, bytes, &allocation_, 0));
  };
  // Releasing takes long: without waiting this is ENOSPC, which may be premature.
  const bool may_release = wait == Wait::kAllowed;
  if (spares_.bytes() > taken_.available()) {
    if (!may_release) {
      taken_.release(bytes);
      return Status(ENOSPC, "memory has to be released first");
    }
    spares_.drop();
  }
  std::uint64_t releases = spares_.releases();
  Status status = create();
  while (status.error() == ENOSPC && may_release) {
    const std::uint64_t now = spares_.drop();
    if (now == releases) break;  // there was nothing to release, here or in another thread
    releases = now;
    status = create();
  }
  if (status.error() == ENOSPC && may_release && keeper() != nullptr) {
    keeper()->settle();  // the keeper may still have descriptors of memory that was released
    status = create();
  }
  while (status.error() == ENOSPC && may_release && pinned_ && pinned_->release_one()) status = create();
  if (status.ok()) return created;
  taken_.release(bytes);
  return status;
}

Status GpuDevice::adopt_physical(int descriptor, std::uint64_t bytes, PhysicalHandle* handle) {
  TRY(import_physical(descriptor, handle));
  taken_.add(bytes);  // whatever the cap is now: it is there already
  if (pinned_) pinned_->trim();
  return {};
}

void GpuDevice::return_physical(PhysicalHandle handle, std::uint64_t bytes, bool reusable, DeviceAddress address) {
  HostTierPool* const pool = reusable && (health().ok() || address != 0) ? pool_of(bytes) : nullptr;
  if (pool == nullptr && (!reusable || !health().ok() || !spares_.keep(handle, bytes))) release({handle});
  taken_.release(bytes);
  if (pool != nullptr) {
    pool->give(handle, address);
  } else if (pinned_ && bytes != 0 && health().ok()) {
    pinned_->refill();
  }
}

// Also on a device out of service: the vendor releases what it still can.
void GpuDevice::release(const std::vector<PhysicalHandle>& handles) {
  const Current current(*this);
  for (const PhysicalHandle handle : handles) functions().memory_release(handle);
}

Status GpuDevice::acquire_plain(std::uint64_t bytes, DeviceAddress* base) {
  TRY(take(bytes));
  Status status = full_if_out_of_memory(call(functions().memory_allocate, base, bytes));
  if (!status.ok()) taken_.release(bytes);
  return status;
}

void GpuDevice::return_plain(DeviceAddress base, std::uint64_t bytes) {
  const Current current(*this);
  functions().memory_free(base);
  taken_.release(bytes);
}

Status GpuDevice::zero_piece(PhysicalHandle piece, DeviceAddress address) {
  const Current current(*this);
  TRY(current.status());
  const Extent whole{0, HostTierPool::kPieceBytes};
  if (address != 0) return zero_spans(address, std::span(&whole, 1));
  DeviceAddress base = 0;
  TRY(call(functions().address_reserve, &base, HostTierPool::kPieceBytes, 0, 0, 0));
  Status status = map(base, HostTierPool::kPieceBytes, piece);
  if (status.ok()) {
    status = allow(base, HostTierPool::kPieceBytes);
    if (status.ok()) status = zero_spans(base, std::span(&whole, 1));
    Status hidden = call(functions().memory_unmap, base, HostTierPool::kPieceBytes);
    if (!hidden.ok()) hidden = call(functions().memory_unmap, base, HostTierPool::kPieceBytes);
    if (!hidden.ok()) return hidden;  // the addresses stay with what they show
  }
  functions().address_free(base, HostTierPool::kPieceBytes);
  return status;
}

Status GpuDevice::zero_spans(DeviceAddress base, std::span<const Extent> spans) {
  SynchronousWork work(*this);
  TRY(work.status());
  for (const Extent& span : spans) {
    TRY(call(functions().fill, base + span.offset, 0, span.bytes, work.get()));
  }
  return work.finish();
}

Status GpuDevice::map(DeviceAddress address, std::uint64_t bytes, PhysicalHandle handle) {
  return full_if_out_of_memory(call_for_others(functions().memory_map, address, bytes, 0, handle, 0));
}

Status GpuDevice::allow(DeviceAddress address, std::uint64_t bytes) {
  Status status =
      full_if_out_of_memory(call(functions().memory_set_access, address, bytes, access_.data(), access_.size()));
  if (status.device_code() != api::kInvalidValue) return status;
  return {status.error(), status.message() + access_remedy_, status.device_code()};
}

Status GpuDevice::allow_own(DeviceAddress address, std::uint64_t bytes, bool writable) {
  std::vector<api::Access> own{{{api::kLocationDevice, ordinal_}, api::kAccessReadWrite}};
  if (info_.host_tier) own.push_back({allocation_.location, api::kAccessReadWrite});
  for (api::Access& each : own) each.flags = writable ? api::kAccessReadWrite : api::kAccessRead;
  return full_if_out_of_memory(call_for_others(functions().memory_set_access, address, bytes, own.data(), own.size()));
}

void GpuDevice::unmap_when_idle(std::shared_ptr<AddressRange> range) {
  std::vector<std::shared_ptr<AddressRange>> ended;  // destroyed without the lock
  {
    const std::scoped_lock lock(unmap_mutex_);
    ended.swap(unmap_later_);
  }
  ended.push_back(std::move(range));
  if (complete_all().ok() || !health().ok()) return;
  const std::scoped_lock lock(unmap_mutex_);
  std::move(ended.begin(), ended.end(), std::back_inserter(unmap_later_));
}

Status GpuDevice::import_physical(int descriptor, PhysicalHandle* handle) {
  // Passed by value, as a pointer.
  void* const value = reinterpret_cast<void*>(static_cast<std::uintptr_t>(descriptor));
  return call_for_others(functions().memory_import, handle, value, api::kHandleDescriptor);
}

// ---- streams and synchronous copies ----

// The thread's capture mode stays relaxed, since the thread is ours: see Current.
Status GpuDevice::bind_thread() {
  int mode = api::kCaptureRelaxed;
  if (const auto& exchange = functions().exchange_capture_mode) exchange(&mode);
  return bind();
}

Result<std::unique_ptr<Stream>> GpuDevice::create_stream() { return GpuStream::create(shared_from_this()); }

Result<std::unique_ptr<Event>> GpuDevice::create_event() { return GpuEvent::create(shared_from_this()); }

Result<std::unique_ptr<Stream>> GpuDevice::adopt_stream(NativeStream native, bool certain) {
  const auto stream = reinterpret_cast<api::Stream>(native);
  TRY(health());
  TRY(check_stream(stream, certain));
  return std::unique_ptr<Stream>(std::make_unique<GpuStream>(shared_from_this(), stream, /*owned=*/false));
}

Status GpuDevice::check_stream(api::Stream stream, bool certain) {
  const bool default_stream = reinterpret_cast<std::uintptr_t>(stream) <= api::kLastDefaultStream;
  if (certain && (default_stream || !reports_streams())) return {};
  if (!default_stream && !reports_streams()) {
    return {EINVAL,
            std::string(library_->software()) + " does not report the device of a stream: say which device it is"};
  }
  // Asked without making the device current, which would answer for a default stream.
  const std::optional<Current> current =
      default_stream ? std::optional<Current>() : std::optional<Current>(std::in_place, *this);
  if (current && !current->status().ok()) return current->status();
  const bool own = TRY(owns(stream, default_stream));
  return own ? Status{} : Status{EXDEV, "the stream is not one of " + name()};
}

Result<api::Stream> GpuDevice::borrow_stream() {
  {
    const std::scoped_lock lock(streams_mutex_);
    if (!idle_streams_.empty()) {
      api::Stream stream = idle_streams_.back();
      idle_streams_.pop_back();
      return stream;
    }
  }
  api::Stream stream = nullptr;
  TRY(call(functions().stream_create, &stream, api::kStreamNonBlocking));
  return stream;
}

void GpuDevice::return_stream(api::Stream stream) {
  const std::scoped_lock lock(streams_mutex_);
  idle_streams_.push_back(stream);
}

// Queues on a stream of the device's own and waits for it.
template <typename Queue>
Status GpuDevice::run(Queue queue) {
  SynchronousWork work(*this);
  TRY(work.status());
  Status status = queue(work.get());
  return status.ok() ? work.finish() : status;
}

// Freeing memory waits for all that is queued on the device, by any stream. The vendors' function for that fails while
// a program captures a graph, and ends the capture, in each capture mode. So it is called only where the device has no
// byte free.
Status GpuDevice::complete_all() {
  const Current current(*this);
  TRY(current.status());
  DeviceAddress byte = 0;
  if (functions().memory_allocate(&byte, 1) == api::kSuccess) {
    return check(functions().memory_free.symbol(), functions().memory_free(byte));
  }
  return check(functions().synchronize.symbol(), functions().synchronize());
}

Status GpuDevice::copy_in(DeviceAddress destination, const void* source, std::size_t bytes) {
  if (bytes == 0) return health();
  return run([&](api::Stream stream) { return call(functions().copy_to_device, destination, source, bytes, stream); });
}

Status GpuDevice::copy_out(void* destination, DeviceAddress source, std::size_t bytes) {
  if (bytes == 0) return health();
  return run([&](api::Stream stream) { return call(functions().copy_to_host, destination, source, bytes, stream); });
}

Status GpuDevice::copy_within(DeviceAddress destination, DeviceAddress source, std::size_t bytes) {
  if (bytes == 0) return health();
  return run([&](api::Stream stream) { return call(functions().copy_on_device, destination, source, bytes, stream); });
}

Status GpuDevice::zero(DeviceAddress destination, std::size_t bytes) {
  if (bytes == 0) return health();
  return run([&](api::Stream stream) { return call(functions().fill, destination, 0, bytes, stream); });
}

// ---- peers ----

Result<bool> GpuDevice::reaches(GpuDevice& peer) {
  if (!functions().device_can_access_peer) return false;
  int reachable = 0;
  TRY(call(functions().device_can_access_peer, &reachable, ordinal_, peer.ordinal_));
  return reachable != 0;
}

Status GpuDevice::copy_to_peer(Device& peer, DeviceAddress destination, DeviceAddress source, std::size_t bytes) {
  if (&peer == this) return copy_within(destination, source, bytes);
  if (typeid(peer) != typeid(*this)) return {EOPNOTSUPP, "the other device belongs to another driver"};
  auto& remote = static_cast<GpuDevice&>(peer);
  TRY(remote.health());
  if (remote.info_.host_tier) return copy_out(reinterpret_cast<void*>(destination), source, bytes);
  if (info_.host_tier) return remote.copy_in(destination, reinterpret_cast<const void*>(source), bytes);
  bool reachable = TRY(reaches(remote));
  if (!reachable) return {EOPNOTSUPP, name() + " has no direct way to " + remote.name()};
  // Virtual memory gives peers access when it is mapped.
  if (!remote.virtual_memory()) {
    const std::scoped_lock lock(peers_mutex_);
    if (!enabled_peers_.contains(remote.ordinal_)) {
      const Current current(*this);
      TRY(current.status().ok() ? enable_peer(remote) : current.status());
      enabled_peers_.insert(remote.ordinal_);
    }
  }
  if (bytes == 0) return health();
  return run([&](api::Stream stream) { return queue_copy_to_peer(remote, destination, source, bytes, stream); });
}

// ---- pinned host memory ----

Status GpuDevice::pin(void* address, std::size_t bytes) {
  const Current current(*this);
  TRY(current.status());
  return call(functions().host_register, address, bytes, api::kHostRegisterPortable);
}

Status GpuDevice::unpin(void* address) {
  const Current current(*this);
  TRY(current.status());
  return call(functions().host_unregister, address);
}

Result<DeviceAddress> GpuDevice::address_of_pinned(void* address) {
  const Current current(*this);
  TRY(current.status());
  // Without the function, host and device share their addresses.
  if (!functions().host_address) return reinterpret_cast<DeviceAddress>(address);
  DeviceAddress found = 0;
  TRY(call(functions().host_address, &found, address, 0));
  return found;
}

Result<PinnedHostRange> GpuDevice::pinned_range(const void* address) {
  const Current current(*this);
  TRY(current.status());
  const auto& attribute_of = functions().pointer_attribute;
  if (!attribute_of) return lacks("does not report what is pinned", attribute_of.symbol());
  const auto at = reinterpret_cast<DeviceAddress>(address);
  PinnedHostRange range;
  std::size_t bytes = 0;
  TRY(call(attribute_of, &range.start, api::kPointerRangeStart, at));
  TRY(call(attribute_of, &bytes, api::kPointerRangeBytes, at));
  range.end = range.start + bytes;
  return range;
}

// ---- guards ----

Current::Current(GpuDevice& device) : device_(device), status_(device.health()) {
  if (!status_.ok()) return;
  Result<bool> changed = device_.make_current(&before_);
  status_ = changed.status();
  changed_ = changed.ok() && changed.value();
  if (const auto& exchange = device_.functions().exchange_capture_mode) exchange(&capture_mode_);
}

Current::~Current() {
  if (capture_mode_ != api::kCaptureRelaxed) device_.functions().exchange_capture_mode(&capture_mode_);
  if (changed_) device_.restore(before_);
}

SynchronousWork::SynchronousWork(GpuDevice& device) : device_(device), current_(device), status_(current_.status()) {
  if (!status_.ok()) return;
  Result<api::Stream> stream = device_.borrow_stream();
  if (stream.ok()) {
    stream_ = stream.value();
  } else {
    status_ = stream.status();
  }
}

SynchronousWork::~SynchronousWork() {
  if (stream_ == nullptr) return;
  if (!finished_) static_cast<void>(finish());
  device_.return_stream(stream_);
}

Status SynchronousWork::finish() {
  finished_ = true;
  return device_.call(device_.functions().stream_synchronize, stream_);
}

}  // namespace gpufs::gpu
