#include "fuse/relay.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <memory>
#include <utility>

#include "base/log.h"
#include "base/math.h"
#include "base/pages.h"
#include "base/thread.h"
#include "fuse/control_messages.h"

namespace gpufs::fuse {

namespace {

// A message of a megabyte, and a few small ones behind it.
constexpr int kWantedBuffer = 4 << 20;
// The kernel's own part of a message, generously.
constexpr std::size_t kMessageOverhead = 4096;
// Headers of requests and replies, generously.
constexpr std::size_t kHeaderBytes = 4096;
constexpr std::size_t kLargestMessage = (std::size_t{1} << 20) + kHeaderBytes;
constexpr std::size_t kSmallestMessage = 64 << 10;
// The kernel needs contiguous memory for a message's part beyond about 80 KiB, and may have none. The relay tries again
// then, the control plane does not: so directories are read in smaller parts.
constexpr std::size_t kDirectoryPart = 64 << 10;
// Before a message that found no contiguous memory is sent again.
constexpr std::chrono::milliseconds kMemoryPause{5};
// Between an INTERRUPT and the answer EINTR. Few programs expect EINTR from calls such as mkdir(2), and many get
// signals that do not end them: so it is given only if the control plane waits for something.
constexpr std::chrono::seconds kInterruptGrace{2};
// How long FORGETs wait for others: the control plane takes about as long for one message with many as for one FORGET.
constexpr std::chrono::milliseconds kForgetPause{5};
// FORGETs in one relayed message: the control plane works through a message without a pause.
constexpr std::size_t kForgetsTogether = 1024;

void raise_buffer(int socket, int forced, int ordinary) {
  const int bytes = kWantedBuffer;
  if (::setsockopt(socket, SOL_SOCKET, forced, &bytes, sizeof(bytes)) == 0) return;
  static_cast<void>(::setsockopt(socket, SOL_SOCKET, ordinary, &bytes, sizeof(bytes)));  // clipped to the limit
}

}  // namespace

Result<RelayPair> make_relay_pair() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    return Status::from_errno(errno, "the socket pair between the planes");
  }
  for (const int end : ends) {
    raise_buffer(end, SO_SNDBUFFORCE, SO_SNDBUF);
    raise_buffer(end, SO_RCVBUFFORCE, SO_RCVBUF);
  }
  return RelayPair{UniqueFd(ends[0]), UniqueFd(ends[1])};
}

std::size_t largest_message(int socket) {
  int bytes = 0;
  socklen_t length = sizeof(bytes);
  if (::getsockopt(socket, SOL_SOCKET, SO_SNDBUF, &bytes, &length) != 0 || bytes < 0) return kSmallestMessage;
  const std::size_t limit = static_cast<std::size_t>(bytes);
  return std::clamp(limit > kMessageOverhead ? limit - kMessageOverhead : 0, kSmallestMessage, kLargestMessage);
}

Relay::Relay(UniqueFd socket, Transport& transport, InodeTable& table, BackingTable& backing_files, Executor& executor,
             const InitNegotiation::Options& init, observe::EngineCounters& counters)
    : socket_(std::move(socket)),
      message_limit_(largest_message(socket_.get())),
      payload_limit_(round_down(message_limit_ - kHeaderBytes, kPageBytes)),
      transport_(transport),
      table_(table),
      backing_files_(backing_files),
      executor_(executor),
      init_(init, static_cast<std::uint32_t>(payload_limit_)),
      counters_(counters) {}

Status Relay::start() {
  Result<std::thread> receiver = start_thread(
      "gpufs-relay", [this, buffer = std::make_shared<std::vector<std::byte>>(message_limit_ + kPageBytes)] {
        receive_loop(*buffer);
      });
  if (receiver.ok()) receiver_ = receiver.take();
  return receiver.status();
}

void Relay::stop() {
  {
    const std::lock_guard lock(send_mutex_);
    stopping_ = true;
  }
  if (socket_.valid()) static_cast<void>(::shutdown(socket_.get(), SHUT_RDWR));  // all threads return from their calls
  if (receiver_.joinable()) receiver_.join();
  die();
}

// ---- requests ----

std::span<std::byte> Relay::clip(Request& request) {
  const std::span<std::byte> whole = request.message;
  auto limit = static_cast<std::uint32_t>(payload_limit_);
  switch (request.header.opcode) {
    case FUSE_READDIRPLUS:
      limit = std::min<std::uint32_t>(limit, kDirectoryPart);
      [[fallthrough]];
    case FUSE_READ: {
      fuse_read_in in{};
      if (!read_struct(whole, kBodyOffset, &in) || in.size <= limit) return whole;
      in.size = limit;
      write_struct(whole, kBodyOffset, in);
      return whole;
    }
    case FUSE_WRITE: {
      fuse_write_in in{};
      if (!read_struct(whole, kBodyOffset, &in) || in.size <= limit || whole.size() <= message_limit_) {
        return whole;
      }
      // A short count is the answer; the kernel or the program writes the rest.
      in.size = limit;
      write_struct(whole, kBodyOffset, in);
      fuse_in_header header = request.header;
      header.len = static_cast<std::uint32_t>(kWriteHeaderBytes + limit);
      write_struct(whole, 0, header);
      return whole.first(header.len);
    }
    default:
      return whole;
  }
}

Relay::Admission Relay::admit(std::uint64_t unique, Responder& responder) {
  const std::lock_guard lock(pending_mutex_);
  if (dead_) return Admission::kDead;
  const auto [place, fresh] = pending_.try_emplace(unique);
  if (!fresh) return Admission::kTwice;
  place->second = std::move(responder);
  return Admission::kPending;
}

void Relay::initialize(const Request& request, Responder responder) {
  const Result<fuse_init_out> answer = init_.answer(request.message);
  if (!answer.ok()) {
    log_error("INIT: ", answer.status().message());
    return responder.error(answer.status().error());
  }
  table_.records().put_init(init_.offered(), init_.granted());
  responder.body(answer.value());
  // The other readers may start only now: the kernel sizes requests by the reply.
  transport_.initialized();
}

void Relay::restore_init(std::uint64_t offered, std::uint64_t granted) {
  init_.restore(offered, granted);
  transport_.initialized();
}

void Relay::forward(Request& request, Responder responder) {
  if (const int error = adapt_request(request); error != 0) return responder.error(error);
  const std::uint64_t unique = request.header.unique;
  const std::span<std::byte> message = clip(request);
  if (message.size() > message_limit_) return responder.error(EMSGSIZE);
  switch (admit(unique, responder)) {
    case Admission::kPending:
      break;
    case Admission::kDead: {
      // A backing file can be closed without the control plane.
      const bool closes = request.header.opcode == FUSE_RELEASE;
      if (closes && backing_files_.remove(request.arguments<fuse_release_in>().fh) != nullptr) return responder.ok();
      return responder.error(ENOTCONN);
    }
    case Admission::kTwice:
      // The reply to the first one answers it.
      count(counters_.bad_requests);
      log_error("the kernel sent a request twice");
      return responder.abandon();
  }
  if (const int error = send(message); error != 0) {
    Responder failed = take_pending(unique);
    if (failed.pending()) failed.error(error == EPIPE || error == ECONNRESET ? ENOTCONN : EIO);
  }
}

void Relay::forget(std::span<const fuse_forget_one> dropped) {
  if (dropped.empty()) return;
  const std::lock_guard lock(forget_mutex_);
  if (forgotten_.empty()) {
    executor_.submit_at(std::chrono::steady_clock::now() + kForgetPause, [this](int refusal, Cancellation&) {
      if (refusal == 0) forward_forgotten();
    });
  }
  forgotten_.insert(forgotten_.end(), dropped.begin(), dropped.end());
}

void Relay::forward_forgotten() {
  std::vector<fuse_forget_one> forgotten;
  {
    const std::lock_guard lock(forget_mutex_);
    forgotten.swap(forgotten_);
  }
  constexpr std::size_t kFirst = kBodyOffset + sizeof(fuse_batch_forget_in);
  std::vector<std::byte> message;
  for (std::size_t done = 0; done < forgotten.size();) {
    const std::size_t count = std::min(kForgetsTogether, forgotten.size() - done);
    message.assign(kFirst + count * sizeof(fuse_forget_one), std::byte{0});
    fuse_in_header header{};
    header.opcode = FUSE_BATCH_FORGET;
    header.len = static_cast<std::uint32_t>(message.size());
    write_struct(message, 0, header);
    write_struct(message, sizeof(header), fuse_batch_forget_in{static_cast<std::uint32_t>(count), 0});
    std::memcpy(message.data() + kFirst, forgotten.data() + done, count * sizeof(fuse_forget_one));
    static_cast<void>(send(message));  // fails only when the control plane is gone, and then it is not needed
    done += count;
  }
}

int Relay::send(std::span<const std::byte> message) {
  const std::lock_guard lock(send_mutex_);
  if (stopping_) return EPIPE;
  while (overflow_ == 0) {
    const ssize_t sent = ::send(socket_.get(), message.data(), message.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) return 0;
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != ENOBUFS && errno != ENOMEM) return errno;
    break;
  }
  count(counters_.relay_overflows);
  ++overflow_;
  executor_.submit({Executor::Lane::Kind::kRelay, -1, 0}, nullptr, 0,
                   [this, copy = std::vector<std::byte>(message.begin(), message.end())](int refusal, Cancellation&) {
                     if (refusal == 0) send_waiting(copy);
                   });
  return 0;
}

void Relay::send_waiting(std::span<const std::byte> message) {
  // On other failures the receiver sees the end of the connection, too, and answers what is pending.
  while (::send(socket_.get(), message.data(), message.size(), MSG_NOSIGNAL) < 0) {
    if (errno == ENOBUFS || errno == ENOMEM) {
      std::this_thread::sleep_for(kMemoryPause);
    } else if (errno != EINTR) {
      break;
    }
  }
  const std::lock_guard lock(send_mutex_);
  --overflow_;
}

// ---- interrupts ----

bool Relay::interrupt(std::uint64_t unique) {
  {
    const std::lock_guard lock(pending_mutex_);
    if (!pending_.contains(unique)) return false;
  }
  executor_.submit_at(std::chrono::steady_clock::now() + kInterruptGrace, [this, unique](int refusal, Cancellation&) {
    if (refusal == 0) answer_interrupted(unique);
  });
  return true;
}

void Relay::answer_interrupted(std::uint64_t unique) {
  Responder responder;
  {
    const std::lock_guard lock(pending_mutex_);
    const auto found = pending_.find(unique);
    if (found == pending_.end()) return;
    responder = std::move(found->second);
  }
  if (responder.pending()) responder.error(EINTR);
}

// ---- replies ----

void Relay::receive_loop(std::span<std::byte> buffer) {
  for (;;) {
    iovec part{buffer.data(), buffer.size()};
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    const ssize_t got = ::recvmsg(socket_.get(), &header, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    try {
      receive(buffer.first(static_cast<std::size_t>(got)), (header.msg_flags & MSG_TRUNC) != 0);
    } catch (const std::exception& failure) {  // the request's responder has answered ENOMEM
      log_warning("a message of the control plane failed: ", failure.what());
    }
  }
  {
    const std::lock_guard lock(send_mutex_);
    if (!stopping_) log_warning("the control plane has closed its connection; its requests fail from now on");
  }
  die();
}

void Relay::receive(std::span<std::byte> message, bool truncated) {
  fuse_out_header header{};
  if (!read_struct(message, 0, &header)) {
    count(counters_.relay_bad_replies);
    log_error("a message of ", message.size(), " bytes from the control plane is too short");
    return;
  }
  bool answered = false;
  Responder responder = take_pending(header.unique, &answered);
  const std::uint32_t opcode = responder.opcode();
  if (answered) {
    if (header.error != 0 || truncated) return;
    const KernelReferences granted = references_in(opcode, message);
    forget(granted.references);
    if (!granted.release.empty()) {
      {
        const std::lock_guard lock(pending_mutex_);
        pending_.try_emplace(header.unique);  // nobody waits for its reply either
      }
      static_cast<void>(send(granted.release));
    }
    return;
  }
  if (!responder.pending()) {
    count(counters_.relay_bad_replies);
    log_warning("the control plane answered an unknown request");
    return;
  }
  if (truncated || header.len != message.size() || header.error > 0 || header.error < -kMaximumErrno ||
      (header.error != 0 && header.len != sizeof(header))) {
    count(counters_.relay_bad_replies);
    log_error("a reply to ", opcode_name(opcode), truncated ? " was too large for a message" : " makes no sense");
    return responder.error(EIO);
  }
  if (header.error != 0) return responder.error(-header.error);
  responder.data(adapt_reply(opcode, message, table_, init_, statx_));
}

Responder Relay::take_pending(std::uint64_t unique, bool* answered) {
  const std::lock_guard lock(pending_mutex_);
  const auto found = pending_.find(unique);
  if (found == pending_.end()) return {};
  Responder responder = std::move(found->second);
  pending_.erase(found);
  if (answered != nullptr) *answered = !responder.pending();
  return responder;
}

void Relay::die() {
  std::unordered_map<std::uint64_t, Responder> pending;
  {
    const std::lock_guard lock(pending_mutex_);
    dead_ = true;
    pending.swap(pending_);
  }
  for (auto& [unique, responder] : pending) {
    if (!responder.pending()) continue;
    responder.error(ENOTCONN);
  }
}

std::size_t Relay::pending() const {
  const std::lock_guard lock(pending_mutex_);
  return pending_.size();
}

}  // namespace gpufs::fuse
