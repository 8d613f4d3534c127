// The backing file and transfer functions of the C interface.

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "abi/barrier.h"
#include "abi/handles.h"
#include "abi/transfers.h"
#include "gpufs.h"
#include "io/backing_file.h"
#include "io/direct_path.h"
#include "io/refusal.h"
#include "io/transfer_engine.h"
#include "observe/trace.h"

namespace gpufs {
namespace {

Result<FastpathMode> fastpath_mode(std::int32_t value) {
  switch (value) {
    case GPUFS_AUTO:
    case GPUFS_ON:
      return FastpathMode::kAuto;
    case GPUFS_OFF:
      return FastpathMode::kOff;
    case GPUFS_REQUIRE:
      return FastpathMode::kRequire;
    default:
      return Status(EINVAL, "fastpath must be auto, off or require");
  }
}

Result<Switch> three_way(std::int32_t value, const char* name) {
  switch (value) {
    case GPUFS_AUTO:
      return Switch::kAuto;
    case GPUFS_ON:
      return Switch::kOn;
    case GPUFS_OFF:
      return Switch::kOff;
    default:
      return Status(EINVAL, std::string(name) + " must be auto, on or off");
  }
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
  if (given.slots != 0) options.slots = given.slots;
  Result<FastpathMode> fastpath = fastpath_mode(given.fastpath);
  if (!fastpath.ok()) return fastpath.status();
  options.fastpath = fastpath.value();
  Result<Switch> fallback = three_way(given.fallback, "fallback");
  if (!fallback.ok()) return fallback.status();
  options.fallback = fallback.value() != Switch::kOff;
  Result<Switch> direct = three_way(given.direct, "direct");
  if (!direct.ok()) return direct.status();
  options.direct = direct.value();
  options.file_systems = file_systems_from(given.file_systems);
  return options;
}

void fill_progress(const TransferProgress& from, gpufs_transfer_progress& to) {
  to = {};
  to.state = static_cast<std::int32_t>(from.state);
  to.error = from.status.error();
  to.device_code = from.status.device_code();
  to.sync_failed = from.sync_failed ? 1 : 0;
  to.total = from.total;
  to.moved = from.moved;
  to.prefix = from.prefix;
  to.fastpath_bytes = from.path_bytes[static_cast<std::size_t>(Path::kFastpath)];
  to.fallback_bytes = from.path_bytes[static_cast<std::size_t>(Path::kFallback)];
  to.hole_bytes = from.hole_bytes;
  to.refusals = from.refusals;
}

}  // namespace

Result<TransferRequest> transfer_request_from(const Engine& engine, const gpufs_transfer_request& given) {
  HandleTable& handles = HandleTable::instance();
  TransferRequest request;
  Result<std::shared_ptr<BackingFile>> file = handles.get<BackingFile>(given.backing);
  if (!file.ok()) return file.status();
  request.file = file.take();
  if (given.buffer != 0) {
    Result<std::shared_ptr<Buffer>> buffer = handles.get<Buffer>(given.buffer);
    if (!buffer.ok()) return buffer.status();
    const auto& devices = engine.devices();
    if (std::find(devices.begin(), devices.end(), buffer.value()->device()) == devices.end()) {
      return Status(EXDEV, "the buffer belongs to another engine");
    }
    request.target = buffer.take();
  } else {
    Result<std::shared_ptr<DeviceContext>> device = engine.device(given.device);
    if (!device.ok()) return device.status();
    if (given.address == 0) return Status(EINVAL, "neither a buffer nor an address was given");
    if (given.address_bytes > std::numeric_limits<std::uint64_t>::max() - given.address) {
      return Status(EINVAL, "the device memory's address and size overflow");
    }
    request.set_range(device.take(), given.address, given.address_bytes);
  }
  request.file_offset = given.file_offset;
  request.target_offset = given.buffer_offset;
  request.bytes = given.bytes;
  if (given.direction != GPUFS_LOAD && given.direction != GPUFS_STORE) return Status(EINVAL, "unknown direction");
  request.direction = given.direction == GPUFS_LOAD ? Direction::kLoad : Direction::kStore;
  if (given.sync < GPUFS_SYNC_NONE || given.sync > GPUFS_SYNC_FULL) return Status(EINVAL, "unknown kind of sync");
  // A device has nothing to make durable.
  request.sync = request.direction == Direction::kStore ? static_cast<SyncMode>(given.sync) : SyncMode::kNone;
  request.sparse = given.sparse != 0;
  if (given.fastpath != GPUFS_AUTO) {
    Result<FastpathMode> fastpath = fastpath_mode(given.fastpath);
    if (!fastpath.ok()) return fastpath.status();
    request.fastpath = fastpath.value();
  }
  if (given.fallback != GPUFS_AUTO) {
    Result<Switch> fallback = three_way(given.fallback, "fallback");
    if (!fallback.ok()) return fallback.status();
    request.fallback = fallback.value() == Switch::kOn;
  }
  if (given.share < 0) return Status(EINVAL, "share must not be negative");
  request.share = given.share;
  request.client = given.client;
  return request;
}

}  // namespace gpufs

using gpufs::BackingFile;
using gpufs::Engine;
using gpufs::guarded;
using gpufs::HandleTable;
using gpufs::Result;
using gpufs::Status;
using gpufs::Transfer;
using gpufs::TransferEngine;

gpufs_status gpufs_io_configure(gpufs_handle engine, const gpufs_io_options* options) {
  return gpufs::with<Engine>(engine, [&](Engine& found) -> Status {
    if (options == nullptr) return gpufs::null_argument();
    Result<gpufs::IoOptions> wanted = gpufs::options_from(*options);
    if (!wanted.ok()) return wanted.status();
    return found.configure_transfers(wanted.value());
  });
}

gpufs_status gpufs_backing_open(gpufs_handle engine, int32_t fd, gpufs_handle* backing) {
  return gpufs::with<Engine>(engine, [&](Engine& /*owner*/) -> Status {
    if (backing == nullptr) return gpufs::null_argument();
    Result<std::shared_ptr<BackingFile>> file = BackingFile::open(fd);
    if (!file.ok()) return file.status();
    return gpufs::give(HandleTable::instance().put<BackingFile>(file.take(), engine), backing);
  });
}

gpufs_status gpufs_backing_close(gpufs_handle backing) {
  return guarded([&]() -> Status { return HandleTable::instance().take<BackingFile>(backing).status(); });
}

gpufs_status gpufs_backing_info_get(gpufs_handle backing, gpufs_backing_info* info) {
  return gpufs::with<BackingFile>(backing, [&](BackingFile& file) -> Status {
    if (info == nullptr) return gpufs::null_argument();
    const gpufs::BackingFacts& facts = file.facts();
    *info = {};
    facts.file_system.copy(info->file_system, sizeof info->file_system - 1);
    info->block_device = facts.block_device ? 1 : 0;
    info->readable = facts.readable ? 1 : 0;
    info->writable = facts.writable ? 1 : 0;
    info->direct = file.direct_fd() >= 0 ? 1 : 0;
    info->offset_align = facts.offset_align;
    info->memory_align = facts.memory_align;
    info->fastpath_refusals = facts.fastpath_refusals;
    return {};
  });
}

gpufs_status gpufs_fastpath_probe(const char* driver, uint32_t* refusals) {
  return guarded([&]() -> Status {
    if (driver == nullptr || refusals == nullptr) return gpufs::null_argument();
    *refusals = gpufs::make_direct_path(driver)->refusals();
    return {};
  });
}

gpufs_status gpufs_trace_start(void) {
  return guarded([&]() -> Status { return gpufs::observe::trace::start(); });
}

gpufs_status gpufs_trace_stop(void) {
  return guarded([&]() -> Status {
    gpufs::observe::trace::stop();
    return {};
  });
}

gpufs_status gpufs_trace_read(void* data, uint64_t capacity, uint64_t* bytes) {
  return guarded([&]() -> Status {
    if (data == nullptr || bytes == nullptr) return gpufs::null_argument();
    *bytes = gpufs::observe::trace::read({static_cast<std::byte*>(data), static_cast<std::size_t>(capacity)});
    return {};
  });
}

const char* gpufs_refusal_name(int32_t bit) {
  if (bit < 0 || static_cast<std::size_t>(bit) >= gpufs::kRefusalCount) return "";
  return gpufs::kRefusalNames[static_cast<std::size_t>(bit)].data();
}

gpufs_status gpufs_transfer_start(gpufs_handle engine, const gpufs_transfer_request* request, gpufs_handle* transfer) {
  return gpufs::with<Engine>(engine, [&](Engine& found) -> Status {
    if (request == nullptr || transfer == nullptr) return gpufs::null_argument();
    Result<std::shared_ptr<TransferEngine>> transfers = found.transfers();
    if (!transfers.ok()) return transfers.status();
    Result<gpufs::TransferRequest> wanted = gpufs::transfer_request_from(found, *request);
    if (!wanted.ok()) return wanted.status();
    Result<std::shared_ptr<Transfer>> started = transfers.value()->start(wanted.value());
    if (!started.ok()) return started.status();
    const std::shared_ptr<Transfer> kept = started.value();
    Result<gpufs_handle> handle = HandleTable::instance().put<Transfer>(started.take(), engine);
    if (!handle.ok()) {
      kept->cancel();
      kept->wait();
      return handle.status();
    }
    *transfer = handle.value();
    return {};
  });
}

gpufs_status gpufs_transfer_wait(gpufs_handle transfer, int64_t timeout_ms, int32_t* done) {
  return gpufs::with<Transfer>(transfer, [&](Transfer& found) -> Status {
    const bool ended = found.wait(gpufs::patience_of(timeout_ms));
    if (done != nullptr) *done = ended ? 1 : 0;
    return {};
  });
}

gpufs_status gpufs_transfer_progress_get(gpufs_handle transfer, gpufs_transfer_progress* progress) {
  return gpufs::with<Transfer>(transfer, [&](Transfer& found) -> Status {
    if (progress == nullptr) return gpufs::null_argument();
    gpufs::fill_progress(found.progress(), *progress);
    return {};
  });
}

gpufs_status gpufs_transfer_result(gpufs_handle transfer) {
  return gpufs::with<Transfer>(transfer, [&](Transfer& found) -> Status {
    const gpufs::TransferProgress progress = found.progress();
    if (progress.state != gpufs::TransferState::kDone) return Status(EINPROGRESS, "the transfer is still running");
    return progress.status;
  });
}

gpufs_status gpufs_transfer_cancel(gpufs_handle transfer) {
  return gpufs::with<Transfer>(transfer, [&](Transfer& found) -> Status {
    found.cancel();
    return {};
  });
}

gpufs_status gpufs_transfer_event_fd(gpufs_handle transfer, int* fd) {
  return gpufs::with<Transfer>(transfer, [&](Transfer& found) -> Status {
    if (fd == nullptr) return gpufs::null_argument();
    return gpufs::give(found.event_fd(), fd);
  });
}

gpufs_status gpufs_transfer_close(gpufs_handle transfer) {
  return gpufs::with<Transfer>(transfer, [&](Transfer& found) -> Status {
    Status closed = found.close();
    return closed.ok() ? HandleTable::instance().take<Transfer>(transfer).status() : closed;
  });
}
