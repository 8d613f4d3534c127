#include <cerrno>
#include <exception>
#include <string>
#include <utility>

#include "base/log.h"
#include "fuse/statistics.h"
#include "fuse/transport.h"

namespace gpufs::fuse {

Responder::Responder(Responder&& other) noexcept
    : transport_(std::exchange(other.transport_, nullptr)),
      statistics_(other.statistics_),
      unique_(other.unique_),
      opcode_(other.opcode_) {}

Responder& Responder::operator=(Responder&& other) noexcept {
  if (this != &other) {
    Responder previous(std::move(*this));  // answers its request if nobody has
    transport_ = std::exchange(other.transport_, nullptr);
    statistics_ = other.statistics_;
    unique_ = other.unique_;
    opcode_ = other.opcode_;
  }
  return *this;
}

Responder::~Responder() {
  if (!pending()) return;
  if (std::uncaught_exceptions() != 0) {  // there was no memory: nothing else throws here
    error(ENOMEM);
    return;
  }
  statistics_->unanswered.add();
  log_error("no reply was made to a request (", opcode_name(opcode_), "); it is answered EIO");
  error(EIO);
}

void Responder::error(int error) {
  // A number that the kernel refuses would leave the client waiting.
  deliver(error > 0 && error <= kMaximumErrno ? error : EIO, {});
}

void Responder::data(std::span<const iovec> body) { deliver(0, body); }

void Responder::deliver(int error, std::span<const iovec> body) {
  Transport* transport = std::exchange(transport_, nullptr);
  if (transport == nullptr) return;
  if (error != 0) statistics_->of(opcode_).errors.add();
  const int outcome = transport->send(unique_, error, body);
  if (outcome == 0 || outcome == ENODEV) return;
  if (outcome == ENOENT) {  // the connection was aborted, or the kernel has ended the request itself
    statistics_->lost_replies.add();
    return;
  }
  // The kernel did not like the reply (or had no memory for it). Its client still waits unless it is told something.
  statistics_->rejected_replies.add();
  log_warning("the kernel refused a reply to ", opcode_name(opcode_), " (errno ", outcome, "); answering EIO");
  if (error == 0) static_cast<void>(transport->send(unique_, EIO, {}));
}

}  // namespace gpufs::fuse
