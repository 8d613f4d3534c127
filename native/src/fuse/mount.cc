#include "fuse/mount.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <optional>
#include <utility>
#include <variant>

#include "base/keeper_messages.h"
#include "base/pages.h"
#include "fuse/caller.h"
#include "fuse/protocol.h"

namespace gpufs::fuse {

namespace {

template <typename... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};
// Compilers before clang 17 do not make this guide for an aggregate.
template <typename... Functions>
Overloaded(Functions...) -> Overloaded<Functions...>;

constexpr std::size_t kReadAheadThreads = 2;
// Sleeping costs less than spinning for longer waits, whatever the machine.
constexpr std::chrono::microseconds kReaderSpin{100};
// The kernel has sent everything again after so long.
constexpr std::chrono::seconds kResendTime{60};
// Before the kernel is asked to repeat an INTERRUPT.
constexpr std::chrono::milliseconds kInterruptPause{5};
// How long close() waits for threads in files of the host.
constexpr std::chrono::milliseconds kStopTimeout{200};

void close_on_exec(int fd) {
  const int flags = ::fcntl(fd, F_GETFD);
  if (flags >= 0) static_cast<void>(::fcntl(fd, F_SETFD, flags | FD_CLOEXEC));
}

std::uint64_t metadata_limit_of(const MountOptions& options) {
  constexpr std::uint64_t kNoLimit = InodeTable::kNoMetadataLimit;
  return options.metadata_bytes == 0 ? kNoLimit : std::min(options.metadata_bytes, kNoLimit);
}

}  // namespace

// What becomes of a request that the kernel sends again, since the last process has not answered it. One that the last
// process has not carried out is carried out now.
enum class Resent : std::uint8_t {
  kRepeat,  // done twice, the request changes nothing more
  kNever,   // the request has no reply, so the kernel does not send it again
  // Done twice, the request would do harm. So the process that carries it out records the outcome, and the next one
  // answers from the state. What the reply has:
  kDone,           // nothing
  kAttributes,     // those of the request's inode
  kEntry,          // the outcome's inode
  kOpenFile,       // the outcome's handle
  kOpenDirectory,  // the same
  kCreated,        // inode and handle
};

// Serves a request on an open file. Its handle, with which the arguments begin, says which kind of file it is.
struct Mount::FileHandler {
  void (BufferOperations::*buffer)(const BufferOperations::File&, Request&, Responder);
  void (BackingOperations::*backing)(const BackingOperations::File&, Request&, Responder);
  void (Mount::*control)(Request&, Responder);  // null: relayed
};

struct Mount::Handler {
  std::uint32_t opcode;
  std::size_t arguments;  // bytes
  Resent resent;
  // Requests on inodes and directories that the table does not have are relayed, as are all that have no handler: the
  // control plane answers them, and they are repeated.
  std::variant<FileHandler, void (AttributeOperations::*)(const AttributeOperations::Target&, Request&, Responder),
               void (NameOperations::*)(const NameOperations::InodePointer&, Request&, Responder),
               void (NameOperations::*)(const NameOperations::Directory&, Request&, Responder),
               void (Mount::*)(Request&, Responder), void (Mount::*)(const Request&)>
      serve;
};

const Mount::Handler* Mount::handler_of(std::uint32_t opcode) {
  using Buffers = BufferOperations;
  using Backing = BackingOperations;
  using Attributes = AttributeOperations;
  using Names = NameOperations;
  using enum Resent;
  static constexpr Handler kHandlers[] = {
      // Bytes
      {FUSE_READ, sizeof(fuse_read_in), kRepeat, FileHandler{&Buffers::read, &Backing::read, nullptr}},
      {FUSE_WRITE, sizeof(fuse_write_in), kRepeat, FileHandler{&Buffers::write, &Backing::write, nullptr}},
      {FUSE_FLUSH, sizeof(fuse_flush_in), kRepeat, FileHandler{&Buffers::flush, &Backing::flush, nullptr}},
      {FUSE_FSYNC, sizeof(fuse_fsync_in), kRepeat, FileHandler{&Buffers::fsync, &Backing::fsync, nullptr}},
      {FUSE_LSEEK, sizeof(fuse_lseek_in), kRepeat,
       FileHandler{&Buffers::lseek, &Backing::lseek, &Mount::lseek_control_file}},
      {FUSE_FALLOCATE, sizeof(fuse_fallocate_in), kRepeat,
       FileHandler{&Buffers::fallocate, &Backing::fallocate, &Mount::refuse_fallocate}},
      {FUSE_COPY_FILE_RANGE, sizeof(fuse_copy_file_range_in), kRepeat, &Mount::copy_file_range},
      {kOpcodeCopyFileRange64, sizeof(fuse_copy_file_range_in), kRepeat, &Mount::copy_file_range},
      // Attributes
      {FUSE_GETATTR, 0, kRepeat, &Attributes::getattr},
      {kOpcodeStatx, 0, kRepeat, &Attributes::statx},
      {FUSE_SETATTR, sizeof(fuse_setattr_in), kAttributes, &Attributes::setattr},
      {FUSE_STATFS, 0, kRepeat, &Attributes::statfs},
      {FUSE_GETXATTR, sizeof(fuse_getxattr_in), kRepeat, &Attributes::getxattr},
      {FUSE_SETXATTR, sizeof(fuse_setxattr_in), kDone, &Attributes::setxattr},
      {FUSE_LISTXATTR, sizeof(fuse_getxattr_in), kRepeat, &Attributes::listxattr},
      {FUSE_REMOVEXATTR, 0, kDone, &Attributes::removexattr},
      // Names
      {FUSE_LOOKUP, 0, kEntry, &Names::lookup},
      {FUSE_CREATE, sizeof(fuse_create_in), kCreated, &Names::create},
      {FUSE_TMPFILE, sizeof(fuse_create_in), kCreated, &Names::create},
      {FUSE_MKNOD, sizeof(fuse_mknod_in), kEntry, &Names::mknod},
      {FUSE_MKDIR, sizeof(fuse_mkdir_in), kEntry, &Names::mkdir},
      {FUSE_SYMLINK, 0, kEntry, &Names::symlink},
      {FUSE_LINK, sizeof(fuse_link_in), kEntry, &Names::link},
      {FUSE_UNLINK, 0, kDone, &Names::remove},
      {FUSE_RMDIR, 0, kDone, &Names::remove},
      {FUSE_RENAME, sizeof(fuse_rename_in), kDone, &Names::rename},
      {FUSE_RENAME2, sizeof(fuse_rename2_in), kDone, &Names::rename},
      {FUSE_READLINK, 0, kRepeat, &Names::readlink},
      // Open files and directories. A listing that is repeated takes references again; see release_forgotten().
      {FUSE_OPEN, sizeof(fuse_open_in), kOpenFile, &Mount::open},
      {FUSE_RELEASE, sizeof(fuse_release_in), kRepeat, &Mount::release},
      {FUSE_OPENDIR, 0, kOpenDirectory, &Names::opendir},
      {FUSE_READDIRPLUS, sizeof(fuse_read_in), kRepeat, &Names::readdirplus},
      {FUSE_FSYNCDIR, sizeof(fuse_fsync_in), kRepeat, &Names::fsyncdir},
      {FUSE_RELEASEDIR, sizeof(fuse_release_in), kRepeat, &Names::releasedir},
      // The connection
      {FUSE_INIT, 0, kRepeat, &Mount::initialize},
      {FUSE_IOCTL, 0, kRepeat, &Mount::refuse_ioctl},
      {FUSE_FORGET, 0, kNever, &Mount::forget},
      {FUSE_BATCH_FORGET, 0, kNever, &Mount::forget},
      {FUSE_INTERRUPT, 0, kNever, &Mount::interrupt},
      {FUSE_NOTIFY_REPLY, 0, kNever, &Mount::ignore},
  };
  static const auto kByOpcode = [] {
    std::array<const Handler*, 64> found{};
    for (const Handler& handler : kHandlers) found.at(handler.opcode) = &handler;
    return found;
  }();
  return opcode < kByOpcode.size() ? kByOpcode[opcode] : nullptr;
}

// ---- start and end ----

Mount::Mount(UniqueFd device, UniqueFd relay, UniqueFd ended, std::vector<std::shared_ptr<DeviceContext>> devices,
             MountOptions options)
    : ended_(std::move(ended)),
      region_(devices.front()->counters().region()),
      executor_({}),
      kept_(options.kept),
      records_(std::move(options.journal)),
      table_(std::move(devices), executor_, records_, metadata_limit_of(options),
             options.user_bytes != 0 ? options.user_bytes : Account::kNoLimit),
      names_(table_),
      transport_(std::move(device),
                 {.reader_threads = options.reader_threads,
                  .payload_bytes = options.max_write,
                  .spin = kReaderSpin,
                  .locks = options.locks},
                 region_.counters()),
      long_requests_(table_.devices(), executor_, region_.counters(), options.space_timeout),
      read_ahead_(region_.counters()),
      notifier_(transport_, executor_, table_),
      backing_(table_, options.transfers, long_requests_, region_.counters()),
      relay_(std::move(relay), transport_, table_, backing_.files(), executor_,
             {.max_write = options.max_write, .mask_flags = options.mask_flags}, region_.counters()),
      buffers_(table_, names_, long_requests_, read_ahead_, relay_.init(), region_.counters()),
      attributes_(table_, long_requests_),
      name_operations_(table_, names_, relay_, read_ahead_, region_.counters()) {}

Result<std::shared_ptr<Mount>> Mount::create(UniqueFd device, UniqueFd relay,
                                             std::vector<std::shared_ptr<DeviceContext>> devices,
                                             MountOptions options) {
  if (!device.valid() || !relay.valid()) return Status(EBADF, "a mount needs a FUSE device and a relay socket");
  int type = 0;
  socklen_t length = sizeof(type);
  if (::getsockopt(relay.get(), SOL_SOCKET, SO_TYPE, &type, &length) != 0 || type != SOCK_SEQPACKET) {
    return Status(EINVAL, "the relay must be a SOCK_SEQPACKET socket");
  }
  close_on_exec(device.get());
  close_on_exec(relay.get());
  UniqueFd ended(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!ended.valid()) return Status::from_errno(errno, "eventfd");
  std::shared_ptr<Mount> mount(
      new Mount(std::move(device), std::move(relay), std::move(ended), std::move(devices), std::move(options)));
  TRY(mount->executor_.start());
  TRY(mount->restore());
  return mount;
}

Status Mount::restore() {
  if (kept_ != nullptr) {
    for (const std::shared_ptr<DeviceContext>& device : table_.devices()) device->device().set_keeper(kept_);
  }
  if (const auto init = records_.init()) {  // else nothing was there
    TRY(table_.restore());
    TRY(names_.restore());
    name_operations_.restore_directories();
    relay_.restore_init(init->first, init->second);
    restored_ = true;
  }
  if (kept_ != nullptr) kept_->drop_untaken();
  return {};
}

Status Mount::resume() {
  const int error = transport_.notify(kNotifyResend, {});
  return error == 0 ? Status() : Status::from_errno(error, "asking the kernel for unanswered requests");
}

void Mount::release_forgotten() {
  if (std::chrono::steady_clock::now() - created_ > kResendTime) records_.forget_outcomes();
  for (const std::uint64_t ino : table_.doubtful()) {
    notifier_.if_forgotten(ino, [this, ino] { table_.forget(ino, UINT64_MAX); });
  }
}

void Mount::close_handle(std::uint64_t handle) {
  if (is_buffer(handle)) static_cast<void>(table_.release(handle));
  if (is_directory_handle(handle)) static_cast<void>(name_operations_.close_directory(handle));
}

Status Mount::survives() const {
  if (records_.journal() == nullptr) return Status(EOPNOTSUPP, "it has no keeper");
  for (const std::shared_ptr<DeviceContext>& device : table_.devices()) {
    TRY(device->device().check_keeping());
  }
  if (!relay_.init().granted(kInitHasResend)) return Status(EOPNOTSUPP, "the kernel is older than Linux 6.9");
  const Status health = records_.journal()->health();
  return health.ok() ? kept_->health() : health;
}

Status Mount::start() {
  started_ = true;
  table_.release_unclaimed();
  Status status = relay_.start();
  if (status.ok() && restored_) status = resume();
  if (status.ok()) status = transport_.start(*this);
  if (!status.ok()) close();
  return status;
}

Status Mount::read_ahead(const std::string& directory, std::uint64_t piece) {
  const std::lock_guard lock(close_mutex_);
  if (closed_) return Status(ESHUTDOWN, "the mount is closed");
  return read_ahead_.start(directory, piece, kReadAheadThreads);
}

void Mount::close() {
  const std::lock_guard lock(close_mutex_);
  if (closed_) return;
  closed_ = true;
  // The readers end last: until then every request is still answered, so none of the waits below can depend on one that
  // is not. The control plane's requests are answered first, because a notification may wait for one of them.
  relay_.stop();
  read_ahead_.stop();
  backing_.left_behind(executor_.stop(kStopTimeout));
  transport_.stop();
  transport_.close();
  if (kept_ != nullptr) kept_->end();  // some files live on until the engine is closed
  connection_ended();
}

void Mount::connection_ended() {
  const std::uint64_t one = 1;
  static_cast<void>(!::write(ended_.get(), &one, sizeof(one)));  // the counter cannot overflow
}

// ---- requests ----

void Mount::handle(Request& request) {
  const std::uint64_t unique = request.header.unique;
  const Handler* const handler = handler_of(request.header.opcode);
  if (handler != nullptr && handler->resent == Resent::kNever) {
    return (this->*std::get<void (Mount::*)(const Request&)>(handler->serve))(request);
  }
  Responder responder(transport_, unique, request.header.opcode, request.header.pid, request.header.uid);
  if (handler == nullptr) return relay_.forward(request, std::move(responder));
  if (handler->resent == Resent::kRepeat) return serve(*handler, request, std::move(responder));
  if (const std::optional<Outcome> outcome = records_.outcome_of(unique)) {
    return answer_from_state(*handler, *outcome, request, std::move(responder));
  }
  serve(*handler, request, std::move(responder));
}

void Mount::serve(const Handler& handler, Request& request, Responder responder) {
  const bool whole = request.message.size() >= kBodyOffset + handler.arguments;
  // Calls the function of an object of the table; without the object the request is relayed.
  const auto call = [&](auto& operations, auto function, const auto& subject) {
    if (!subject) return relay_.forward(request, std::move(responder));
    whole ? (operations.*function)(subject, request, std::move(responder)) : responder.error(EINVAL);
  };
  const auto visit = Overloaded{
      [&](const FileHandler& file) { serve_file(handler, file, request, std::move(responder)); },
      [&](decltype(&AttributeOperations::getattr) function) {
        call(attributes_, function, table_.find(request.header.nodeid));
      },
      [&](decltype(&NameOperations::lookup) function) {
        if (NameOperations::crosses_to_host(request)) return responder.error(EXDEV);
        // The directory above those of the host is in the table, but its names are the control plane's.
        const bool is_host = request.header.nodeid >= kFirstHostInode;
        call(name_operations_, function, is_host ? nullptr : table_.find(request.header.nodeid));
      },
      [&](decltype(&NameOperations::readdirplus) function) {
        const auto fh = request.arguments<std::uint64_t>();
        if (!is_directory_handle(fh)) return relay_.forward(request, std::move(responder));
        const NameOperations::Directory directory = name_operations_.directory(fh);
        directory ? call(name_operations_, function, directory) : responder.error(EBADF);
      },
      [&](void (Mount::*function)(Request&, Responder)) {
        whole ? (this->*function)(request, std::move(responder)) : responder.error(EINVAL);
      },
      [](void (Mount::*)(const Request&)) {},  // has no reply, see handle()
  };
  std::visit(visit, handler.serve);
}

void Mount::answer_from_state(const Handler& handler, const Outcome& outcome, Request& request, Responder responder) {
  if (handler.resent == Resent::kDone) return responder.ok();
  const bool about_subject = handler.resent == Resent::kAttributes;
  const std::shared_ptr<Inode> inode = table_.find(about_subject ? request.header.nodeid : outcome.inode);
  if (!inode) return responder.error(ESTALE);
  switch (handler.resent) {
    case Resent::kAttributes:
      return attributes_.getattr(inode, request, std::move(responder));
    case Resent::kEntry:
      return name_operations_.reply_entry(*inode, responder);
    case Resent::kOpenFile:
      return name_operations_.reply_open(outcome.handle, 0, responder);
    case Resent::kOpenDirectory: {
      fuse_open_out out{};
      out.fh = outcome.handle;
      return responder.body(out);
    }
    default:
      return name_operations_.reply_created(*inode, outcome.handle, request, responder);
  }
}

void Mount::serve_file(const Handler& handler, const FileHandler& file, Request& request, Responder responder) {
  const bool whole = request.message.size() >= kBodyOffset + handler.arguments;
  const auto fh = request.arguments<std::uint64_t>();
  if (whole && !is_buffer(fh) && !is_backing(fh) && file.control == nullptr) {
    return relay_.forward(request, std::move(responder));
  }
  if (!whole) return responder.error(EINVAL);
  if (handler.opcode == FUSE_LSEEK) {
    const auto in = request.arguments<fuse_lseek_in>();
    if (in.whence != SEEK_DATA && in.whence != SEEK_HOLE) return responder.error(EINVAL);  // the kernel does the others
    if (in.offset > kMaximumOffset) return responder.error(ENXIO);                         // a negative one
  }
  if (is_buffer(fh)) {
    const std::shared_ptr<OpenFile> found = table_.file(fh);
    return found ? (buffers_.*file.buffer)(found, request, std::move(responder)) : responder.error(EBADF);
  }
  if (is_backing(fh)) {
    const std::shared_ptr<OpenBacking> found = backing_.files().find(fh);
    return found ? (backing_.*file.backing)(found, request, std::move(responder)) : responder.error(EBADF);
  }
  (this->*file.control)(request, std::move(responder));
}

void Mount::lseek_control_file(Request& request, Responder responder) {
  // These files have no holes except the one at the end.
  const auto in = request.arguments<fuse_lseek_in>();
  const std::shared_ptr<Inode> inode = table_.find(request.header.nodeid);
  if (!inode) return responder.error(EBADF);
  const std::uint64_t size = inode->attributes().size;
  if (in.offset >= size) return responder.error(ENXIO);
  responder.body(fuse_lseek_out{in.whence == SEEK_DATA ? in.offset : size});
}

void Mount::refuse_fallocate(Request& /*request*/, Responder responder) { responder.error(EOPNOTSUPP); }

void Mount::refuse_ioctl(Request& /*request*/, Responder responder) { responder.error(ENOTTY); }

void Mount::initialize(Request& request, Responder responder) { relay_.initialize(request, std::move(responder)); }

void Mount::forget(const Request& request) { name_operations_.forget(request); }

void Mount::ignore(const Request& /*request*/) {}  // a reply to a notification that is never sent

void Mount::copy_file_range(Request& request, Responder responder) {
  const Result<CopyRequest> read = read_copy_request(request);
  if (!read.ok()) return responder.error(read.error());
  const CopyRequest& copy = read.value();
  // Each file has one of the two, or none if it is the control plane's.
  const auto buffer_of = [this](std::uint64_t fh) { return table_.file(fh); };
  const auto backing_of = [this](std::uint64_t fh) { return backing_.files().find(fh); };
  const std::shared_ptr<OpenFile> from = buffer_of(copy.in.fh_in);
  const std::shared_ptr<OpenFile> to = buffer_of(copy.in.fh_out);
  const std::shared_ptr<OpenBacking> from_backing = backing_of(copy.in.fh_in);
  const std::shared_ptr<OpenBacking> to_backing = backing_of(copy.in.fh_out);
  const auto is_stale = [](std::uint64_t fh, bool found) { return !found && (is_buffer(fh) || is_backing(fh)); };
  if (is_stale(copy.in.fh_in, from || from_backing) || is_stale(copy.in.fh_out, to || to_backing)) {
    return responder.error(EBADF);
  }
  if (from && to) return buffers_.copy(from, to, request, copy, std::move(responder));
  if (from_backing && to_backing) {
    return backing_.copy(from_backing, to_backing, request, copy, std::move(responder));
  }
  if (from_backing && to) {
    return backing_.copy_with_buffer(from_backing, to, true, request, copy, std::move(responder));
  }
  if (from && to_backing) {
    return backing_.copy_with_buffer(to_backing, from, false, request, copy, std::move(responder));
  }
  // The kernel then copies by reads and writes. Never relayed: it would remember an ENOSYS for the whole mount.
  responder.error(EXDEV);
}

void Mount::open(Request& request, Responder responder) {
  const std::shared_ptr<Inode> inode = table_.find(request.header.nodeid);
  const bool has_buffer = inode && inode->buffer();
  if (!has_buffer) return relay_.forward(request, std::move(responder));
  name_operations_.open(inode, request, std::move(responder));
}

void Mount::release(Request& request, Responder responder) {
  const auto in = request.arguments<fuse_release_in>();
  if (!is_buffer(in.fh)) return relay_.forward(request, std::move(responder));  // the control plane closes the others
  static_cast<void>(table_.release(in.fh));  // quick; unknown: the last process has closed it
  responder.ok();
}

void Mount::interrupt(const Request& request) {
  count(region_.counters().interrupts);
  fuse_interrupt_in in{};
  if (!read_struct(request.message, kBodyOffset, &in)) {
    count(region_.counters().bad_requests);
    return;
  }
  if (relay_.interrupt(in.unique)) return;
  const std::uint32_t client = executor_.client_of(in.unique);
  const bool goes_on = client != 0 && !Caller{.pid = client}.dying();
  const Executor::Cancelled outcome = goes_on ? Executor::Cancelled::kUnknown : executor_.cancel(in.unique);
  if (outcome == Executor::Cancelled::kRunning) backing_.interrupted(in.unique);
  if (outcome != Executor::Cancelled::kUnknown) return count(region_.counters().interrupts_cancelled);
  // Another thread may be about to submit it, or the client may be killed later: on EAGAIN the kernel sends the
  // INTERRUPT again, unless the request has ended.
  count(region_.counters().interrupts_early);
  executor_.submit_at(std::chrono::steady_clock::now() + kInterruptPause,
                      [this, unique = request.header.unique](int refusal, Cancellation&) {
                        if (refusal == 0) static_cast<void>(transport_.send(unique, EAGAIN, {}));
                      });
}

void Mount::publish_gauges() {
  observe::EngineGauges& gauges = region_.gauges();
  const InodeTable::Counts counts = table_.counts();
  set(gauges.inodes, counts.inodes);
  set(gauges.open_files, counts.files);
  set(gauges.removed_files, counts.orphans);
  set(gauges.metadata_bytes, counts.metadata_bytes);
  set(gauges.metadata_limit_bytes, table_.metadata_limit());
  set(gauges.backing_open_files, backing_.files().size());
  const Executor::JobCounts jobs = executor_.counts();
  set(gauges.requests_running, jobs.running);
  set(gauges.requests_queued, jobs.queued);
  set(gauges.requests_relayed, relay_.pending());
}

}  // namespace gpufs::fuse
