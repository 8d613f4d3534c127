#include "memory/registered_buffer.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/math.h"

namespace gpufs {
namespace {

Status stale() { return {ESTALE, "the program that registered this memory has withdrawn it"}; }

}  // namespace

class RegisteredBuffer::MappingUse {
 public:
  MappingUse() = default;
  ~MappingUse() {
    if (!buffer_) return;
    std::unique_ptr<ForeignMapping> unmapped;
    {
      const std::lock_guard lock(buffer_->mutex_);
      if (--buffer_->uses_ == 0 && buffer_->revoked_) unmapped = std::move(buffer_->memory_);
    }
    if (unmapped) buffer_->unmap(std::move(unmapped));
  }
  MappingUse(const MappingUse&) = delete;
  MappingUse& operator=(const MappingUse&) = delete;

  [[nodiscard]] DeviceAddress address() const { return memory_->address(); }
  [[nodiscard]] ForeignMapping& memory() const { return *memory_; }

 private:
  friend class RegisteredBuffer;
  std::shared_ptr<RegisteredBuffer> buffer_;  // null: nothing is used
  ForeignMapping* memory_ = nullptr;
};

RegisteredBuffer::RegisteredBuffer(std::shared_ptr<DeviceContext> device, std::unique_ptr<ForeignMapping> memory,
                                   std::uint64_t bytes, bool writable)
    : context_(std::move(device)), bytes_(bytes), writable_(writable), memory_(std::move(memory)) {}

Result<std::shared_ptr<RegisteredBuffer>> RegisteredBuffer::map(const std::shared_ptr<DeviceContext>& device,
                                                                const ForeignMemory& memory, const Charge& payers) {
  const auto buffer = std::make_shared<RegisteredBuffer>(device, nullptr, memory.bytes, memory.writable);
  Charge& charge = buffer->charge();
  charge.move_to_accounts_of(payers);
  const std::uint64_t addresses = std::max(memory.bytes, memory.whole_bytes());
  TRY(charge.take_addresses(addresses));
  buffer->address_bytes_ = addresses;
  TRY(charge.take_descriptors(1));
  if (device->info().cpu_addressable) TRY(charge.grow(buffer->bytes_held()));
  Result<std::unique_ptr<ForeignMapping>> mapped = device->device().map_foreign(memory);
  while (mapped.error() == ENOSPC && device->releases().evict(memory.bytes)) {
    mapped = device->device().map_foreign(memory);
  }
  buffer->memory_ = TRY(std::move(mapped));
  return buffer;
}

bool RegisteredBuffer::revoke(std::chrono::milliseconds timeout) {
  std::unique_ptr<ForeignMapping> unmapped;
  {
    const std::lock_guard lock(mutex_);
    revoked_ = true;
    if (uses_ == 0) unmapped = std::move(memory_);
  }
  if (unmapped) unmap(std::move(unmapped));
  std::unique_lock lock(mutex_);
  return unused_.wait_for(lock, timeout, [this] { return gone_; });
}

void RegisteredBuffer::unmap(std::unique_ptr<ForeignMapping> memory) {
  memory.reset();
  charge().settle(0);
  charge().release_addresses(address_bytes_);
  charge().settle_descriptors(0);
  device()->released(0);  // on the host driver it counted as memory of the device
  {
    const std::lock_guard lock(mutex_);
    gone_ = true;
  }
  unused_.notify_all();
}

std::uint64_t RegisteredBuffer::bytes_held() const {
  const std::lock_guard lock(mutex_);
  return revoked_ ? 0 : round_up(bytes_, 512);
}

Status RegisteredBuffer::begin(MappingUse* use, bool is_pinned) {
  {
    const std::lock_guard lock(mutex_);
    if (is_pinned ? memory_ == nullptr : revoked_) return stale();
    ++uses_;
    use->buffer_ = std::static_pointer_cast<RegisteredBuffer>(shared_from_this());
    use->memory_ = memory_.get();
  }
  return check_intact(*use);
}

Status RegisteredBuffer::check_intact(MappingUse& use) {
  if (use.memory_->intact()) return {};
  return {ESTALE, "the program that registered this memory has taken a part of it away"};
}

Status RegisteredBuffer::check_pinned() {
  MappingUse use;
  return begin(&use, /*is_pinned=*/true);
}

Status RegisteredBuffer::check_write(std::uint64_t offset, std::uint64_t bytes) const {
  if (!writable_) return {EPERM, "this memory is registered for reading only"};
  if (offset >= bytes_ && bytes != 0) return fixed_size();
  if (bytes > bytes_ - std::min(offset, bytes_)) return {EFBIG, "a registered file has a fixed size"};
  return {};
}

Result<Buffer::Pin> RegisteredBuffer::pin_for_read(std::uint64_t offset, std::uint64_t bytes, Wait /*wait*/) {
  const auto use = std::make_shared<MappingUse>();
  TRY(begin(use.get()));
  Pin pin{{}, use, context_.get()};
  const std::uint64_t end = offset + std::min(bytes, bytes_ - std::min(offset, bytes_));
  while (offset < end) {
    const std::uint64_t data = std::min(use->memory().next_data(offset), end);
    if (data > offset) pin.pieces.push_back({Extent::between(offset, data), 0});
    if (data == end) break;
    // At least a byte: the memory may be taken away between the two calls.
    offset = std::clamp(use->memory().next_hole(data), data + 1, end);
    pin.pieces.push_back({Extent::between(data, offset), use->address() + data});
  }
  return pin;
}

Result<Buffer::Pin> RegisteredBuffer::pin_for_write(std::uint64_t offset, std::uint64_t bytes, Wait /*wait*/) {
  const auto use = std::make_shared<MappingUse>();
  Status status = begin(use.get());
  if (status.ok()) status = check_write(offset, bytes);
  if (status.error() == EFBIG) status = fixed_size();
  if (!status.ok()) return status;
  Pin pin{{}, use, context_.get()};
  if (bytes != 0) pin.pieces.push_back({{offset, bytes}, use->address() + offset});
  return pin;
}

Result<std::size_t> RegisteredBuffer::read(std::uint64_t offset, std::span<std::byte> destination, Wait /*wait*/) {
  MappingUse use;
  TRY(begin(&use));
  if (offset >= bytes_) return std::size_t{0};
  const std::size_t bytes = std::min<std::uint64_t>(destination.size(), bytes_ - offset);
  Status status = use.memory().copy_out(destination.data(), offset, bytes);
  if (status.error() == EOPNOTSUPP) {
    status = context_->device().copy_out(destination.data(), use.address() + offset, bytes);
  }
  if (status.ok()) status = check_intact(use);
  if (!status.ok()) return status;
  return bytes;
}

Result<std::size_t> RegisteredBuffer::write(std::uint64_t offset, std::span<const std::byte> source, Wait /*wait*/) {
  MappingUse use;
  TRY(begin(&use));
  TRY(check_write(offset, source.size()));
  TRY(context_->device().copy_in(use.address() + offset, source.data(), source.size()));
  TRY(check_intact(use));
  return source.size();
}

Result<std::uint64_t> RegisteredBuffer::seek_data(std::uint64_t offset) {
  MappingUse use;
  TRY(begin(&use));
  const std::uint64_t data = offset < bytes_ ? use.memory().next_data(offset) : bytes_;
  if (data >= bytes_) return Status(ENXIO, "no data at or above the offset");
  return data;
}

Result<std::uint64_t> RegisteredBuffer::seek_hole(std::uint64_t offset) {
  MappingUse use;
  TRY(begin(&use));
  if (offset >= bytes_) return Status(ENXIO, "the offset is not below the end");
  return std::min(use.memory().next_hole(offset), bytes_);
}

Status RegisteredBuffer::clip_copy(std::uint64_t offset, std::uint64_t* bytes) const {
  TRY(check_write(offset, 1));
  *bytes = std::min(*bytes, bytes_ - offset);
  return {};
}

Status RegisteredBuffer::copy_chunks(Buffer& source, std::uint64_t source_offset, std::uint64_t offset,
                                     std::uint64_t bytes, const std::atomic<bool>* cancelled, Wait wait,
                                     std::uint64_t* done, const std::function<void()>& advanced) {
  while (*done < bytes) {
    if (cancelled != nullptr && cancelled->load(std::memory_order_relaxed)) {
      return Status(ECANCELED, "the copy was cancelled");
    }
    const std::uint64_t before = *done;
    MappingUse use;
    TRY(begin(&use));
    Pin pinned = TRY(source.pin_for_read(source_offset + before, std::min(kCopyChunk, bytes - before), wait));
    std::uint64_t copied = 0;
    Status status = copy_pinned(use.address() + offset + before, pinned, &copied);
    *done += copied;
    if (!status.ok()) return status;
    status = check_intact(use);
    if (!status.ok() || *done == before) return status;  // the source may have become shorter
    advanced();
  }
  return {};
}

Status RegisteredBuffer::resize(std::uint64_t size, Wait /*wait*/) {
  return size == bytes_ ? pin_for_read(0, 0, Wait::kAllowed).status() : refuse_change();
}

}  // namespace gpufs
