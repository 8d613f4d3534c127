#include "fuse/operations.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "base/log.h"
#include "base/math.h"
#include "device/device_context.h"
#include "observe/trace.h"

namespace gpufs::fuse {

namespace {

constexpr std::uint64_t kAllocateChunk = std::uint64_t{256} << 20;  // between two looks for an INTERRUPT

// What a client is told; the driver's own words go to the log.
int client_error(const Status& status, const char* what) {
  const int error = status.error();
  if (error != ENOSPC && error != EFBIG && error != ENXIO && error != EINVAL && log_enabled(LogLevel::kWarning)) {
    log_warning(what, " failed: ", status.message(), " (errno ", error, ", device code ", status.device_code(), ")");
  }
  return error;
}

// Where operations on a buffer are counted: nowhere, for one that is on no device.
const observe::DeviceCounters& counters_of(const Buffer& buffer) {
  static const observe::DeviceCounters nowhere;
  return buffer.device() ? buffer.device()->counters() : nowhere;
}

}  // namespace

Operations::Operations(InodeTable& table, LongOperations& long_operations, Statistics& statistics)
    : table_(table), long_operations_(long_operations), statistics_(statistics) {}

bool Operations::serve(Request& request, Responder& responder) {
  switch (request.header.opcode) {
    case FUSE_READ:
      return read(request, responder);
    case FUSE_WRITE:
      return write(request, responder);
    case FUSE_LSEEK:
      return lseek(request, responder);
    case FUSE_FALLOCATE:
      return fallocate(request, responder);
    case FUSE_COPY_FILE_RANGE:
    case kOpcodeCopyFileRange64:
      return copy_file_range(request, responder);
    case FUSE_FLUSH:
    case FUSE_FSYNC:
      return flush_or_fsync(request, responder);
    case FUSE_RELEASE:
      return release(request, responder);
    case FUSE_READDIR:
    case FUSE_READDIRPLUS:
      return mark_listed(request);
    case FUSE_IOCTL:
      responder.error(ENOTTY);
      return true;
    default:
      return false;
  }
}

Operations::Source Operations::classify(std::uint64_t fh, std::shared_ptr<OpenFile>* file) const {
  if ((fh & InodeTable::kHandleBit) == 0) return Source::kControl;
  *file = table_.file(fh);
  return *file ? Source::kNative : Source::kStale;
}

template <typename Arguments>
std::shared_ptr<OpenFile> Operations::begin(const Request& request, Responder& responder, Arguments* in,
                                            const std::uint64_t* fh, bool* answered) {
  std::shared_ptr<OpenFile> file;
  const bool whole = read_struct(request.message, sizeof(fuse_in_header), in);
  const Source source = whole ? classify(*fh, &file) : Source::kStale;
  *answered = source == Source::kStale;
  if (*answered) responder.error(whole ? EBADF : EINVAL);
  return file;
}

bool Operations::release(Request& request, Responder& responder) {
  fuse_release_in in{};
  if (!read_struct(request.message, sizeof(fuse_in_header), &in)) return false;
  // Quick, as the memory of a file that is gone is given back by another thread. What is no buffer's handle is relayed.
  if (!table_.release(in.fh).ok()) return false;
  responder.ok();
  return true;
}

bool Operations::mark_listed(const Request& request) {
  // The control plane lists, but is not told of O_NOATIME.
  fuse_read_in in{};
  if (read_struct(request.message, sizeof(fuse_in_header), &in) && in.offset == 0 && (in.flags & O_NOATIME) == 0) {
    if (const std::shared_ptr<Inode> inode = table_.find(request.header.nodeid)) table_.was_read(*inode);
  }
  return false;
}

bool Operations::read(Request& request, Responder& responder) {
  fuse_read_in in{};
  bool answered = false;
  const std::shared_ptr<OpenFile> file = begin(request, responder, &in, &in.fh, &answered);
  if (!file) return answered;
  if (!valid_range(in.offset, in.size)) {
    responder.error(EINVAL);
    return true;
  }
  Inode& inode = *file->inode;
  observe::Measured measured(counters_of(*inode.buffer()), observe::Backend::kMount, observe::Flow::kOut);
  const std::uint64_t wanted = std::min<std::uint64_t>(in.size, request.payload.size());
  const observe::Span span(observe::TraceKind::kMountRead, inode.device(), in.offset, wanted, request.header.nodeid);
  const bool keep_atime = (in.flags & O_NOATIME) != 0;

  // Straight from the device's memory where the CPU can address it: the kernel copies, and nobody else.
  Result<Buffer::Gathered> gathered = inode.buffer()->gather(in.offset, wanted);
  if (gathered.ok() && gathered.value().pieces.size() <= Transport::kMaximumPieces) {
    if (!keep_atime) table_.was_read(inode);
    note_read(inode, gathered.value().bytes);
    {
      const observe::Span reply(observe::TraceKind::kReply, inode.device(), in.offset, gathered.value().bytes);
      responder.data(gathered.value().pieces);
    }
    measured.done(gathered.value().bytes);
    return true;
  }
  if (!gathered.ok() && gathered.error() != EOPNOTSUPP && gathered.error() != EAGAIN) {
    responder.error(client_error(gathered.status(), "read"));
    return true;
  }
  // The request is no longer needed, and its payload memory is where devices copy fastest to.
  const std::span<std::byte> target = request.payload.first(static_cast<std::size_t>(wanted));
  Result<std::size_t> got = [&] {
    const observe::Span copy(observe::TraceKind::kCopyToHost, inode.device(), in.offset, wanted);
    return inode.buffer()->read(in.offset, target);
  }();
  if (got.error() == EAGAIN) {
    measured.dismiss();
    read_later(file, in, wanted, std::move(responder));
    return true;
  }
  if (!got.ok()) {
    responder.error(client_error(got.status(), "read"));
    return true;
  }
  if (!keep_atime) table_.was_read(inode);
  note_read(inode, got.value());
  const iovec part{target.data(), got.value()};
  {
    const observe::Span reply(observe::TraceKind::kReply, inode.device(), in.offset, got.value());
    responder.data({&part, 1});
  }
  measured.done(got.value());
  return true;
}

void Operations::read_later(const std::shared_ptr<OpenFile>& file, const fuse_read_in& in, std::uint64_t bytes,
                            Responder responder) {
  long_operations_.run(*file->inode, std::move(responder),
                       [this, file, in, target = std::vector<std::byte>(static_cast<std::size_t>(bytes))](
                           const Operation&, Responder& reply) mutable {
                         Inode& inode = *file->inode;
                         observe::Measured measured(counters_of(*inode.buffer()), observe::Backend::kMount,
                                                    observe::Flow::kOut);
                         const Result<std::size_t> got = inode.buffer()->read(in.offset, target);
                         if (!got.ok()) return reply.error(client_error(got.status(), "read"));
                         if ((in.flags & O_NOATIME) == 0) table_.was_read(inode);
                         note_read(inode, got.value());
                         const iovec part{target.data(), got.value()};
                         reply.data({&part, 1});
                         measured.done(got.value());
                       });
}

void Operations::note_read(Inode& inode, std::uint64_t bytes) {
  // Before the reply: who has it may ask at once what has been read of the file.
  statistics_.read_bytes.add(bytes);
  inode.buffer()->activity().note(observe::Backend::kMount, observe::Flow::kOut, bytes);
}

bool Operations::write(Request& request, Responder& responder) {
  fuse_write_in in{};
  bool answered = false;
  const std::shared_ptr<OpenFile> file = begin(request, responder, &in, &in.fh, &answered);
  if (!file) return answered;
  const std::span<const std::byte> data = request.message.subspan(kWriteHeaderBytes);
  if (data.size() != in.size) {
    statistics_.bad_requests.add();
    responder.error(EINVAL);
    return true;
  }
  if (!valid_range(in.offset, in.size)) {
    responder.error(EFBIG);
    return true;
  }
  if (data.empty()) {
    responder.body(fuse_write_out{});
    return true;
  }
  // Where files are cached the kernel clears set-id bits itself, but for those that mark a group without execution;
  // what it writes back later is nobody's doing.
  const Caller caller = Caller::of(request.header);
  SetIdLoss loss = SetIdLoss::kNone;
  if ((in.write_flags & kWriteKillSetId) != 0) {
    loss = file->inode->loss_by(caller);
  } else if ((in.write_flags & FUSE_WRITE_CACHE) == 0) {
    loss = file->inode->bare_loss_by(caller);
  }
  Buffer& buffer = *file->inode->buffer();
  observe::Measured measured(counters_of(buffer), observe::Backend::kMount, observe::Flow::kIn);
  const observe::Span span(observe::TraceKind::kMountWrite, file->inode->device(), in.offset, in.size,
                           request.header.nodeid);
  Result<std::size_t> written = [&] {
    const observe::Span copy(observe::TraceKind::kCopyToDevice, file->inode->device(), in.offset, in.size);
    return write_to_limit(buffer, in.offset, data);
  }();
  if (written.ok()) {
    finish_write(*file, loss, written.value(), responder);
    measured.done(written.value());
    return true;
  }
  if (written.error() != ENOSPC && written.error() != EAGAIN) {
    responder.error(client_error(written.status(), "write"));
    return true;
  }
  measured.dismiss();
  // The reader's memory is needed for the next request.
  write_later(file, in.offset, loss, {data.begin(), data.end()}, std::move(responder));
  return true;
}

Result<std::size_t> Operations::write_to_limit(Buffer& buffer, std::uint64_t offset, std::span<const std::byte> data) {
  Result<std::size_t> written = buffer.write(offset, data);
  if (written.ok() || written.error() != EFBIG) return written;
  // A write across the largest size ends there; one that begins there fails.
  const std::uint64_t limit = buffer.limit();
  if (offset >= limit || limit - offset >= data.size()) return written;
  return buffer.write(offset, data.first(static_cast<std::size_t>(limit - offset)));
}

void Operations::finish_write(OpenFile& file, SetIdLoss loss, std::uint64_t bytes, Responder& responder) {
  file.inode->was_written(loss);
  statistics_.written_bytes.add(bytes);
  file.inode->buffer()->activity().note(observe::Backend::kMount, observe::Flow::kIn, bytes);
  fuse_write_out out{};
  out.size = static_cast<std::uint32_t>(bytes);  // at most the request's 32-bit size
  responder.body(out);
}

void Operations::write_later(const std::shared_ptr<OpenFile>& file, std::uint64_t offset, SetIdLoss loss,
                             std::vector<std::byte> data, Responder responder) {
  // From the first attempt to the reply.
  auto measured = std::make_unique<observe::Measured>(counters_of(*file->inode->buffer()), observe::Backend::kMount,
                                                      observe::Flow::kIn);
  long_operations_.run_with_space(*file->inode, std::move(responder),
                                  [this, file, offset, loss, data = std::move(data), measured = std::move(measured)](
                                      const Operation&, Responder& reply) {
                                    const std::uint64_t granule = table_.source().granule(file->inode->device());
                                    const Result<std::size_t> written =
                                        write_what_fits(*file->inode->buffer(), granule, offset, data);
                                    if (!written.ok()) return client_error(written.status(), "write");
                                    finish_write(*file, loss, written.value(), reply);
                                    measured->done(written.value());
                                    return 0;
                                  });
}

Result<std::size_t> Operations::write_what_fits(Buffer& buffer, std::uint64_t granule, std::uint64_t offset,
                                                std::span<const std::byte> data) {
  Result<std::size_t> all = write_to_limit(buffer, offset, data);
  if (all.ok() || all.error() != ENOSPC || granule == 0) return all;
  // As many granules from the front as there is room for: write(2) promises what fits.
  std::size_t done = 0;
  while (done < data.size()) {
    const std::uint64_t at = offset + done;
    const std::uint64_t bytes = std::min<std::uint64_t>(round_down(at, granule) + granule - at, data.size() - done);
    Result<std::size_t> part = buffer.write(at, data.subspan(done, static_cast<std::size_t>(bytes)));
    if (!part.ok()) {
      if (done == 0) return part.status();
      break;
    }
    done += part.value();
  }
  return done;
}

bool Operations::lseek(Request& request, Responder& responder) {
  fuse_lseek_in in{};
  if (!read_struct(request.message, sizeof(fuse_in_header), &in)) {
    responder.error(EINVAL);
    return true;
  }
  if (in.whence != SEEK_DATA && in.whence != SEEK_HOLE) {  // the kernel does the others itself
    responder.error(EINVAL);
    return true;
  }
  if (in.offset > kMaximumOffset) {  // a negative one
    responder.error(ENXIO);
    return true;
  }
  std::shared_ptr<OpenFile> file;
  const Source source = classify(in.fh, &file);
  fuse_lseek_out out{};
  if (source == Source::kNative) {
    Buffer& buffer = *file->inode->buffer();
    Result<std::uint64_t> found = in.whence == SEEK_DATA ? buffer.seek_data(in.offset) : buffer.seek_hole(in.offset);
    if (!found.ok()) {
      responder.error(client_error(found.status(), "lseek"));
      return true;
    }
    out.offset = found.value();
    responder.body(out);
    return true;
  }
  // The control plane does not know LSEEK, and its ENOSYS would end hole searches on the whole mount. Its files have no
  // holes but the one at the end.
  const std::shared_ptr<Inode> inode = source == Source::kControl ? table_.find(request.header.nodeid) : nullptr;
  if (!inode) {
    responder.error(EBADF);
    return true;
  }
  const std::uint64_t size = inode->attributes().size;
  if (in.offset >= size) {
    responder.error(ENXIO);
    return true;
  }
  out.offset = in.whence == SEEK_DATA ? in.offset : size;
  responder.body(out);
  return true;
}

bool Operations::fallocate(Request& request, Responder& responder) {
  fuse_fallocate_in in{};
  if (!read_struct(request.message, sizeof(fuse_in_header), &in)) {
    responder.error(EINVAL);
    return true;
  }
  std::shared_ptr<OpenFile> file;
  const Source source = classify(in.fh, &file);
  if (source != Source::kNative) {
    // Not relayed: an ENOSYS would end fallocate() on the whole mount.
    responder.error(source == Source::kStale ? EBADF : EOPNOTSUPP);
    return true;
  }
  if (in.length == 0) {
    responder.error(EINVAL);
    return true;
  }
  if (!valid_range(in.offset, in.length)) {
    responder.error(EFBIG);
    return true;
  }
  const SetIdLoss loss = file->inode->bare_loss_by(Caller::of(request.header));
  long_operations_.run_with_space(*file->inode, std::move(responder),
                                  [this, file, in, loss](const Operation& operation, Responder& reply) {
                                    const Status status = allocate(*file->inode, in, operation);
                                    if (!status.ok()) return client_error(status, "fallocate");
                                    file->inode->was_written(loss);
                                    reply.ok();
                                    return 0;
                                  });
  return true;
}

// Long ranges go in chunks, so that an INTERRUPT ends them; what has been allocated until then stays, as elsewhere.
// A range that the device has no room for is one call: it fails as a whole and leaves the file as it was.
Status Operations::allocate(Inode& inode, const fuse_fallocate_in& in, const Operation& operation) const {
  Buffer& buffer = *inode.buffer();
  const bool keep_size = (in.mode & FALLOC_FL_KEEP_SIZE) != 0;
  const std::uint32_t kind = in.mode & ~static_cast<std::uint32_t>(FALLOC_FL_KEEP_SIZE);
  if (operation.cancelled) return Status(EINTR, "interrupted");
  if (kind == FALLOC_FL_PUNCH_HOLE) {
    if (!keep_size) return Status(EOPNOTSUPP, "punching a hole keeps the size");
    return buffer.punch(in.offset, in.length);
  }
  if (kind != 0 && kind != FALLOC_FL_ZERO_RANGE) return Status(EOPNOTSUPP, "this mode of fallocate is not there");

  const auto apply = [&](std::uint64_t offset, std::uint64_t bytes, bool keep) {
    return kind == 0 ? buffer.allocate(offset, bytes, keep) : buffer.zero_range(offset, bytes, keep);
  };
  if (in.length <= kAllocateChunk) return apply(in.offset, in.length, keep_size);
  Result<MemoryInfo> memory = table_.source().memory(inode.device());
  if (!memory.ok()) return memory.status();
  if (memory.value().free_bytes < in.length) return apply(in.offset, in.length, keep_size);
  for (std::uint64_t done = 0; done < in.length;) {
    if (operation.cancelled) return Status(EINTR, "interrupted");
    const std::uint64_t bytes = std::min(kAllocateChunk, in.length - done);
    const bool last = done + bytes == in.length;
    if (Status status = apply(in.offset + done, bytes, keep_size || !last); !status.ok()) return status;
    done += bytes;
  }
  return {};
}

bool Operations::copy_file_range(Request& request, Responder& responder) {
  const Result<CopyRequest> copy = read_copy_request(request);
  if (!copy.ok()) {
    responder.error(copy.error());
    return true;
  }
  const fuse_copy_file_range_in in = copy.value().in;
  const bool wide = copy.value().wide;
  std::shared_ptr<OpenFile> from;
  std::shared_ptr<OpenFile> to;
  const Source from_source = classify(in.fh_in, &from);
  const Source to_source = classify(in.fh_out, &to);
  if (from_source == Source::kStale || to_source == Source::kStale) {
    responder.error(EBADF);
    return true;
  }
  if (from_source == Source::kControl || to_source == Source::kControl) {
    // The kernel then copies by reads and writes. Never relayed: ENOSYS would be remembered for the whole mount.
    responder.error(EXDEV);
    return true;
  }
  const SetIdLoss loss = to->inode->bare_loss_by(Caller::of(request.header));
  if (to->inode->buffer()->copies_briefly(*from->inode->buffer(), in.off_in, in.len)) {
    const Result<std::uint64_t> copied =
        to->inode->buffer()->copy_from(*from->inode->buffer(), in.off_in, in.off_out, in.len, nullptr);
    if (copied.ok()) {
      end_copy(*from->inode, *to->inode, loss, copied.value());
      reply_copied(responder, wide, copied.value());
      return true;
    }
    if (copied.error() != ENOSPC && copied.error() != EAGAIN) {
      responder.error(client_error(copied.status(), "copy_file_range"));
      return true;
    }
  }
  long_operations_.run_with_space(
      *to->inode, std::move(responder), [this, from, to, in, wide, loss](const Operation& operation, Responder& reply) {
        const Result<std::uint64_t> copied =
            to->inode->buffer()->copy_from(*from->inode->buffer(), in.off_in, in.off_out, in.len, &operation.cancelled);
        if (copied.error() == ECANCELED) return EINTR;
        if (!copied.ok()) return client_error(copied.status(), "copy_file_range");
        end_copy(*from->inode, *to->inode, loss, copied.value());
        reply_copied(reply, wide, copied.value());
        return 0;
      });
  return true;
}

void Operations::end_copy(Inode& from, Inode& to, SetIdLoss loss, std::uint64_t bytes) {
  if (bytes == 0) return;
  table_.was_read(from);
  to.was_written(loss);
  statistics_.copied_bytes.add(bytes);
}

bool Operations::flush_or_fsync(Request& request, Responder& responder) {
  // Both begin with the handle. Memory has nothing to write back. (FLUSH comes from kernels before 5.16 only: the reply
  // to OPEN asks for none.)
  std::uint64_t fh = 0;
  bool answered = false;
  if (!begin(request, responder, &fh, &fh, &answered)) return answered;
  responder.ok();
  return true;
}

}  // namespace gpufs::fuse
