// The interface of a buffer, the contents of one file: ExtentBuffer owns memory of a device, RegisteredBuffer shows
// memory of another program.
// Owned by shared pointers (inode table, open files, transfers); its memory is freed with the last one.
// Any thread may call any function, except a driver's own threads. Readers wait only while the driver moves a piece of
// memory that they want. Writers wait for growth, and for calls that take memory away, which wait until nobody uses
// that memory any more. With Wait::kForbidden read(), write(), gather(), copy_from(), resize() and pins change nothing
// and return EAGAIN where they would have to wait for others who use the buffer. They do not reclaim memory from other
// buffers either, so ENOSPC may be premature. EDQUOT: an account to which the memory is charged is at its limit. What
// is said of ENOSPC below holds for it, too.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "drivers/driver.h"
#include "memory/account.h"
#include "memory/transfer_target.h"

namespace gpufs {

// A file's first byte may lie anywhere below this in its memory, so that what programs use in place is aligned however
// long the file's header is.
inline constexpr std::uint64_t kPlacementEnd = 256;

// How much a copy moves between two checks whether it is cancelled.
inline constexpr std::uint64_t kCopyChunk = std::uint64_t{64} << 20;

class Buffer : public TransferTarget, public std::enable_shared_from_this<Buffer> {
 public:
  // The largest size of a buffer in bytes (sparse), a multiple of the page size; resize() beyond it is EFBIG.
  static constexpr std::uint64_t kMaximumBytes = std::uint64_t{1} << 46;

  // All device memory of the buffer, with what is preallocated: st_blocks.
  [[nodiscard]] virtual std::uint64_t bytes_held() const = 0;

  // Synchronous copies by the calling thread. read: the count, short only at the end of the file; holes are zeros.
  // write: all or an error; with ENOSPC nothing is written and the size is unchanged.
  virtual Result<std::size_t> read(std::uint64_t offset, std::span<std::byte> destination,
                                   Wait wait = Wait::kAllowed) = 0;
  virtual Result<std::size_t> write(std::uint64_t offset, std::span<const std::byte> source,
                                    Wait wait = Wait::kAllowed) = 0;

  // Where the device is cpu_addressable: the file's bytes as iovecs (holes point at a page of zeros), valid while
  // `keep` lives. EOPNOTSUPP on other devices and for memory of other programs, which is copied.
  struct Gathered {
    std::vector<iovec> pieces;
    std::size_t bytes = 0;
    std::shared_ptr<void> keep;
  };
  virtual Result<Gathered> gather(std::uint64_t offset, std::uint64_t bytes, Wait wait = Wait::kAllowed);

  // The next four change size or memory. Where both are fixed: EPERM, or ESTALE once the memory is withdrawn.
  // Shrinking zeroes the rest of the last granule's bytes above the size and releases whole granules, also those that
  // were allocated beyond the size; growing makes a hole. EFBIG beyond the maximum.
  virtual Status resize(std::uint64_t size, Wait wait = Wait::kAllowed) = 0;
  // fallocate(2): mode 0 / KEEP_SIZE; a partial failure (ENOSPC) leaves everything as it was.
  virtual Status allocate(std::uint64_t offset, std::uint64_t bytes, bool keep_size);
  // Zeroes partial granules and releases whole ones.
  virtual Status punch(std::uint64_t offset, std::uint64_t bytes);
  // Zeroes what exists and allocates what does not, as fallocate(2) has it: later writes there find memory.
  virtual Status zero_range(std::uint64_t offset, std::uint64_t bytes, bool keep_size);
  // One of the three, by the mode of fallocate(2). EOPNOTSUPP: another mode.
  Status fallocate(std::uint32_t mode, std::uint64_t offset, std::uint64_t bytes);

  // lseek(2) SEEK_DATA, as seek_hole(): ENXIO if no data follows. Granular: a populated granule is data.
  virtual Result<std::uint64_t> seek_data(std::uint64_t offset) = 0;
  // Copies between buffers, overlap within one allowed only where copy_file_range(2) allows it (else EINVAL).
  // Holes in the source become zeros. Clipped at the source's end; returns the count, which is short when `cancelled`
  // (may be null; checked between chunks) became true or an error came after progress. ECANCELED if nothing was copied.
  Result<std::uint64_t> copy_from(Buffer& source, std::uint64_t source_offset, std::uint64_t offset,
                                  std::uint64_t bytes, const std::atomic<bool>* cancelled, Wait wait = Wait::kAllowed);

  // Keeps the memory of [0, bytes()) in place, for somebody who maps it or uses its address, and keeps the buffer.
  // While a lease lives, resize() to less than bytes() and punch() there are EBUSY. Growth is allowed.
  class Lease {
   public:
    virtual ~Lease() = default;
    // The buffer's size when the lease began, or was last extended.
    [[nodiscard]] virtual std::uint64_t bytes() const = 0;
    // Extends the lease to the buffer's size now. Fails as Buffer::lease(); the lease is then as before.
    virtual Status refresh() = 0;
    // Where in the memory of the pieces the first byte lies.
    [[nodiscard]] virtual std::uint64_t placement() const = 0;
    // See DeviceMemory::export_memory(). The pieces are whole: the last one may reach beyond bytes().
    virtual Result<std::vector<ExportedMemory>> pieces(std::uint64_t from, std::size_t capacity) = 0;
    // The device address of offset 0 in this process, valid while this object lives; refresh() may change it. 0 if the
    // lease is empty.
    [[nodiscard]] virtual DeviceAddress address() const = 0;
  };
  // writable: holes get memory first (ENOSPC), and descriptors give access for writing where the driver makes a
  // difference. Otherwise a hole is ENODATA. exports: pieces() will be called; EOPNOTSUPP if the device cannot share
  // memory. Where ranges move by copying (DeviceInfo::reserve_copies) a buffer with a lease cannot outgrow its range:
  // EFBIG. label: what messages call the holder. EPERM for memory of another program, which alone can pass it on.
  // placement: where the first byte should lie; the contents move there. They stay where they are while another lease
  // or a load uses the memory, and where the device is full: Lease::placement() has the outcome. most: leases no more
  // bytes, as for a program that had a lease before: the buffer may have grown since, by holes perhaps.
  virtual Result<std::shared_ptr<Lease>> lease(bool writable, bool exports, std::string label,
                                               std::optional<std::uint64_t> placement = std::nullopt,
                                               std::uint64_t most = kMaximumBytes);

  // How many leases there are on its memory, or of these for writing.
  [[nodiscard]] virtual std::size_t leases(bool /*writable*/) const { return 0; }

  // Of the host tier: what parked contents take there.
  [[nodiscard]] virtual std::uint64_t bytes_parked() const { return 0; }

  // Who pays for bytes_held().
  [[nodiscard]] Charge& charge() { return *charge_; }

 protected:
  static Status fixed_size();  // EPERM
  Status refuse_change();      // fixed_size(), or ESTALE
  // Copies what is pinned, or zeros for holes, one piece after the other to `destination` on this buffer's device.
  // Synchronous, by the shortest way that the devices have. *copied: the bytes, also after a failure. The caller holds
  // both memories.
  Status copy_pinned(DeviceAddress destination, const Pin& source, std::uint64_t* copied) const;
  [[nodiscard]] const std::shared_ptr<Charge>& shared_charge() const { return charge_; }

 private:
  // Whether a copy may write there; *bytes: as many as may be.
  virtual Status clip_copy(std::uint64_t offset, std::uint64_t* bytes) const = 0;
  // What copy_from() does once its arguments are checked. *done: the bytes copied, also after a failure. Calls
  // advanced() after each chunk.
  virtual Status copy_chunks(Buffer& source, std::uint64_t source_offset, std::uint64_t offset, std::uint64_t bytes,
                             const std::atomic<bool>* cancelled, Wait wait, std::uint64_t* done,
                             const std::function<void()>& advanced) = 0;

  const std::shared_ptr<Charge> charge_ = std::make_shared<Charge>();
};

}  // namespace gpufs
