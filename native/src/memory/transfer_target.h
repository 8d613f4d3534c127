// The memory that a transfer reads or writes: that of a file (memory/buffer.h), or a program's own.
// Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "base/thread.h"
#include "drivers/driver.h"
#include "observe/counters.h"

namespace gpufs {

class DeviceContext;  // device/device_context.h
class ExtentBuffer;   // memory/extent_buffer.h

class TransferTarget {
 public:
  virtual ~TransferTarget() = default;

  [[nodiscard]] virtual const std::shared_ptr<DeviceContext>& device() const = 0;
  // Where the contents are now: the device, or the host tier.
  [[nodiscard]] virtual std::shared_ptr<DeviceContext> residence() const { return device(); }
  [[nodiscard]] virtual std::uint64_t size() const = 0;
  // The largest size that it may have.
  [[nodiscard]] virtual std::uint64_t limit() const = 0;
  // Where memory lies that a program allocated itself, and keeps; 0: that of a file.
  [[nodiscard]] virtual DeviceAddress address() const { return 0; }
  // Where in its first granule a buffer's first byte lies.
  [[nodiscard]] virtual std::uint64_t placement() const { return 0; }
  // The buffer, if a load allocates its memory and sets its size, and if it can have holes. Null if memory and size
  // are fixed: zeros must be written into it where a file has a hole.
  [[nodiscard]] virtual ExtentBuffer* growing() { return nullptr; }

  // A part that stays mapped at its addresses for as long as this object lives. Pieces are in order and without
  // overlap, cut at holes; a hole is a piece with address 0.
  struct Piece : Extent {
    DeviceAddress address = 0;
  };
  struct Pin {
    std::vector<Piece> pieces;
    std::shared_ptr<void> keep;
    const DeviceContext* device = nullptr;  // whose addresses they are; it lives as long as `keep`
  };
  // For reading, where the contents are: clipped to size(); holes stay holes. While a thread holds such a pin it must
  // not resize or punch the same buffer, which would wait for the pin.
  virtual Result<Pin> pin_for_read(std::uint64_t offset, std::uint64_t bytes, Wait wait = Wait::kAllowed) = 0;
  // For writing, on device(): a buffer populates memory over the whole range first (ENOSPC leaves everything as it was,
  // EFBIG beyond the maximum). The size does not change: call publish() of growing() with the end of what was really
  // written, while the pin is held (a truncation that came in between would otherwise be undone). Bytes above size()
  // that were written and are not published must be cleared with its discard_above_size(). While a thread holds such a
  // pin it must call nothing else that populates or takes away memory of the same buffer: a small file that moves to
  // memory of its own waits for its writers.
  virtual Result<Pin> pin_for_write(std::uint64_t offset, std::uint64_t bytes, Wait wait = Wait::kAllowed) = 0;
  // While a part is pinned: ESTALE if some of the memory was taken away, so that what was copied from or to it may be
  // lost.
  virtual Status check_pinned() { return {}; }
  // lseek(2) SEEK_HOLE: the first hole at or above the offset, or the size; ENXIO at and beyond the size.
  virtual Result<std::uint64_t> seek_hole(std::uint64_t offset) = 0;
  [[nodiscard]] bool has_hole(std::uint64_t offset, std::uint64_t end) {
    const Result<std::uint64_t> found = seek_hole(offset);
    return found.ok() && found.value() < end;
  }

  // Noted by whatever moves the bytes.
  [[nodiscard]] observe::FileActivity& activity() { return activity_; }

 private:
  observe::FileActivity activity_;
};

}  // namespace gpufs
