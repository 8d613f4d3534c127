// The functions of the C interface for streams, operations and queues of them.

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "abi/barrier.h"
#include "abi/handles.h"
#include "abi/transfers.h"
#include "async/async_engine.h"
#include "async/completion_queue.h"
#include "async/operation.h"
#include "gpufs.h"

namespace gpufs {
namespace {

constexpr std::uint32_t kKnownFlags =
    GPUFS_STREAM_FIXED_BUFFER_OFFSET | GPUFS_STREAM_FIXED_FILE_OFFSET | GPUFS_STREAM_FIXED_SIZE | GPUFS_STREAM_ALIGNED;
// Of an engine at most: one fails, and not the system, when something submits for ever.
constexpr std::uint64_t kMostOperations = std::uint64_t{1} << 22;

Result<std::shared_ptr<AsyncEngine>> operations_of(gpufs_handle engine) {
  Result<std::shared_ptr<Engine>> found = HandleTable::instance().get<Engine>(engine);
  if (!found.ok()) return found.status();
  return found.value()->operations();
}

Result<StreamPromises> promises_from(std::uint32_t flags) {
  if ((flags & ~kKnownFlags) != 0) return Status(EINVAL, "unknown flags of a stream");
  return StreamPromises{(flags & GPUFS_STREAM_FIXED_BUFFER_OFFSET) != 0, (flags & GPUFS_STREAM_FIXED_FILE_OFFSET) != 0,
                        (flags & GPUFS_STREAM_FIXED_SIZE) != 0, (flags & GPUFS_STREAM_ALIGNED) != 0};
}

std::uint32_t flags_of(const StreamPromises& promises) {
  std::uint32_t flags = 0;
  if (promises.fixed_target_offset) flags |= GPUFS_STREAM_FIXED_BUFFER_OFFSET;
  if (promises.fixed_file_offset) flags |= GPUFS_STREAM_FIXED_FILE_OFFSET;
  if (promises.fixed_bytes) flags |= GPUFS_STREAM_FIXED_SIZE;
  if (promises.aligned) flags |= GPUFS_STREAM_ALIGNED;
  return flags;
}

// What the handle of a queue stands for: the queue, and the engine that its operations' handles belong to.
struct QueueEntry {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<AsyncEngine> operations;
  std::shared_ptr<CompletionQueue> queue;

  [[nodiscard]] Status close() const { return queue->close(operations->stall_timeout()); }
};

// Pinned memory that the program uses until its handle is closed.
class PinnedCells {
 public:
  PinnedCells(std::shared_ptr<DeviceContext> device, const PinnedBlock& block)
      : device_(std::move(device)), block_(block) {}
  ~PinnedCells() { device_->pinned().release(block_); }

  PinnedCells(const PinnedCells&) = delete;
  PinnedCells& operator=(const PinnedCells&) = delete;

 private:
  std::shared_ptr<DeviceContext> device_;
  PinnedBlock block_;
};

Result<AsyncEngine::Submission> entry_from(const QueueEntry& owner, const gpufs_operation& given) {
  AsyncEngine::Submission entry;
  Result<TransferRequest> transfer = transfer_request_from(*owner.engine, given.transfer);
  if (!transfer.ok()) return transfer.status();
  entry.request.transfer = transfer.take();
  entry.request.bytes = {given.transfer.bytes, given.bytes_cell};
  entry.request.file_offset = {given.transfer.file_offset, given.file_offset_cell};
  entry.request.target_offset = {given.transfer.buffer_offset, given.buffer_offset_cell};
  entry.request.count = given.count;
  entry.request.codes = given.codes;
  entry.request.cookie = given.cookie;
  entry.request.trace_cookie = given.trace_cookie;
  if (given.stream != 0) {
    Result<std::shared_ptr<OperationStream>> stream = HandleTable::instance().get<OperationStream>(given.stream);
    if (!stream.ok()) return stream.status();
    entry.stream = stream.take();
  } else if (given.implied != 0) {
    Result<std::shared_ptr<OperationStream>> stream =
        owner.operations->imply_stream(static_cast<NativeStream>(given.native_stream), given.native_device);
    if (!stream.ok()) return stream.status();
    entry.stream = stream.take();
  }
  return entry;
}

void fill_completion(const Completion& from, gpufs_completion& to) {
  to = {};
  to.cookie = from.cookie;
  to.id = from.id;
  to.bytes = from.bytes;
  to.fastpath_bytes = from.fastpath_bytes;
  to.fallback_bytes = from.fallback_bytes;
  to.hole_bytes = from.hole_bytes;
  to.error = from.status.error();
  to.device_code = from.status.device_code();
  to.refusals = from.refusals;
  from.status.message().copy(to.message, sizeof to.message - 1);
}

Status put_stream(Result<std::shared_ptr<OperationStream>> made, gpufs_handle engine, gpufs_handle* stream) {
  if (!made.ok()) return made.status();
  const std::shared_ptr<OperationStream> kept = made.value();
  Result<gpufs_handle> handle = HandleTable::instance().put<OperationStream>(
      made.take(), engine, [](OperationStream& closing) { closing.close(); });
  if (!handle.ok()) {
    kept->close();
    return handle.status();
  }
  *stream = handle.value();
  return {};
}

}  // namespace
}  // namespace gpufs

using gpufs::AsyncEngine;
using gpufs::Engine;
using gpufs::guarded;
using gpufs::HandleTable;
using gpufs::OperationStream;
using gpufs::PinnedCells;
using gpufs::QueueEntry;
using gpufs::Result;
using gpufs::Status;

extern "C" {

gpufs_status gpufs_async_configure(gpufs_handle engine, const gpufs_async_options* options) {
  return gpufs::with<Engine>(engine, [&](Engine& found) -> Status {
    if (options == nullptr) return gpufs::null_argument();
    gpufs::AsyncOptions wanted;
    if (options->operations > gpufs::kMostOperations) return Status(EINVAL, "operations must be at most 4194304");
    if (options->stream_depth > gpufs::kMostOperations) return Status(EINVAL, "stream_depth must be at most 4194304");
    if (options->operations != 0) wanted.operations = static_cast<std::size_t>(options->operations);
    if (options->stream_depth != 0) wanted.stream_depth = static_cast<std::size_t>(options->stream_depth);
    if (options->patience_ms >= 0) wanted.patience = gpufs::patience_of(options->patience_ms);
    if (options->stream_waits != GPUFS_AUTO && options->stream_waits != GPUFS_OFF) {
      return Status(EINVAL, "stream_waits must be auto or off");
    }
    if (options->stream_waits == GPUFS_OFF) wanted.stream_waits = gpufs::Switch::kOff;
    return found.configure_operations(wanted);
  });
}

gpufs_status gpufs_stream_create(gpufs_handle engine, int32_t device, uint32_t flags, gpufs_handle* stream) {
  return guarded([&]() -> Status {
    if (stream == nullptr) return gpufs::null_argument();
    Result<gpufs::StreamPromises> promises = gpufs::promises_from(flags);
    if (!promises.ok()) return promises.status();
    Result<std::shared_ptr<AsyncEngine>> operations = gpufs::operations_of(engine);
    if (!operations.ok()) return operations.status();
    if (device < 0) return Status(EINVAL, "no such device");
    return gpufs::put_stream(operations.value()->create_stream(static_cast<std::size_t>(device), promises.value()),
                             engine, stream);
  });
}

gpufs_status gpufs_stream_register(gpufs_handle engine, int32_t device, uint64_t native, uint32_t flags,
                                   gpufs_handle* stream) {
  return guarded([&]() -> Status {
    if (stream == nullptr) return gpufs::null_argument();
    Result<gpufs::StreamPromises> promises = gpufs::promises_from(flags);
    if (!promises.ok()) return promises.status();
    Result<std::shared_ptr<AsyncEngine>> operations = gpufs::operations_of(engine);
    if (!operations.ok()) return operations.status();
    return gpufs::put_stream(
        operations.value()->register_stream(static_cast<gpufs::NativeStream>(native), device, promises.value()), engine,
        stream);
  });
}

gpufs_status gpufs_stream_info_get(gpufs_handle stream, gpufs_stream_info* info) {
  return gpufs::with<OperationStream>(stream, [&](OperationStream& found) -> Status {
    if (info == nullptr) return gpufs::null_argument();
    *info = {};
    info->native = found.native();
    info->outstanding = found.outstanding();
    info->device = found.device()->info().index;
    info->flags = gpufs::flags_of(found.promises());
    info->waits_for_values = found.waits_for_values() ? 1 : 0;
    return {};
  });
}

gpufs_status gpufs_stream_call(gpufs_handle stream, void (*function)(void*), void* argument) {
  return gpufs::with<OperationStream>(stream, [&](OperationStream& found) -> Status {
    if (function == nullptr) return gpufs::null_argument();
    return found.call(function, argument);
  });
}

gpufs_status gpufs_stream_synchronize(gpufs_handle stream) {
  return gpufs::with<OperationStream>(stream, [&](OperationStream& found) -> Status { return found.synchronize(); });
}

gpufs_status gpufs_stream_close(gpufs_handle stream) {
  return guarded([&]() -> Status {
    Result<std::shared_ptr<OperationStream>> taken = HandleTable::instance().take<OperationStream>(stream);
    if (taken.ok()) taken.value()->close();
    return taken.status();
  });
}

gpufs_status gpufs_pinned_create(gpufs_handle engine, int32_t device, uint64_t bytes, gpufs_handle* pinned,
                                 void** memory, uint64_t* device_address) {
  return gpufs::with<Engine>(engine, [&](Engine& found) -> Status {
    if (pinned == nullptr || memory == nullptr || device_address == nullptr) return gpufs::null_argument();
    Result<std::shared_ptr<gpufs::DeviceContext>> context = found.device(device);
    if (!context.ok()) return context.status();
    Result<gpufs::PinnedBlock> taken = context.value()->pinned().take(static_cast<std::size_t>(bytes));
    if (!taken.ok()) return taken.status();
    const gpufs::PinnedBlock block = taken.value();
    Result<gpufs_handle> handle =
        HandleTable::instance().put<PinnedCells>(std::make_shared<PinnedCells>(context.take(), block), engine);
    if (!handle.ok()) return handle.status();
    *pinned = handle.value();
    *memory = block.data;
    *device_address = block.address;
    return {};
  });
}

gpufs_status gpufs_pinned_close(gpufs_handle pinned) {
  return guarded([&]() -> Status { return HandleTable::instance().take<PinnedCells>(pinned).status(); });
}

gpufs_status gpufs_queue_open(gpufs_handle engine, uint64_t capacity, gpufs_handle* queue) {
  return guarded([&]() -> Status {
    if (queue == nullptr) return gpufs::null_argument();
    auto entry = std::make_shared<QueueEntry>();
    Result<std::shared_ptr<Engine>> found = HandleTable::instance().get<Engine>(engine);
    if (!found.ok()) return found.status();
    Result<std::shared_ptr<AsyncEngine>> operations = gpufs::operations_of(engine);
    if (!operations.ok()) return operations.status();
    if (capacity > gpufs::kMostOperations) return Status(EINVAL, "a queue has room for 4194304 operations at most");
    entry->engine = found.take();
    entry->operations = operations.take();
    entry->queue = entry->operations->open_queue(static_cast<std::size_t>(capacity));
    Result<gpufs_handle> handle = HandleTable::instance().put<QueueEntry>(
        std::move(entry), engine, [](QueueEntry& closing) { (void)closing.close(); });
    if (handle.ok()) *queue = handle.value();
    return handle.status();
  });
}

gpufs_status gpufs_queue_submit(gpufs_handle queue, const gpufs_operation* operations, uint64_t count, uint64_t* ids,
                                uint64_t* bad) {
  return gpufs::with<QueueEntry>(queue, [&](QueueEntry& found) -> Status {
    if (operations == nullptr) return gpufs::null_argument();
    std::vector<AsyncEngine::Submission> entries;
    entries.reserve(static_cast<std::size_t>(std::min(count, gpufs::kMostOperations)));
    for (std::uint64_t number = 0; number < count; ++number) {
      Result<AsyncEngine::Submission> entry = gpufs::entry_from(found, operations[number]);
      if (!entry.ok()) {
        if (bad != nullptr) *bad = number;
        return entry.status();
      }
      entries.push_back(entry.take());
    }
    std::vector<std::uint64_t> given;
    given.reserve(entries.size());
    std::size_t first_bad = 0;
    Status status = found.operations->submit(found.queue, std::move(entries), &given, &first_bad);
    if (bad != nullptr) *bad = first_bad;
    if (status.ok() && ids != nullptr) std::copy(given.begin(), given.end(), ids);
    return status;
  });
}

gpufs_status gpufs_queue_collect(gpufs_handle queue, gpufs_completion* completions, uint64_t capacity, uint64_t fewest,
                                 int64_t timeout_ms, uint64_t* collected) {
  return gpufs::with<QueueEntry>(queue, [&](QueueEntry& found) -> Status {
    if (collected == nullptr || (completions == nullptr && capacity > 0)) return gpufs::null_argument();
    const std::vector<gpufs::Completion> over =
        found.queue->collect(static_cast<std::size_t>(std::min(fewest, capacity)), static_cast<std::size_t>(capacity),
                             gpufs::patience_of(timeout_ms));
    for (std::size_t number = 0; number < over.size(); ++number) {
      gpufs::fill_completion(over[number], completions[number]);
    }
    *collected = over.size();
    return {};
  });
}

gpufs_status gpufs_queue_counts(gpufs_handle queue, uint64_t* under_way, uint64_t* uncollected) {
  return gpufs::with<QueueEntry>(queue, [&](QueueEntry& found) -> Status {
    if (under_way == nullptr || uncollected == nullptr) return gpufs::null_argument();
    const gpufs::CompletionQueue::OperationCounts counts = found.queue->counts();
    *under_way = counts.under_way;
    *uncollected = counts.uncollected;
    return {};
  });
}

gpufs_status gpufs_queue_event_fd(gpufs_handle queue, int* fd) {
  return gpufs::with<QueueEntry>(queue, [&](QueueEntry& found) -> Status {
    if (fd == nullptr) return gpufs::null_argument();
    return gpufs::give(found.queue->event_fd(), fd);
  });
}

gpufs_status gpufs_queue_cancel(gpufs_handle queue, uint64_t id) {
  return gpufs::with<QueueEntry>(queue, [&](QueueEntry& found) -> Status { return found.queue->cancel(id); });
}

gpufs_status gpufs_queue_close(gpufs_handle queue) {
  return gpufs::with<QueueEntry>(queue, [&](QueueEntry& found) -> Status {
    Status closed = found.close();
    return closed.ok() ? HandleTable::instance().take<QueueEntry>(queue).status() : closed;
  });
}
}
