#include "io/copy_batches.h"

#include <utility>

namespace gpufs {
namespace {

std::size_t bytes_of(std::span<const HostCopy> copies) {
  std::size_t bytes = 0;
  for (const HostCopy& copy : copies) bytes += copy.bytes;
  return bytes;
}

}  // namespace

Result<std::shared_ptr<CopyBatches>> CopyBatches::create(DeviceContext& device, CopyDirection direction) {
  std::shared_ptr<CopyBatches> batches(new CopyBatches(direction));
  for (Lane& lane : batches->lanes_) {
    Result<std::shared_ptr<Stream>> stream = device.streams().acquire();
    if (!stream.ok()) return stream.status().with_context("a stream for the transfer");
    lane.stream = stream.take();
    Result<std::shared_ptr<Event>> event = device.events().acquire();
    if (!event.ok()) return event.status().with_context("an event for the transfer");
    lane.event = event.take();
  }
  return batches;
}

std::shared_ptr<const CopyBatches::Batch> CopyBatches::add(std::span<const HostCopy> copies, bool known) {
  const std::lock_guard lock(mutex_);
  const bool joins = known && !waiting_.empty() && waiting_.back()->known_ &&
                     bytes_of(waiting_.back()->copies_) + bytes_of(copies) <= kLargestBatch;
  if (!joins) waiting_.push_back(std::make_shared<Batch>());
  std::shared_ptr<Batch> batch = waiting_.back();
  batch->known_ = known;
  batch->copies_.insert(batch->copies_.end(), copies.begin(), copies.end());
  advance_locked();
  return batch;
}

void CopyBatches::advance() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (lock.owns_lock()) advance_locked();
}

void CopyBatches::advance_locked() {
  for (Lane& lane : lanes_) {
    if (lane.batch == nullptr) continue;
    const Result<bool> over = lane.event->query();
    if (!over.ok() || over.value()) end(lane, over.status());
  }
  for (Lane& lane : lanes_) {
    while (lane.batch == nullptr && !waiting_.empty()) {
      lane.batch = std::move(waiting_.front());
      waiting_.pop_front();
      if (Status status = submit(lane); !status.ok()) end(lane, status);
    }
  }
}

Status CopyBatches::submit(Lane& lane) {
  const std::span<const HostCopy> copies(lane.batch->copies_);
  const std::size_t step = lane.batch->known_ ? copies.size() : 1;
  for (std::size_t at = 0; at < copies.size(); at += step) {
    TRY(lane.stream->copy(direction_, copies.subspan(at, step)));
  }
  return lane.stream->record(*lane.event);
}

void CopyBatches::end(Lane& lane, const Status& status) {
  // Copies that did start must end before their memory is freed; their outcome no longer matters.
  if (!status.ok()) (void)lane.stream->synchronize();
  Batch& batch = *lane.batch;
  batch.copies_.clear();
  batch.status_ = status;
  batch.done_ = true;
  lane.batch = nullptr;
}

}  // namespace gpufs
