#include "fuse/request.h"

#include <algorithm>
#include <cerrno>
#include <exception>
#include <utility>

#include "base/log.h"
#include "fuse/transport.h"

namespace gpufs::fuse {

std::optional<std::string_view> Request::text(std::size_t arguments) const {
  const std::span<const std::byte> rest = message.subspan(std::min(kBodyOffset + arguments, message.size()));
  const std::string_view all(reinterpret_cast<const char*>(rest.data()), rest.size());
  const std::size_t end = all.find('\0');
  return end == all.npos ? std::nullopt : std::optional(all.substr(0, end));
}

Responder::Responder(Responder&& other) noexcept
    : transport_(std::exchange(other.transport_, nullptr)),
      unique_(other.unique_),
      opcode_(other.opcode_),
      client_(other.client_),
      user_(other.user_),
      outcome_(std::move(other.outcome_)) {}

Responder& Responder::operator=(Responder&& other) noexcept {
  if (this != &other) {
    Responder previous(std::move(*this));  // answers its own request if that is still pending
    transport_ = std::exchange(other.transport_, nullptr);
    unique_ = other.unique_;
    opcode_ = other.opcode_;
    client_ = other.client_;
    user_ = other.user_;
    outcome_ = std::move(other.outcome_);
  }
  return *this;
}

Responder::~Responder() {
  if (!pending()) return;
  if (std::uncaught_exceptions() != 0) {
    error(ENOMEM);
    return;
  }
  count(transport_->counters().replies_missing);
  log_error("a request (", opcode_name(opcode_), ") was left without a reply; answering EIO");
  error(EIO);
}

void Responder::error(int error) {
  // A number that the kernel refuses would leave the client waiting.
  deliver(error > 0 && error <= kMaximumErrno ? error : EIO, {});
}

void Responder::data(std::span<const iovec> body) { deliver(0, body); }

void Responder::data(std::span<const std::byte> body) {
  const iovec part{const_cast<std::byte*>(body.data()), body.size()};  // sent, not written to
  deliver(0, {&part, body.empty() ? std::size_t{0} : std::size_t{1}});
}

void Responder::deliver(int error, std::span<const iovec> body) {
  Transport* transport = std::exchange(transport_, nullptr);
  if (transport == nullptr) return;
  const int outcome = transport->send(unique_, error, body);
  if (outcome == 0 || outcome == ENODEV) return;
  if (outcome == ENOENT) {  // the connection was aborted, or the kernel has ended the request itself
    count(transport->counters().replies_lost);
    return;
  }
  // The kernel rejected the reply (or had no memory for it), and its client still waits for one.
  count(transport->counters().replies_rejected);
  log_warning("the kernel refused a reply to ", opcode_name(opcode_), " (errno ", outcome, "); answering EIO");
  if (error == 0) static_cast<void>(transport->send(unique_, EIO, {}));
}

}  // namespace gpufs::fuse
