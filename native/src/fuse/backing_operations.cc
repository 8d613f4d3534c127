#include "fuse/backing_operations.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <exception>
#include <utility>

#include "base/log.h"
#include "fuse/attributes.h"
#include "fuse/protocol.h"
#include "io/file_io.h"
#include "memory/account.h"
#include "memory/buffer.h"

namespace gpufs::fuse {

namespace {

// Between two checks whether a client is being killed: most requests are answered before the first one.
constexpr std::chrono::seconds kGrace{1};
// Which client of the transfer engine a copy counts as, apart from the processes that use the copy service: a user on
// one file system; or a server, because if that hangs all copies from and to it do, whoever requested them.
constexpr std::uint64_t kUserBit = std::uint64_t{1} << 61;
constexpr std::uint64_t kServerBit = std::uint64_t{1} << 62;

std::uint64_t client_of(const BackingFacts& facts, std::uint32_t uid) {
  if (facts.may_hang) return kServerBit | facts.disk;
  constexpr std::uint64_t kDiskMask = (std::uint64_t{1} << 29) - 1;
  return kUserBit | (facts.disk & kDiskMask) << 32 | uid;
}

// As the kernel does for writers without CAP_FSETID: members of the group keep a set-gid bit without execution.
void drop_set_id(int fd, const Caller& writer) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return;
  const bool all = has_bare_set_gid(status.st_mode) && !writer.in_group(status.st_gid);
  const mode_t mode = mode_without_set_id(status.st_mode, all ? SetIdLoss::kAll : SetIdLoss::kExecutable);
  if (mode != status.st_mode) static_cast<void>(::fchmod(fd, mode & 07777U));
}

// The same after changes for which the kernel does not report whether the caller may keep the bits.
void drop_set_id_unless_kept(int fd, const Caller& caller) {
  struct stat status {};
  if (::fstat(fd, &status) != 0 || (status.st_mode & (S_ISUID | S_ISGID)) == 0 || caller.keeps_set_id()) return;
  drop_set_id(fd, caller);
}

// The bytes copied; short if it was cancelled or failed after progress.
Result<std::uint64_t> copy_files(const OpenBacking& from, const OpenBacking& to, const fuse_copy_file_range_in& in,
                                 const Cancellation& cancellation) {
  bool cancelled = false;
  const Moved moved = move_all(in.len, 1, "copy_file_range", [&](std::uint64_t done, std::size_t rest) -> ssize_t {
    cancelled = cancellation.requested();
    if (cancelled) return 0;
    auto source = static_cast<off_t>(in.off_in + done);
    auto destination = static_cast<off_t>(in.off_out + done);
    return ::copy_file_range(from.fd.get(), &source, to.fd.get(), &destination, std::min(rest, kCopyChunk), 0);
  });
  if (moved.bytes == 0 && cancelled) return Status(EINTR, "interrupted");
  if (moved.bytes > 0 || moved.status.ok()) return moved.bytes;
  // The kernel would remember an ENOSYS for the whole mount.
  return moved.status.error() == ENOSYS ? Status(EXDEV, moved.status.message()) : moved.status;
}

}  // namespace

// ---- threads ----

template <typename T>
BackingOperations::Answer BackingOperations::answer_of(const T& body) {
  const auto bytes = std::as_bytes(std::span(&body, 1));
  Answer answer;
  answer.body.assign(bytes.begin(), bytes.end());
  return answer;
}

template <typename Body>
void BackingOperations::pass_through(const OpenBacking& open, const Request& request, Responder responder, Body body) {
  const std::uint64_t unique = responder.unique();
  auto pending = std::make_shared<Pending>();
  pending->unique = unique;
  pending->client = Caller::of(request.header);
  pending->responder = std::move(responder);
  {
    const std::lock_guard lock(pending_mutex_);
    pending_.emplace(unique, pending);
  }
  const Executor::Lane lane{Executor::Lane::Kind::kFiles, -1, open.file->facts().disk};
  long_requests_.executor().submit(
      lane, nullptr, unique,
      [this, pending = std::move(pending), body = std::move(body)](int refusal, Cancellation& cancellation) mutable {
        Answer answer{refusal != 0 ? refusal : EINTR};
        if (refusal == 0 && !cancellation.requested()) {
          try {
            answer = body(cancellation);
          } catch (const std::exception&) {
            answer = Answer{ENOMEM};
          }
        }
        const std::lock_guard lock(pending->mutex);
        if (pending->responder.pending()) settle(*pending, answer);  // else this object may be gone
      });
}

void BackingOperations::interrupted(std::uint64_t unique) {
  std::shared_ptr<Pending> found;
  {
    const std::lock_guard lock(pending_mutex_);
    const auto place = pending_.find(unique);
    if (place != pending_.end()) found = place->second.lock();
  }
  if (!found) return;
  long_requests_.executor().submit_at(
      std::chrono::steady_clock::now() + kGrace,
      [this, pending = std::move(found)](int refusal, Cancellation&) -> std::optional<Executor::TimePoint> {
        if (refusal != 0) return std::nullopt;
        {
          const std::lock_guard lock(pending->mutex);
          if (!pending->responder.pending()) return std::nullopt;
        }
        if (pending->client.pid != 0 && !pending->client.dying()) return std::chrono::steady_clock::now() + kGrace;
        if (long_requests_.executor().cancel(pending->unique) == Executor::Cancelled::kEnded) return std::nullopt;
        const std::lock_guard lock(pending->mutex);
        if (pending->responder.pending()) settle(*pending, Answer{EINTR});
        return std::nullopt;
      });
}

void BackingOperations::settle(Pending& pending, const Answer& answer) {
  count(counters_.*answer.counter, answer.counted);
  if (answer.error != 0) {
    pending.responder.error(answer.error);
  } else {
    pending.responder.data(answer.body);
  }
  const std::lock_guard lock(pending_mutex_);
  pending_.erase(pending.unique);
}

void BackingOperations::left_behind(std::size_t threads) {
  if (threads == 0) return;
  log_warning(threads, " threads hang in files of backing/ and are left behind");
  decltype(pending_) hanging;
  {
    const std::lock_guard lock(pending_mutex_);
    hanging.swap(pending_);
  }
  for (auto& [unique, job] : hanging) {
    const std::shared_ptr<Pending> pending = job.lock();
    if (!pending) continue;
    const std::lock_guard lock(pending->mutex);
    if (pending->responder.pending()) pending->responder.error(ENOTCONN);
  }
}

// ---- requests ----

void BackingOperations::read(const File& file, Request& request, Responder responder) {
  const auto in = request.arguments<fuse_read_in>();
  if (!valid_range(in.offset, in.size)) return responder.error(EINVAL);
  const std::size_t wanted = std::min<std::size_t>(in.size, request.payload.size());
  if (read_cached(*file, in, request.payload.first(wanted), responder)) return;
  pass_through(*file, request, std::move(responder), [file, in, wanted](const Cancellation&) {
    // The request's own memory belongs to the next request by now.
    Answer answer;
    answer.body.resize(wanted);
    const ssize_t count =
        TEMP_FAILURE_RETRY(::pread(file->fd.get(), answer.body.data(), wanted, static_cast<off_t>(in.offset)));
    if (count < 0) return Answer{errno};
    answer.body.resize(static_cast<std::size_t>(count));
    answer.counted = answer.body.size();
    return answer;
  });
}

bool BackingOperations::read_cached(const OpenBacking& open, const fuse_read_in& in, std::span<std::byte> memory,
                                    Responder& responder) {
  if (open.file->facts().may_hang || memory.empty()) return false;
  const iovec part{memory.data(), memory.size()};
  const ssize_t got = ::preadv2(open.fd.get(), &part, 1, static_cast<off_t>(in.offset), RWF_NOWAIT);
  // A short count may mean that the rest is not cached.
  if (got < 0 || static_cast<std::size_t>(got) != memory.size()) return false;
  count(counters_.backing_read_bytes, memory.size());
  responder.data({&part, 1});
  return true;
}

void BackingOperations::write(const File& file, Request& request, Responder responder) {
  const auto in = request.arguments<fuse_write_in>();
  const std::span<const std::byte> data = request.message.subspan(kWriteHeaderBytes);
  if (data.size() != in.size || !valid_range(in.offset, in.size)) {
    return responder.error(data.size() != in.size ? EINVAL : EFBIG);
  }
  pass_through(*file, request, std::move(responder),
               [file, in, writer = Caller::of(request.header),
                bytes = std::vector<std::byte>(data.begin(), data.end())](const Cancellation&) {
                 // At the host's end of the file, which can differ from the kernel's; pages that a mapping changed keep
                 // their offset, however the handle was opened that they come by.
                 const bool pages = (in.write_flags & FUSE_WRITE_CACHE) != 0;
                 const bool append = (in.flags & O_APPEND) != 0 && !pages;
                 const Moved moved = move_all(bytes.size(), 1, "write", [&](std::uint64_t done, std::size_t rest) {
                   const iovec part{const_cast<std::byte*>(bytes.data()) + done, rest};
                   return ::pwritev2(file->fd.get(), &part, 1, static_cast<off_t>(in.offset + done),
                                     append ? RWF_APPEND : 0);
                 });
                 // After some bytes the next write meets the error again; but the kernel does not look at the count of
                 // pages that it writes back.
                 if (!moved.status.ok() && (moved.bytes == 0 || pages)) return Answer{moved.status.error()};
                 if ((in.write_flags & FUSE_WRITE_KILL_SUIDGID) != 0) drop_set_id(file->fd.get(), writer);
                 fuse_write_out out{};
                 out.size = static_cast<std::uint32_t>(moved.bytes);
                 Answer answer = answer_of(out);
                 answer.counter = &observe::EngineCounters::backing_written_bytes;
                 answer.counted = moved.bytes;
                 return answer;
               });
}

void BackingOperations::lseek(const File& file, Request& request, Responder responder) {
  pass_through(
      *file, request, std::move(responder), [file, in = request.arguments<fuse_lseek_in>()](const Cancellation&) {
        // Moves the descriptor's position, which nothing uses.
        const off_t found = ::lseek(file->fd.get(), static_cast<off_t>(in.offset), static_cast<int>(in.whence));
        return found < 0 ? Answer{errno} : answer_of(fuse_lseek_out{static_cast<std::uint64_t>(found)});
      });
}

void BackingOperations::fallocate(const File& file, Request& request, Responder responder) {
  const auto in = request.arguments<fuse_fallocate_in>();
  if (!valid_range(in.offset, in.length)) return responder.error(EFBIG);
  pass_through(*file, request, std::move(responder),
               [file, in, caller = Caller::of(request.header)](const Cancellation&) {
                 const int outcome = ::fallocate(file->fd.get(), static_cast<int>(in.mode),
                                                 static_cast<off_t>(in.offset), static_cast<off_t>(in.length));
                 const int error = errno;
                 if (outcome == 0) drop_set_id_unless_kept(file->fd.get(), caller);
                 // After an ENOSYS the kernel never sends FALLOCATE again, for buffers neither.
                 return Answer{outcome == 0 ? 0 : error == ENOSYS ? EOPNOTSUPP : error};
               });
}

void BackingOperations::flush(const File& file, Request& request, Responder responder) {
  const BackingFacts& facts = file->file->facts();
  if (!facts.may_hang || !facts.writable) return responder.ok();
  const std::uint64_t unique = responder.unique();
  // Network file systems write back, and report failures, when a descriptor is closed.
  pass_through(*file, request, std::move(responder), [file](const Cancellation&) {
    const int copy = ::fcntl(file->fd.get(), F_DUPFD_CLOEXEC, 3);
    return Answer{copy < 0 || ::close(copy) != 0 ? errno : 0};
  });
  // An exiting process ignores signals when its files are closed: no INTERRUPT comes.
  if (Caller::of(request.header).dying()) interrupted(unique);
}

void BackingOperations::fsync(const File& file, Request& request, Responder responder) {
  pass_through(*file, request, std::move(responder),
               [file, in = request.arguments<fuse_fsync_in>()](const Cancellation&) {
                 const auto sync = (in.fsync_flags & 1U) != 0 ? ::fdatasync : ::fsync;
                 const long outcome = TEMP_FAILURE_RETRY(sync(file->fd.get()));
                 // As with fallocate: the kernel would remember an ENOSYS.
                 return Answer{outcome == 0 ? 0 : errno == ENOSYS ? EINVAL : errno};
               });
}

void BackingOperations::copy(const File& from, const File& to, const Request& request, const CopyRequest& copy,
                             Responder responder) {
  pass_through(from->file->facts().may_hang ? *from : *to, request, std::move(responder),
               [from, to, copy, caller = Caller::of(request.header)](const Cancellation& cancellation) {
                 const Result<std::uint64_t> copied = copy_files(*from, *to, copy.in, cancellation);
                 if (!copied.ok()) return Answer{copied.error()};
                 if (copied.value() > 0) drop_set_id_unless_kept(to->fd.get(), caller);
                 fuse_write_out narrow{};
                 narrow.size = static_cast<std::uint32_t>(copied.value());  // the length was clipped to 32 bits
                 Answer answer = copy.wide ? answer_of(copied.value()) : answer_of(narrow);
                 answer.counter = &observe::EngineCounters::backing_copied_bytes;
                 answer.counted = copied.value();
                 return answer;
               });
}

void BackingOperations::copy_with_buffer(const File& file, const std::shared_ptr<OpenFile>& buffer, bool load,
                                         const Request& request, const CopyRequest& copy, Responder responder) {
  if (!transfers_) return responder.error(EXDEV);
  const BackingFacts& facts = file->file->facts();
  Inode& inode = *buffer->inode;
  TransferRequest wanted;
  wanted.direction = load ? Direction::kLoad : Direction::kStore;
  wanted.file = file->file;
  wanted.target = inode.buffer();
  wanted.file_offset = load ? copy.in.off_in : copy.in.off_out;
  wanted.target_offset = load ? copy.in.off_out : copy.in.off_in;
  wanted.bytes = copy.in.len;
  wanted.client = client_of(facts, request.header.uid);
  const Caller caller = Caller::of(request.header);
  const SetIdLoss loss = load ? inode.bare_set_gid_to_clear(caller) : SetIdLoss::kNone;
  long_requests_.retry_until_memory(
      {Executor::Lane::Kind::kCopies, inode.device(), facts.disk}, nullptr, std::move(responder),
      [this, file, buffer, load, wanted, loss, wide = copy.wide, caller](Cancellation& cancellation, Responder& reply) {
        const Result<std::uint64_t> copied = transfer(wanted, *buffer->inode, loss, cancellation);
        if (copied.ok()) {
          if (!load && copied.value() > 0) drop_set_id_after_copy(file, caller);
          count(counters_.backing_copied_bytes, copied.value());
          reply_copied(reply, wide, copied.value());
          return 0;
        }
        const int error = copied.error();
        if (error == ECANCELED) return EINTR;
        // A full file system: free memory of a device does not help.
        if (lacks_memory(error) && !load) {
          reply.error(error);
          return 0;
        }
        // Programs would continue with reads and writes after these, which hides the failure.
        if (error == EOPNOTSUPP || error == ENOSYS) {
          log_warning("copy_file_range failed: ", copied.status().message());
          return EIO;
        }
        return error;
      });
}

void BackingOperations::drop_set_id_after_copy(const File& to, const Caller& caller) {
  const BackingFacts& facts = to->file->facts();
  if (!facts.may_hang) return drop_set_id_unless_kept(to->fd.get(), caller);
  if (caller.keeps_set_id()) return;
  // The file's server may not answer any more: the reply to the copy does not wait for it.
  const Executor::Lane lane{Executor::Lane::Kind::kFiles, -1, facts.disk};
  long_requests_.executor().submit(lane, nullptr, 0, [to, caller](int refusal, Cancellation&) {
    if (refusal == 0) drop_set_id(to->fd.get(), caller);
  });
}

Result<std::uint64_t> BackingOperations::transfer(const TransferRequest& wanted, Inode& inode, SetIdLoss loss,
                                                  Cancellation& cancellation) {
  const std::shared_ptr<Transfer> started = TRY(transfers_->start(wanted));
  Transfer& transfer = *started;
  cancellation.on_request([&transfer] { transfer.cancel(); });
  transfer.wait();
  cancellation.on_request(nullptr);
  const TransferProgress done = transfer.progress();
  if (done.prefix == 0 && !done.status.ok()) return done.status;
  if (done.prefix > 0 && wanted.direction == Direction::kLoad) inode.was_written(loss);
  if (done.prefix > 0 && wanted.direction == Direction::kStore) table_.was_read(inode);
  return done.prefix;
}

}  // namespace gpufs::fuse
