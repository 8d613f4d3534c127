// The counters of an engine, in memory or in a file that other processes read. docs/internals/statistics-file.md has
// the layout. Ownership: a Region is shared by the engine and the contexts of its devices. Thread-safe: any thread may
// count. Nothing is locked, so each number is exact, but a reading is not a snapshot.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <type_traits>

#include "base/status.h"
#include "base/unique_fd.h"

namespace gpufs {

using Counter = std::atomic<std::uint64_t>;
static_assert(Counter::is_always_lock_free && sizeof(Counter) == 8);
inline void count(Counter& counter, std::uint64_t amount = 1) { counter.fetch_add(amount, std::memory_order_relaxed); }
inline void set(Counter& gauge, std::uint64_t value) { gauge.store(value, std::memory_order_relaxed); }

}  // namespace gpufs

namespace gpufs::observe {

// The way by which bytes were moved. A transfer is a whole copy between a file and a device, whatever moved its pieces.
// Locked and pageable are copies from and to a program's own memory, which is locked or not.
enum class Backend : std::uint8_t { kMount, kFastpath, kFallback, kDeviceCopy, kTransfer, kLocked, kPageable };
inline constexpr std::size_t kBackendCount = 7;
inline constexpr std::array<std::string_view, kBackendCount> kBackendNames = {
    "mount", "fastpath", "fallback", "device_copy", "transfer", "locked", "pageable"};
// Into the device's memory or out of it.
enum class Flow : std::uint8_t { kToDevice, kFromDevice };
inline constexpr std::size_t kFlowCount = 2;

// Bucket b of a histogram counts values above 2^(b-1) up to 2^b, bucket 0 those up to 1, the last one all beyond.
inline constexpr std::size_t kBuckets = 44;
inline constexpr std::size_t kReasons = 32;
[[nodiscard]] constexpr std::size_t bucket_of(std::uint64_t value) {
  const auto width = static_cast<std::size_t>(value <= 1 ? 0 : std::bit_width(value - 1));
  return width < kBuckets ? width : kBuckets - 1;
}

// One device, backend and direction, as one stripe of threads has counted it. A reader adds up the stripes.
struct alignas(64) Block {
  Counter started;
  Counter ended;
  Counter errors;  // of those that ended
  Counter bytes;
  Counter nanoseconds;  // of those that ended, from start to end
  std::array<Counter, 3> reserved;
  std::array<Counter, kReasons> refusals;  // by the bit of the reason
  std::array<Counter, kBuckets> sizes;     // bytes moved
  std::array<Counter, kBuckets> times;     // nanoseconds
};
static_assert(sizeof(Block) == 1024 && std::is_standard_layout_v<Block>);

// More about the transfers of a device in one direction. They are too rare to be striped.
struct alignas(64) TransferDetails {
  Counter failed;
  Counter cancelled;
  Counter abandoned;  // cancelled while a thread hung in the file
  // Parts of fallback's bytes.
  Counter buffered_bytes;  // through the page cache
  Counter direct_bytes;    // by O_DIRECT
  Counter hole_bytes;      // not one of the parts: holes of the source, never read
};

// Gauges, written from time to time. gpufs/statistics/_format.py says what each of them and of the counters is.
struct alignas(64) EngineGauges {
  Counter transfers_active;
  Counter bounce_slot_bytes;
  Counter bounce_capacity_bytes;
  Counter bounce_pinned_bytes;
  Counter bounce_used_bytes;
  Counter request_pinned_bytes;  // of the mount's own request memory
  Counter locked_bytes;          // host memory that programs or transfers locked
  Counter locked_ranges;
  // These belong to the mount.
  Counter inodes;
  Counter open_files;
  Counter removed_files;
  Counter metadata_bytes;
  Counter metadata_limit_bytes;
  Counter backing_open_files;
  Counter requests_running;
  Counter requests_queued;
  Counter requests_relayed;
};

// Counters that belong to no device. They are too rare to be striped.
struct alignas(64) EngineCounters {
  Counter bounce_waits;  // this and the next are written with the gauges
  Counter bounce_pin_failures;
  // These belong to the mount.
  Counter read_ahead_bytes;
  Counter backing_read_bytes;
  Counter backing_written_bytes;
  Counter backing_copied_bytes;
  Counter interrupts;
  Counter interrupts_cancelled;
  Counter interrupts_early;
  Counter memory_waits;
  Counter reader_spins;
  Counter replies_lost;
  Counter replies_rejected;
  Counter replies_missing;
  Counter bad_requests;
  Counter relay_overflows;
  Counter relay_bad_replies;
};

struct alignas(64) DeviceGauges {
  Counter total_bytes;
  Counter held_bytes;
  Counter health_error;  // errno; 0: the device works
  Counter events_existing;
  Counter events_idle;
  Counter streams_existing;
  Counter streams_idle;
};

inline constexpr std::size_t kHeaderBytes = 4096;
inline constexpr std::size_t kTextBytes = kHeaderBytes - 256;
inline constexpr std::uint32_t kFormatVersion = 3;

struct Header {
  std::array<char, 8> magic;  // "GPUFSTAT"
  std::uint32_t version;
  std::uint32_t header_bytes;
  std::uint64_t file_bytes;
  std::uint32_t devices;
  std::uint32_t stripes;
  std::uint32_t backends;
  std::uint32_t flows;
  std::uint32_t buckets;
  std::uint32_t reasons;
  std::uint32_t process;  // its number
  std::uint32_t device_gauges_bytes;
  std::uint32_t details_bytes;
  std::atomic<std::uint32_t> text_bytes;
  std::uint64_t gauges_offset;
  std::uint64_t counters_offset;
  std::uint64_t device_gauges_offset;  // one for each device
  std::uint64_t details_offset;        // [device][flow]
  std::uint64_t blocks_offset;         // [stripe][device][backend][flow]
  std::uint64_t created;               // nanoseconds since 1970, as below
  Counter updated;                     // when the gauges were written: the process was alive then
  std::array<std::byte, 256 - 120> reserved;
  std::array<char, kTextBytes> text;  // JSON that describes the counters
};
static_assert(sizeof(Header) == kHeaderBytes && std::is_standard_layout_v<Header>);

// Nanoseconds of the monotonic clock.
[[nodiscard]] inline std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
          .count());
}

class Region {
 public:
  // path: the file for the counters, empty for private memory. The file is replaced, has mode 0600, and is locked (a
  // write lock of the whole file, by open file description) for as long as the process lives: an unlocked file belongs
  // to a dead process. Its space is allocated at once, so this fails with ENOSPC rather than counting later.
  static Result<std::shared_ptr<Region>> create(std::size_t devices, const std::string& path);
  ~Region();

  // In the calling thread's stripe.
  [[nodiscard]] Block& block(std::size_t device, Backend backend, Flow flow) {
    return block_of(thread_number() & (stripes_ - 1), device, backend, flow);
  }
  // Over all stripes. select: a member of Block, or a function that reads a counter of it.
  template <typename Select>
  [[nodiscard]] std::uint64_t sum(std::size_t device, Backend backend, Flow flow, Select select) const {
    std::uint64_t total = 0;
    for (std::size_t stripe = 0; stripe < stripes_; ++stripe) {
      total += std::invoke(select, block_of(stripe, device, backend, flow));
    }
    return total;
  }

  [[nodiscard]] TransferDetails& details(std::size_t device, Flow flow) {
    return details_[device * kFlowCount + static_cast<std::size_t>(flow)];
  }
  [[nodiscard]] EngineGauges& gauges() { return *gauges_; }
  [[nodiscard]] EngineCounters& counters() { return *counters_; }
  [[nodiscard]] DeviceGauges& gauges(std::size_t device) { return device_gauges_[device]; }

  // Stores a description of the counters. EFBIG beyond kTextBytes.
  Status describe(std::string_view json);
  // Notes that the gauges have been written.
  void touch();
  // The whole region, in the format of a file.
  [[nodiscard]] std::string_view bytes() const { return {static_cast<const char*>(base_), bytes_}; }

 private:
  Region(std::size_t devices, std::size_t stripes) : devices_(devices), stripes_(stripes) {}
  Status map(UniqueFd file);
  // A number of the calling thread's own, from 0 on.
  [[nodiscard]] static std::uint32_t thread_number();
  [[nodiscard]] Block& block_of(std::size_t stripe, std::size_t device, Backend backend, Flow flow) const {
    return blocks_[((stripe * devices_ + device) * kBackendCount + static_cast<std::size_t>(backend)) * kFlowCount +
                   static_cast<std::size_t>(flow)];
  }

  const std::size_t devices_;
  const std::size_t stripes_;  // a power of two
  UniqueFd file_;              // holds the lock
  void* base_ = nullptr;
  std::size_t bytes_ = 0;
  Header* header_ = nullptr;  // this and the others point into the mapping
  EngineGauges* gauges_ = nullptr;
  EngineCounters* counters_ = nullptr;
  DeviceGauges* device_gauges_ = nullptr;
  TransferDetails* details_ = nullptr;
  Block* blocks_ = nullptr;
  std::mutex text_mutex_;  // guards the header's text against two writers
};

// One device's part of a region. Cheap to copy.
class DeviceCounters {
 public:
  DeviceCounters(std::shared_ptr<Region> region, std::size_t device) : region_(std::move(region)), device_(device) {}

  void begin(Backend backend, Flow flow) const { count(region_->block(device_, backend, flow).started); }
  // Counts bytes of an operation that has not ended, so that rates follow it. end() gets them as `counted`.
  void advance(Backend backend, Flow flow, std::uint64_t bytes) const {
    count(region_->block(device_, backend, flow).bytes, bytes);
  }
  void end(Backend backend, Flow flow, std::uint64_t bytes, bool failed, std::uint64_t nanoseconds,
           std::uint64_t counted = 0) const {
    Block& block = region_->block(device_, backend, flow);
    count(block.ended);
    if (failed) count(block.errors);
    count(block.bytes, bytes - counted);
    count(block.nanoseconds, nanoseconds);
    count(block.sizes[bucket_of(bytes)]);
    count(block.times[bucket_of(nanoseconds)]);
  }
  // Undoes begin().
  void forget(Backend backend, Flow flow) const {
    region_->block(device_, backend, flow).started.fetch_sub(1, std::memory_order_relaxed);
  }
  // Counts each reason, a set bit, once.
  void refuse(Backend backend, Flow flow, std::uint32_t reasons) const;
  [[nodiscard]] Region& region() const { return *region_; }
  [[nodiscard]] std::size_t device() const { return device_; }

 private:
  std::shared_ptr<Region> region_;
  std::size_t device_;
};

// Counts an operation that lasts as long as the object. It has failed unless done() was called.
class ScopedOperationCount {
 public:
  ScopedOperationCount(const DeviceCounters& counters, Backend backend, Flow flow)
      : counters_(counters), backend_(backend), flow_(flow), started_(now_ns()) {
    counters_.begin(backend_, flow_);
  }
  ~ScopedOperationCount() {
    if (!dismissed_) counters_.end(backend_, flow_, bytes_, failed_, now_ns() - started_, counted_);
  }
  ScopedOperationCount(const ScopedOperationCount&) = delete;
  ScopedOperationCount& operator=(const ScopedOperationCount&) = delete;

  // So many bytes have been moved since the start; never fewer than at the last call.
  void advance(std::uint64_t bytes) {
    counters_.advance(backend_, flow_, bytes - bytes_);
    bytes_ = counted_ = bytes;
  }
  void done(std::uint64_t bytes) {
    bytes_ = bytes;
    failed_ = false;
  }
  // Counts nothing: another object counts the operation.
  void dismiss() {
    counters_.forget(backend_, flow_);
    dismissed_ = true;
  }

 private:
  const DeviceCounters& counters_;
  const Backend backend_;
  const Flow flow_;
  const std::uint64_t started_;
  std::uint64_t bytes_ = 0;
  std::uint64_t counted_ = 0;  // of them, before the end
  bool failed_ = true;
  bool dismissed_ = false;
};

// Counts what has been read and written of one file, by any path, and notes which path was the last. The Buffer's.
class FileActivity {
 public:
  static constexpr std::uint8_t kNoBackend = 255;

  // Counts an operation that has ended, unless it moved nothing.
  void note(Backend backend, Flow flow, std::uint64_t bytes) {
    if (bytes == 0) return;
    Side& side = sides_[static_cast<std::size_t>(flow)];
    count(side.bytes, bytes);
    count(side.operations);
    last_.store(static_cast<std::uint8_t>(backend), std::memory_order_relaxed);
  }
  [[nodiscard]] std::uint64_t bytes(Flow flow) const { return read(&Side::bytes, flow); }
  [[nodiscard]] std::uint64_t operations(Flow flow) const { return read(&Side::operations, flow); }
  // Bytes moved since the last call.
  [[nodiscard]] std::uint64_t take_recent() {
    const std::uint64_t now = bytes(Flow::kToDevice) + bytes(Flow::kFromDevice);
    return now - taken_.exchange(now, std::memory_order_relaxed);
  }
  // A Backend's number, or kNoBackend.
  [[nodiscard]] std::uint8_t last() const { return last_.load(std::memory_order_relaxed); }

 private:
  struct Side {
    Counter bytes{0};
    Counter operations{0};
  };
  [[nodiscard]] std::uint64_t read(Counter Side::*member, Flow flow) const {
    return (sides_[static_cast<std::size_t>(flow)].*member).load(std::memory_order_relaxed);
  }

  std::array<Side, kFlowCount> sides_;
  Counter taken_{0};  // by take_recent()
  std::atomic<std::uint8_t> last_{kNoBackend};
};

}  // namespace gpufs::observe
