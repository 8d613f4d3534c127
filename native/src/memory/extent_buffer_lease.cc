// Leases on an ExtentBuffer: memory that stays where it is, for those who map it or use its address.

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "memory/extent_buffer.h"

namespace gpufs {

// Listed in leases_ from ExtentBuffer::lease() until it is destroyed.
class ExtentBuffer::SharedLease final : public Buffer::Lease {
 public:
  SharedLease(std::shared_ptr<ExtentBuffer> buffer, bool writable, bool exports, std::string label,
              std::optional<std::uint64_t> placement)
      : buffer_(std::move(buffer)),
        writable_(writable),
        exports_(exports),
        label_(std::move(label)),
        wanted_(placement) {}
  ~SharedLease() override {
    // Arrays of this process go without regard to the work that uses them.
    if (!exports_) buffer_->context_->device().synchronize();
    buffer_->touch();
    const std::lock_guard lock(buffer_->state_mutex_);
    std::erase(buffer_->leases_, this);
  }
  SharedLease(const SharedLease&) = delete;
  SharedLease& operator=(const SharedLease&) = delete;

  [[nodiscard]] std::uint64_t bytes() const override {
    const std::lock_guard lock(buffer_->state_mutex_);
    return bytes_;
  }
  [[nodiscard]] DeviceAddress address() const override {
    const std::lock_guard lock(buffer_->state_mutex_);
    return range_ == nullptr ? 0 : range_->base() + placement_;
  }
  [[nodiscard]] std::uint64_t placement() const override {
    const std::lock_guard lock(buffer_->state_mutex_);
    return placement_;
  }
  Status refresh() override { return fix(kMaximumBytes); }
  // Leases at most so many bytes of the buffer.
  Status fix(std::uint64_t most) {
    Status status = fix(most, wanted_);
    return wanted_ && lacks_memory(status.error()) ? fix(most, std::nullopt) : status;
  }
  Status fix(std::uint64_t most, std::optional<std::uint64_t> placement) {
    const std::uint64_t end = writable_ ? std::min(most, buffer_->size()) : 0;
    return buffer_->change_at_home(0, end, {}, [this, most, placement] {
      std::uint64_t bytes = most;
      TRY(buffer_->fix_for_lease(writable_, exports_, placement, &bytes));
      std::shared_ptr<AddressRange> range = bytes > 0 ? buffer_->here_->range : nullptr;
      const std::lock_guard lock(buffer_->state_mutex_);
      if (!listed_) buffer_->leases_.push_back(this);
      listed_ = true;
      bytes_ = bytes;
      placement_ = buffer_->snapshot_->placement;
      range_.swap(range);
      return Status();
    });
  }
  Result<std::vector<ExportedMemory>> pieces(std::uint64_t from, std::size_t capacity) override {
    if (!exports_) return Status(EINVAL, "the lease is for this process alone");
    const std::lock_guard mutation(buffer_->mutation_mutex_);
    const std::uint64_t end = bytes();
    if (end == 0) return std::vector<ExportedMemory>{};
    return buffer_->here_->memory->export_memory(from, placement() + end, capacity, writable_);
  }

 private:
  friend class ExtentBuffer;
  const std::shared_ptr<ExtentBuffer> buffer_;
  const bool writable_;
  const bool exports_;
  const std::string label_;
  const std::optional<std::uint64_t> wanted_;
  // Guarded by the buffer's state_mutex_:
  bool listed_ = false;
  std::uint64_t bytes_ = 0;
  std::uint64_t placement_ = 0;
  std::shared_ptr<AddressRange> range_;  // keeps the address valid when the buffer moves to a larger range
};

Result<std::shared_ptr<Buffer::Lease>> ExtentBuffer::lease(bool writable, bool exports, std::string label,
                                                           std::optional<std::uint64_t> placement, std::uint64_t most) {
  auto lease = std::make_shared<SharedLease>(std::static_pointer_cast<ExtentBuffer>(shared_from_this()), writable,
                                             exports, std::move(label), placement);
  TRY(lease->fix(most));
  return std::shared_ptr<Lease>(std::move(lease));
}

Status ExtentBuffer::fix_for_lease(bool writable, bool exports, std::optional<std::uint64_t> placement,
                                   std::uint64_t* bytes) {
  if (exports) {
    TRY(context_->device().check_sharing());
  }
  if (shift_.step != 0) return torn();
  (void)release_unused(TimePoint::max());  // it could not go back later
  const std::uint64_t size = std::min(this->size(), *bytes);
  *bytes = size;
  if (size == 0) return {};
  const Extent contents = placed(0, size);
  const std::uint64_t data_end = writable ? contents.end() : contents.offset;
  if (!writable && !covered(snapshot_->extents, contents.offset, contents.end())) {
    return Status(ENODATA, "the file has holes, which have no memory to map: allocate it with fallocate first");
  }
  TRY(ensure_own(contents.offset, data_end, contents.end(), {}));
  if (placement && *placement != snapshot_->placement && !leased()) {
    Status status = shift_to(*placement);
    if (!status.ok() && status.error() != EBUSY) return status;
  }
  here_->memory->fix_in_place();
  return {};
}

std::size_t ExtentBuffer::leases(bool writable) const {
  const std::lock_guard lock(state_mutex_);
  return static_cast<std::size_t>(
      std::ranges::count_if(leases_, [writable](const SharedLease* lease) { return lease->writable_ || !writable; }));
}

bool ExtentBuffer::leased() const {
  const std::lock_guard lock(state_mutex_);
  // A lease on an empty file keeps no memory until it is refreshed.
  return std::ranges::any_of(leases_, [](const SharedLease* lease) { return lease->bytes_ > 0; });
}

void ExtentBuffer::unfix_unless_leased() {
  if (here_->memory != nullptr && !leased()) here_->memory->allow_moves();
}

Status ExtentBuffer::check_leases_locked(const char* what, std::uint64_t offset) const {
  for (const SharedLease* lease : leases_) {
    if (lease->bytes_ <= offset) continue;
    return {EBUSY, "the file cannot be " + std::string(what) + " at " + std::to_string(offset) + ": its first " +
                       std::to_string(lease->bytes_) + " bytes are leased" +
                       (lease->label_.empty() ? "" : " by " + lease->label_)};
  }
  return {};
}

}  // namespace gpufs
