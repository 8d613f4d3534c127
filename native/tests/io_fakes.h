// Stand-ins for the tests of transfers: a device whose work happens only when somebody waits for it, a buffer over
// plain memory that counts its pins, and file operations that fail as planned. Owned by the test that makes them. Any
// thread may call any function; plans are made before threads use them.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "device/device_context.h"
#include "drivers/driver.h"
#include "io/file_ops.h"
#include "memory/buffer.h"

namespace gpufs::testing {

// What the fake device is to do, and what it has seen.
struct FakePlan {
  bool cpu_addressable = false;
  std::atomic<int> pins_possible{1 << 30};
  std::atomic<int> read_only_pins_possible{0};
  // Whether it is done with something only when that is looked at for the second time.
  std::atomic<bool> lags{true};

  std::atomic<int> pinned{0};
  std::atomic<int> pins{0};
  std::atomic<int> read_only_pins{0};
  std::atomic<int> events{0};
  std::atomic<int> streams{0};
};

// Work is done when it is waited for, in order: what is touched too early or too late shows.
class FakeStream final : public Stream {
 public:
  explicit FakeStream(std::shared_ptr<FakePlan> plan) : plan_(std::move(plan)) { ++plan_->streams; }
  ~FakeStream() override {
    (void)run_until(~std::uint64_t{0});
    --plan_->streams;
  }

  Status copy_to_device(DeviceAddress destination, const void* source, std::size_t bytes) override {
    return copy(reinterpret_cast<void*>(destination), source, bytes);
  }
  Status copy_to_host(void* destination, DeviceAddress source, std::size_t bytes) override {
    return copy(destination, reinterpret_cast<const void*>(source), bytes);
  }
  Status copy_on_device(DeviceAddress, DeviceAddress, std::size_t) override { return Status(ENOSYS, "not here"); }
  Status fill_zero(DeviceAddress, std::size_t) override { return Status(ENOSYS, "not here"); }
  Status record(Event& event) override;
  Status wait(Event&) override { return Status(ENOSYS, "not here"); }
  Status call(HostFunction, void*) override { return Status(ENOSYS, "not here"); }
  Status wait_for_value(DeviceAddress, std::uint32_t) override { return Status(ENOSYS, "not here"); }
  [[nodiscard]] NativeStream native() const override { return 0; }
  Status synchronize() override { return run_until(~std::uint64_t{0}); }

  Status run_until(std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    Status first;
    while (!work_.empty() && done_ < number) {
      const Status status = work_.front()();
      work_.pop_front();
      ++done_;
      if (first.ok() && !status.ok()) first = status;
    }
    return first;
  }
  std::uint64_t queued() {
    const std::lock_guard lock(mutex_);
    return done_ + work_.size();
  }

 private:
  Status copy(void* destination, const void* source, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    work_.push_back([=]() -> Status {
      std::memcpy(destination, source, bytes);
      return {};
    });
    return {};
  }

  std::shared_ptr<FakePlan> plan_;
  std::mutex mutex_;
  std::deque<std::function<Status()>> work_;
  std::uint64_t done_ = 0;
};

class FakeEvent final : public Event {
 public:
  explicit FakeEvent(std::shared_ptr<FakePlan> plan) : plan_(std::move(plan)) { ++plan_->events; }
  ~FakeEvent() override { --plan_->events; }
  Result<bool> query() override {
    if (plan_->lags && !looked_at_.exchange(true)) return false;
    const Status status = synchronize();
    if (!status.ok()) return status;
    return true;
  }
  Status synchronize() override { return stream_ == nullptr ? Status{} : stream_->run_until(number_); }

 private:
  friend class FakeStream;
  std::shared_ptr<FakePlan> plan_;
  FakeStream* stream_ = nullptr;
  std::uint64_t number_ = 0;
  std::atomic<bool> looked_at_{false};  // since it was recorded
};

inline Status FakeStream::record(Event& event) {
  auto& fake = static_cast<FakeEvent&>(event);
  fake.stream_ = this;
  fake.number_ = queued();
  fake.looked_at_ = false;
  return {};
}

class FakeDevice final : public Device {
 public:
  explicit FakeDevice(std::shared_ptr<FakePlan> plan) : plan_(std::move(plan)) {
    info_.name = "fake";
    info_.total_bytes = std::uint64_t{1} << 34;
    info_.granule = 1 << 16;
    info_.cpu_addressable = plan_->cpu_addressable;
  }
  [[nodiscard]] const DeviceInfo& info() const override { return info_; }
  Result<MemoryInfo> memory() override { return MemoryInfo{info_.total_bytes, info_.total_bytes}; }
  Status bind_thread() override { return {}; }
  Status health() override { return {}; }
  Result<std::unique_ptr<DeviceMemory>> create_memory() override { return Status(ENOSYS, "not here"); }
  Result<std::unique_ptr<Stream>> create_stream() override {
    return std::unique_ptr<Stream>(std::make_unique<FakeStream>(plan_));
  }
  Result<std::unique_ptr<Event>> create_event() override {
    return std::unique_ptr<Event>(std::make_unique<FakeEvent>(plan_));
  }
  Result<std::unique_ptr<Stream>> adopt_stream(NativeStream, bool) override { return Status(ENOSYS, "not here"); }
  Result<DeviceAddress> address_of_pinned(void*) override { return Status(ENOSYS, "not here"); }
  Status copy_in(DeviceAddress, const void*, std::size_t) override { return Status(ENOSYS, "not here"); }
  Status copy_out(void*, DeviceAddress, std::size_t) override { return Status(ENOSYS, "not here"); }
  Status copy_within(DeviceAddress, DeviceAddress, std::size_t) override { return Status(ENOSYS, "not here"); }
  Status zero(DeviceAddress, std::size_t) override { return Status(ENOSYS, "not here"); }
  Status copy_to_peer(Device&, DeviceAddress, DeviceAddress, std::size_t) override { return Status(ENOSYS, ""); }
  Status pin(void*, std::size_t) override {
    if (++plan_->pinned > plan_->pins_possible) {
      --plan_->pinned;
      return Status(ENOMEM, "no more memory can be pinned", 2);
    }
    ++plan_->pins;
    return {};
  }
  Status pin_read_only(const void* address, std::size_t bytes) override {
    if (plan_->read_only_pins >= plan_->read_only_pins_possible) return Status(EOPNOTSUPP, "not here");
    // As a real driver does: pages that are missing are read, pages beyond the end of the file are an error.
    std::vector<unsigned char> pages(bytes / 4096 + 1);
    if (::mincore(const_cast<void*>(address), bytes, pages.data()) != 0) return Status(EFAULT, "not mapped");
    ++plan_->read_only_pins;
    ++plan_->pinned;
    return {};
  }
  Status unpin(void*) override {
    --plan_->pinned;
    return {};
  }

 private:
  const std::shared_ptr<FakePlan> plan_;
  DeviceInfo info_;
};

class FakeDriver final : public Driver {
 public:
  explicit FakeDriver(const std::shared_ptr<FakePlan>& plan) { devices_.push_back(std::make_unique<FakeDevice>(plan)); }
  [[nodiscard]] const char* name() const override { return "host"; }
  [[nodiscard]] const std::vector<std::shared_ptr<Device>>& devices() const override { return devices_; }

 private:
  std::vector<std::shared_ptr<Device>> devices_;
};

// Memory that is there from the beginning, with holes where nothing was pinned for writing; what it does with its size
// and its pins is what Buffer promises.
class FakeBuffer final : public Buffer {
 public:
  static constexpr std::uint64_t kGranule = 1 << 16;

  FakeBuffer(std::shared_ptr<DeviceContext> device, std::uint64_t capacity)
      : device_(std::move(device)), capacity_(capacity), populated_(capacity / kGranule + 1) {
    void* const memory =
        ::mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    memory_ = memory == MAP_FAILED ? nullptr : static_cast<std::byte*>(memory);
  }
  ~FakeBuffer() override { ::munmap(memory_, capacity_); }

  [[nodiscard]] const std::shared_ptr<DeviceContext>& device() const override { return device_; }
  [[nodiscard]] std::uint64_t size() const override {
    const std::lock_guard lock(mutex_);
    return size_;
  }
  [[nodiscard]] std::uint64_t bytes_held() const override {
    const std::lock_guard lock(mutex_);
    return static_cast<std::uint64_t>(std::count(populated_.begin(), populated_.end(), true)) * kGranule;
  }
  [[nodiscard]] std::uint64_t limit() const override { return kMaximumBytes; }

  Result<std::unique_ptr<Pinned>> pin_for_read(std::uint64_t offset, std::uint64_t bytes) override {
    const std::lock_guard lock(mutex_);
    const std::uint64_t end = std::min(offset + bytes, size_);
    return make_pin_locked(offset, end > offset ? end - offset : 0);
  }
  using Buffer::pin_for_write;
  Result<std::unique_ptr<Pinned>> pin_for_write(std::uint64_t offset, std::uint64_t bytes, Made*) override {
    const std::lock_guard lock(mutex_);
    if (bytes > 0) {
      for (std::uint64_t g = offset / kGranule; g <= (offset + bytes - 1) / kGranule; ++g) populated_[g] = true;
    }
    return make_pin_locked(offset, bytes);
  }
  Status populate(std::uint64_t offset, std::uint64_t bytes, Made*) override {
    return pin_for_write(offset, bytes).status();
  }
  void release_unused(const Made&) override {}
  void publish(std::uint64_t end) override {
    const std::lock_guard lock(mutex_);
    size_ = std::max(size_, end);
  }
  bool publish_since(std::uint64_t end, std::uint64_t noted) override {
    const std::lock_guard lock(mutex_);
    if (shrinks_ != noted) return false;
    size_ = std::max(size_, end);
    return true;
  }
  [[nodiscard]] std::uint64_t shrinks() const override {
    const std::lock_guard lock(mutex_);
    return shrinks_;
  }
  Status discard_above_size(std::uint64_t offset, std::uint64_t bytes) override {
    const std::lock_guard lock(mutex_);
    const std::uint64_t start = std::max(offset, size_);
    if (start < offset + bytes) std::memset(memory_ + start, 0, offset + bytes - start);
    return {};
  }
  Result<std::size_t> read(std::uint64_t, std::span<std::byte>) override { return Status(ENOSYS, ""); }
  Result<std::size_t> write(std::uint64_t, std::span<const std::byte>) override { return Status(ENOSYS, ""); }
  Result<Gathered> gather(std::uint64_t, std::uint64_t) override { return Status(ENOSYS, ""); }
  Status resize(std::uint64_t size) override {
    const std::lock_guard lock(mutex_);
    if (size <= size_) ++shrinks_;
    size_ = size;
    return {};
  }
  Status allocate(std::uint64_t, std::uint64_t, bool) override { return Status(ENOSYS, ""); }
  Status punch(std::uint64_t offset, std::uint64_t bytes) override {
    const std::lock_guard lock(mutex_);
    std::memset(memory_ + offset, 0, bytes);
    const std::uint64_t end = offset + bytes >= size_ ? populated_.size() * kGranule : offset + bytes;
    for (std::uint64_t g = (offset + kGranule - 1) / kGranule; (g + 1) * kGranule <= end; ++g) populated_[g] = false;
    return {};
  }
  Status zero_range(std::uint64_t, std::uint64_t, bool) override { return Status(ENOSYS, ""); }
  Result<std::uint64_t> seek_data(std::uint64_t offset) override {
    const std::lock_guard lock(mutex_);
    while (offset < size_ && !populated_[offset / kGranule]) offset = (offset / kGranule + 1) * kGranule;
    if (offset >= size_) return Status(ENXIO, "no data at or above the offset");
    return offset;
  }
  Result<std::uint64_t> seek_hole(std::uint64_t offset) override {
    const std::lock_guard lock(mutex_);
    while (offset < size_ && populated_[offset / kGranule]) offset = (offset / kGranule + 1) * kGranule;
    return std::min(offset, size_);
  }
  Result<std::uint64_t> copy_from(Buffer&, std::uint64_t, std::uint64_t, std::uint64_t,
                                  const std::atomic<bool>*) override {
    return Status(ENOSYS, "");
  }
  Result<DeviceAddress> pin_address(std::uint64_t) override { return Status(ENOSYS, ""); }
  Result<std::vector<ExportedMemory>> export_memory() override { return Status(ENOSYS, ""); }

  // For the test: its contents, all of it data.
  std::byte* contents() { return memory_; }
  void fill(const std::vector<std::byte>& bytes) {
    std::memcpy(memory_, bytes.data(), bytes.size());
    for (std::uint64_t g = 0; g * kGranule < bytes.size(); ++g) populated_[g] = true;
    size_ = bytes.size();
  }
  void make_hole(std::uint64_t granule) {
    populated_[granule] = false;
    std::memset(memory_ + granule * kGranule, 0x5a, kGranule);  // must never be read
  }
  std::atomic<int> pins{0};

 private:
  class Pin final : public Pinned {
   public:
    Pin(std::shared_ptr<Buffer> keep, std::atomic<int>& pins) : keep_(std::move(keep)), pins_(pins) { ++pins_; }
    ~Pin() override { --pins_; }
    [[nodiscard]] const std::vector<Piece>& pieces() const override { return pieces_; }
    std::vector<Piece> pieces_;

   private:
    std::shared_ptr<Buffer> keep_;
    std::atomic<int>& pins_;
  };

  Result<std::unique_ptr<Pinned>> make_pin_locked(std::uint64_t offset, std::uint64_t bytes) {
    auto pin = std::make_unique<Pin>(shared_from_this(), pins);
    const std::uint64_t end = offset + bytes;
    while (offset < end) {
      const std::uint64_t next = std::min(end, (offset / kGranule + 1) * kGranule);
      const bool there = populated_[offset / kGranule];
      std::vector<Piece>& pieces = pin->pieces_;
      if (!pieces.empty() && (pieces.back().address != 0) == there) {
        pieces.back().bytes += next - offset;
      } else {
        pieces.push_back({there ? reinterpret_cast<DeviceAddress>(memory_ + offset) : 0, offset, next - offset});
      }
      offset = next;
    }
    return std::unique_ptr<Pinned>(std::move(pin));
  }

  const std::shared_ptr<DeviceContext> device_;
  const std::uint64_t capacity_;
  std::byte* memory_ = nullptr;
  mutable std::mutex mutex_;
  std::vector<bool> populated_;
  std::uint64_t size_ = 0;
  std::uint64_t shrinks_ = 0;
};

// The system's calls, with a test's own in front of some.
class PlannedFileOps : public FileOps {
 public:
  // Returns true if it has done the call itself, with *result and errno.
  using ReadHook = std::function<bool(int fd, void* memory, std::size_t bytes, std::uint64_t offset, ssize_t* result)>;
  using WriteHook =
      std::function<bool(int fd, const void* memory, std::size_t bytes, std::uint64_t offset, ssize_t* result)>;
  ReadHook on_read;
  WriteHook on_write;
  std::atomic<int> page_writes{0};
  std::function<int(bool)> on_sync;  // data only?
  std::function<int(int, std::uint64_t, std::uint64_t)> on_allocate;
  std::function<int(std::uint64_t*)> on_size;
  std::function<int(std::uint64_t, std::uint64_t*)> on_cached;  // bytes asked, bytes found
  std::function<int(std::uint64_t, int, std::uint64_t*)> on_seek;
  std::atomic<int> seeks{0};

  ssize_t read_at(int fd, void* destination, std::size_t bytes, std::uint64_t offset) override {
    ssize_t result = 0;
    if (on_read && on_read(fd, destination, bytes, offset, &result)) return result;
    return FileOps::system().read_at(fd, destination, bytes, offset);
  }
  ssize_t write_at(int fd, const void* source, std::size_t bytes, std::uint64_t offset) override {
    ssize_t result = 0;
    if (on_write && on_write(fd, source, bytes, offset, &result)) return result;
    return FileOps::system().write_at(fd, source, bytes, offset);
  }
  ssize_t write_pages_at(int fd, const void* source, std::size_t bytes, std::uint64_t offset) override {
    ++page_writes;
    ssize_t result = 0;
    if (on_write && on_write(fd, source, bytes, offset, &result)) return result;
    return FileOps::system().write_pages_at(fd, source, bytes, offset);
  }
  int sync(int fd, bool data_only) override {
    return on_sync ? on_sync(data_only) : FileOps::system().sync(fd, data_only);
  }
  int truncate(int fd, std::uint64_t size) override { return FileOps::system().truncate(fd, size); }
  int allocate(int fd, int mode, std::uint64_t offset, std::uint64_t bytes) override {
    return on_allocate ? on_allocate(mode, offset, bytes) : FileOps::system().allocate(fd, mode, offset, bytes);
  }
  int size(int fd, std::uint64_t* bytes) override {
    return on_size ? on_size(bytes) : FileOps::system().size(fd, bytes);
  }
  int stored_bytes(int fd, std::uint64_t* bytes) override { return FileOps::system().stored_bytes(fd, bytes); }
  int seek(int fd, std::uint64_t offset, int whence, std::uint64_t* found) override {
    ++seeks;
    return on_seek ? on_seek(offset, whence, found) : FileOps::system().seek(fd, offset, whence, found);
  }
  int cached_bytes(int fd, std::uint64_t offset, std::uint64_t bytes, std::uint64_t* cached) override {
    return on_cached ? on_cached(bytes, cached) : FileOps::system().cached_bytes(fd, offset, bytes, cached);
  }
};

}  // namespace gpufs::testing
