#include "abi/engine.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <sstream>
#include <string>
#include <utility>

#include "abi/barrier.h"
#include "abi/handles.h"
#include "async/async_engine.h"
#include "base/log.h"
#include "fuse/mount.h"
#include "io/fastpath.h"
#include "io/transfer_engine.h"
#include "memory/slab_pool.h"
#include "observe/trace.h"

namespace gpufs {

static_assert(static_cast<int>(LockPolicy::kMandatory) == GPUFS_LOCK_MANDATORY);
static_assert(static_cast<int>(HipMemory::kPlain) == GPUFS_HIP_MEMORY_PLAIN);

Result<std::shared_ptr<Engine>> Engine::open(const gpufs_engine_options& options) {
  constexpr std::uint64_t kLargestSlabFile = std::uint64_t{1} << 20;
  if (options.slab_file_bytes > kLargestSlabFile) return Status(EINVAL, "slab_file_bytes is more than 1 MiB");
  DriverOptions driver_options{options.devices,
                               options.memory_bytes,
                               std::chrono::milliseconds(options.keep_freed_ms),
                               static_cast<HipMemory>(options.hip_memory),
                               {},
                               options.host_memory_bytes};
  std::istringstream chosen(options.chosen_devices != nullptr ? options.chosen_devices : "");
  for (std::string device; std::getline(chosen, device, ',');) driver_options.chosen.push_back(device);
  std::unique_ptr<Driver> driver = TRY(open_driver(options.driver, driver_options));
  const std::string statistics_path = options.statistics_path != nullptr ? options.statistics_path : "";
  std::shared_ptr<Engine> engine(new Engine());
  engine->driver_ = std::move(driver);
  Result<std::shared_ptr<observe::Region>> counters =
      observe::Region::create(engine->driver_->devices().size(), statistics_path);
  if (!counters.ok() && !statistics_path.empty()) {
    log_warning("the counters end with this process: ", counters.status().message());
    counters = observe::Region::create(engine->driver_->devices().size(), "");
  }
  if (!counters.ok()) return counters.status();
  engine->counters_ = counters.take();
  engine->host_locks_ = std::make_shared<HostLocks>(engine->driver_, static_cast<LockPolicy>(options.lock_policy));
  for (std::size_t index = 0; index < engine->driver_->devices().size(); ++index) {
    std::shared_ptr<DeviceContext> device = TRY(DeviceContext::create(engine->driver_, index));
    device->set_host_locks(engine->host_locks_);
    device->set_counters(observe::DeviceCounters(engine->counters_, index));
    if (options.slab_file_bytes > 0) {
      Result<std::shared_ptr<SlabPool>> slabs = SlabPool::create(*device, options.slab_file_bytes);
      if (slabs.ok()) {
        device->set_slabs(slabs.take());
      } else {
        log_info("small files do not share slabs: ", slabs.status().message());
      }
    }
    engine->devices_.push_back(std::move(device));
  }
  return engine;
}

Result<std::shared_ptr<DeviceContext>> Engine::device(std::int32_t index) const {
  if (index < 0 || static_cast<std::size_t>(index) >= devices_.size()) {
    return Status(EINVAL, "no device " + std::to_string(index) + ": there are " + std::to_string(devices_.size()));
  }
  return devices_[static_cast<std::size_t>(index)];
}

Result<std::shared_ptr<TransferEngine>> Engine::make_transfers_locked(const IoOptions& options) {
  if (closed_) return Status(ESHUTDOWN, "the engine is closed");
  Result<std::shared_ptr<TransferEngine>> made =
      TransferEngine::create(options, make_fastpath(driver_->name(), options.file_systems));
  if (made.ok()) transfers_ = made.value();
  return made;
}

Result<std::shared_ptr<TransferEngine>> Engine::transfers() {
  const std::lock_guard lock(mutex_);
  if (transfers_) return transfers_;
  return make_transfers_locked({});
}

Status Engine::configure_transfers(const IoOptions& options) {
  const std::lock_guard lock(mutex_);
  if (transfers_) return Status(EBUSY, "transfers of this engine have been used already");
  return make_transfers_locked(options).status();
}

Result<std::shared_ptr<AsyncEngine>> Engine::make_operations_locked(const AsyncOptions& options) {
  if (!transfers_) {
    if (Status status = make_transfers_locked({}).status(); !status.ok()) return status;
  }
  operations_ = std::make_shared<AsyncEngine>(options, transfers_, devices_);
  return operations_;
}

Result<std::shared_ptr<AsyncEngine>> Engine::operations() {
  const std::lock_guard lock(mutex_);
  if (operations_) return operations_;
  return make_operations_locked({});
}

Status Engine::configure_operations(const AsyncOptions& options) {
  const std::lock_guard lock(mutex_);
  if (operations_) return Status(EBUSY, "streams or queues of this engine have been used already");
  return make_operations_locked(options).status();
}

void Engine::publish_of(std::weak_ptr<fuse::Mount> mount) {
  const std::lock_guard lock(mutex_);
  mount_ = std::move(mount);
}

void Engine::publish_gauges() {
  std::shared_ptr<TransferEngine> transfers;
  std::shared_ptr<fuse::Mount> mount;
  {
    const std::lock_guard lock(mutex_);
    transfers = transfers_;
    mount = mount_.lock();
  }
  if (mount) mount->publish_gauges();
  observe::EngineGauges& gauges = counters_->gauges();
  if (transfers) {
    const BouncePool::Usage pool = transfers->bounce_pool()->statistics();
    set(gauges.transfers_active, transfers->active());
    set(gauges.bounce_slot_bytes, pool.slot_bytes);
    set(gauges.bounce_capacity_bytes, pool.capacity_bytes);
    set(gauges.bounce_pinned_bytes, pool.pinned_bytes);
    set(gauges.bounce_used_bytes, pool.used_bytes);
    set(counters_->counters().bounce_waits, pool.waits);
    set(counters_->counters().bounce_pin_failures, pool.pin_failures);
  }
  const HostLocks::Totals locked = host_locks_->statistics();
  set(gauges.locked_bytes, locked.bytes);
  set(gauges.locked_ranges, locked.ranges);
  set(gauges.request_pinned_bytes, locked.mount_bytes);
  for (std::size_t index = 0; index < devices_.size(); ++index) {
    DeviceContext& device = *devices_[index];
    observe::DeviceGauges& own = counters_->gauges(index);
    set(own.total_bytes, device.info().total_bytes);
    set(own.held_bytes, device.held_bytes());
    set(own.health_error, static_cast<std::uint64_t>(device.device().health().error()));
    set(own.events_existing, device.events().existing());
    set(own.events_idle, device.events().idle());
    set(own.streams_existing, device.streams().existing());
    set(own.streams_idle, device.streams().idle());
  }
  counters_->touch();
}

Status Engine::close() {
  std::shared_ptr<TransferEngine> transfers;
  std::shared_ptr<AsyncEngine> operations;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    transfers.swap(transfers_);
    operations.swap(operations_);
  }
  // The operations first, which use the transfers; both before the mounts, so that none of those waits for a copy.
  if (operations) operations->shutdown();
  if (transfers) transfers->shutdown();
  Status status = operations == nullptr ? Status{} : operations->released_early();
  const std::size_t left = transfers == nullptr ? 0 : transfers->left_in_use();
  if (left == 0) return status;
  const std::string text = "the memory of " + std::to_string(left) + " operations and transfers is still in use";
  return Status(ETIMEDOUT, status.ok() ? text : status.message() + "; " + text);
}

namespace {

// Copies the text as far as it fits, always terminated.
template <std::size_t N>
void fill(char (&field)[N], const std::string& text) {
  const std::size_t length = std::min(text.size(), N - 1);
  std::memcpy(field, text.data(), length);
  std::fill(field + length, std::end(field), '\0');
}

}  // namespace

extern "C" {

gpufs_status gpufs_engine_open(const gpufs_engine_options* options, gpufs_handle* engine) {
  return catch_all([&] { return open_handle(Engine::open(*options), 0, engine); });
}

gpufs_status gpufs_engine_close(gpufs_handle engine) {
  return catch_all([&]() -> Status {
    std::shared_ptr<Engine> taken = TRY(HandleTable::instance().take<Engine>(engine));
    Status closed = taken->close();
    HandleTable::instance().close_owned(engine);
    // After the mounts, whose request memory is locked too.
    taken->host_locks()->close();
    return closed;
  });
}

gpufs_status gpufs_statistics_describe(gpufs_handle engine, const char* json) {
  return with_handle<Engine>(engine, [&](Engine& found) -> Status { return found.counters().describe(json); });
}

gpufs_status gpufs_statistics_publish(gpufs_handle engine) {
  return with_handle<Engine>(engine, [&](Engine& found) { found.publish_gauges(); });
}

gpufs_status gpufs_statistics_read(gpufs_handle engine, const char** data, uint64_t* bytes) {
  return with_handle<Engine>(engine, [&](Engine& found) {
    thread_local std::string last;
    found.publish_gauges();
    last = found.counters().bytes();
    *data = last.data();
    *bytes = last.size();
  });
}

gpufs_status gpufs_trace_start(void) {
  return catch_all([&]() -> Status { return observe::trace::start(); });
}

gpufs_status gpufs_trace_stop(void) {
  return catch_all([&]() { observe::trace::stop(); });
}

gpufs_status gpufs_trace_read(void* data, uint64_t capacity, uint64_t* bytes) {
  return catch_all([&]() {
    *bytes = observe::trace::read({static_cast<std::byte*>(data), static_cast<std::size_t>(capacity)});
  });
}

gpufs_status gpufs_engine_device_count(gpufs_handle engine, int32_t* count) {
  return with_handle<Engine>(engine, [&](Engine& found) { *count = static_cast<int32_t>(found.device_count()); });
}

gpufs_status gpufs_engine_device_info(gpufs_handle engine, int32_t device, gpufs_device_info* info) {
  return with_handle<Engine>(engine, [&](Engine& found) -> Status {
    const std::shared_ptr<DeviceContext> context = TRY(found.device(device));
    const DeviceInfo& known = context->info();
    fill(info->name, known.name);
    fill(info->pci_address, known.pci_address);
    fill(info->uuid, known.uuid);
    info->index = known.index;
    info->numa_node = known.numa_node;
    info->total_bytes = known.total_bytes;
    info->granule = known.granule;
    info->slot_bytes = context->slabs() != nullptr ? context->slabs()->largest() : 0;
    info->cpu_addressable = known.cpu_addressable ? 1 : 0;
    info->fastpath_memory = known.files_reach_memory ? 1 : 0;
    info->host_tier = known.host_tier ? 1 : 0;
    info->keeps_memory = context->device().check_keeping().ok() ? 1 : 0;
    return {};
  });
}

gpufs_status gpufs_engine_device_check(gpufs_handle engine, int32_t device) {
  return with_handle<Engine>(engine, [&](Engine& found) -> Status {
    const Result<std::shared_ptr<DeviceContext>> context = found.device(device);
    return context.ok() ? context.value()->device().health() : context.status();
  });
}

gpufs_status gpufs_engine_device_memory(gpufs_handle engine, int32_t device, gpufs_device_memory* memory) {
  return with_handle<Engine>(engine, [&](Engine& found) -> Status {
    const std::shared_ptr<DeviceContext> context = TRY(found.device(device));
    *memory = {};
    const Status health = context->device().health();
    memory->health_error = health.error();
    memory->health_device_code = health.device_code();
    Result<MemoryInfo> now = context->memory();
    if (now.ok()) {
      memory->total_bytes = now.value().total_bytes;
      // The driver has memory back a moment before nobody is charged for it any more, which is when it counts as free.
      memory->held_bytes = std::min(context->held_bytes(), memory->total_bytes);
      memory->free_bytes = std::min(now.value().free_bytes, memory->total_bytes - memory->held_bytes);
      return {};
    }
    memory->held_bytes = context->held_bytes();
    // A device that is out of service answers no more, and the caller wants to see its health.
    memory->total_bytes = context->info().total_bytes;
    return health.ok() ? now.status() : Status();
  });
}

gpufs_status gpufs_host_lock(gpufs_handle engine, const void* address, uint64_t bytes, int32_t read_only) {
  return with_handle<Engine>(engine, [&](Engine& found) -> Status {
    return found.host_locks()->lock(address, bytes,
                                    read_only != 0 ? HostLocks::Access::kSource : HostLocks::Access::kBoth);
  });
}

gpufs_status gpufs_host_unlock(gpufs_handle engine, const void* address, uint64_t bytes) {
  return with_handle<Engine>(engine,
                             [&](Engine& found) -> Status { return found.host_locks()->unlock(address, bytes); });
}

gpufs_status gpufs_host_lock_info_get(gpufs_handle engine, const void* address, uint64_t bytes,
                                      gpufs_host_lock_info* info) {
  return with_handle<Engine>(engine, [&](Engine& found) -> Status {
    const HostLocks::Info known = TRY(found.host_locks()->info(address, bytes));
    *info = {known.foreign ? 1 : 0, known.device_address};
    return {};
  });
}

}  // extern "C"

}  // namespace gpufs
