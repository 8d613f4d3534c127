// What all kinds of buffers share: what a copy between buffers checks and counts, and what a buffer of fixed size
// refuses.

#include "memory/buffer.h"

#include <algorithm>
#include <cerrno>
#include <memory>
#include <utility>

#include "device/device_context.h"
#include "memory/extent_buffer.h"
#include "observe/counters.h"
#include "observe/trace.h"

namespace gpufs {

Result<std::shared_ptr<Buffer>> Buffer::create(std::shared_ptr<DeviceContext> device, bool preallocates) {
  return std::shared_ptr<Buffer>(std::make_shared<ExtentBuffer>(std::move(device), preallocates));
}

Result<std::shared_ptr<Buffer>> Buffer::restore(std::shared_ptr<DeviceContext> device, const KeptContents& contents) {
  auto buffer = std::make_shared<ExtentBuffer>(std::move(device), /*preallocates=*/true);
  if (Status restored = buffer->restore(contents); !restored.ok()) return restored;
  return std::shared_ptr<Buffer>(std::move(buffer));
}

Result<std::uint64_t> Buffer::copy_from(Buffer& source, std::uint64_t source_offset, std::uint64_t offset,
                                        std::uint64_t bytes, const std::atomic<bool>* cancelled, Wait wait) {
  const std::uint64_t source_size = source.size();
  if (source_offset >= source_size || bytes == 0) return std::uint64_t{0};
  bytes = std::min(bytes, source_size - source_offset);
  if (Status status = clip_copy(offset, &bytes); !status.ok()) return status;
  if (&source == this && offset < source_offset + bytes && source_offset < offset + bytes) {
    return Status(EINVAL, "the ranges to copy overlap");
  }
  const observe::Span span(observe::TraceKind::kBufferCopy, device()->info().index, offset, bytes);
  // Counted at both ends, which are often of one device.
  observe::Measured taken(source.device()->counters(), observe::Backend::kDeviceCopy, observe::Flow::kOut);
  observe::Measured given(device()->counters(), observe::Backend::kDeviceCopy, observe::Flow::kIn);
  std::uint64_t done = 0;
  Status status = copy_chunks(source, source_offset, offset, bytes, cancelled, wait, &done, [&] {
    taken.advance(done);
    given.advance(done);
  });
  if (done == 0 && !status.ok()) return status;
  taken.done(done);
  given.done(done);
  source.activity().note(observe::Backend::kDeviceCopy, observe::Flow::kOut, done);
  activity().note(observe::Backend::kDeviceCopy, observe::Flow::kIn, done);
  return done;
}

Status Buffer::fixed_size() { return {EPERM, "a registered file has a fixed size and the memory of its program"}; }

Status Buffer::refuse_change() {
  Status usable = pin_for_read(0, 0).status();
  return usable.ok() ? fixed_size() : usable;
}

Result<Buffer::Gathered> Buffer::gather(std::uint64_t /*offset*/, std::uint64_t /*bytes*/, Wait /*wait*/) {
  return Status(EOPNOTSUPP, "the memory of another program is copied");
}

Status Buffer::allocate(std::uint64_t /*offset*/, std::uint64_t /*bytes*/, bool /*keep_size*/) {
  return refuse_change();
}

Status Buffer::punch(std::uint64_t /*offset*/, std::uint64_t /*bytes*/) { return refuse_change(); }

Status Buffer::zero_range(std::uint64_t /*offset*/, std::uint64_t /*bytes*/, bool /*keep_size*/) {
  return refuse_change();
}

Result<std::shared_ptr<Buffer::Lease>> Buffer::lease(bool /*writable*/, bool /*exports*/, std::string /*label*/) {
  return Status(EPERM, "the memory of a registered file belongs to another program, which alone can pass it on");
}

}  // namespace gpufs
