// Copies between buffers, on one device or between two, that never wait for memory while they hold a pin: two copies
// in opposite directions would wait for each other.

#include <algorithm>
#include <cerrno>
#include <deque>
#include <memory>
#include <new>
#include <utility>

#include "base/math.h"
#include "device/device_context.h"
#include "memory/extent_buffer.h"
#include "observe/trace.h"

namespace gpufs {
namespace {

constexpr std::uint64_t kCopyChunk = std::uint64_t{64} << 20;  // between two looks at a cancellation
// Chunks of a copy within a GPU that are under way: it never runs dry, and a cancellation waits for no more than these.
constexpr std::size_t kQueueLength = 4;
constexpr std::uint64_t kStagingBytes = std::uint64_t{4} << 20;  // between devices without a direct way

Status copy_staged(Device& to, DeviceAddress destination, Device& from, DeviceAddress source, std::uint64_t bytes) {
  const std::uint64_t step = std::min(bytes, kStagingBytes);
  const std::unique_ptr<std::byte[]> staging(new (std::nothrow) std::byte[step]);
  if (staging == nullptr) return Status(ENOMEM, "no memory to copy through");
  for (std::uint64_t done = 0; done < bytes;) {
    const std::uint64_t part = std::min(step, bytes - done);
    Status status = from.copy_out(staging.get(), source + done, part);
    if (status.ok()) status = to.copy_in(destination + done, staging.get(), part);
    if (!status.ok()) return status;
    done += part;
  }
  return {};
}

Status copy_between(const DeviceContext& to, DeviceAddress destination, const DeviceContext& from, DeviceAddress source,
                    std::uint64_t bytes) {
  if (&to.device() == &from.device()) return to.device().copy_within(destination, source, bytes);
  if (&to.driver() == &from.driver()) {
    Status status = from.device().copy_to_peer(to.device(), destination, source, bytes);
    if (status.error() != EOPNOTSUPP) return status;
  }
  return copy_staged(to.device(), destination, from.device(), source, bytes);
}

}  // namespace

// What is under way of a copy within one GPU: chunks on one stream, each with its pins until its event is done. Owned
// by copy_from(), on its thread, which must wait for nothing but the device while chunks are under way: somebody else
// may wait for their pins.
class ExtentBuffer::CopyQueue {
 public:
  CopyQueue(ExtentBuffer& target, Buffer& source) : target_(target), source_(source) {}
  ~CopyQueue() { (void)settle(0, nullptr); }
  CopyQueue(const CopyQueue&) = delete;
  CopyQueue& operator=(const CopyQueue&) = delete;

  // Queues a chunk. False, and nothing has happened, where that would mean to wait, or its memory is not there at both
  // ends: it is to be copied in another way once nothing is under way. *failure: what was queued last may have failed.
  bool try_add(std::uint64_t source_offset, std::uint64_t offset, std::uint64_t bytes, Status* failure) {
    auto chunk = std::make_unique<Chunk>();
    chunk->source = source_.try_pin_for_read(source_offset, bytes);
    if (chunk->source == nullptr || chunk->source->pieces().size() != 1) return false;
    const Piece& piece = chunk->source->pieces().front();
    if (piece.address == 0 || piece.bytes != bytes || !open(chunk.get())) return false;
    {
      const std::lock_guard lock(target_.state_mutex_);
      if (!target_.try_write_locked(offset, offset + bytes, &chunk->target)) return false;
    }
    chunk->end = offset + bytes;
    chunk->bytes = bytes;
    *failure = stream_->copy_on_device(chunk->target.address(), piece.address, static_cast<std::size_t>(bytes));
    if (failure->ok()) *failure = stream_->record(*chunk->moved);
    if (failure->ok()) {
      under_way_.push_back(std::move(chunk));
    } else {
      (void)stream_->synchronize();  // it may have begun, and there is no event to tell when it has ended
    }
    return true;
  }

  // Waits until no more than `left` chunks are under way. What is in place up to the first failure is published and
  // added to *done; a failure ends all that is under way.
  Status settle(std::size_t left, std::uint64_t* done) {
    while (under_way_.size() > left) {
      const std::unique_ptr<Chunk> chunk = std::move(under_way_.front());
      under_way_.pop_front();
      Status status = chunk->moved->synchronize();
      if (!status.ok()) {
        (void)stream_->synchronize();
        under_way_.clear();
        return status;
      }
      if (done == nullptr) continue;
      target_.publish(chunk->end);
      *done += chunk->bytes;
    }
    return {};
  }

 private:
  struct Chunk {
    WriteLease target;
    std::unique_ptr<Pinned> source;
    std::shared_ptr<Event> moved;
    std::uint64_t end = 0;  // in the target
    std::uint64_t bytes = 0;
  };

  bool open(Chunk* chunk) {
    if (stream_ == nullptr) {
      Result<std::shared_ptr<Stream>> stream = target_.context_->streams().acquire();
      if (!stream.ok()) return false;
      stream_ = stream.take();
    }
    Result<std::shared_ptr<Event>> event = target_.context_->events().acquire();
    if (event.ok()) chunk->moved = event.take();
    return event.ok();
  }

  ExtentBuffer& target_;
  Buffer& source_;
  std::shared_ptr<Stream> stream_;  // from the first chunk on
  std::deque<std::unique_ptr<Chunk>> under_way_;
};

bool ExtentBuffer::copies_briefly(const Buffer& source, std::uint64_t source_offset, std::uint64_t bytes) const {
  // A GPU moves that much within its memory in 8 ms. Two threads that sleep, to do the copy and to take the next
  // request, begin 0.25 to 1 ms late altogether, of the 4 ms that 8 GiB take (one H200, in a virtual machine).
  constexpr std::uint64_t kBrief = std::uint64_t{16} << 30;
  const std::uint64_t size = source.size();
  return source.device() == context_ && !context_->info().cpu_addressable &&
         std::min(bytes, size - std::min(size, source_offset)) <= kBrief;
}

Result<std::uint64_t> ExtentBuffer::copy_from(Buffer& source, std::uint64_t source_offset, std::uint64_t offset,
                                              std::uint64_t bytes, const std::atomic<bool>* cancelled) {
  const std::uint64_t source_size = source.size();
  if (source_offset >= source_size || bytes == 0) return std::uint64_t{0};
  bytes = std::min(bytes, source_size - source_offset);
  std::uint64_t end = 0;
  Status status = check_end(offset, bytes, &end);
  if (!status.ok()) return status;
  if (&source == this && offset < source_offset + bytes && source_offset < end) {
    return Status(EINVAL, "the ranges to copy overlap");
  }
  const observe::Span span(observe::TraceKind::kBufferCopy, context_->info().index, offset, bytes);
  // Counted at both ends, which are often of one device.
  const std::shared_ptr<DeviceContext> from = source.device();
  observe::Measured taken(from->counters(), observe::Backend::kDeviceCopy, observe::Flow::kOut);
  observe::Measured given(context_->counters(), observe::Backend::kDeviceCopy, observe::Flow::kIn);
  std::uint64_t done = 0;
  status = copy_chunks(source, source_offset, offset, bytes, cancelled, &done);
  if (done == 0 && !status.ok()) return status;
  taken.done(done);
  given.done(done);
  source.activity().note(observe::Backend::kDeviceCopy, observe::Flow::kOut, done);
  activity().note(observe::Backend::kDeviceCopy, observe::Flow::kIn, done);
  return done;
}

Status ExtentBuffer::copy_chunks(Buffer& source, std::uint64_t source_offset, std::uint64_t offset, std::uint64_t bytes,
                                 const std::atomic<bool>* cancelled, std::uint64_t* done) {
  const bool on_one_gpu = &source.device()->device() == &context_->device() && !context_->info().cpu_addressable;
  const std::uint64_t large = on_one_gpu ? context_->copy_chunk_bytes() : kCopyChunk;
  expect(offset + bytes);
  std::uint64_t chunk = large;
  std::uint64_t begun = 0;  // done, or under way
  Status status;
  {
    CopyQueue queue(*this, source);
    while (begun < bytes) {
      if (cancelled != nullptr && cancelled->load(std::memory_order_relaxed)) {
        status = Status(ECANCELED, "the copy was cancelled");
        break;
      }
      const std::uint64_t part = std::min(chunk, bytes - begun);
      // A single chunk has nothing to overlap with.
      if (on_one_gpu && bytes > large && queue.try_add(source_offset + begun, offset + begun, part, &status)) {
        begun += part;
        if (status.ok()) status = queue.settle(kQueueLength, done);
        if (!status.ok()) break;
        continue;
      }
      status = queue.settle(0, done);
      if (!status.ok()) break;
      const std::uint64_t before = *done;
      status = copy_chunk(source, source_offset + before, offset + before, part, done);
      begun = *done;
      if (status.error() == ENOSPC && chunk > kCopyChunk) {
        chunk = kCopyChunk;  // as much as there is room for
        status = {};
        continue;
      }
      if (!status.ok() || begun - before < part) break;  // the source may have become shorter
    }
    const Status settled = queue.settle(0, done);
    if (!settled.ok()) status = settled;
  }
  if (*done == begun) return status;
  // What was moved behind a failure counts as never written.
  const Status cleared = discard_above_size(offset + *done, begun - *done);
  return status.ok() ? cleared : status;
}

Status ExtentBuffer::copy_chunk(Buffer& source, std::uint64_t source_offset, std::uint64_t offset, std::uint64_t bytes,
                                std::uint64_t* done) {
  std::vector<Piece> pieces;
  {
    Result<std::unique_ptr<Pinned>> pinned = source.pin_for_read(source_offset, bytes);
    if (!pinned.ok()) return pinned.status();
    pieces = pinned.value()->pieces();
  }
  for (const Piece& piece : pieces) {
    const std::uint64_t target = offset + (piece.offset - source_offset);
    if (piece.address == 0) {
      Status status = copy_hole(target, target + piece.bytes);
      if (!status.ok()) return status;
      *done += piece.bytes;
      continue;
    }
    const std::uint64_t before = *done;
    Status status = copy_data(source, piece.offset, target, piece.bytes, done);
    if (!status.ok() || *done - before < piece.bytes) return status;
  }
  return {};
}

Status ExtentBuffer::copy_data(Buffer& source, std::uint64_t source_offset, std::uint64_t offset, std::uint64_t bytes,
                               std::uint64_t* done) {
  Status status;
  std::uint64_t copied = 0;
  {
    WriteLease target;
    std::unique_ptr<Pinned> pinned;
    for (;;) {
      // The source may have changed since it was looked at: it is cut anew.
      Result<std::unique_ptr<Pinned>> looked_at = source.pin_for_read(source_offset, bytes);
      if (!looked_at.ok()) return looked_at.status();
      pinned = looked_at.take();
      {
        const std::lock_guard lock(state_mutex_);
        if (try_write_locked(offset, offset + bytes, &target)) break;
      }
      // What has to be waited for is waited for without the pin.
      pinned.reset();
      WriteLease made;
      status = acquire_write(offset, offset + bytes, &made);
      if (!status.ok()) return status;
    }
    for (const Piece& piece : pinned->pieces()) {
      const DeviceAddress to = target.address() + (piece.offset - source_offset);
      status = piece.address == 0 ? context_->device().zero(to, piece.bytes)
                                  : copy_between(*context_, to, *source.device(), piece.address, piece.bytes);
      if (!status.ok()) break;
      copied += piece.bytes;
    }
    if (copied > 0) publish(offset + copied);
    *done += copied;
  }
  if (copied == bytes) return status;
  const Status cleared = discard_above_size(offset + copied, bytes - copied);
  return status.ok() ? cleared : status;
}

// A hole of the source: what exists here becomes zeros, what does not stays a hole.
Status ExtentBuffer::copy_hole(std::uint64_t offset, std::uint64_t end) {
  for (const Extent& extent : inside(current()->extents, offset, end)) {
    WriteLease target;
    Status status = acquire_write(extent.offset, extent.offset + extent.bytes, &target);
    if (status.ok()) status = context_->device().zero(target.address(), extent.bytes);
    if (!status.ok()) return status;
  }
  publish(end);
  return {};
}

}  // namespace gpufs
