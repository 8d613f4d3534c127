#include "memory/buffer.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <utility>

#include "base/math.h"
#include "device/device_context.h"

namespace gpufs {
namespace {

constexpr std::uint64_t kSmallestReservation = std::uint64_t{64} << 20;
constexpr std::uint64_t kCopyChunk = std::uint64_t{64} << 20;   // between two looks at a cancellation
constexpr std::size_t kStagingBytes = std::size_t{4} << 20;     // between devices without a direct way
constexpr std::size_t kZeroBytes = std::size_t{2} << 20;

// Zeros to show where a file has a hole: one mapping for the process, all of it the kernel's zero page.
const void* zeros() {
  static const void* const area = ::mmap(nullptr, kZeroBytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return area;
}

class ExtentBuffer;

// What readers and writers see: a range and the granules that exist in it. Immutable but for `pins`.
struct Snapshot {
  std::shared_ptr<AddressRange> range;
  std::vector<Extent> extents;  // sorted, neighbours joined
  std::uint64_t pins = 0;       // guarded by the buffer's state mutex
};

bool overlap(const MemorySpan& span, std::uint64_t offset, std::uint64_t bytes) {
  return span.bytes > 0 && offset < span.offset + span.bytes && span.offset < offset + bytes;
}

// The pieces of [offset, offset + bytes): extents where memory exists, holes between them.
std::vector<Buffer::Piece> cut(const Snapshot& snapshot, std::uint64_t offset, std::uint64_t bytes) {
  std::vector<Buffer::Piece> pieces;
  const std::uint64_t end = offset + bytes;
  auto extent = std::partition_point(snapshot.extents.begin(), snapshot.extents.end(),
                                     [&](const Extent& e) { return e.offset + e.bytes <= offset; });
  while (offset < end) {
    if (extent == snapshot.extents.end() || extent->offset >= end) {
      pieces.push_back({0, offset, end - offset});
      break;
    }
    if (extent->offset > offset) {
      pieces.push_back({0, offset, extent->offset - offset});
      offset = extent->offset;
    }
    const std::uint64_t stop = std::min(end, extent->offset + extent->bytes);
    pieces.push_back({snapshot.range->base() + offset, offset, stop - offset});
    offset = stop;
    ++extent;
  }
  return pieces;
}

std::vector<Extent> with(const std::vector<Extent>& extents, const std::vector<Extent>& added) {
  std::vector<Extent> all(extents);
  all.insert(all.end(), added.begin(), added.end());
  std::sort(all.begin(), all.end(), [](const Extent& a, const Extent& b) { return a.offset < b.offset; });
  std::vector<Extent> joined;
  for (const Extent& extent : all) {
    if (!joined.empty() && joined.back().offset + joined.back().bytes == extent.offset) {
      joined.back().bytes += extent.bytes;
    } else {
      joined.push_back(extent);
    }
  }
  return joined;
}

// The parts of `extents` inside [offset, end) and those outside.
std::pair<std::vector<Extent>, std::vector<Extent>> split(const std::vector<Extent>& extents, std::uint64_t offset,
                                                          std::uint64_t end) {
  std::vector<Extent> inside;
  std::vector<Extent> outside;
  for (const Extent& extent : extents) {
    const std::uint64_t extent_end = extent.offset + extent.bytes;
    const std::uint64_t from = std::clamp(offset, extent.offset, extent_end);
    const std::uint64_t to = std::clamp(end, from, extent_end);
    if (from > extent.offset) outside.push_back({extent.offset, from - extent.offset});
    if (to > from) inside.push_back({from, to - from});
    if (extent_end > to) outside.push_back({to, extent_end - to});
  }
  return {std::move(inside), std::move(outside)};
}

class ExtentBuffer : public Buffer {
 public:
  ExtentBuffer(std::shared_ptr<DeviceContext> device, std::unique_ptr<DeviceMemory> memory)
      : device_(std::move(device)), granule_(device_->info().granule), memory_(std::move(memory)) {
    current_ = std::make_shared<Snapshot>();
  }
  ~ExtentBuffer() override {
    device_->account(-static_cast<std::int64_t>(bytes_held_.load()));
    static_cast<void>(device_->run([this](Device&) {
      current_.reset();
      memory_.reset();
      return Status();
    }));
  }

  [[nodiscard]] const std::shared_ptr<DeviceContext>& device() const override { return device_; }
  [[nodiscard]] std::uint64_t size() const override { return size_.load(std::memory_order_acquire); }
  [[nodiscard]] std::uint64_t bytes_held() const override { return bytes_held_.load(std::memory_order_relaxed); }

  Result<std::unique_ptr<Pinned>> pin_for_read(std::uint64_t offset, std::uint64_t bytes) override;
  Result<std::unique_ptr<Pinned>> pin_for_write(std::uint64_t offset, std::uint64_t bytes) override;
  void publish(std::uint64_t end) override;
  Status discard_above_size(std::uint64_t offset, std::uint64_t bytes) override;
  Result<std::size_t> read(std::uint64_t offset, std::span<std::byte> destination) override;
  Result<std::size_t> write(std::uint64_t offset, std::span<const std::byte> source) override;
  Result<Gathered> gather(std::uint64_t offset, std::uint64_t bytes) override;
  Status resize(std::uint64_t size) override;
  Status allocate(std::uint64_t offset, std::uint64_t bytes, bool keep_size) override;
  Status punch(std::uint64_t offset, std::uint64_t bytes) override;
  Status zero_range(std::uint64_t offset, std::uint64_t bytes, bool keep_size) override;
  Result<std::uint64_t> seek_data(std::uint64_t offset) override;
  Result<std::uint64_t> seek_hole(std::uint64_t offset) override;
  Result<std::uint64_t> copy_from(Buffer& source, std::uint64_t source_offset, std::uint64_t offset,
                                  std::uint64_t bytes, const std::atomic<bool>* cancelled) override;
  Result<DeviceAddress> pin_address(std::uint64_t maximum_bytes) override;
  Result<std::vector<ExportedMemory>> export_memory() override;

 private:
  class Pin;
  static constexpr MemorySpan kNothing{0, 0};
  static constexpr MemorySpan kEverything{0, ~std::uint64_t{0}};

  std::shared_ptr<Snapshot> snapshot() {
    const std::lock_guard lock(state_mutex_);
    return current_;
  }
  std::unique_ptr<Pin> pin_current(std::uint64_t offset, std::uint64_t bytes);
  std::unique_ptr<Pin> try_pin_covered(std::uint64_t offset, std::uint64_t bytes);
  void unpin(std::shared_ptr<Snapshot> snapshot);
  void replace(std::shared_ptr<Snapshot> next);
  void drain();
  Status reserve_for(std::uint64_t end);
  Status populate(std::uint64_t offset, std::uint64_t bytes);
  Status release(std::uint64_t offset, std::uint64_t end);
  Status clear(std::uint64_t offset, std::uint64_t bytes);
  Status erase(std::uint64_t offset, std::uint64_t end);
  Status copy_pieces(Buffer& source, const std::vector<Piece>& from, const std::vector<Piece>& to,
                     std::uint64_t shift);

  const std::shared_ptr<DeviceContext> device_;
  const std::uint64_t granule_;
  std::atomic<std::uint64_t> size_{0};
  std::atomic<std::uint64_t> bytes_held_{0};

  // Serialises all that changes which memory exists. Before state_mutex_. Held over driver calls by intent: it is taken
  // by those who change memory, never by those who only use it.
  std::mutex change_mutex_;
  std::unique_ptr<DeviceMemory> memory_;  // guarded by change_mutex_
  std::uint64_t promised_bytes_ = 0;      // guarded by change_mutex_; the end of the promised range, 0: no promise

  // Guards all below; held for a few instructions.
  std::mutex state_mutex_;
  std::shared_ptr<Snapshot> current_;
  std::vector<std::shared_ptr<Snapshot>> retired_;  // replaced, but still pinned
  MemorySpan gate_ = kNothing;                      // pins that touch it wait
  std::condition_variable state_changed_;
};

class ExtentBuffer::Pin : public Buffer::Pinned {
 public:
  Pin(std::shared_ptr<ExtentBuffer> buffer, std::shared_ptr<Snapshot> snapshot, std::uint64_t offset,
      std::uint64_t bytes)
      : buffer_(std::move(buffer)), snapshot_(std::move(snapshot)), pieces_(cut(*snapshot_, offset, bytes)) {}
  ~Pin() override { buffer_->unpin(std::move(snapshot_)); }
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;
  [[nodiscard]] const std::vector<Piece>& pieces() const override { return pieces_; }

 private:
  const std::shared_ptr<ExtentBuffer> buffer_;
  std::shared_ptr<Snapshot> snapshot_;
  const std::vector<Piece> pieces_;
};

std::unique_ptr<ExtentBuffer::Pin> ExtentBuffer::pin_current(std::uint64_t offset, std::uint64_t bytes) {
  std::shared_ptr<Snapshot> pinned;
  {
    std::unique_lock lock(state_mutex_);
    state_changed_.wait(lock, [&] { return !overlap(gate_, offset, bytes); });
    pinned = current_;
    ++pinned->pins;
  }
  return std::make_unique<Pin>(std::static_pointer_cast<ExtentBuffer>(shared_from_this()), std::move(pinned), offset,
                               bytes);
}

// Null when a part of the range has no memory, or is being moved.
std::unique_ptr<ExtentBuffer::Pin> ExtentBuffer::try_pin_covered(std::uint64_t offset, std::uint64_t bytes) {
  std::shared_ptr<Snapshot> pinned;
  {
    const std::lock_guard lock(state_mutex_);
    if (overlap(gate_, offset, bytes)) return nullptr;
    const std::vector<Extent>& extents = current_->extents;
    auto extent = std::partition_point(extents.begin(), extents.end(),
                                       [&](const Extent& e) { return e.offset + e.bytes <= offset; });
    if (extent == extents.end() || extent->offset > offset || extent->offset + extent->bytes < offset + bytes) {
      return nullptr;
    }
    pinned = current_;
    ++pinned->pins;
  }
  return std::make_unique<Pin>(std::static_pointer_cast<ExtentBuffer>(shared_from_this()), std::move(pinned), offset,
                               bytes);
}

void ExtentBuffer::unpin(std::shared_ptr<Snapshot> snapshot) {
  std::shared_ptr<Snapshot> last;  // destroyed outside the lock: it may unmap a range
  {
    const std::lock_guard lock(state_mutex_);
    if (--snapshot->pins == 0 && snapshot != current_) {
      const auto found = std::find(retired_.begin(), retired_.end(), snapshot);
      if (found != retired_.end()) {
        last = std::move(*found);
        retired_.erase(found);
        state_changed_.notify_all();
      }
    }
  }
  snapshot.reset();
}

void ExtentBuffer::replace(std::shared_ptr<Snapshot> next) {
  std::shared_ptr<Snapshot> unused;
  const std::lock_guard lock(state_mutex_);
  unused = std::exchange(current_, std::move(next));
  if (unused->pins > 0) retired_.push_back(unused);
}

// Waits until nobody uses a snapshot older than the current one. New pins are pins of the current one.
void ExtentBuffer::drain() {
  std::unique_lock lock(state_mutex_);
  state_changed_.wait(lock, [&] { return retired_.empty(); });
}

Result<std::unique_ptr<Buffer::Pinned>> ExtentBuffer::pin_for_read(std::uint64_t offset, std::uint64_t bytes) {
  const std::uint64_t end = size();
  const std::uint64_t clipped = offset < end ? std::min(bytes, end - offset) : 0;
  return std::unique_ptr<Pinned>(pin_current(offset, clipped));
}

Result<std::unique_ptr<Buffer::Pinned>> ExtentBuffer::pin_for_write(std::uint64_t offset, std::uint64_t bytes) {
  std::uint64_t end = 0;
  if (add_overflows(offset, bytes, &end) || end > kMaximumBytes) return Status(EFBIG, "beyond the largest file size");
  if (bytes == 0) return std::unique_ptr<Pinned>(pin_current(offset, 0));
  if (std::unique_ptr<Pin> pin = try_pin_covered(offset, bytes)) return std::unique_ptr<Pinned>(std::move(pin));
  const std::lock_guard lock(change_mutex_);
  if (Status status = populate(offset, bytes); !status.ok()) return status;
  return std::unique_ptr<Pinned>(pin_current(offset, bytes));
}

void ExtentBuffer::publish(std::uint64_t end) {
  std::uint64_t seen = size_.load(std::memory_order_relaxed);
  while (seen < end && !size_.compare_exchange_weak(seen, end, std::memory_order_release)) {
  }
}

Status ExtentBuffer::discard_above_size(std::uint64_t offset, std::uint64_t bytes) {
  std::uint64_t end = 0;
  if (add_overflows(offset, bytes, &end)) return Status(EFBIG, "beyond the largest file size");
  const std::uint64_t from = std::max(offset, size());
  return from < end ? clear(from, end - from) : Status();
}

// Zeros over what exists of the range.
Status ExtentBuffer::clear(std::uint64_t offset, std::uint64_t bytes) {
  const std::unique_ptr<Pin> pin = pin_current(offset, bytes);
  for (const Piece& piece : pin->pieces()) {
    if (piece.address == 0) continue;
    if (Status status = device_->device().zero(piece.address, piece.bytes); !status.ok()) return status;
  }
  return {};
}

// With change_mutex_ held.
Status ExtentBuffer::reserve_for(std::uint64_t end) {
  const std::shared_ptr<Snapshot> old = snapshot();
  if (old->range && end <= old->range->bytes()) return {};
  if (promised_bytes_ > 0) {
    return Status(EFBIG, "the buffer's address was given out for " + std::to_string(promised_bytes_) + " bytes at most");
  }
  const std::uint64_t wanted =
      std::min(std::max(std::bit_ceil(end) * 4, kSmallestReservation), round_up(kMaximumBytes, granule_));
  const bool copies = device_->info().reserve_copies && !old->extents.empty();
  if (copies) {
    // Nobody may write into the old memory while it is copied.
    {
      const std::lock_guard lock(state_mutex_);
      gate_ = kEverything;
    }
    replace(std::make_shared<Snapshot>(Snapshot{old->range, old->extents, 0}));
    drain();
  }
  Result<std::shared_ptr<AddressRange>> range = Status(EIO, "");
  const Status status = device_->run([&](Device&) {
    range = memory_->reserve(wanted);
    return range.status();
  });
  if (status.ok()) replace(std::make_shared<Snapshot>(Snapshot{range.take(), old->extents, 0}));
  if (copies) {
    const std::lock_guard lock(state_mutex_);
    gate_ = kNothing;
    state_changed_.notify_all();
  }
  return status.error() == ENOMEM ? Status(ENOSPC, status.message(), status.device_code()) : status;
}

// Makes every granule of the range exist; all or nothing. With change_mutex_ held.
Status ExtentBuffer::populate(std::uint64_t offset, std::uint64_t bytes) {
  const std::uint64_t from = round_down(offset, granule_);
  const std::uint64_t end = round_up(offset + bytes, granule_);
  if (Status status = reserve_for(end); !status.ok()) return status;
  const std::shared_ptr<Snapshot> old = snapshot();
  std::vector<Extent> missing;
  std::uint64_t total = 0;
  for (const Piece& piece : cut(*old, from, end - from)) {
    if (piece.address != 0) continue;
    missing.push_back({piece.offset, piece.bytes});
    total += piece.bytes;
  }
  if (missing.empty()) return {};
  const Status status = device_->run([&](Device&) {
    for (std::size_t done = 0; done < missing.size(); ++done) {
      Status failed = memory_->populate(missing[done].offset, missing[done].bytes);
      if (failed.ok()) continue;
      // Nobody has seen these granules yet.
      while (done-- > 0) static_cast<void>(memory_->release(missing[done].offset, missing[done].bytes));
      return failed;
    }
    return Status();
  });
  if (!status.ok()) return status;
  bytes_held_.fetch_add(total, std::memory_order_relaxed);
  device_->account(static_cast<std::int64_t>(total));
  replace(std::make_shared<Snapshot>(Snapshot{old->range, with(old->extents, missing), 0}));
  return {};
}

// Gives back the granules that exist in [offset, end), whole ones only. With change_mutex_ held.
Status ExtentBuffer::release(std::uint64_t offset, std::uint64_t end) {
  const std::shared_ptr<Snapshot> old = snapshot();
  auto [inside, outside] = split(old->extents, offset, end);
  if (inside.empty()) return {};
  MemorySpan moved = memory_->release_span(inside.front().offset,
                                           inside.back().offset + inside.back().bytes - inside.front().offset);
  for (const Extent& extent : inside) {
    const MemorySpan span = memory_->release_span(extent.offset, extent.bytes);
    const std::uint64_t span_end = std::max(moved.offset + moved.bytes, span.offset + span.bytes);
    moved.offset = std::min(moved.offset, span.offset);
    moved.bytes = span_end - moved.offset;
  }
  const bool moves = moved.offset < inside.front().offset ||
                     moved.offset + moved.bytes > inside.back().offset + inside.back().bytes;
  if (moves) {
    const std::lock_guard lock(state_mutex_);
    gate_ = moved;
  }
  replace(std::make_shared<Snapshot>(Snapshot{old->range, outside, 0}));
  drain();
  std::uint64_t freed = 0;
  std::vector<Extent> kept;
  Status status;
  static_cast<void>(device_->run([&](Device&) {
    for (const Extent& extent : inside) {
      Status failed = memory_->release(extent.offset, extent.bytes);
      if (failed.ok()) {
        freed += extent.bytes;
      } else {
        kept.push_back(extent);
        if (status.ok()) status = failed;
      }
    }
    return Status();
  }));
  bytes_held_.fetch_sub(freed, std::memory_order_relaxed);
  device_->account(-static_cast<std::int64_t>(freed));
  if (!kept.empty()) {
    // What the device did not take back is still there: zeroed, so that it reads as the hole that was asked for.
    replace(std::make_shared<Snapshot>(Snapshot{old->range, with(outside, kept), 0}));
  }
  if (moves) {
    const std::lock_guard lock(state_mutex_);
    gate_ = kNothing;
    state_changed_.notify_all();
  }
  for (const Extent& extent : kept) {
    if (Status failed = clear(extent.offset, extent.bytes); !failed.ok()) return failed;
  }
  return kept.empty() ? Status() : status;
}

// Makes [offset, end) read as zeros, and frees the whole granules in it. With change_mutex_ held.
Status ExtentBuffer::erase(std::uint64_t offset, std::uint64_t end) {
  const std::uint64_t first = round_up(offset, granule_);
  const std::uint64_t last = round_down(end, granule_);
  if (first >= last) return clear(offset, end - offset);
  Status status = release(first, last);
  if (Status failed = clear(offset, first - offset); status.ok()) status = failed;
  if (Status failed = clear(last, end - last); status.ok()) status = failed;
  return status;
}

Result<std::size_t> ExtentBuffer::read(std::uint64_t offset, std::span<std::byte> destination) {
  Result<std::unique_ptr<Pinned>> pinned = pin_for_read(offset, destination.size());
  if (!pinned.ok()) return pinned.status();
  std::size_t done = 0;
  for (const Piece& piece : pinned.value()->pieces()) {
    if (piece.address == 0) {
      std::memset(destination.data() + done, 0, piece.bytes);
    } else if (Status status = device_->device().copy_out(destination.data() + done, piece.address, piece.bytes);
               !status.ok()) {
      return status;
    }
    done += piece.bytes;
  }
  return done;
}

Result<std::size_t> ExtentBuffer::write(std::uint64_t offset, std::span<const std::byte> source) {
  if (source.empty()) return std::size_t{0};
  Status status;
  {
    Result<std::unique_ptr<Pinned>> pinned = pin_for_write(offset, source.size());
    if (!pinned.ok()) return pinned.status();
    std::size_t done = 0;
    for (const Piece& piece : pinned.value()->pieces()) {
      status = device_->device().copy_in(piece.address, source.data() + done, piece.bytes);
      if (!status.ok()) break;
      done += piece.bytes;
    }
    if (status.ok()) publish(offset + source.size());
  }
  if (status.ok()) return source.size();
  static_cast<void>(discard_above_size(offset, source.size()));
  return status;
}

Result<Buffer::Gathered> ExtentBuffer::gather(std::uint64_t offset, std::uint64_t bytes) {
  if (!device_->info().cpu_addressable) return Status(EOPNOTSUPP, "this device's memory has no CPU address");
  if (zeros() == MAP_FAILED) return Status(ENOMEM, "no address space for zeros");
  Result<std::unique_ptr<Pinned>> pinned = pin_for_read(offset, bytes);
  if (!pinned.ok()) return pinned.status();
  Gathered gathered;
  for (const Piece& piece : pinned.value()->pieces()) {
    gathered.bytes += piece.bytes;
    if (piece.address != 0) {
      gathered.pieces.push_back({reinterpret_cast<void*>(piece.address), piece.bytes});
      continue;
    }
    for (std::uint64_t left = piece.bytes; left > 0;) {
      const std::uint64_t part = std::min<std::uint64_t>(left, kZeroBytes);
      gathered.pieces.push_back({const_cast<void*>(zeros()), part});
      left -= part;
    }
  }
  gathered.keep = pinned.take();
  return gathered;
}

Status ExtentBuffer::resize(std::uint64_t size) {
  if (size > kMaximumBytes) return Status(EFBIG, "beyond the largest file size");
  const std::lock_guard lock(change_mutex_);
  if (promised_bytes_ > 0 && size > promised_bytes_) {
    return Status(EFBIG, "the buffer's address was given out for " + std::to_string(promised_bytes_) + " bytes at most");
  }
  const std::uint64_t before = size_.exchange(size, std::memory_order_acq_rel);
  if (size >= before) return {};
  const std::shared_ptr<Snapshot> now = snapshot();
  if (now->extents.empty()) return {};
  const std::uint64_t end = now->extents.back().offset + now->extents.back().bytes;
  return end > size ? erase(size, end) : Status();
}

Status ExtentBuffer::allocate(std::uint64_t offset, std::uint64_t bytes, bool keep_size) {
  std::uint64_t end = 0;
  if (add_overflows(offset, bytes, &end) || end > kMaximumBytes) return Status(EFBIG, "beyond the largest file size");
  if (bytes == 0) return Status(EINVAL, "nothing to allocate");
  const std::lock_guard lock(change_mutex_);
  if (Status status = populate(offset, bytes); !status.ok()) return status;
  if (!keep_size) publish(end);
  return {};
}

Status ExtentBuffer::punch(std::uint64_t offset, std::uint64_t bytes) {
  std::uint64_t end = 0;
  if (add_overflows(offset, bytes, &end)) end = ~std::uint64_t{0};
  const std::lock_guard lock(change_mutex_);
  const std::shared_ptr<Snapshot> now = snapshot();
  if (now->extents.empty()) return {};
  const std::uint64_t held_end = now->extents.back().offset + now->extents.back().bytes;
  // A last granule that the file does not fill is freed too when all of the file's bytes in it are punched.
  const std::uint64_t file_end = size();
  if (end >= file_end && offset < file_end) end = std::max(end, round_up(file_end, granule_));
  end = std::min(end, held_end);
  return offset < end ? erase(offset, end) : Status();
}

Status ExtentBuffer::zero_range(std::uint64_t offset, std::uint64_t bytes, bool keep_size) {
  std::uint64_t end = 0;
  if (add_overflows(offset, bytes, &end) || end > kMaximumBytes) return Status(EFBIG, "beyond the largest file size");
  if (bytes == 0) return Status(EINVAL, "nothing to zero");
  const std::lock_guard lock(change_mutex_);
  if (Status status = populate(offset, bytes); !status.ok()) return status;
  if (Status status = clear(offset, bytes); !status.ok()) return status;
  if (!keep_size) publish(end);
  return {};
}

Result<std::uint64_t> ExtentBuffer::seek_data(std::uint64_t offset) {
  const std::uint64_t end = size();
  const std::shared_ptr<Snapshot> now = snapshot();
  for (const Extent& extent : now->extents) {
    if (extent.offset + extent.bytes <= offset) continue;
    const std::uint64_t found = std::max(offset, extent.offset);
    if (found >= end) break;
    return found;
  }
  return Status(ENXIO, "no data there");
}

Result<std::uint64_t> ExtentBuffer::seek_hole(std::uint64_t offset) {
  const std::uint64_t end = size();
  if (offset >= end) return Status(ENXIO, "beyond the end");
  const std::shared_ptr<Snapshot> now = snapshot();
  for (const Extent& extent : now->extents) {
    if (extent.offset + extent.bytes <= offset) continue;
    if (extent.offset > offset) break;
    return std::min(end, extent.offset + extent.bytes);
  }
  return offset;
}

Status ExtentBuffer::copy_pieces(Buffer& source, const std::vector<Piece>& from, const std::vector<Piece>& to,
                                 std::uint64_t shift) {
  Device& target_device = device_->device();
  Device& source_device = source.device()->device();
  std::vector<std::byte> staging;
  auto target = to.begin();
  for (const Piece& piece : from) {
    for (std::uint64_t done = 0; done < piece.bytes;) {
      const std::uint64_t at = piece.offset + done + shift;
      while (target->offset + target->bytes <= at) ++target;
      const std::uint64_t skip = at - target->offset;
      const std::uint64_t part = std::min(piece.bytes - done, target->bytes - skip);
      Status status = &target_device == &source_device
                          ? target_device.copy_within(target->address + skip, piece.address + done, part)
                          : source_device.copy_to_peer(target_device, target->address + skip, piece.address + done, part);
      if (status.error() == EOPNOTSUPP) {
        staging.resize(kStagingBytes);
        status = Status();
        for (std::uint64_t moved = 0; moved < part && status.ok();) {
          const std::uint64_t step = std::min<std::uint64_t>(staging.size(), part - moved);
          status = source_device.copy_out(staging.data(), piece.address + done + moved, step);
          if (status.ok()) status = target_device.copy_in(target->address + skip + moved, staging.data(), step);
          moved += step;
        }
      }
      if (!status.ok()) return status;
      done += part;
    }
  }
  return {};
}

Result<std::uint64_t> ExtentBuffer::copy_from(Buffer& source, std::uint64_t source_offset, std::uint64_t offset,
                                              std::uint64_t bytes, const std::atomic<bool>* cancelled) {
  const std::uint64_t source_end = source.size();
  if (source_offset >= source_end) return std::uint64_t{0};
  bytes = std::min(bytes, source_end - source_offset);
  std::uint64_t end = 0;
  if (add_overflows(offset, bytes, &end) || end > kMaximumBytes) return Status(EFBIG, "beyond the largest file size");
  if (&source == this && offset < source_offset + bytes && source_offset < end) {
    return Status(EINVAL, "the ranges overlap");
  }
  std::uint64_t done = 0;
  while (done < bytes) {
    if (cancelled != nullptr && cancelled->load(std::memory_order_relaxed)) {
      if (done == 0) return Status(ECANCELED, "cancelled");
      break;
    }
    Status status;
    std::uint64_t part = std::min(kCopyChunk, bytes - done);
    const std::uint64_t from = source_offset + done;
    const std::uint64_t to = offset + done;
    const Result<std::uint64_t> data = source.seek_data(from);
    const std::uint64_t data_start = data.ok() ? data.value() : from + part;
    if (data_start > from) {
      part = std::min(part, data_start - from);
      status = punch(to, part);
    } else {
      if (const Result<std::uint64_t> hole = source.seek_hole(from); hole.ok()) {
        part = std::min(part, hole.value() - from);
      }
      // Never waits for memory while it holds a pin: two copies in opposite directions would wait for each other.
      std::unique_ptr<Pinned> read_pin;
      std::unique_ptr<Pinned> write_pin;
      while (status.ok() && !write_pin) {
        read_pin.reset();
        if (Result<std::unique_ptr<Pinned>> made = pin_for_write(to, part); !made.ok()) {
          status = made.status();
        }
        if (!status.ok()) break;
        Result<std::unique_ptr<Pinned>> reading = source.pin_for_read(from, part);
        if (!reading.ok()) {
          status = reading.status();
          break;
        }
        read_pin = reading.take();
        write_pin = try_pin_covered(to, part);
      }
      if (status.ok()) {
        // The source may have shrunk or been punched since.
        std::vector<Piece> existing;
        std::uint64_t seen = 0;
        for (const Piece& piece : read_pin->pieces()) {
          seen += piece.bytes;
          if (piece.address != 0) {
            existing.push_back(piece);
            continue;
          }
          for (const Piece& target : write_pin->pieces()) {
            const std::uint64_t start = std::max(target.offset, piece.offset - from + to);
            const std::uint64_t stop =
                std::min(target.offset + target.bytes, piece.offset + piece.bytes - from + to);
            if (start < stop && status.ok()) {
              status = device_->device().zero(target.address + (start - target.offset), stop - start);
            }
          }
        }
        if (status.ok()) status = copy_pieces(source, existing, write_pin->pieces(), to - from);
        if (status.ok() && seen < part) {
          done += seen;
          publish(offset + done);
          break;
        }
      }
      read_pin.reset();
      write_pin.reset();
      if (!status.ok()) static_cast<void>(discard_above_size(to, part));
    }
    if (!status.ok()) {
      if (done == 0) return status;
      break;
    }
    done += part;
    publish(offset + done);
  }
  return done;
}

Result<DeviceAddress> ExtentBuffer::pin_address(std::uint64_t maximum_bytes) {
  if (maximum_bytes == 0 || maximum_bytes > kMaximumBytes) return Status(EINVAL, "the largest size is out of range");
  const std::lock_guard lock(change_mutex_);
  if (promised_bytes_ > 0) {
    if (maximum_bytes > promised_bytes_) {
      return Status(EBUSY, "the address is promised already, for " + std::to_string(promised_bytes_) + " bytes");
    }
    return snapshot()->range->base();
  }
  if (maximum_bytes < size()) return Status(EINVAL, "the buffer is larger than that already");
  if (Status status = reserve_for(maximum_bytes); !status.ok()) return status;
  memory_->fix_in_place();
  promised_bytes_ = maximum_bytes;
  return snapshot()->range->base();
}

Result<std::vector<ExportedMemory>> ExtentBuffer::export_memory() {
  const std::lock_guard lock(change_mutex_);
  Result<std::vector<ExportedMemory>> exported = Status(EIO, "");
  static_cast<void>(device_->run([&](Device&) {
    exported = memory_->export_memory();
    return Status();
  }));
  return exported;
}

}  // namespace

Result<std::shared_ptr<Buffer>> Buffer::create(std::shared_ptr<DeviceContext> device) {
  Result<std::unique_ptr<DeviceMemory>> memory = Status(EIO, "");
  static_cast<void>(device->run([&](Device& current) {
    memory = current.create_memory();
    return Status();
  }));
  if (!memory.ok()) return memory.status();
  return std::shared_ptr<Buffer>(std::make_shared<ExtentBuffer>(std::move(device), memory.take()));
}

}  // namespace gpufs
