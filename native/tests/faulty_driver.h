// A driver for tests: the host's devices, with calls that are counted and that fail as planned.
// Owned by the test; the plan is shared by every device and memory of the driver.
// Any thread may call any function; the plan is set while nothing runs.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "drivers/driver.h"
#include "streams.h"

namespace gpufs::testing {

// The n-th call from now (1: the next) and `times - 1` after it fail; 0: none does.
class Fault {
 public:
  void at(int call, int times = 1, int error = EIO) {
    calls_ = 0;
    first_ = call;
    last_ = call == 0 ? 0 : call + times - 1;
    error_ = error;
  }
  void clear() { at(0); }
  [[nodiscard]] int calls() const { return calls_; }
  Status next(const char* what) {
    const int call = ++calls_;
    if (first_ != 0 && call >= first_ && call <= last_) return Status(error_, std::string("planned: ") + what, 700);
    return {};
  }
  // What work() returns, unless this call fails.
  template <typename Work>
  auto next(const char* what, Work work) -> decltype(work()) {
    Status status = next(what);
    if (!status.ok()) return status;
    return work();
  }

 private:
  std::atomic<int> calls_{0};
  std::atomic<int> first_{0};
  std::atomic<int> last_{0};
  std::atomic<int> error_{EIO};
};

struct FaultPlan {
  Fault create_memory, reserve, populate, sharing, copy_in, copy_within, zero, peer, create_event, create_stream,
      stream_copy, synchronize, record, query, call, wait_for_value, pin, unpin;
  bool reserve_copies = false;
  bool cpu_addressable = true;
  bool waits_for_values = true;
  std::atomic<bool> lags{false};     // an event is reported done at its tenth query at the earliest
  std::atomic<bool> prompt{false};   // an event is done at its first query
  std::uint64_t span = 0;            // release_span() widens to multiples of this
  std::function<void()> on_release;  // called before a part of memory is released
  std::function<void()> on_free;     // called before all of it is
  std::function<void()> on_copy;     // called before a copy within a device or to another one
  std::function<Status()> on_pin, on_unpin;
  bool pins_read_only = true;
  bool reports_pinned_ranges = true;
  std::int64_t seen_at = 0;  // distance from pinned memory to the device's addresses of it; -1: it has none
  std::atomic<int> memories{0};
};

class FaultyMemory : public DeviceMemory {
 public:
  FaultyMemory(std::unique_ptr<DeviceMemory> inner, std::shared_ptr<FaultPlan> plan)
      : inner_(std::move(inner)), plan_(std::move(plan)) {
    ++plan_->memories;
  }
  ~FaultyMemory() override {
    if (plan_->on_free) plan_->on_free();
    --plan_->memories;
  }
  Result<std::shared_ptr<AddressRange>> reserve(std::uint64_t bytes, std::span<const Extent> populated) override {
    return plan_->reserve.next("reserve", [&] { return inner_->reserve(bytes, populated); });
  }
  Status populate_all(std::span<const Extent> spans, Wait wait) override {
    for (std::size_t i = 0; i < spans.size(); ++i) {
      Status status = plan_->populate.next("populate");
      if (status.ok()) status = inner_->populate(spans[i].offset, spans[i].bytes, wait);
      if (status.ok()) continue;
      inner_->release_all(spans.first(i));
      return status;
    }
    return {};
  }
  void release_all(std::span<const Extent> spans) override {
    if (plan_->on_release) plan_->on_release();
    inner_->release_all(spans);
  }
  [[nodiscard]] Extent release_span(std::uint64_t offset, std::uint64_t bytes) override {
    if (plan_->span == 0) return {offset, bytes};
    const std::uint64_t start = offset / plan_->span * plan_->span;
    const std::uint64_t end = (offset + bytes + plan_->span - 1) / plan_->span * plan_->span;
    return {start, end - start};
  }
  Result<std::vector<ExportedMemory>> export_memory(std::uint64_t from, std::uint64_t end, std::size_t capacity,
                                                    bool writable) override {
    return inner_->export_memory(from, end, capacity, writable);
  }

 private:
  std::unique_ptr<DeviceMemory> inner_;
  std::shared_ptr<FaultPlan> plan_;
};

class FaultyEvent : public Event {
 public:
  FaultyEvent(std::unique_ptr<Event> inner, std::shared_ptr<FaultPlan> plan)
      : inner_(std::move(inner)), plan_(std::move(plan)) {}
  Result<bool> query() override {
    Status status = plan_->query.next("query");
    if (!status.ok()) return status;
    if (plan_->lags && ++queries_ < 10) return false;
    if (plan_->prompt) (void)finished(*inner_);
    return inner_->query();
  }
  [[nodiscard]] Event& inner() {
    queries_ = 0;
    return *inner_;
  }

 private:
  std::unique_ptr<Event> inner_;
  std::shared_ptr<FaultPlan> plan_;
  std::atomic<int> queries_{0};  // since it was recorded
};

class FaultyStream : public Stream {
 public:
  FaultyStream(std::unique_ptr<Stream> inner, std::shared_ptr<FaultPlan> plan)
      : inner_(std::move(inner)), plan_(std::move(plan)) {}
  Status copy(CopyDirection direction, std::span<const HostCopy> copies) override {
    for (std::size_t at = 0; at < copies.size(); ++at) {
      Status status =
          plan_->stream_copy.next("stream copy", [&] { return inner_->copy(direction, copies.subspan(at, 1)); });
      if (!status.ok()) return status;
    }
    return {};
  }
  Status fill_zero(DeviceAddress to, std::size_t n) override { return inner_->fill_zero(to, n); }
  Status record(Event& event) override {
    return plan_->record.next("record", [&] { return inner_->record(static_cast<FaultyEvent&>(event).inner()); });
  }
  Status call(HostFunction function, void* argument) override {
    Status status = plan_->call.next("call");
    if (status.error() == ENOMEM) throw std::bad_alloc();
    return status.ok() ? inner_->call(function, argument) : status;
  }
  Status wait_for_value(DeviceAddress cell, std::uint32_t value) override {
    if (!plan_->waits_for_values) return Status(EOPNOTSUPP, "planned: streams do not wait for values");
    return plan_->wait_for_value.next("wait_for_value", [&] { return inner_->wait_for_value(cell, value); });
  }
  [[nodiscard]] NativeStream native() const override { return inner_->native(); }
  Status synchronize() override {
    return plan_->synchronize.next("synchronize", [&] { return inner_->synchronize(); });
  }

 private:
  std::unique_ptr<Stream> inner_;
  std::shared_ptr<FaultPlan> plan_;
};

class FaultyDevice : public Device {
 public:
  FaultyDevice(std::shared_ptr<Device> inner, std::shared_ptr<FaultPlan> plan)
      : inner_(std::move(inner)), plan_(std::move(plan)), info_(inner_->info()) {
    info_.reserve_copies = plan_->reserve_copies;
    info_.cpu_addressable = plan_->cpu_addressable;
  }
  [[nodiscard]] const DeviceInfo& info() const override { return info_; }
  Result<MemoryInfo> memory(Wait wait) override { return inner_->memory(wait); }
  Status bind_thread() override { return {}; }
  Status health() override { return {}; }
  Result<std::unique_ptr<DeviceMemory>> create_memory() override {
    return plan_->create_memory.next("create_memory", [&] { return wrap<FaultyMemory>(inner_->create_memory()); });
  }
  Status check_sharing() override { return plan_->sharing.next("sharing"); }
  Result<std::unique_ptr<ImportedRange>> create_import(std::uint64_t capacity, ImportAccess access) override {
    return inner_->create_import(capacity, access);
  }
  Result<std::unique_ptr<Stream>> create_stream() override {
    return plan_->create_stream.next("create_stream", [&] { return wrap<FaultyStream>(inner_->create_stream()); });
  }
  Result<std::unique_ptr<Event>> create_event() override {
    return plan_->create_event.next("create_event", [&] { return wrap<FaultyEvent>(inner_->create_event()); });
  }
  Result<std::unique_ptr<Stream>> adopt_stream(NativeStream native, bool certain) override {
    return wrap<FaultyStream>(inner_->adopt_stream(native, certain));
  }
  Status copy_in(DeviceAddress to, const void* from, std::size_t n) override {
    Status status = plan_->copy_in.next("copy_in");
    if (status.ok()) return inner_->copy_in(to, from, n);
    // A failing copy may have moved a part.
    (void)inner_->copy_in(to, from, n / 2);
    return status;
  }
  Status copy_out(void* to, DeviceAddress from, std::size_t n) override { return inner_->copy_out(to, from, n); }
  Status copy_within(DeviceAddress to, DeviceAddress from, std::size_t n) override {
    if (plan_->on_copy) plan_->on_copy();
    return plan_->copy_within.next("copy_within", [&] { return inner_->copy_within(to, from, n); });
  }
  Status zero(DeviceAddress to, std::size_t n) override {
    return plan_->zero.next("zero", [&] { return inner_->zero(to, n); });
  }
  Status copy_to_peer(Device& peer, DeviceAddress to, DeviceAddress from, std::size_t n) override {
    if (plan_->on_copy) plan_->on_copy();
    return plan_->peer.next(
        "copy_to_peer", [&] { return inner_->copy_to_peer(*static_cast<FaultyDevice&>(peer).inner_, to, from, n); });
  }
  Status pin(void* address, std::size_t n) override {
    Status status = plan_->pin.next("pin");
    if (status.ok() && plan_->on_pin) status = plan_->on_pin();
    return status.ok() ? inner_->pin(address, n) : status;
  }
  Status pin_read_only(const void* address, std::size_t n) override {
    if (!plan_->pins_read_only) return Status(EOPNOTSUPP, "planned: no read-only pinning");
    return pin(const_cast<void*>(address), n);
  }
  Status unpin(void* address) override {
    Status status = plan_->unpin.next("unpin");
    if (status.ok() && plan_->on_unpin) status = plan_->on_unpin();
    return status.ok() ? inner_->unpin(address) : status;
  }
  Result<PinnedHostRange> pinned_range(const void* address) override {
    if (!plan_->reports_pinned_ranges) return Status(EOPNOTSUPP, "planned: pinned ranges are not reported");
    return inner_->pinned_range(address);
  }
  Result<DeviceAddress> address_of_pinned(void* address) override {
    if (plan_->seen_at < 0) return Status(EOPNOTSUPP, "planned: no device address");
    return reinterpret_cast<DeviceAddress>(address) + static_cast<DeviceAddress>(plan_->seen_at);
  }

 private:
  template <typename Faulty, typename T>
  Result<std::unique_ptr<T>> wrap(Result<std::unique_ptr<T>> made) {
    if (!made.ok()) return made.status();
    return std::unique_ptr<T>(std::make_unique<Faulty>(made.take(), plan_));
  }

  std::shared_ptr<Device> inner_;
  std::shared_ptr<FaultPlan> plan_;
  DeviceInfo info_;
};

inline std::shared_ptr<Driver> make_faulty_driver(const std::shared_ptr<FaultPlan>& plan, std::uint64_t memory_bytes,
                                                  int devices = 1) {
  DriverOptions options;
  options.devices = devices;
  options.memory_bytes = memory_bytes;
  Result<std::unique_ptr<Driver>> host = open_driver("host", options);
  if (!host.ok()) return nullptr;
  std::vector<std::shared_ptr<Device>> faulty;
  for (const auto& device : host.value()->devices()) faulty.push_back(std::make_shared<FaultyDevice>(device, plan));
  return std::make_shared<Driver>("host", std::move(faulty));
}

}  // namespace gpufs::testing
