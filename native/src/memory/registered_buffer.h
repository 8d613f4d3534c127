// A buffer of fixed size over memory that another program has passed on, until that program withdraws it. Afterwards
// every call fails with ESTALE, and the memory is unmapped as soon as nobody uses it.
// Ownership: as Buffer; the mapping is the buffer's until revoke(), then that of the last pin.
// Thread-safe. No function waits for others, except revoke().
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>

#include "device/device_context.h"
#include "drivers/driver.h"
#include "memory/buffer.h"

namespace gpufs {

class RegisteredBuffer : public Buffer {
 public:
  // Maps the memory and charges it to the accounts that `payers` charges: its addresses, and on the host driver its
  // bytes, since accesses allocate what its program has not. As Device::map_foreign(). EDQUOT: beyond a limit of
  // theirs.
  static Result<std::shared_ptr<RegisteredBuffer>> map(const std::shared_ptr<DeviceContext>& device,
                                                       const ForeignMemory& memory, const Charge& payers);
  // memory: `bytes` of it are the buffer; not null.
  RegisteredBuffer(std::shared_ptr<DeviceContext> device, std::unique_ptr<ForeignMapping> memory, std::uint64_t bytes,
                   bool writable);

  // Calls fail from now on. Waits until nobody uses the memory any more: true; false after `timeout`.
  bool revoke(std::chrono::milliseconds timeout);

  [[nodiscard]] const std::shared_ptr<DeviceContext>& device() const override { return context_; }
  [[nodiscard]] std::uint64_t size() const override { return bytes_; }
  [[nodiscard]] std::uint64_t bytes_held() const override;
  [[nodiscard]] std::uint64_t limit() const override { return bytes_; }

  Status check_pinned() override;
  Result<Pin> pin_for_read(std::uint64_t offset, std::uint64_t bytes, Wait wait) override;
  // EPERM beyond the end, and for memory that is shared for reading only.
  Result<Pin> pin_for_write(std::uint64_t offset, std::uint64_t bytes, Wait wait) override;
  Result<std::size_t> read(std::uint64_t offset, std::span<std::byte> destination, Wait wait) override;
  // A write across the end is EFBIG, as for other buffers across limit(): the caller shortens it.
  Result<std::size_t> write(std::uint64_t offset, std::span<const std::byte> source, Wait wait) override;
  Result<std::uint64_t> seek_data(std::uint64_t offset) override;
  Result<std::uint64_t> seek_hole(std::uint64_t offset) override;

  // EPERM for another size.
  Status resize(std::uint64_t size, Wait wait) override;

 private:
  // Keeps the memory mapped while it lives.
  class MappingUse;

  Status clip_copy(std::uint64_t offset, std::uint64_t* bytes) const override;
  Status copy_chunks(Buffer& source, std::uint64_t source_offset, std::uint64_t offset, std::uint64_t bytes,
                     const std::atomic<bool>* cancelled, Wait wait, std::uint64_t* done,
                     const std::function<void()>& advanced) override;
  // ESTALE, EPERM.
  Status check_write(std::uint64_t offset, std::uint64_t bytes) const;
  // is_pinned: also once the memory is withdrawn, since a pin keeps it until its end.
  Status begin(MappingUse* use, bool is_pinned = false);
  // After an access: ESTALE if the memory was taken away under it.
  Status check_intact(MappingUse& use);
  // Unmaps the memory, which nobody uses any more. Needs no lock.
  void unmap(std::unique_ptr<ForeignMapping> memory);

  const std::shared_ptr<DeviceContext> context_;
  const std::uint64_t bytes_;
  const bool writable_;
  std::uint64_t address_bytes_ = 0;  // charged; set before the buffer is shared

  mutable std::mutex mutex_;  // guards all below; nothing is called under it
  std::condition_variable unused_;
  std::unique_ptr<ForeignMapping> memory_;  // null once it is unmapped
  std::uint64_t uses_ = 0;
  bool revoked_ = false;
  bool gone_ = false;  // the memory is unmapped
};

}  // namespace gpufs
