// Copies between buffers, on one device or between two. They never wait for memory while they hold a pin: two copies in
// opposite directions would wait for each other.

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/thread.h"
#include "device/device_context.h"
#include "memory/account.h"
#include "memory/extent_buffer.h"

namespace gpufs {
namespace {

// Between two devices a chunk may be twice as long as the last one if that took less than this time. Taking 1 GiB of
// memory takes a third as long as copying it over NVLink (two H200s), so it is ready in time from 256 MiB on. Chunks
// end at 4 GiB there, which take 11 ms; a cancellation is seen between two of them.
constexpr std::chrono::milliseconds kFastChunk{8};

}  // namespace

bool ExtentBuffer::copies_briefly(const Buffer& source, std::uint64_t source_offset, std::uint64_t bytes) const {
  // A GPU moves that much within its memory in 8 ms. Waking one thread for the copy and another for the next request
  // costs 0.25 to 1 ms, of the 4 ms that 8 GiB take (one H200, in a virtual machine).
  constexpr std::uint64_t kBrief = std::uint64_t{16} << 30;
  const std::uint64_t size = source.size();
  return source.residence() == context_ && !context_->info().cpu_addressable &&
         std::min(bytes, size - std::min(size, source_offset)) <= kBrief;
}

Status ExtentBuffer::clip_copy(std::uint64_t offset, std::uint64_t* bytes) const {
  std::uint64_t end = 0;
  return check_end(offset, *bytes, &end);
}

// Between two devices another thread takes, maps and zeroes memory for the next chunk while one is copied.
Status ExtentBuffer::copy_chunks(Buffer& source, std::uint64_t source_offset, std::uint64_t offset, std::uint64_t bytes,
                                 const std::atomic<bool>* cancelled, Wait wait, std::uint64_t* done,
                                 const std::function<void()>& advanced) {
  // One call of copy_file_range(2) copies 2 GiB at most, so the rest of the source will likely follow. Where addresses
  // are memory, only what is certain counts.
  const std::uint64_t rest = source.size() - std::min(source.size(), source_offset);
  // What is claimed is not parked from now on. What is in the host tier comes back here: a hole of the source needs no
  // memory, but may cover data.
  std::shared_ptr<const Claim> claimed =
      claim({offset, context_->info().reserve_copies ? bytes : std::max(bytes, rest)});
  if (residence() != context_) {
    TRY(bring_back(wait));
  }
  if (offset == source_offset) take_placement(source);
  const bool between_devices = &source.residence()->device() != &context_->device();
  const std::uint64_t largest = context_->info().cpu_addressable ? kCopyChunk : context_->copy_chunk_bytes();
  std::uint64_t chunk = between_devices ? std::min(kCopyChunk, largest) : largest;
  std::uint64_t next = chunk;
  std::uint64_t touched = 0;  // the end of the highest bytes for which memory was taken
  Status taking;              // written by the other thread while it runs
  Status status;
  while (*done < bytes) {
    if (cancelled != nullptr && cancelled->load(std::memory_order_relaxed)) {
      status = Status(ECANCELED, "the copy was cancelled");
      break;
    }
    const std::uint64_t before = *done;
    // A hole is one step: a sparse file of 64 TiB has a million chunks.
    const std::uint64_t hole = hole_of_both(source, source_offset + before, offset + before, bytes - before);
    const std::uint64_t part = std::max(hole, std::min(chunk, bytes - before));
    const std::uint64_t following = before + part;
    touched = std::max(touched, following);
    const auto start = std::chrono::steady_clock::now();
    std::thread ahead;
    // After a failure the copy itself takes what it needs, and reports what it cannot get.
    if (between_devices && taking.ok() && following < bytes) {
      const std::uint64_t length = std::min(next, bytes - following);
      Result<std::thread> started = start_thread("gpufs-ahead", [&, following, length] {
        taking = take_ahead(source, source_offset + following, offset + following, length);
      });
      if (started.ok()) {
        ahead = started.take();
        touched = following + length;
      }
    }
    status = copy_chunk(source, source_offset + before, offset + before, part, wait, done);
    const bool fast = std::chrono::steady_clock::now() - start < kFastChunk;
    if (ahead.joinable()) ahead.join();
    if (lacks_memory(status.error()) && chunk > kCopyChunk) {
      chunk = next = std::max(chunk / 2, kCopyChunk);  // as much as still fits
      continue;
    }
    if (!status.ok() || *done - before < part) break;  // the source may have become shorter
    chunk = next;
    if (between_devices && fast) next = std::min(next * 2, largest);
    advanced();
  }
  claimed.reset();
  if (touched <= *done) return status;
  const Status cleared = discard_above_size(offset + *done, touched - *done);
  return status.ok() ? cleared : status;
}

// How much of the next bytes is a hole of the source, and has no memory here.
std::uint64_t ExtentBuffer::hole_of_both(Buffer& source, std::uint64_t source_offset, std::uint64_t offset,
                                         std::uint64_t bytes) const {
  const Result<std::uint64_t> data = source.seek_data(source_offset);
  if (!data.ok() && data.error() != ENXIO) return 0;
  const std::uint64_t end = data.ok() ? std::min(data.value() - source_offset, bytes) : bytes;
  const SnapshotPointer now = current();
  const std::uint64_t first = now->placement + offset;
  const Extents existing = inside(now->extents, first, first + end);
  return existing.empty() ? end : existing.front().offset - first;
}

// Takes memory for a copy of the source's data, not for its holes.
Status ExtentBuffer::take_ahead(Buffer& source, std::uint64_t source_offset, std::uint64_t offset,
                                std::uint64_t bytes) {
  std::vector<Piece> pieces;
  {
    Pin pinned = TRY(source.pin_for_read(source_offset, bytes));
    pieces = std::move(pinned.pieces);
  }
  for (const Piece& piece : pieces) {
    if (piece.address == 0) continue;
    const std::uint64_t target = offset + (piece.offset - source_offset);
    TRY(pin_for_write(target, piece.bytes, Wait::kAllowed).status());
  }
  return {};
}

Status ExtentBuffer::copy_chunk(Buffer& source, std::uint64_t source_offset, std::uint64_t offset, std::uint64_t bytes,
                                Wait wait, std::uint64_t* done) {
  std::vector<Piece> pieces;
  {
    Pin pinned = TRY(source.pin_for_read(source_offset, bytes, wait));
    pieces = std::move(pinned.pieces);
  }
  for (const Piece& piece : pieces) {
    const std::uint64_t target = offset + (piece.offset - source_offset);
    if (piece.address == 0) {
      TRY(copy_hole(target, target + piece.bytes, wait));
      *done += piece.bytes;
      continue;
    }
    const std::uint64_t before = *done;
    Status status = copy_data(source, piece.offset, target, piece.bytes, wait, done);
    if (!status.ok() || *done - before < piece.bytes) return status;
  }
  return {};
}

Status ExtentBuffer::copy_data(Buffer& source, std::uint64_t source_offset, std::uint64_t offset, std::uint64_t bytes,
                               Wait wait, std::uint64_t* done) {
  Status status;
  std::uint64_t copied = 0;
  {
    WritePin target;
    Pin pinned;
    for (;;) {
      // The source may have changed since its pieces were listed: list them again.
      pinned = TRY(source.pin_for_read(source_offset, bytes, wait));
      {
        const std::lock_guard lock(state_mutex_);
        if (at_home() && try_write_locked(offset, offset + bytes, &target)) break;
      }
      // Waits without the pin.
      pinned = {};
      WritePin grown;
      TRY(acquire_write(offset, offset + bytes, &grown, {.wait = wait}));
    }
    status = copy_pinned(target.address(), pinned, &copied);
    if (copied > 0) publish(offset + copied);
    *done += copied;
  }
  if (copied == bytes) return status;
  const Status cleared = discard_above_size(offset + copied, bytes - copied);
  return status.ok() ? cleared : status;
}

// A hole of the source: what exists here becomes zeros, what does not stays a hole.
Status ExtentBuffer::copy_hole(std::uint64_t offset, std::uint64_t end, Wait wait) {
  SnapshotPointer now = current();
  const std::uint64_t first = now->placement;
  const Extents existing = inside(now->extents, first + offset, first + end);
  now.reset();  // a shrink waits for its end, with the mutex that a write needs
  for (const Extent& extent : existing) {
    WritePin target;
    TRY(acquire_write(extent.offset - first, extent.end() - first, &target, {.wait = wait}));
    TRY(context_->device().zero(target.address(), extent.bytes));
  }
  publish(end);
  return {};
}

}  // namespace gpufs
