#include "fuse/relay.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "base/log.h"
#include "base/math.h"
#include "base/thread.h"
#include "fuse/protocol.h"
#include "fuse/relay_socket.h"

namespace gpufs::fuse {

namespace {

constexpr std::size_t kPage = 4096;
// Headers of requests and replies, and entries that a directory's reply may exceed its size by: none, but be generous.
constexpr std::size_t kHeaderRoom = 4096;
// The kernel wants contiguous memory for what a message has beyond about 80 KiB, and may find none. Whoever sends tries
// again then, but for the control plane's library with its replies: a directory is read in smaller parts.
constexpr std::size_t kDirectoryPart = 64 << 10;
// Until what finds neither room in the socket nor memory to wait in is sent again. It will be: what waits before it is
// sent without memory.
constexpr std::chrono::milliseconds kMemoryPause{5};
// Between an INTERRUPT and the answer EINTR. Few programs expect EINTR of calls such as mkdir(2), and many get signals
// that do not end them: so it is given only where the control plane waits for something.
constexpr std::chrono::seconds kInterruptGrace{2};

void set_timer(int timer, std::chrono::nanoseconds delay) {
  const auto seconds = std::chrono::floor<std::chrono::seconds>(delay);
  itimerspec when{};
  when.it_value = {seconds.count(), (delay - seconds).count() + 1};  // 0 would be never
  static_cast<void>(::timerfd_settime(timer, 0, &when, nullptr));
}

}  // namespace

Relay::Relay(UniqueFd socket, Statistics& statistics)
    : socket_(std::move(socket)),
      message_limit_(largest_message(socket_.get())),
      payload_limit_(round_down(message_limit_ - kHeaderRoom, kPage)),
      statistics_(statistics) {}

Status Relay::start(RelayHandler& handler) {
  handler_ = &handler;
  timer_ = UniqueFd(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  if (!timer_.valid()) return Status::from_errno(errno, "timerfd_create");
  Result<std::thread> receiver = start_thread(
      "gpufs-relay-rx",
      [this, buffer = std::make_shared<std::vector<std::byte>>(message_limit_ + kPage)] { receive_loop(*buffer); });
  if (!receiver.ok()) return receiver.status();
  receiver_ = receiver.take();
  Result<std::thread> sender = start_thread("gpufs-relay-tx", [this] { overflow_loop(); });
  if (!sender.ok()) {
    stop();
    return sender.status();
  }
  sender_ = sender.take();
  return {};
}

void Relay::stop() {
  {
    const std::lock_guard lock(send_mutex_);
    stopping_ = true;
  }
  overflow_wanted_.notify_all();
  if (socket_.valid()) static_cast<void>(::shutdown(socket_.get(), SHUT_RDWR));  // both threads return from their calls
  if (receiver_.joinable()) receiver_.join();
  if (sender_.joinable()) sender_.join();
  die();
}

bool Relay::alive() const {
  const std::lock_guard lock(pending_mutex_);
  return !dead_;
}

bool Relay::interrupt(std::uint64_t unique) {
  const std::lock_guard lock(pending_mutex_);
  if (!pending_.contains(unique)) return false;
  interrupted_.emplace_back(std::chrono::steady_clock::now() + kInterruptGrace, unique);
  if (interrupted_.size() == 1) set_timer(timer_.get(), kInterruptGrace);
  return true;
}

void Relay::answer_interrupted() {
  std::uint64_t expirations = 0;
  static_cast<void>(!::read(timer_.get(), &expirations, sizeof(expirations)));
  std::vector<Responder> due;
  {
    const std::lock_guard lock(pending_mutex_);
    const auto now = std::chrono::steady_clock::now();
    for (; !interrupted_.empty() && interrupted_.front().first <= now; interrupted_.pop_front()) {
      const auto found = pending_.find(interrupted_.front().second);
      if (found != pending_.end()) due.push_back(std::move(found->second));
    }
    if (!interrupted_.empty()) set_timer(timer_.get(), interrupted_.front().first - now);
  }
  for (Responder& responder : due) {
    if (responder.pending()) responder.error(EINTR);
  }
}

std::span<std::byte> Relay::clip(Request& request) {
  const std::span<std::byte> whole = request.message;
  auto limit = static_cast<std::uint32_t>(payload_limit_);
  switch (request.header.opcode) {
    case FUSE_READDIR:
    case FUSE_READDIRPLUS:
      limit = std::min<std::uint32_t>(limit, kDirectoryPart);
      [[fallthrough]];
    case FUSE_READ: {
      fuse_read_in in{};
      if (!read_struct(whole, sizeof(fuse_in_header), &in) || in.size <= limit) return whole;
      in.size = limit;
      write_struct(whole, sizeof(fuse_in_header), in);
      statistics_.relay_clipped.add();
      return whole;
    }
    case FUSE_WRITE: {
      fuse_write_in in{};
      if (!read_struct(whole, sizeof(fuse_in_header), &in) || in.size <= limit || whole.size() <= message_limit_) {
        return whole;
      }
      // A short count is the answer; the kernel or the program writes the rest.
      in.size = limit;
      write_struct(whole, sizeof(fuse_in_header), in);
      fuse_in_header header = request.header;
      header.len = static_cast<std::uint32_t>(kWriteHeaderBytes + limit);
      write_struct(whole, 0, header);
      statistics_.relay_clipped.add();
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

void Relay::forward(Request& request, Responder responder) {
  const std::uint64_t unique = request.header.unique;
  const std::span<std::byte> message = clip(request);
  if (message.size() > message_limit_) {
    responder.error(EMSGSIZE);
    return;
  }
  // What the control plane keeps for a file would stay for ever if this did not arrive.
  const bool closes = request.header.opcode == FUSE_RELEASE || request.header.opcode == FUSE_RELEASEDIR;
  Admission admission = Admission::kDead;
  try {
    admission = admit(unique, responder);
  } catch (const std::bad_alloc&) {
    if (!closes) throw;
    // Nobody hears how closing ended, so the kernel need not wait for it.
    responder.error(0);
    forward_unheard(message);
    return;
  }
  if (admission == Admission::kDead) {
    statistics_.relay_refused.add();
    handler_->orphaned(request, responder);
    responder.error(ENOTCONN);
    return;
  }
  if (admission == Admission::kTwice) {
    // The reply to the first one answers it.
    statistics_.bad_requests.add();
    log_error("the kernel sent a request twice");
    responder.abandon();
    return;
  }
  statistics_.of(request.header.opcode).relayed.add();
  int error = send(message);
  for (; error == ENOMEM && closes; error = send(message)) std::this_thread::sleep_for(kMemoryPause);
  if (error != 0) {
    Responder failed = take_pending(unique);
    if (!failed.pending()) return;
    failed.error(error == EPIPE || error == ECONNRESET ? ENOTCONN : error == ENOMEM ? ENOMEM : EIO);
  }
}

void Relay::forward_one_way(std::span<const std::byte> message) {
  fuse_in_header header{};
  if (!read_struct(message, 0, &header) || !alive()) return;
  statistics_.of(header.opcode).relayed.add();
  // Fails otherwise only when the control plane has gone, and then nobody needs it.
  while (send(message) == ENOMEM) {
    // It must not be lost: what the kernel forgets is forgotten here, or never.
    std::this_thread::sleep_for(kMemoryPause);
  }
}

void Relay::forward_unheard(std::span<const std::byte> message) {
  unheard_.fetch_add(1);
  forward_one_way(message);
}

int Relay::send(std::span<const std::byte> message) {
  std::unique_lock lock(send_mutex_);
  if (stopping_) return EPIPE;
  if (overflow_.empty() && !sending_overflow_) {
    for (;;) {
      const ssize_t sent = ::send(socket_.get(), message.data(), message.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent >= 0) return 0;
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != ENOBUFS && errno != ENOMEM) return errno;
      break;
    }
  }
  statistics_.relay_overflowed.add();
  try {
    overflow_.emplace_back(message.begin(), message.end());
  } catch (const std::bad_alloc&) {
    return ENOMEM;
  }
  overflow_bytes_ += message.size();
  statistics_.relay_overflow_peak.raise(overflow_bytes_);
  lock.unlock();
  overflow_wanted_.notify_one();
  return 0;
}

void Relay::overflow_loop() {
  std::unique_lock lock(send_mutex_);
  for (;;) {
    overflow_wanted_.wait(lock, [this] { return stopping_ || !overflow_.empty(); });
    if (stopping_) return;
    const std::vector<std::byte> message = std::move(overflow_.front());
    overflow_.pop_front();
    overflow_bytes_ -= message.size();
    sending_overflow_ = true;
    lock.unlock();
    // Waits until there is room. On another failure the receiver sees the end of the connection, too, and answers what
    // is pending.
    while (::send(socket_.get(), message.data(), message.size(), MSG_NOSIGNAL) < 0) {
      if (errno == ENOBUFS || errno == ENOMEM) {
        std::this_thread::sleep_for(kMemoryPause);
      } else if (errno != EINTR) {
        break;
      }
    }
    lock.lock();
    sending_overflow_ = false;
  }
}

void Relay::receive_loop(std::span<std::byte> buffer) {
  for (;;) {
    std::array<pollfd, 2> ready{pollfd{socket_.get(), POLLIN, 0}, pollfd{timer_.get(), POLLIN, 0}};
    if (::poll(ready.data(), ready.size(), -1) < 0) continue;
    if (ready[1].revents != 0) answer_interrupted();
    if (ready[0].revents == 0) continue;
    iovec part{buffer.data(), buffer.size()};
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    const ssize_t got = ::recvmsg(socket_.get(), &header, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    try {
      receive(buffer.first(static_cast<std::size_t>(got)), (header.msg_flags & MSG_TRUNC) != 0);
    } catch (const std::bad_alloc&) {  // a reply's request has been answered so
      log_warning("no memory for a message of the control plane");
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
    statistics_.relay_bad_replies.add();
    log_error("a message of ", message.size(), " bytes from the control plane is too short");
    return;
  }
  if (header.unique == 0) {
    if (truncated) {
      statistics_.relay_truncated.add();
    } else {
      handler_->notification(message);
    }
    return;
  }
  bool answered = false;
  Responder responder = take_pending(header.unique, &answered);
  if (answered) {
    if (header.error == 0 && !truncated) handler_->unheard(responder.opcode(), message);
    return;
  }
  if (!responder.pending()) {
    if (unheard_.load() > 0) {
      unheard_.fetch_sub(1);
      return;
    }
    statistics_.relay_bad_replies.add();
    log_warning("the control plane answered a request that is not there");
    return;
  }
  const std::uint32_t opcode = responder.opcode();
  statistics_.relay_replies.add();
  if (truncated || header.len > message.size()) {
    statistics_.relay_truncated.add();
    log_error("a reply to ", opcode_name(opcode), " was too large for a message");
    responder.error(EIO);
    return;
  }
  if (header.len != message.size() || header.error > 0 || header.error < -kMaximumErrno ||
      (header.error != 0 && header.len != sizeof(header))) {
    statistics_.relay_bad_replies.add();
    log_error("a reply to ", opcode_name(opcode), " makes no sense");
    responder.error(EIO);
    return;
  }
  if (header.error != 0) {
    responder.error(-header.error);
  } else {
    const std::span<const std::byte> body = handler_->amend(opcode, message);
    const iovec part{const_cast<std::byte*>(body.data()), body.size()};  // sent, not written to
    responder.data({&part, 1});
  }
  handler_->replied(opcode, header.error == 0);
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
    statistics_.relay_refused.add();
    responder.error(ENOTCONN);
  }
}

void Relay::write_statistics(JsonWriter& json) const {
  json.boolean("alive", alive());
  json.number("payload_limit", payload_limit_);
  {
    const std::lock_guard lock(pending_mutex_);
    json.number("pending", pending_.size());
  }
  const std::lock_guard lock(send_mutex_);
  json.number("overflow", overflow_.size());
  json.number("overflow_bytes", overflow_bytes_);
}

}  // namespace gpufs::fuse
