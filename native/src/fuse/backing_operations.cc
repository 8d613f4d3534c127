#include "fuse/backing_operations.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "fuse/caller.h"
#include "fuse/protocol.h"

namespace gpufs::fuse {

namespace {

// Between two looks for an INTERRUPT.
constexpr std::uint64_t kCopyChunk = std::uint64_t{64} << 20;
constexpr std::chrono::milliseconds kLook{20};
// Between two looks whether a client is being killed: most requests are answered before the first one.
constexpr std::chrono::seconds kGrace{1};
// Whose transfers they are, apart from the processes that are clients of the copy service: a user's, on one file
// system; or a server's, since when that hangs all copies from and to it do, whoever made them.
constexpr std::uint64_t kUserBit = std::uint64_t{1} << 61;
constexpr std::uint64_t kServerBit = std::uint64_t{1} << 62;

std::uint64_t client_of(const BackingFacts& facts, std::uint32_t uid) {
  if (facts.may_hang) return kServerBit | facts.device;
  constexpr std::uint64_t kDeviceMask = (std::uint64_t{1} << 29) - 1;
  return kUserBit | (facts.device & kDeviceMask) << 32 | uid;
}

// As the kernel does for who writes without the right to keep them all: a set-gid bit without execution stays with
// those of the group.
void drop_set_id(int fd, const Caller& writer) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return;
  mode_t mode = status.st_mode & 07777U;
  if ((mode & S_ISUID) != 0) mode &= ~static_cast<mode_t>(S_ISUID);
  if ((mode & S_ISGID) != 0 && ((mode & S_IXGRP) != 0 || !writer.in_group(status.st_gid))) {
    mode &= ~static_cast<mode_t>(S_ISGID);
  }
  if (mode != (status.st_mode & 07777U)) static_cast<void>(::fchmod(fd, mode));
}

// The same after changes of which the kernel does not say whether who makes them may keep the bits.
void drop_set_id_unless_kept(int fd, const Caller& caller) {
  struct stat status {};
  if (::fstat(fd, &status) != 0 || (status.st_mode & (S_ISUID | S_ISGID)) == 0 || caller.keeps_set_id()) return;
  drop_set_id(fd, caller);
}

}  // namespace

BackingOperations::BackingOperations(InodeTable& table, std::shared_ptr<TransferEngine> transfers,
                                     LongOperations& long_operations, Statistics& statistics)
    : table_(table), transfers_(std::move(transfers)), long_operations_(long_operations), statistics_(statistics) {}

// ---- threads ----

BackingOperations::Answer BackingOperations::failed(int error) {
  Answer answer;
  answer.error = error;
  return answer;
}

template <typename T>
BackingOperations::Answer BackingOperations::answer_of(const T& body) {
  Answer answer;
  answer.body = std::make_unique_for_overwrite<std::byte[]>(sizeof(T));
  answer.body_bytes = sizeof(T);
  std::memcpy(answer.body.get(), &body, sizeof(T));
  return answer;
}

template <typename Body>
void BackingOperations::pass_through(const OpenBacking& open, const Request& request, Responder responder, Body body) {
  auto flight = std::make_shared<Flight>();
  flight->client = Caller::of(request.header);
  flight->operation = long_operations_.cancellations().begin(responder.unique());
  flight->responder = std::move(responder);
  auto serve = [this, flight, body = std::move(body)](int refusal) mutable {
    Answer answer = failed(refusal != 0 ? refusal : EINTR);
    if (refusal == 0 && !flight->operation->cancelled) {
      try {
        answer = body(*flight->operation);
      } catch (const std::bad_alloc&) {
        answer = failed(ENOMEM);
      }
    }
    const std::lock_guard lock(flight->mutex);
    if (flight->responder.pending()) settle(*flight, answer);  // else this object may be gone
  };
  try {
    {
      const std::lock_guard lock(flights_mutex_);
      flights_.emplace(flight.get(), flight);
    }
    const Executor::Lane lane{Executor::Lane::Kind::kFiles, -1, open.file->facts().device};
    Executor& executor = long_operations_.executor();
    executor.submit(lane, nullptr, flight->operation->unique, std::move(serve));
    // An INTERRUPT that came before it was in the queue has not found it there.
    if (flight->operation->cancelled) static_cast<void>(executor.discard(flight->operation->unique));
  } catch (const std::bad_alloc&) {
    const std::lock_guard lock(flight->mutex);
    if (flight->responder.pending()) settle(*flight, failed(ENOMEM));
  }
}

void BackingOperations::interrupted(std::uint64_t unique) {
  std::shared_ptr<Flight> found;
  {
    const std::lock_guard lock(flights_mutex_);
    const auto place = std::ranges::find_if(
        flights_, [unique](const auto& entry) { return entry.second->operation->unique == unique; });
    if (place == flights_.end()) return;
    found = place->second;
  }
  watch(std::move(found));
}

void BackingOperations::watch(std::shared_ptr<Flight> flight) {
  Executor& executor = long_operations_.executor();
  // A job that is parked until its deadline, in a lane of its own; no memory is ever freed for it.
  const auto deadline = std::chrono::steady_clock::now() + kGrace;
  executor.submit(
      {Executor::Lane::Kind::kBuffers, -1, 0}, nullptr, 0,
      [this, &executor, deadline, flight = std::move(flight)](int refusal) -> std::optional<Executor::TimePoint> {
        if (refusal == 0) return deadline;
        if (refusal != ENOSPC) return std::nullopt;  // everything ends, or there is no thread to look
        {
          const std::lock_guard lock(flight->mutex);
          if (!flight->responder.pending()) return std::nullopt;
        }
        if (flight->client.pid != 0 && !flight->client.dying()) {
          watch(flight);
          return std::nullopt;
        }
        if (executor.discard(flight->operation->unique)) return std::nullopt;
        const std::lock_guard lock(flight->mutex);
        if (flight->responder.pending()) settle(*flight, failed(EINTR));
        return std::nullopt;
      });
}

// With the flight's mutex held.
void BackingOperations::settle(Flight& flight, const Answer& answer) {
  read_bytes_.add(answer.read);
  written_bytes_.add(answer.written);
  copied_bytes_.add(answer.copied);
  statistics_.read_bytes.add(answer.read);
  statistics_.written_bytes.add(answer.written);
  statistics_.copied_bytes.add(answer.copied);
  const iovec part{answer.body.get(), answer.body_bytes};
  if (answer.error != 0) {
    flight.responder.error(answer.error);
  } else {
    flight.responder.data({&part, answer.body_bytes == 0 ? std::size_t{0} : std::size_t{1}});
  }
  // After the reply: the kernel does not use the number for another request.
  long_operations_.cancellations().end(flight.operation->unique);
  const std::lock_guard lock(flights_mutex_);
  flights_.erase(&flight);
}

void BackingOperations::left_behind(std::size_t threads) {
  if (threads == 0) return;
  log_warning(threads, " threads hang in files of backing/ and are left behind");
  left_behind_.add(threads);
  decltype(flights_) flights;
  {
    const std::lock_guard lock(flights_mutex_);
    flights.swap(flights_);
  }
  for (auto& [raw, flight] : flights) {
    const std::lock_guard lock(flight->mutex);
    if (!flight->responder.pending()) continue;
    flight->responder.error(ENOTCONN);
    long_operations_.cancellations().end(flight->operation->unique);
  }
}

void BackingOperations::write_statistics(JsonWriter& json) const {
  json.number("open_files", files_.size());
  json.number("left_behind", left_behind_.get());
  json.number("read_bytes", read_bytes_.get());
  json.number("written_bytes", written_bytes_.get());
  json.number("copied_bytes", copied_bytes_.get());
  json.number("cached_reads", cached_reads_.get());
}

// ---- requests ----

bool BackingOperations::serve(Request& request, Responder& responder) {
  switch (request.header.opcode) {
    case FUSE_READ:
      return read(request, responder);
    case FUSE_WRITE:
      return write(request, responder);
    case FUSE_LSEEK:
      return lseek(request, responder);
    case FUSE_FALLOCATE:
      return fallocate(request, responder);
    case FUSE_FLUSH:
      return flush(request, responder);
    case FUSE_FSYNC:
      return fsync(request, responder);
    case FUSE_COPY_FILE_RANGE:
    case kOpcodeCopyFileRange64:
      return copy_file_range(request, responder);
    default:
      return false;
  }
}

bool BackingOperations::read(Request& request, Responder& responder) {
  fuse_read_in in{};
  if (!read_struct(request.message, sizeof(fuse_in_header), &in) || !BackingTable::is_backing(in.fh)) return false;
  const std::shared_ptr<OpenBacking> open = files_.find(in.fh);
  if (!open || !valid_range(in.offset, in.size)) {
    responder.error(open ? EINVAL : EBADF);
    return true;
  }
  const std::size_t wanted = std::min<std::size_t>(in.size, request.payload.size());
  if (read_cached(*open, in, request.payload.first(wanted), responder)) return true;
  pass_through(*open, request, std::move(responder), [open, in, wanted](const Operation&) {
    // The request's own memory belongs to the next request by now.
    Answer answer;
    answer.body = std::make_unique_for_overwrite<std::byte[]>(wanted);
    ssize_t count = 0;
    do {
      count = ::pread(open->fd.get(), answer.body.get(), wanted, static_cast<off_t>(in.offset));
    } while (count < 0 && errno == EINTR);
    if (count < 0) return failed(errno);
    answer.body_bytes = static_cast<std::size_t>(count);
    answer.read = answer.body_bytes;
    return answer;
  });
  return true;
}

bool BackingOperations::read_cached(const OpenBacking& open, const fuse_read_in& in, std::span<std::byte> memory,
                                    Responder& responder) {
  if (open.file->facts().may_hang || memory.empty()) return false;
  const iovec part{memory.data(), memory.size()};
  const ssize_t count = ::preadv2(open.fd.get(), &part, 1, static_cast<off_t>(in.offset), RWF_NOWAIT);
  // Less may be what is cached of more: a pool's thread finds out.
  if (count < 0 || static_cast<std::size_t>(count) != memory.size()) return false;
  cached_reads_.add();
  read_bytes_.add(memory.size());
  statistics_.read_bytes.add(memory.size());
  responder.data({&part, 1});
  return true;
}

bool BackingOperations::write(Request& request, Responder& responder) {
  fuse_write_in in{};
  if (!read_struct(request.message, sizeof(fuse_in_header), &in) || !BackingTable::is_backing(in.fh)) return false;
  const std::shared_ptr<OpenBacking> open = files_.find(in.fh);
  const std::span<const std::byte> data = request.message.subspan(kWriteHeaderBytes);
  if (!open || data.size() != in.size || !valid_range(in.offset, in.size)) {
    responder.error(!open ? EBADF : data.size() != in.size ? EINVAL : EFBIG);
    return true;
  }
  pass_through(*open, request, std::move(responder),
               [open, in, writer = Caller::of(request.header),
                bytes = std::vector<std::byte>(data.begin(), data.end())](const Operation&) {
                 // At the host's end of the file, which is not always the kernel's; pages that a mapping changed have
                 // their place, however the handle that they come by was opened.
                 const bool append = (in.flags & O_APPEND) != 0 && (in.write_flags & FUSE_WRITE_CACHE) == 0;
                 std::size_t done = 0;
                 while (done < bytes.size()) {
                   const iovec part{const_cast<std::byte*>(bytes.data()) + done, bytes.size() - done};
                   const ssize_t count = ::pwritev2(open->fd.get(), &part, 1, static_cast<off_t>(in.offset + done),
                                                    append ? RWF_APPEND : 0);
                   if (count < 0 && errno == EINTR) continue;
                   if (count < 0 && done == 0) return failed(errno);
                   if (count <= 0) break;  // a short count; the next write meets the error again
                   done += static_cast<std::size_t>(count);
                 }
                 if ((in.write_flags & kWriteKillSetId) != 0) drop_set_id(open->fd.get(), writer);
                 fuse_write_out out{};
                 out.size = static_cast<std::uint32_t>(done);
                 Answer answer = answer_of(out);
                 answer.written = done;
                 return answer;
               });
  return true;
}

bool BackingOperations::lseek(Request& request, Responder& responder) {
  fuse_lseek_in in{};
  if (!read_struct(request.message, sizeof(fuse_in_header), &in) || !BackingTable::is_backing(in.fh)) return false;
  const std::shared_ptr<OpenBacking> open = files_.find(in.fh);
  // The kernel does the others itself.
  const bool known = in.whence == SEEK_DATA || in.whence == SEEK_HOLE;
  if (!open || !known) {
    responder.error(open ? EINVAL : EBADF);
    return true;
  }
  if (in.offset > kMaximumOffset) {  // a negative one
    responder.error(ENXIO);
    return true;
  }
  pass_through(*open, request, std::move(responder), [open, in](const Operation&) {
    // Moves the descriptor's position, which nobody uses.
    const off_t found = ::lseek(open->fd.get(), static_cast<off_t>(in.offset), static_cast<int>(in.whence));
    if (found < 0) return failed(errno);
    fuse_lseek_out out{};
    out.offset = static_cast<std::uint64_t>(found);
    return answer_of(out);
  });
  return true;
}

bool BackingOperations::fallocate(Request& request, Responder& responder) {
  fuse_fallocate_in in{};
  if (!read_struct(request.message, sizeof(fuse_in_header), &in) || !BackingTable::is_backing(in.fh)) return false;
  const std::shared_ptr<OpenBacking> open = files_.find(in.fh);
  if (!open || !valid_range(in.offset, in.length)) {
    responder.error(open ? EFBIG : EBADF);
    return true;
  }
  pass_through(*open, request, std::move(responder), [open, in, caller = Caller::of(request.header)](const Operation&) {
    const int outcome = ::fallocate(open->fd.get(), static_cast<int>(in.mode), static_cast<off_t>(in.offset),
                                    static_cast<off_t>(in.length));
    const int error = errno;
    if (outcome == 0) drop_set_id_unless_kept(open->fd.get(), caller);
    // The kernel remembers for the whole mount that there is no fallocate, which would end it for buffers too.
    return failed(outcome == 0 ? 0 : error == ENOSYS ? EOPNOTSUPP : error);
  });
  return true;
}

bool BackingOperations::flush(Request& request, Responder& responder) {
  fuse_flush_in in{};
  if (!read_struct(request.message, sizeof(fuse_in_header), &in) || !BackingTable::is_backing(in.fh)) return false;
  const std::shared_ptr<OpenBacking> open = files_.find(in.fh);
  if (!open) {
    responder.error(EBADF);
    return true;
  }
  if (!open->file->facts().may_hang || !open->file->facts().writable) {
    responder.ok();
    return true;
  }
  // Network file systems write back, and tell of failures, when a descriptor is closed.
  pass_through(*open, request, std::move(responder), [open](const Operation&) {
    const int copy = ::fcntl(open->fd.get(), F_DUPFD_CLOEXEC, 3);
    return failed(copy < 0 || ::close(copy) != 0 ? errno : 0);
  });
  // What ends by itself is deaf to signals when its files are closed: no INTERRUPT comes.
  if (Caller::of(request.header).dying()) interrupted(request.header.unique);
  return true;
}

bool BackingOperations::fsync(Request& request, Responder& responder) {
  fuse_fsync_in in{};
  if (!read_struct(request.message, sizeof(fuse_in_header), &in) || !BackingTable::is_backing(in.fh)) return false;
  const std::shared_ptr<OpenBacking> open = files_.find(in.fh);
  if (!open) {
    responder.error(EBADF);
    return true;
  }
  pass_through(*open, request, std::move(responder), [open, in](const Operation&) {
    int outcome = 0;
    do {
      outcome = (in.fsync_flags & 1U) != 0 ? ::fdatasync(open->fd.get()) : ::fsync(open->fd.get());
    } while (outcome != 0 && errno == EINTR);
    // As with fallocate: an ENOSYS would be remembered for the whole mount.
    return failed(outcome == 0 ? 0 : errno == ENOSYS ? EINVAL : errno);
  });
  return true;
}

bool BackingOperations::copy_file_range(Request& request, Responder& responder) {
  const Result<CopyRequest> copy = read_copy_request(request);
  if (!copy.ok()) return false;  // whoever's it is, the answer is the same
  const fuse_copy_file_range_in in = copy.value().in;
  const bool wide = copy.value().wide;
  const bool backing_in = BackingTable::is_backing(in.fh_in);
  const bool backing_out = BackingTable::is_backing(in.fh_out);
  if (!backing_in && !backing_out) return false;
  const std::shared_ptr<OpenBacking> from = backing_in ? files_.find(in.fh_in) : nullptr;
  const std::shared_ptr<OpenBacking> to = backing_out ? files_.find(in.fh_out) : nullptr;
  if ((backing_in && !from) || (backing_out && !to)) {
    responder.error(EBADF);
    return true;
  }
  if (from && to) {
    pass_through(from->file->facts().may_hang ? *from : *to, request, std::move(responder),
                 [from, to, in, wide, caller = Caller::of(request.header)](const Operation& operation) {
                   Answer answer = copy_files(*from, *to, in, wide, operation);
                   if (answer.copied > 0) drop_set_id_unless_kept(to->fd.get(), caller);
                   return answer;
                 });
    return true;
  }
  const std::uint64_t other = backing_in ? in.fh_out : in.fh_in;
  if ((other & InodeTable::kHandleBit) == 0 || !transfers_) {
    responder.error(EXDEV);  // a file of the control plane's: the kernel then copies by reads and writes
    return true;
  }
  const std::shared_ptr<OpenFile> buffer_file = table_.file(other);
  if (!buffer_file) {
    responder.error(EBADF);
    return true;
  }
  const std::shared_ptr<OpenBacking>& backing = from ? from : to;
  const BackingFacts& facts = backing->file->facts();
  const bool load = from != nullptr;
  Inode& inode = *buffer_file->inode;
  TransferRequest wanted;
  wanted.direction = load ? Direction::kLoad : Direction::kStore;
  wanted.file = backing->file;
  wanted.target = Target::of_buffer(inode.buffer());
  wanted.file_offset = load ? in.off_in : in.off_out;
  wanted.target_offset = load ? in.off_out : in.off_in;
  wanted.bytes = in.len;
  wanted.client = client_of(facts, request.header.uid);
  long_operations_.run_with_space(
      {Executor::Lane::Kind::kCopies, inode.device(), facts.device}, nullptr, std::move(responder),
      [this, backing, buffer_file, wanted, wide, caller = Caller::of(request.header)](const Operation& operation,
                                                                                      Responder& reply) {
        const Result<std::uint64_t> copied = copy_with_buffer(wanted, *buffer_file->inode, operation);
        if (copied.ok()) {
          if (wanted.direction == Direction::kStore && copied.value() > 0) drop_set_id_after_copy(backing, caller);
          copied_bytes_.add(copied.value());
          statistics_.copied_bytes.add(copied.value());
          reply_copied(reply, wide, copied.value());
          return 0;
        }
        const int error = copied.error();
        if (error == ECANCELED) return EINTR;
        // A file system that is full: no memory of a device helps.
        if (error == ENOSPC && wanted.direction == Direction::kStore) {
          reply.error(ENOSPC);
          return 0;
        }
        // Programs go on by reads and writes after these, which hides what was refused or has failed.
        if (error == EOPNOTSUPP || error == ENOSYS) {
          log_warning("copy_file_range failed: ", copied.status().message());
          return EIO;
        }
        return error;
      });
  return true;
}

void BackingOperations::drop_set_id_after_copy(const std::shared_ptr<OpenBacking>& to, const Caller& caller) {
  const BackingFacts& facts = to->file->facts();
  if (!facts.may_hang) return drop_set_id_unless_kept(to->fd.get(), caller);
  if (caller.keeps_set_id()) return;
  // Its server may not answer any more: the reply to the copy does not wait for it.
  const Executor::Lane lane{Executor::Lane::Kind::kFiles, -1, facts.device};
  long_operations_.executor().submit(lane, nullptr, 0, [to, caller](int refusal) {
    if (refusal == 0) drop_set_id(to->fd.get(), caller);
  });
}

Result<std::uint64_t> BackingOperations::copy_with_buffer(const TransferRequest& wanted, Inode& inode,
                                                          const Operation& operation) {
  Result<std::shared_ptr<Transfer>> started = transfers_->start(wanted);
  if (!started.ok()) return started.status();
  while (!started.value()->wait(kLook)) {
    if (operation.cancelled) started.value()->cancel();
  }
  const TransferProgress done = started.value()->progress();
  if (done.prefix == 0 && !done.status.ok()) return done.status;
  if (done.prefix > 0 && wanted.direction == Direction::kLoad) inode.was_written(SetIdLoss::kNone);
  if (done.prefix > 0 && wanted.direction == Direction::kStore) table_.was_read(inode);
  return done.prefix;
}

BackingOperations::Answer BackingOperations::copy_files(const OpenBacking& from, const OpenBacking& to,
                                                        const fuse_copy_file_range_in& in, bool wide,
                                                        const Operation& operation) {
  std::uint64_t done = 0;
  while (done < in.len) {
    if (operation.cancelled) {
      if (done > 0) break;
      return failed(EINTR);
    }
    auto source = static_cast<off_t>(in.off_in + done);
    auto destination = static_cast<off_t>(in.off_out + done);
    const auto part = static_cast<std::size_t>(std::min(in.len - done, kCopyChunk));
    const ssize_t count = ::copy_file_range(from.fd.get(), &source, to.fd.get(), &destination, part, 0);
    if (count < 0 && errno == EINTR) continue;
    // An ENOSYS would be remembered for the whole mount.
    if (count < 0 && done == 0) return failed(errno == ENOSYS ? EXDEV : errno);
    if (count <= 0) break;
    done += static_cast<std::uint64_t>(count);
  }
  fuse_write_out narrow{};
  narrow.size = static_cast<std::uint32_t>(done);  // of a length that was clipped to 32 bits
  Answer answer = wide ? answer_of(CopyFileRangeOut{done}) : answer_of(narrow);
  answer.copied = done;
  return answer;
}

}  // namespace gpufs::fuse
