// The functions of the C interface for files, transfers, streams and operations.

#include <algorithm>
#include <cerrno>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "abi/barrier.h"
#include "abi/engine.h"
#include "abi/handles.h"
#include "async/async_engine.h"
#include "async/completion_queue.h"
#include "async/operation.h"
#include "gpufs.h"
#include "io/backing_file.h"
#include "io/fastpath.h"
#include "io/transfer_engine.h"

namespace gpufs {
namespace {

static_assert(static_cast<int>(Switch::kOn) == GPUFS_ON && static_cast<int>(Switch::kOff) == GPUFS_OFF);

FastpathMode fastpath_mode(std::int32_t value) {
  if (value == GPUFS_REQUIRE) return FastpathMode::kRequire;
  return value == GPUFS_OFF ? FastpathMode::kOff : FastpathMode::kAuto;
}

// Splits "nfs4,lustre".
FileSystems file_systems_from(const char* text) {
  std::vector<std::string> types;
  std::istringstream words(text == nullptr ? "" : text);
  for (std::string type; std::getline(words, type, ',');) types.push_back(type);
  return FileSystems(std::move(types));
}

Result<IoOptions> options_from(const gpufs_io_options& given) {
  IoOptions options;
  if (given.chunk_bytes > std::numeric_limits<std::size_t>::max()) return Status(EINVAL, "chunk_bytes is too large");
  if (given.chunk_bytes != 0) options.chunk_bytes = static_cast<std::size_t>(given.chunk_bytes);
  if (given.pinned_bytes != 0) options.pinned_bytes = given.pinned_bytes;
  options.workers = given.workers;
  options.fastpath = fastpath_mode(given.fastpath);
  options.file_systems = file_systems_from(given.file_systems);
  return options;
}

void fill_progress(const TransferProgress& from, gpufs_transfer_progress& to) {
  to = {static_cast<std::int32_t>(from.state),
        from.status.error(),
        from.status.device_code(),
        from.sync_failed ? 1 : 0,
        from.total,
        from.moved,
        from.prefix,
        from.path_bytes[static_cast<std::size_t>(Path::kFastpath)],
        from.path_bytes[static_cast<std::size_t>(Path::kFallback)],
        from.hole_bytes,
        from.refusals,
        {}};
  from.status.message().copy(to.message, sizeof to.message - 1);
}

Result<TransferRequest> transfer_request_from(const Engine& engine, const gpufs_transfer_request& given) {
  HandleTable& handles = HandleTable::instance();
  TransferRequest request;
  request.file = TRY(handles.get<BackingFile>(given.backing));
  if (given.buffer != 0) {
    const std::shared_ptr<Buffer> buffer = TRY(handles.get<Buffer>(given.buffer));
    const auto& devices = engine.devices();
    if (std::find(devices.begin(), devices.end(), buffer->device()) == devices.end()) {
      return Status(EXDEV, "the buffer belongs to another engine");
    }
    request.target = buffer;
  } else {
    const std::shared_ptr<DeviceContext> device = TRY(engine.device(given.device));
    if (given.address == 0) return Status(EINVAL, "neither a buffer nor an address was given");
    if (given.address_bytes > std::numeric_limits<std::uint64_t>::max() - given.address) {
      return Status(EINVAL, "the device memory's address and size overflow");
    }
    request.target = program_memory(device, given.address, given.address_bytes);
  }
  request.file_offset = given.file_offset;
  request.target_offset = given.buffer_offset;
  request.bytes = given.bytes;
  request.direction = given.direction == GPUFS_LOAD ? Direction::kLoad : Direction::kStore;
  // A device has nothing to make durable.
  request.sync = request.direction == Direction::kStore ? static_cast<SyncMode>(given.sync) : SyncMode::kNone;
  request.sparse = given.sparse != 0;
  if (given.fastpath != GPUFS_AUTO) request.fastpath = fastpath_mode(given.fastpath);
  if (given.share < 0) return Status(EINVAL, "share must not be negative");
  request.share = given.share;
  request.client = given.client;
  return request;
}

// An engine takes at most so many: a program that submits for ever fails, and not the system.
constexpr std::uint64_t kMostOperations = std::uint64_t{1} << 22;

Result<std::shared_ptr<AsyncEngine>> operations_of(gpufs_handle engine) {
  std::shared_ptr<Engine> found = TRY(HandleTable::instance().get<Engine>(engine));
  return found->operations();
}

StreamPromises promises_from(std::uint32_t flags) {
  return StreamPromises{(flags & GPUFS_STREAM_FIXED_BUFFER_OFFSET) != 0, (flags & GPUFS_STREAM_FIXED_FILE_OFFSET) != 0,
                        (flags & GPUFS_STREAM_FIXED_SIZE) != 0, (flags & GPUFS_STREAM_ALIGNED) != 0};
}

// What the handle of a queue stands for: the queue, and the engine that its operations' handles belong to.
struct QueueEntry {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<AsyncEngine> operations;
  std::shared_ptr<CompletionQueue> queue;

  [[nodiscard]] Status close() const { return queue->close(operations->stall_timeout()); }
};

Result<AsyncEngine::Submission> entry_from(const QueueEntry& owner, const gpufs_operation& given) {
  AsyncEngine::Submission entry;
  entry.request.transfer = TRY(transfer_request_from(*owner.engine, given.transfer));
  entry.request.bytes_cell = given.bytes_cell;
  entry.request.file_offset_cell = given.file_offset_cell;
  entry.request.target_offset_cell = given.buffer_offset_cell;
  entry.request.count = given.count;
  entry.request.cookie = given.cookie;
  entry.request.trace_cookie = given.trace_cookie;
  if (given.stream != 0) {
    entry.stream = TRY(HandleTable::instance().get<OperationStream>(given.stream));
  } else if (given.implied != 0) {
    entry.stream =
        TRY(owner.operations->imply_stream(static_cast<NativeStream>(given.native_stream), given.native_device));
  }
  return entry;
}

}  // namespace

extern "C" {

gpufs_status gpufs_io_configure(gpufs_handle engine, const gpufs_io_options* options) {
  return with_handle<Engine>(engine, [&](Engine& found) -> Status {
    IoOptions wanted = TRY(options_from(*options));
    return found.configure_transfers(wanted);
  });
}

gpufs_status gpufs_backing_open(gpufs_handle engine, int32_t fd, gpufs_handle* backing) {
  return with_handle<Engine>(
      engine, [&](Engine& /*owner*/) -> Status { return open_handle(BackingFile::open(fd), engine, backing); });
}

gpufs_status gpufs_backing_info_get(gpufs_handle backing, gpufs_backing_info* info) {
  return with_handle<BackingFile>(backing, [&](BackingFile& file) {
    const BackingFacts& facts = file.facts();
    *info = {};
    facts.file_system.copy(info->file_system, sizeof info->file_system - 1);
    info->block_device = facts.block_device ? 1 : 0;
    info->readable = facts.readable ? 1 : 0;
    info->writable = facts.writable ? 1 : 0;
    info->direct = file.direct_fd() >= 0 ? 1 : 0;
    info->offset_align = facts.offset_align;
    info->memory_align = facts.memory_align;
    info->fastpath_refusals = facts.fastpath_refusals;
  });
}

gpufs_status gpufs_fastpath_probe(const char* driver, uint32_t* refusals) {
  return catch_all([&]() { *refusals = make_fastpath(driver)->refusals(); });
}

const char* gpufs_refusal_name(int32_t bit) {
  if (bit < 0 || static_cast<std::size_t>(bit) >= kRefusalCount) return "";
  return kRefusalNames[static_cast<std::size_t>(bit)].data();
}

gpufs_status gpufs_transfer_start(gpufs_handle engine, const gpufs_transfer_request* request, gpufs_handle* transfer) {
  return with_handle<Engine>(engine, [&](Engine& found) -> Status {
    std::shared_ptr<TransferEngine> transfers = TRY(found.transfers());
    TransferRequest wanted = TRY(transfer_request_from(found, *request));
    return open_handle<Transfer>(transfers->start(wanted), engine, transfer, close_of<Transfer>);
  });
}

gpufs_status gpufs_transfer_wait(gpufs_handle transfer, int64_t timeout_ms, int32_t* done) {
  return with_handle<Transfer>(transfer, [&](Transfer& found) {
    const bool ended = found.wait(timeout_of(timeout_ms));
    *done = ended ? 1 : 0;
  });
}

gpufs_status gpufs_transfer_progress_get(gpufs_handle transfer, gpufs_transfer_progress* progress) {
  return with_handle<Transfer>(transfer, [&](Transfer& found) { fill_progress(found.progress(), *progress); });
}

gpufs_status gpufs_transfer_cancel(gpufs_handle transfer) {
  return with_handle<Transfer>(transfer, [&](Transfer& found) { found.cancel(); });
}

gpufs_status gpufs_transfer_event_fd(gpufs_handle transfer, int* fd) {
  return with_handle<Transfer>(transfer, [&](Transfer& found) -> Status { return store_result(found.event_fd(), fd); });
}

gpufs_status gpufs_async_configure(gpufs_handle engine, const gpufs_async_options* options) {
  return with_handle<Engine>(engine, [&](Engine& found) -> Status {
    AsyncOptions wanted;
    if (options->operations > kMostOperations) return Status(EINVAL, "operations must be at most 4194304");
    if (options->stream_depth > kMostOperations) return Status(EINVAL, "stream_depth must be at most 4194304");
    if (options->operations != 0) wanted.operations = static_cast<std::size_t>(options->operations);
    if (options->stream_depth != 0) wanted.stream_depth = static_cast<std::size_t>(options->stream_depth);
    if (options->timeout_ms >= 0) wanted.timeout = timeout_of(options->timeout_ms);
    if (options->stream_waits == GPUFS_OFF) wanted.stream_waits = Switch::kOff;
    return found.configure_operations(wanted);
  });
}

gpufs_status gpufs_stream_open(gpufs_handle engine, int32_t device, const uint64_t* native, uint32_t flags,
                               gpufs_handle* stream) {
  return catch_all([&]() -> Status {
    const StreamPromises promises = promises_from(flags);
    std::shared_ptr<AsyncEngine> operations = TRY(operations_of(engine));
    return open_handle<OperationStream>(
        native == nullptr ? operations->create_stream(device, promises)
                          : operations->register_stream(static_cast<NativeStream>(*native), device, promises),
        engine, stream, close_of<OperationStream>);
  });
}

gpufs_status gpufs_stream_info_get(gpufs_handle stream, gpufs_stream_info* info) {
  return with_handle<OperationStream>(stream, [&](OperationStream& found) {
    *info = {};
    info->native = found.native();
    info->outstanding = found.outstanding();
    info->device = found.device()->info().index;
    info->waits_for_values = found.waits_for_values() ? 1 : 0;
  });
}

gpufs_status gpufs_stream_call(gpufs_handle stream, void (*function)(void*), void* argument) {
  return with_handle<OperationStream>(stream,
                                      [&](OperationStream& found) -> Status { return found.call(function, argument); });
}

gpufs_status gpufs_stream_synchronize(gpufs_handle stream) {
  return with_handle<OperationStream>(stream, [&](OperationStream& found) -> Status { return found.synchronize(); });
}

gpufs_status gpufs_pinned_create(gpufs_handle engine, int32_t device, uint64_t bytes, gpufs_handle* pinned,
                                 void** memory, uint64_t* device_address) {
  return with_handle<Engine>(engine, [&](Engine& found) -> Status {
    std::shared_ptr<DeviceContext> context = TRY(found.device(device));
    const PinnedBlock block = TRY(context->pinned().take(static_cast<std::size_t>(bytes)));
    const std::shared_ptr<PinnedBlock> shared(new PinnedBlock(block),
                                              [device = std::move(context)](PinnedBlock* released) {
                                                device->pinned().release(*released);
                                                delete released;
                                              });
    TRY(open_handle<PinnedBlock>(shared, engine, pinned));
    *memory = block.data;
    *device_address = block.address;
    return {};
  });
}

gpufs_status gpufs_queue_open(gpufs_handle engine, uint64_t capacity, gpufs_handle* queue) {
  return catch_all([&]() -> Status {
    auto entry = std::make_shared<QueueEntry>();
    std::shared_ptr<Engine> found = TRY(HandleTable::instance().get<Engine>(engine));
    std::shared_ptr<AsyncEngine> operations = TRY(operations_of(engine));
    if (capacity > kMostOperations) return Status(EINVAL, "a queue has room for 4194304 operations at most");
    entry->engine = std::move(found);
    entry->operations = std::move(operations);
    entry->queue = entry->operations->open_queue(static_cast<std::size_t>(capacity));
    return open_handle<QueueEntry>(std::move(entry), engine, queue, close_of<QueueEntry>);
  });
}

gpufs_status gpufs_queue_submit(gpufs_handle queue, const gpufs_operation* operations, uint64_t count, uint64_t* ids,
                                uint64_t* bad) {
  return with_handle<QueueEntry>(queue, [&](QueueEntry& found) -> Status {
    std::vector<AsyncEngine::Submission> entries;
    entries.reserve(static_cast<std::size_t>(std::min(count, kMostOperations)));
    for (std::uint64_t number = 0; number < count; ++number) {
      Result<AsyncEngine::Submission> entry = entry_from(found, operations[number]);
      if (!entry.ok()) {
        if (bad != nullptr) *bad = number;
        return entry.status();
      }
      entries.push_back(entry.take());
    }
    std::vector<std::uint64_t> given;
    std::size_t first_bad = 0;
    Status status = found.operations->submit(found.queue, std::move(entries), &given, &first_bad);
    if (bad != nullptr) *bad = first_bad;
    if (status.ok() && ids != nullptr) std::copy(given.begin(), given.end(), ids);
    return status;
  });
}

gpufs_status gpufs_queue_collect(gpufs_handle queue, gpufs_completion* completions, uint64_t capacity, uint64_t fewest,
                                 int64_t timeout_ms, uint64_t* collected) {
  return with_handle<QueueEntry>(queue, [&](QueueEntry& found) {
    const std::vector<Completion> over =
        found.queue->collect(static_cast<std::size_t>(std::min(fewest, capacity)), static_cast<std::size_t>(capacity),
                             timeout_of(timeout_ms));
    for (std::size_t number = 0; number < over.size(); ++number) {
      completions[number].cookie = over[number].cookie;
      completions[number].id = over[number].id;
      fill_progress(over[number], completions[number].outcome);
    }
    *collected = over.size();
  });
}

gpufs_status gpufs_queue_under_way(gpufs_handle queue, uint64_t* count) {
  return with_handle<QueueEntry>(queue, [&](QueueEntry& found) { *count = found.queue->under_way().size(); });
}

gpufs_status gpufs_queue_cancel(gpufs_handle queue, uint64_t id) {
  return with_handle<QueueEntry>(queue, [&](QueueEntry& found) -> Status { return found.queue->cancel(id); });
}

}  // extern "C"

}  // namespace gpufs
