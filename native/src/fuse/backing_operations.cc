#include "fuse/backing_operations.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/math.h"
#include "fuse/protocol.h"

namespace gpufs::fuse {

namespace {

constexpr std::uint64_t kMaximumOffset = INT64_MAX;
// COPY_FILE_RANGE answers with 32 bits: the largest multiple of a page that fits.
constexpr std::uint64_t kCopyLimit32 = UINT32_MAX & ~std::uint64_t{0xfff};
// Between two looks for an INTERRUPT.
constexpr std::uint64_t kCopyChunk = std::uint64_t{64} << 20;
constexpr std::chrono::milliseconds kLook{20};
// How long a copy that finds the device full waits for removed files' memory to come back.
constexpr std::chrono::milliseconds kSpacePatience{3000};

bool valid_range(std::uint64_t offset, std::uint64_t bytes) {
  std::uint64_t end = 0;
  return !add_overflows(offset, bytes, &end) && end <= kMaximumOffset;
}

// As the kernel does for who writes without the right to keep them.
void drop_set_id(int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return;
  mode_t mode = status.st_mode & 07777U;
  if ((mode & S_ISUID) != 0) mode &= ~static_cast<mode_t>(S_ISUID);
  if ((mode & S_ISGID) != 0 && (mode & S_IXGRP) != 0) mode &= ~static_cast<mode_t>(S_ISGID);
  if (mode != (status.st_mode & 07777U)) static_cast<void>(::fchmod(fd, mode));
}

}  // namespace

BackingOperations::BackingOperations(InodeTable& table, std::shared_ptr<TransferEngine> transfers,
                                     Cancellations& cancellations, Statistics& statistics, std::size_t threads)
    : table_(table),
      transfers_(std::move(transfers)),
      cancellations_(cancellations),
      statistics_(statistics),
      workers_(threads, statistics) {}

template <typename Body>
void BackingOperations::submit(Responder responder, Body body) {
  std::shared_ptr<Operation> operation = cancellations_.begin(responder.unique());
  workers_.submit(operation->unique,
                  [this, operation, responder = std::move(responder), body = std::move(body)](bool discarded) mutable {
                    if (discarded || operation->cancelled) {
                      responder.error(EINTR);
                    } else {
                      body(*operation, responder);
                    }
                    // After the reply: the kernel does not use the number for another request.
                    cancellations_.end(operation->unique);
                  });
}

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
  submit(std::move(responder), [this, open, in, wanted](const Operation&, Responder& reply) {
    // The request's own memory belongs to the next request by now.
    const auto memory = std::make_unique_for_overwrite<std::byte[]>(wanted);
    ssize_t count = 0;
    do {
      count = ::pread(open->fd.get(), memory.get(), wanted, static_cast<off_t>(in.offset));
    } while (count < 0 && errno == EINTR);
    if (count < 0) return reply.error(errno);
    statistics_.read_bytes.add(static_cast<std::uint64_t>(count));
    const iovec part{memory.get(), static_cast<std::size_t>(count)};
    reply.data({&part, 1});
  });
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
  submit(std::move(responder), [this, open, in, bytes = std::vector<std::byte>(data.begin(), data.end())](
                                   const Operation&, Responder& reply) {
    std::size_t done = 0;
    while (done < bytes.size()) {
      const ssize_t count =
          ::pwrite(open->fd.get(), bytes.data() + done, bytes.size() - done, static_cast<off_t>(in.offset + done));
      if (count < 0 && errno == EINTR) continue;
      if (count < 0 && done == 0) return reply.error(errno);
      if (count <= 0) break;  // a short count; the next write meets the error again
      done += static_cast<std::size_t>(count);
    }
    if ((in.write_flags & kWriteKillSetId) != 0) drop_set_id(open->fd.get());
    statistics_.written_bytes.add(done);
    fuse_write_out out{};
    out.size = static_cast<std::uint32_t>(done);
    reply.body(out);
  });
  return true;
}

bool BackingOperations::lseek(Request& request, Responder& responder) {
  fuse_lseek_in in{};
  if (!read_struct(request.message, sizeof(fuse_in_header), &in) || !BackingTable::is_backing(in.fh)) return false;
  const std::shared_ptr<OpenBacking> open = files_.find(in.fh);
  // The kernel does the others itself.
  const bool known = in.whence == SEEK_DATA || in.whence == SEEK_HOLE;
  if (!open || !known || in.offset > kMaximumOffset) {
    responder.error(open ? EINVAL : EBADF);
    return true;
  }
  submit(std::move(responder), [open, in](const Operation&, Responder& reply) {
    // Moves the descriptor's position, which nobody uses.
    const off_t found = ::lseek(open->fd.get(), static_cast<off_t>(in.offset), static_cast<int>(in.whence));
    if (found < 0) return reply.error(errno);
    fuse_lseek_out out{};
    out.offset = static_cast<std::uint64_t>(found);
    reply.body(out);
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
  submit(std::move(responder), [open, in](const Operation&, Responder& reply) {
    const int outcome = ::fallocate(open->fd.get(), static_cast<int>(in.mode), static_cast<off_t>(in.offset),
                                    static_cast<off_t>(in.length));
    // The kernel remembers for the whole mount that there is no fallocate, which would end it for buffers too.
    if (outcome != 0) return reply.error(errno == ENOSYS ? EOPNOTSUPP : errno);
    reply.ok();
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
  submit(std::move(responder), [open](const Operation&, Responder& reply) {
    const int copy = ::fcntl(open->fd.get(), F_DUPFD_CLOEXEC, 3);
    if (copy < 0 || ::close(copy) != 0) return reply.error(errno);
    reply.ok();
  });
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
  submit(std::move(responder), [open, in](const Operation&, Responder& reply) {
    int outcome = 0;
    do {
      outcome = (in.fsync_flags & 1U) != 0 ? ::fdatasync(open->fd.get()) : ::fsync(open->fd.get());
    } while (outcome != 0 && errno == EINTR);
    // As with fallocate: an ENOSYS would be remembered for the whole mount.
    if (outcome != 0) return reply.error(errno == ENOSYS ? EINVAL : errno);
    reply.ok();
  });
  return true;
}

bool BackingOperations::copy_file_range(Request& request, Responder& responder) {
  fuse_copy_file_range_in in{};
  if (!read_struct(request.message, sizeof(fuse_in_header), &in)) return false;
  const bool backing_in = BackingTable::is_backing(in.fh_in);
  const bool backing_out = BackingTable::is_backing(in.fh_out);
  if (!backing_in && !backing_out) return false;
  const std::shared_ptr<OpenBacking> from = backing_in ? files_.find(in.fh_in) : nullptr;
  const std::shared_ptr<OpenBacking> to = backing_out ? files_.find(in.fh_out) : nullptr;
  const std::uint64_t other = backing_in ? in.fh_out : in.fh_in;
  std::shared_ptr<OpenFile> buffer_file;
  if (!backing_in || !backing_out) {
    if ((other & InodeTable::kHandleBit) == 0 || !transfers_) {
      responder.error(EXDEV);  // a file of the control plane's: the kernel then copies by reads and writes
      return true;
    }
    buffer_file = table_.file(other);
  }
  if ((backing_in && !from) || (backing_out && !to) || ((!backing_in || !backing_out) && !buffer_file)) {
    responder.error(EBADF);
    return true;
  }
  const bool wide = request.header.opcode == kOpcodeCopyFileRange64;
  if (!wide) in.len = std::min(in.len, kCopyLimit32);
  if (in.flags != 0 || !valid_range(in.off_in, in.len) || !valid_range(in.off_out, in.len)) {
    responder.error(EINVAL);
    return true;
  }
  const std::uint64_t client = request.header.uid;
  submit(std::move(responder),
         [this, from, to, buffer_file, in, wide, client](const Operation& operation, Responder& reply) {
           Result<std::uint64_t> copied = std::uint64_t{0};
           if (from && to) {
             copied = copy_files(*from, *to, in.off_in, in.off_out, in.len, operation);
           } else if (from) {
             copied = copy_with_buffer(Direction::kLoad, *from, *buffer_file->inode, in.off_in, in.off_out, in.len,
                                       client, operation);
           } else {
             copied = copy_with_buffer(Direction::kStore, *to, *buffer_file->inode, in.off_out, in.off_in, in.len,
                                       client, operation);
           }
           if (!copied.ok()) {
             const int error = copied.error();
             if (error == ECANCELED) return reply.error(EINTR);
             if (error == ENOSYS) return reply.error(EXDEV);  // else the kernel never asked again on this mount
             // For copies that were to be ours alone: cp would go on by reads and writes, which hides what was refused.
             if (error == EOPNOTSUPP && (!from || !to)) {
               log_warning("copy_file_range failed: " + copied.status().message());
               return reply.error(EIO);
             }
             return reply.error(error);
           }
           statistics_.copied_bytes.add(copied.value());
           if (wide) return reply.body(CopyFileRangeOut{copied.value()});
           fuse_write_out out{};
           out.size = static_cast<std::uint32_t>(copied.value());
           reply.body(out);
         });
  return true;
}

Result<std::uint64_t> BackingOperations::copy_with_buffer(Direction direction, const OpenBacking& backing, Inode& inode,
                                                          std::uint64_t file_offset, std::uint64_t buffer_offset,
                                                          std::uint64_t bytes, std::uint64_t client,
                                                          const Operation& operation) {
  TransferRequest wanted;
  wanted.direction = direction;
  wanted.file = backing.file;
  wanted.target = Target::of_buffer(inode.buffer());
  wanted.file_offset = file_offset;
  wanted.target_offset = buffer_offset;
  wanted.bytes = bytes;
  wanted.client = client;
  const auto deadline = std::chrono::steady_clock::now() + kSpacePatience;
  for (;;) {
    const std::uint64_t noted = table_.reaped();
    Result<std::shared_ptr<Transfer>> started = transfers_->start(wanted);
    if (!started.ok()) return started.status();
    while (!started.value()->wait(kLook)) {
      if (operation.cancelled) started.value()->cancel();
    }
    const TransferProgress done = started.value()->progress();
    if (done.prefix > 0 || done.status.ok()) {
      if (done.prefix > 0 && direction == Direction::kLoad) inode.was_written(false);
      if (done.prefix > 0 && direction == Direction::kStore) inode.was_read();
      return done.prefix;
    }
    if (direction == Direction::kStore || done.status.error() != ENOSPC) return done.status;
    // The device may be full of files that were removed just now.
    statistics_.space_waits.add();
    InodeTable::Wait outcome = InodeTable::Wait::kTimeOver;
    while (outcome == InodeTable::Wait::kTimeOver) {
      if (operation.cancelled) return Status(ECANCELED, "interrupted");
      if (std::chrono::steady_clock::now() >= deadline) return done.status;
      outcome = table_.wait_for_orphans(inode.device(), noted, kLook);
    }
    if (outcome == InodeTable::Wait::kNothing) return done.status;
  }
}

Result<std::uint64_t> BackingOperations::copy_files(const OpenBacking& from, const OpenBacking& to,
                                                    std::uint64_t from_offset, std::uint64_t to_offset,
                                                    std::uint64_t bytes, const Operation& operation) {
  std::uint64_t done = 0;
  while (done < bytes) {
    if (operation.cancelled) {
      if (done > 0) return done;
      return Status(ECANCELED, "interrupted");
    }
    auto in = static_cast<off_t>(from_offset + done);
    auto out = static_cast<off_t>(to_offset + done);
    const auto part = static_cast<std::size_t>(std::min(bytes - done, kCopyChunk));
    const ssize_t count = ::copy_file_range(from.fd.get(), &in, to.fd.get(), &out, part, 0);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && done == 0) return Status::from_errno(errno, "copy_file_range");
    if (count <= 0) break;
    done += static_cast<std::uint64_t>(count);
  }
  return done;
}

}  // namespace gpufs::fuse
