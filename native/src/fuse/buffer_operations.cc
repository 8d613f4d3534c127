#include "fuse/buffer_operations.h"

#include <fcntl.h>
#include <linux/falloc.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <span>
#include <utility>

#include "base/log.h"
#include "base/math.h"
#include "base/pages.h"
#include "memory/account.h"
#include "observe/trace.h"

namespace gpufs::fuse {

namespace {

constexpr std::uint64_t kAllocateChunk = std::uint64_t{1} << 30;  // an INTERRUPT ends an allocation between two

// The error that the client gets; the driver's own message goes to the log.
int client_error(const Status& status, const char* what) {
  const int error = status.error();
  const bool ordinary = lacks_memory(error) || error == EFBIG || error == ENXIO || error == EINVAL || error == EPERM ||
                        error == ESTALE || error == EBUSY;
  if (!ordinary && log_enabled(LogLevel::kWarning)) {
    log_warning(what, " failed: ", status.message(), " (errno ", error, ", device code ", status.device_code(), ")");
  }
  return error;
}

// Whether holes that nobody has touched yet may get memory: there must be enough for those that are touched first.
bool may_fill_ahead(Buffer& buffer) {
  constexpr std::uint64_t kPlenty = std::uint64_t{64} << 20;
  const Result<MemoryInfo> memory = buffer.device()->device().memory(Wait::kForbidden);
  return memory.ok() && std::min(memory.value().free_bytes, buffer.charge().available()) >= kPlenty;
}

// Lets this process have each page in its page table. Where the kernel copies from a page that is not there, and
// SIGKILL comes meanwhile, it fails the request with EIO, and the next daemon never sees it. That also concerns memory
// that was filled before this process took over.
void fault_in(std::span<const iovec> pieces) {
  for (const iovec& piece : pieces) {
    const auto* const bytes = static_cast<const volatile std::byte*>(piece.iov_base);
    for (std::size_t at = 0; at < piece.iov_len; at += kPageBytes) static_cast<void>(bytes[at]);
    if (piece.iov_len != 0) static_cast<void>(bytes[piece.iov_len - 1]);
  }
}

// A write across the largest size ends there; one that begins there fails.
Result<std::size_t> write_to_limit(Buffer& buffer, std::uint64_t offset, std::span<const std::byte> data, Wait wait) {
  Result<std::size_t> written = buffer.write(offset, data, wait);
  if (written.ok() || written.error() != EFBIG) return written;
  const std::uint64_t limit = buffer.limit();
  if (offset >= limit || limit - offset >= data.size()) return written;
  return buffer.write(offset, data.first(static_cast<std::size_t>(limit - offset)), wait);
}

}  // namespace

// ---- reading ----

void BufferOperations::read(const File& file, Request& request, Responder responder) {
  const auto in = request.arguments<fuse_read_in>();
  if (!valid_range(in.offset, in.size)) return responder.error(EINVAL);
  Inode& inode = *file->inode;
  const std::uint64_t wanted = std::min<std::uint64_t>(in.size, request.payload.size());
  const bool from_program = (in.read_flags & FUSE_READ_LOCKOWNER) != 0;  // by read(2)
  if (!from_program && read_pages(file, request, in, wanted, responder)) return;
  const observe::Span span(observe::TraceKind::kMountRead, inode.device(), in.offset, wanted, inode.ino());
  if (inode.in_host_memory()) {
    if (reply_from_memory(inode, in, wanted, responder)) return;
  } else {
    // The request is no longer needed, and devices copy fastest to its memory.
    const int error = reply_from_copy(inode, in, request.payload.first(static_cast<std::size_t>(wanted)),
                                      Wait::kForbidden, responder);
    if (error == 0) return;
    if (error != EAGAIN) return responder.error(error);
  }
  read_later(file, in, wanted, std::move(responder));
}

bool BufferOperations::read_pages(const File& file, const Request& request, const fuse_read_in& in,
                                  std::uint64_t wanted, Responder& responder) {
  Inode& inode = *file->inode;
  Buffer& buffer = *inode.buffer();
  const std::uint64_t size = buffer.size();
  const std::uint64_t end = std::min(in.offset + wanted, size);
  const bool own = read_ahead_.is_own(request.header.pid);
  // Where the kernel caches all files, the READ of a fault looks like that of read(2).
  const bool hole = in.offset < end && init_.direct_io() && buffer.has_hole(in.offset, end);
  const bool fills = hole && (file->writes || (own && read_ahead_.is_for_writer(inode.ino())));
  const bool ahead = !fills || may_fill_ahead(buffer);
  if (ahead) read_ahead_.note_read(request.header.pid, inode.ino(), in.offset, wanted, size, file->writes);
  if (own && hole && (!ahead || (!fills && inode.has_writers()))) {
    // A store to a page that is cached asks for nothing, so no hole may be cached without need.
    responder.error(EAGAIN);
    return true;
  }
  if (!fills) return false;
  // The page that a store needs is read first. Memory for it must come now: when the page is written back, nobody can
  // be told any more that there is none. An error becomes a SIGBUS at the store.
  const Status filled = buffer.pin_for_write(in.offset, end - in.offset, Wait::kForbidden).status();
  if (filled.ok()) return false;
  if (!lacks_memory(filled.error()) && filled.error() != EAGAIN) {
    responder.error(client_error(filled, "a page of a mapping"));
  } else {
    fill_later(file, in, end - in.offset, std::move(responder));
  }
  return true;
}

bool BufferOperations::reply_from_memory(Inode& inode, const fuse_read_in& in, std::uint64_t bytes,
                                         Responder& responder) {
  observe::ScopedOperationCount measured(inode.buffer()->device()->counters(), observe::Backend::kMount,
                                         observe::Flow::kFromDevice);
  const Result<Buffer::Gathered> gathered = inode.buffer()->gather(in.offset, bytes, Wait::kForbidden);
  // A registration has just replaced the buffer by one that is copied.
  if (gathered.error() == EAGAIN || gathered.error() == EOPNOTSUPP) {
    measured.dismiss();
    return false;
  }
  if (!gathered.ok()) {
    responder.error(client_error(gathered.status(), "read"));
    return true;
  }
  note_read(inode, in, gathered.value().bytes);
  {
    const observe::Span reply(observe::TraceKind::kReply, inode.device(), in.offset, gathered.value().bytes);
    fault_in(gathered.value().pieces);
    responder.data(gathered.value().pieces);
  }
  measured.done(gathered.value().bytes);
  return true;
}

int BufferOperations::reply_from_copy(Inode& inode, const fuse_read_in& in, std::span<std::byte> memory, Wait wait,
                                      Responder& responder) {
  observe::ScopedOperationCount measured(inode.buffer()->device()->counters(), observe::Backend::kMount,
                                         observe::Flow::kFromDevice);
  const Result<std::size_t> got = [&] {
    const observe::Span copy(observe::TraceKind::kCopyToHost, inode.device(), in.offset, memory.size());
    return inode.buffer()->read(in.offset, memory, wait);
  }();
  if (got.error() == EAGAIN) measured.dismiss();
  if (!got.ok()) return got.error() == EAGAIN ? EAGAIN : client_error(got.status(), "read");
  note_read(inode, in, got.value());
  {
    const observe::Span reply(observe::TraceKind::kReply, inode.device(), in.offset, got.value());
    responder.data(std::span<const std::byte>(memory.first(got.value())));
  }
  measured.done(got.value());
  return 0;
}

void BufferOperations::read_later(const File& file, const fuse_read_in& in, std::uint64_t bytes, Responder responder) {
  long_requests_.run(*file->inode, std::move(responder),
                     [this, file, in, memory = std::vector<std::byte>(static_cast<std::size_t>(bytes))](
                         Cancellation&, Responder& reply) mutable {
                       const int error = reply_from_copy(*file->inode, in, memory, Wait::kAllowed, reply);
                       if (error != 0) reply.error(error);
                     });
}

void BufferOperations::fill_later(const File& file, const fuse_read_in& in, std::uint64_t bytes, Responder responder) {
  long_requests_.retry_until_memory(
      *file->inode, std::move(responder), [this, file, in, bytes](Cancellation&, Responder& reply) {
        const Status filled = file->inode->buffer()->allocate(in.offset, bytes, /*keep_size=*/true);
        if (!filled.ok()) return client_error(filled, "a page of a mapping");
        std::vector<std::byte> memory(static_cast<std::size_t>(bytes));
        return reply_from_copy(*file->inode, in, memory, Wait::kAllowed, reply);
      });
}

void BufferOperations::note_read(Inode& inode, const fuse_read_in& in, std::uint64_t bytes) {
  // Before the reply: the client may ask for these numbers as soon as it has it.
  if ((in.flags & O_NOATIME) == 0) table_.was_read(inode);
  inode.buffer()->activity().note(observe::Backend::kMount, observe::Flow::kFromDevice, bytes);
}

// ---- writing ----

void BufferOperations::write(const File& file, Request& request, Responder responder) {
  const auto in = request.arguments<fuse_write_in>();
  const std::span<const std::byte> data = request.message.subspan(kWriteHeaderBytes);
  if (data.size() != in.size) {
    count(counters_.bad_requests);
    return responder.error(EINVAL);
  }
  if (!valid_range(in.offset, in.size)) return responder.error(EFBIG);
  if (data.empty()) return responder.body(fuse_write_out{});
  // Where files are cached the kernel clears set-id bits itself, except those that mark a group without execution; what
  // it writes back later has no caller.
  Inode& inode = *file->inode;
  const Caller caller = Caller::of(request.header);
  SetIdLoss loss = SetIdLoss::kNone;
  if ((in.write_flags & FUSE_WRITE_KILL_SUIDGID) != 0) {
    loss = inode.set_id_bits_to_clear(caller);
  } else if ((in.write_flags & FUSE_WRITE_CACHE) == 0) {
    loss = inode.bare_set_gid_to_clear(caller);
  }
  observe::ScopedOperationCount measured(inode.buffer()->device()->counters(), observe::Backend::kMount,
                                         observe::Flow::kToDevice);
  const observe::Span span(observe::TraceKind::kMountWrite, inode.device(), in.offset, in.size, inode.ino());
  const Result<std::size_t> written = [&] {
    const observe::Span copy(observe::TraceKind::kCopyToDevice, inode.device(), in.offset, in.size);
    return write_to_limit(*inode.buffer(), in.offset, data, Wait::kForbidden);
  }();
  if (written.ok()) {
    finish_write(*file, loss, written.value(), responder);
    measured.done(written.value());
    return;
  }
  if (!lacks_memory(written.error()) && written.error() != EAGAIN) {
    return responder.error(client_error(written.status(), "write"));
  }
  measured.dismiss();
  // The reader's memory is needed for the next request.
  write_later(file, in, loss, {data.begin(), data.end()}, std::move(responder));
}

void BufferOperations::finish_write(OpenFile& file, SetIdLoss loss, std::uint64_t bytes, Responder& responder) {
  file.inode->was_written(loss);
  file.inode->buffer()->activity().note(observe::Backend::kMount, observe::Flow::kToDevice, bytes);
  fuse_write_out out{};
  out.size = static_cast<std::uint32_t>(bytes);  // at most the request's 32-bit size
  responder.body(out);
}

void BufferOperations::write_later(const File& file, const fuse_write_in& in, SetIdLoss loss,
                                   std::vector<std::byte> data, Responder responder) {
  // From the first attempt to the reply.
  auto measured = std::make_unique<observe::ScopedOperationCount>(file->inode->buffer()->device()->counters(),
                                                                  observe::Backend::kMount, observe::Flow::kToDevice);
  // Pages that a mapping changed: the kernel does not look at the count, so a part is a failure.
  const bool pages = (in.write_flags & FUSE_WRITE_CACHE) != 0;
  long_requests_.retry_until_memory(
      *file->inode, std::move(responder),
      [this, file, in, loss, pages, data = std::move(data), measured = std::move(measured)](Cancellation&,
                                                                                            Responder& reply) {
        Status stopped;
        const std::size_t written = write_what_fits(*file->inode->buffer(), in.offset, data, &stopped);
        if (!stopped.ok() && (written == 0 || pages)) return client_error(stopped, "write");
        finish_write(*file, loss, written, reply);
        measured->done(written);
        return 0;
      },
      [this, file, pages](int error) {
        if (pages) report_lost_stores(*file->inode, error);
      });
}

std::size_t BufferOperations::write_what_fits(Buffer& buffer, std::uint64_t offset, std::span<const std::byte> data,
                                              Status* stopped) {
  const Result<std::size_t> all = write_to_limit(buffer, offset, data, Wait::kAllowed);
  *stopped = all.status();
  if (all.ok()) return all.value();
  if (!lacks_memory(all.error())) return 0;
  // As many granules from the front as fit: write(2) promises a short count.
  const std::uint64_t granule = buffer.device()->info().granule;
  std::size_t done = 0;
  while (done < data.size()) {
    const std::uint64_t at = offset + done;
    const std::uint64_t bytes = std::min<std::uint64_t>(round_down(at, granule) + granule - at, data.size() - done);
    const Result<std::size_t> part = buffer.write(at, data.subspan(done, static_cast<std::size_t>(bytes)));
    *stopped = part.status();
    if (!part.ok()) break;
    done += part.value();
  }
  return done;
}

void BufferOperations::report_lost_stores(Inode& inode, int error) const {
  if (!inode.first_loss() || !log_enabled(LogLevel::kWarning) || !log_permitted(inode.attributes().uid)) return;
  const std::string path = names_.path_of(inode).value_or("(removed)");
  log_warning("file \"", path.substr(path.rfind('/') + 1), "\" (inode ", inode.ino(),
              "): stores through a mapping were lost: ", std::strerror(error));
}

// ---- the rest ----

void BufferOperations::lseek(const File& file, Request& request, Responder responder) {
  const auto in = request.arguments<fuse_lseek_in>();
  Buffer& buffer = *file->inode->buffer();
  const Result<std::uint64_t> found =
      in.whence == SEEK_DATA ? buffer.seek_data(in.offset) : buffer.seek_hole(in.offset);
  if (!found.ok()) return responder.error(client_error(found.status(), "lseek"));
  responder.body(fuse_lseek_out{found.value()});
}

void BufferOperations::flush(const File& /*file*/, Request& /*request*/, Responder responder) { responder.ok(); }

void BufferOperations::fsync(const File& /*file*/, Request& /*request*/, Responder responder) {
  responder.answer(table_.asks_for_fsync() ? 0 : ENOSYS);
}

void BufferOperations::fallocate(const File& file, Request& request, Responder responder) {
  const auto in = request.arguments<fuse_fallocate_in>();
  if (in.length == 0) return responder.error(EINVAL);
  if (!valid_range(in.offset, in.length)) return responder.error(EFBIG);
  const SetIdLoss loss = file->inode->bare_set_gid_to_clear(Caller::of(request.header));
  const uid_t user = request.header.uid;
  long_requests_.retry_until_memory(
      *file->inode, std::move(responder), [this, file, in, loss, user](Cancellation& cancellation, Responder& reply) {
        const Status status = allocate(*file->inode, in, cancellation);
        if (status.error() == EBUSY) {
          log_user_warning(user, "fallocate of inode ", file->inode->ino(), " failed: ", status.message());
        }
        if (!status.ok()) return client_error(status, "fallocate");
        file->inode->was_written(loss);
        reply.ok();
        return 0;
      });
}

// Long ranges go in chunks, so that an INTERRUPT ends them; what has been allocated until then stays, as elsewhere.
// A range that is larger than the free memory or than what limits allow is one call: it fails as a whole and leaves the
// file as it was.
Status BufferOperations::allocate(Inode& inode, const fuse_fallocate_in& in, const Cancellation& cancellation) const {
  Buffer& buffer = *inode.buffer();
  const bool takes_memory = (in.mode & FALLOC_FL_PUNCH_HOLE) == 0;
  if (!takes_memory || in.length <= kAllocateChunk) return buffer.fallocate(in.mode, in.offset, in.length);
  const MemoryInfo memory = TRY(buffer.device()->memory());
  if (std::min(memory.free_bytes, buffer.charge().available()) < in.length) {
    return buffer.fallocate(in.mode, in.offset, in.length);
  }
  for (std::uint64_t done = 0; done < in.length;) {
    if (cancellation.requested()) return Status(EINTR, "interrupted");
    const std::uint64_t bytes = std::min(kAllocateChunk, in.length - done);
    const bool last = done + bytes == in.length;
    TRY(buffer.fallocate(last ? in.mode : in.mode | FALLOC_FL_KEEP_SIZE, in.offset + done, bytes));
    done += bytes;
  }
  return {};
}

void BufferOperations::copy(const File& from, const File& to, const Request& request, const CopyRequest& copy,
                            Responder responder) {
  const fuse_copy_file_range_in& in = copy.in;
  const SetIdLoss loss = to->inode->bare_set_gid_to_clear(Caller::of(request.header));
  ExtentBuffer* const target = to->inode->buffer()->growing();
  if (target != nullptr && target->copies_briefly(*from->inode->buffer(), in.off_in, in.len)) {
    const Result<std::uint64_t> copied =
        target->copy_from(*from->inode->buffer(), in.off_in, in.off_out, in.len, nullptr, Wait::kForbidden);
    if (copied.ok()) {
      finish_copy(*from->inode, *to->inode, loss, copied.value());
      return reply_copied(responder, copy.wide, copied.value());
    }
    if (!lacks_memory(copied.error()) && copied.error() != EAGAIN) {
      return responder.error(client_error(copied.status(), "copy_file_range"));
    }
  }
  long_requests_.retry_until_memory(
      *to->inode, std::move(responder), [this, from, to, copy, loss](Cancellation& cancellation, Responder& reply) {
        const Result<std::uint64_t> copied = to->inode->buffer()->copy_from(
            *from->inode->buffer(), copy.in.off_in, copy.in.off_out, copy.in.len, cancellation.flag());
        if (copied.error() == ECANCELED) return EINTR;
        if (!copied.ok()) return client_error(copied.status(), "copy_file_range");
        finish_copy(*from->inode, *to->inode, loss, copied.value());
        reply_copied(reply, copy.wide, copied.value());
        return 0;
      });
}

void BufferOperations::finish_copy(Inode& from, Inode& to, SetIdLoss loss, std::uint64_t bytes) {
  if (bytes == 0) return;
  table_.was_read(from);
  to.was_written(loss);
}

}  // namespace gpufs::fuse
