#include "fuse/session.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "base/log.h"
#include "fuse/device_transport.h"
#include "fuse/protocol.h"
#include "fuse/reply_amender.h"

namespace gpufs::fuse {

namespace {

constexpr std::uint32_t kPage = 4096;
constexpr std::uint32_t kDefaultMaxWrite = 1 << 20;
constexpr std::uint32_t kLargestMaxWrite = 64 << 20;
constexpr std::size_t kLargestWorkers = 256;
// FORGETs in one relayed message: the control plane works through a message without a pause.
constexpr std::size_t kForgetsTogether = 1024;
// How long close() waits for threads in files of the host.
constexpr std::chrono::milliseconds kStopPatience{200};

void close_on_exec(int fd) {
  const int flags = ::fcntl(fd, F_GETFD);
  if (flags >= 0) static_cast<void>(::fcntl(fd, F_SETFD, flags | FD_CLOEXEC));
}

}  // namespace

Session::Session(InodeTable& table, const SessionOptions& options) : table_(table), options_(options) {}

Result<std::unique_ptr<Session>> Session::create(UniqueFd device, UniqueFd relay, InodeTable& table,
                                                 const SessionOptions& options) {
  if (options.transport != "auto" && options.transport != "device") {
    return Status(EINVAL, "unknown transport \"" + options.transport + "\"");
  }
  const std::uint32_t max_write = options.max_write == 0 ? kDefaultMaxWrite : options.max_write;
  if (max_write % kPage != 0 || max_write > kLargestMaxWrite) {
    return Status(EINVAL, "max_write must be a multiple of 4096 of 64 MiB at most");
  }
  if (!(options.operations.attribute_timeout >= 0 && options.operations.attribute_timeout <= 1e9)) {
    return Status(EINVAL, "the attribute time-out must be 0 or more seconds");
  }
  if (options.worker_threads > kLargestWorkers) return Status(EINVAL, "too many worker threads");
  if (!device.valid() || !relay.valid()) return Status(EBADF, "a mount needs a FUSE device and a relay socket");
  int type = 0;
  socklen_t length = sizeof(type);
  if (::getsockopt(relay.get(), SOL_SOCKET, SO_TYPE, &type, &length) != 0 || type != SOCK_SEQPACKET) {
    return Status(EINVAL, "the relay must be a SOCK_SEQPACKET socket");
  }
  close_on_exec(device.get());
  close_on_exec(relay.get());

  std::unique_ptr<Session> session(new Session(table, options));
  session->ended_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!session->ended_.valid()) return Status::from_errno(errno, "eventfd");

  Statistics& statistics = session->statistics_;
  session->relay_ = std::make_unique<Relay>(std::move(relay), statistics);
  DeviceTransportOptions transport;
  transport.reader_threads = options.reader_threads;
  transport.payload_bytes = max_write;
  transport.adaptive = options.adaptive_readers;
  transport.spin = options.reader_spin;
  transport.pin_hooks = options.pin_hooks;
  session->transport_ = std::make_unique<DeviceTransport>(std::move(device), transport, statistics);
  Executor::Limits limits;
  if (options.worker_threads != 0) limits.buffers = options.worker_threads;
  session->executor_ = std::make_unique<Executor>(limits, statistics);
  table.on_reaped([executor = session->executor_.get()](std::int32_t freed) { executor->memory_freed(freed); });
  session->long_operations_ = std::make_unique<LongOperations>(table, *session->executor_, session->cancellations_,
                                                               statistics, options.operations.space_patience);
  InitNegotiation::Options init;
  init.max_write = max_write;
  init.mask_flags = options.mask_flags;
  init.relay_bytes = static_cast<std::uint32_t>(session->relay_->payload_limit());
  session->init_ = std::make_unique<InitNegotiation>(init);
  session->operations_ = std::make_unique<Operations>(table, *session->long_operations_, statistics);
  session->attributes_ = std::make_unique<AttributeOperations>(table, *session->long_operations_, options.operations);
  session->backing_ =
      std::make_unique<BackingOperations>(table, options.transfers, *session->long_operations_, statistics);
  session->notifier_ = std::make_unique<Notifier>(*session->transport_, statistics);
  return session;
}

Session::~Session() { close(); }

Status Session::start() {
  Status status = notifier_->start();
  if (status.ok()) status = relay_->start(*this);
  if (status.ok()) status = transport_->start(*this);
  if (!status.ok()) close();
  return status;
}

void Session::close() {
  const std::lock_guard lock(close_mutex_);
  if (closed_ || !transport_) return;
  closed_ = true;
  // The readers go last: until then every request still finds somebody, so that none of the waits below can depend on
  // one that nobody answers. First the control plane's requests are answered, then the notification that may have
  // waited for one of them can end, then the long operations.
  relay_->stop();
  notifier_->stop();
  cancellations_.cancel_all();
  table_.on_reaped(nullptr);
  backing_->left_behind(executor_->stop(kStopPatience));
  transport_->stop();
  transport_->close();
  connection_ended();
}

std::string Session::statistics() const {
  JsonWriter json;
  json.open("transport");
  transport_->write_statistics(json);
  json.close();
  json.open("init");
  json.boolean("done", init_done_.load());
  if (init_done_.load()) init_->write_statistics(json);
  json.close();
  json.open("control_plane");
  relay_->write_statistics(json);
  json.close();
  json.open("pool");
  const Executor::Counts jobs = executor_->counts();
  json.number("limit", executor_->limits().buffers);
  json.number("threads", jobs.threads);
  json.number("running", jobs.running);
  json.number("queued", jobs.queued);
  json.number("waiting_for_memory", jobs.parked);
  json.close();
  json.open("backing");
  backing_->write_statistics(json);
  json.close();
  json.open("table");
  const InodeTable::Counts counts = table_.counts();
  json.number("inodes", counts.inodes);
  json.number("open_files", counts.files);
  json.number("orphans", counts.orphans);
  json.number("metadata_bytes", counts.metadata_bytes);
  json.number("metadata_limit", table_.metadata_limit());
  json.number("orphan_bytes", table_.orphan_bytes(-1));
  json.number("notifications_queued", notifier_->queued());
  json.close();
  fuse::write_statistics(statistics_, json);
  return json.finish();
}

void Session::handle(Request& request) {
  switch (request.header.opcode) {
    case FUSE_FORGET:
      return relay_->forward_one_way(request.message);
    case FUSE_BATCH_FORGET:
      return handle_batch_forget(request);
    case FUSE_INTERRUPT:
      return handle_interrupt(request);
    case FUSE_NOTIFY_REPLY:  // to a notification that is never sent
      return;
    default:
      break;
  }
  Responder responder(*transport_, statistics_, request.header.unique, request.header.opcode);
  const std::uint32_t opcode = request.header.opcode;
  switch (opcode) {
    case FUSE_INIT:
      return handle_init(request, std::move(responder));
    case FUSE_TMPFILE:
      return handle_tmpfile(request, std::move(responder));
    default:
      break;
  }
  if (backing_->serve(request, responder) || operations_->serve(request, responder) ||
      attributes_->serve(request, responder)) {
    return statistics_.of(opcode).native.add();
  }
  if (opcode == kOpcodeStatx) return relay_statx(request, std::move(responder));
  if (opcode == FUSE_SETXATTR) return relay_setxattr(request, std::move(responder));
  if (opcode == FUSE_STATFS) return relay_statfs(request, std::move(responder));
  relay_->forward(request, std::move(responder));
}

void Session::handle_init(Request& request, Responder responder) {
  if (Status status = init_->amend_request(request.message); !status.ok()) {
    log_error("INIT: ", status.message());
    responder.error(status.error());
    return;
  }
  relay_->forward(request, std::move(responder));
}

void Session::handle_tmpfile(Request& request, Responder responder) {
  // The control plane's library does not know TMPFILE. It is a CREATE in every field but the name, which the kernel
  // gives as "/": no file can be called so, and the control plane takes it for what it is.
  constexpr std::size_t kName = sizeof(fuse_in_header) + sizeof(fuse_create_in);
  std::array<char, 2> name{};
  if (request.message.size() != kName + name.size() || !read_struct(request.message, kName, &name) ||
      name != std::array{'/', '\0'}) {
    responder.error(EOPNOTSUPP);
    return;
  }
  request.header.opcode = FUSE_CREATE;
  write_struct(request.message, 0, request.header);
  relay_->forward(request, std::move(responder));
}

void Session::relay_statx(Request& request, Responder responder) {
  // A GETATTR is the first part of it; amend() makes its answer one to STATX. (ENOSYS would end STATX for all inodes.)
  if (request.message.size() < sizeof(fuse_in_header) + sizeof(fuse_getattr_in)) return responder.error(EINVAL);
  request.header.opcode = FUSE_GETATTR;
  request.header.len = sizeof(fuse_in_header) + sizeof(fuse_getattr_in);
  request.message = request.message.first(request.header.len);
  write_struct(request.message, 0, request.header);
  relay_->forward(request, std::move(responder));
}

void Session::relay_setxattr(Request& request, Responder responder) {
  // pyfuse3 knows the short form alone, and would make two requests of XATTR_CREATE and XATTR_REPLACE, which others can
  // come between. So the flags go as a digit before the name, where the control plane takes them from.
  constexpr std::size_t kHeader = sizeof(fuse_in_header);
  const std::size_t fixed = init_->granted(kInitSetxattrExt) ? sizeof(SetxattrIn) : kSetxattrShort;
  if (request.message.size() < kHeader + fixed) return responder.error(EINVAL);
  SetxattrIn in{};
  std::memcpy(static_cast<void*>(&in), request.message.data() + kHeader, kSetxattrShort);
  const auto flags = static_cast<std::byte>('0' + (in.flags & (XATTR_CREATE | XATTR_REPLACE)));
  in.flags = 0;

  const std::span<const std::byte> rest = request.message.subspan(kHeader + fixed);
  std::vector<std::byte> message(kHeader + kSetxattrShort + 1 + rest.size());
  request.header.len = static_cast<std::uint32_t>(message.size());
  write_struct(message, 0, request.header);
  std::memcpy(message.data() + kHeader, static_cast<const void*>(&in), kSetxattrShort);
  message[kHeader + kSetxattrShort] = flags;
  std::ranges::copy(rest, message.begin() + kHeader + kSetxattrShort + 1);
  request.message = message;
  relay_->forward(request, std::move(responder));
}

void Session::relay_statfs(Request& request, Responder responder) {
  // pyfuse3 does not say whose file system is asked for. So it is asked for as the attribute without a name, which the
  // kernel lets nobody ask for; its value is the body of the reply to STATFS as it stands.
  std::array<std::byte, sizeof(fuse_in_header) + sizeof(fuse_getxattr_in) + 1> message{};
  request.header.opcode = FUSE_GETXATTR;
  request.header.len = static_cast<std::uint32_t>(message.size());
  write_struct(std::span(message), 0, request.header);
  fuse_getxattr_in in{};
  in.size = sizeof(fuse_statfs_out);
  write_struct(std::span(message), sizeof(fuse_in_header), in);
  request.message = message;
  relay_->forward(request, std::move(responder));
}

void Session::handle_interrupt(Request& request) {
  statistics_.interrupts.add();
  fuse_interrupt_in in{};
  if (!read_struct(request.message, sizeof(fuse_in_header), &in)) {
    statistics_.bad_requests.add();
    return;
  }
  if (relay_->interrupt(in.unique)) {
    statistics_.interrupts_relayed.add();
    return;
  }
  if (cancellations_.interrupt(in.unique)) {
    statistics_.interrupts_cancelled.add();
    // One that still waits for a worker is answered at once: the workers may be busy for long.
    if (!executor_->discard(in.unique)) backing_->interrupted(in.unique);
  } else {
    statistics_.interrupts_remembered.add();
  }
}

void Session::handle_batch_forget(Request& request) {
  fuse_batch_forget_in in{};
  constexpr std::size_t kFirst = sizeof(fuse_in_header) + sizeof(fuse_batch_forget_in);
  if (!read_struct(request.message, sizeof(fuse_in_header), &in) ||
      (request.message.size() - kFirst) / sizeof(fuse_forget_one) < in.count) {
    statistics_.bad_requests.add();
    return;
  }
  std::array<std::byte, kFirst + kForgetsTogether * sizeof(fuse_forget_one)> part;
  for (std::size_t done = 0; done < in.count;) {
    const std::size_t count = std::min<std::size_t>(kForgetsTogether, in.count - done);
    const std::size_t bytes = kFirst + count * sizeof(fuse_forget_one);
    fuse_in_header header = request.header;
    header.len = static_cast<std::uint32_t>(bytes);
    write_struct(std::span(part), 0, header);
    write_struct(std::span(part), sizeof(header), fuse_batch_forget_in{static_cast<std::uint32_t>(count), 0});
    std::memcpy(part.data() + kFirst, request.message.data() + kFirst + done * sizeof(fuse_forget_one),
                count * sizeof(fuse_forget_one));
    relay_->forward_one_way(std::span(part).first(bytes));
    done += count;
  }
}

void Session::connection_ended() {
  const std::uint64_t one = 1;
  static_cast<void>(!::write(ended_.get(), &one, sizeof(one)));  // the counter cannot overflow
}

std::span<const std::byte> Session::amend(std::uint32_t opcode, std::span<std::byte> reply) {
  if (opcode == FUSE_INIT) {
    if (Status status = init_->amend_reply(reply); !status.ok()) log_error("INIT: ", status.message());
    attributes_->negotiated(init_->acls(), init_->granted(kInitSetxattrExt));
  } else if (opcode == kOpcodeStatx) {
    return statx_reply_from(reply, statx_reply_);
  } else {
    amend_reply(opcode, reply, table_, init_->direct_io());
  }
  return reply.subspan(sizeof(fuse_out_header));
}

void Session::replied(std::uint32_t opcode, bool success) {
  // The other readers may start only now: the kernel sizes requests by the reply.
  if (opcode != FUSE_INIT || !success) return;
  init_done_.store(true);
  transport_->initialized();
}

void Session::notification(std::span<const std::byte> message) { notifier_->forward(message); }

void Session::unheard(std::uint32_t opcode, std::span<const std::byte> reply) {
  fuse_out_header answered{};
  if (!read_struct(reply, 0, &answered)) return;
  const auto forget = [&](std::size_t entry_at) {
    fuse_entry_out entry{};
    if (!read_struct(reply, entry_at, &entry) || entry.nodeid == 0) return;
    struct {
      fuse_in_header header;
      fuse_forget_in in;
    } const message{{sizeof(message), FUSE_FORGET, 0, entry.nodeid, 0, 0, 0, 0, 0}, {1}};
    relay_->forward_one_way(std::as_bytes(std::span(&message, 1)));
  };
  const auto release = [&](std::uint32_t by, std::size_t open_at) {
    fuse_open_out open{};
    if (!read_struct(reply, open_at, &open)) return;
    struct {
      fuse_in_header header;
      fuse_release_in in;
    } const message{{sizeof(message), by, answered.unique, 0, 0, 0, 0, 0, 0}, {open.fh, 0, 0, 0}};
    relay_->forward_unheard(std::as_bytes(std::span(&message, 1)));
  };
  constexpr std::size_t kBody = sizeof(fuse_out_header);
  switch (opcode) {
    case FUSE_LOOKUP:
    case FUSE_MKNOD:
    case FUSE_MKDIR:
    case FUSE_SYMLINK:
    case FUSE_LINK:
      return forget(kBody);
    case FUSE_CREATE:
    case FUSE_TMPFILE:
      release(FUSE_RELEASE, kBody + sizeof(fuse_entry_out));
      return forget(kBody);
    case FUSE_OPEN:
      return release(FUSE_RELEASE, kBody);
    case FUSE_OPENDIR:
      return release(FUSE_RELEASEDIR, kBody);
    case FUSE_READDIRPLUS:
      break;
    default:
      return;
  }
  fuse_direntplus entry{};
  for (std::size_t at = kBody; read_struct(reply, at, &entry); at += FUSE_DIRENTPLUS_SIZE(&entry)) {
    const auto name = reply.subspan(at + FUSE_NAME_OFFSET_DIRENTPLUS);
    const std::size_t length = entry.dirent.namelen;
    const bool dots = length <= 2 && length <= name.size() &&
                      std::ranges::all_of(name.first(length), [](std::byte c) { return c == std::byte{'.'}; });
    if (!dots) forget(at);  // "." and ".." are no references
  }
}

void Session::orphaned(Request& request, Responder& responder) {
  // A backing file that is closed after the control plane's end is closed all the same.
  fuse_release_in in{};
  if (request.header.opcode != FUSE_RELEASE || !read_struct(request.message, sizeof(fuse_in_header), &in)) return;
  if (backing_->files().release(in.fh).ok()) responder.ok();
}

}  // namespace gpufs::fuse
