// How requests come from the kernel and replies go back, whatever the mechanism: the operations see only this.
// The Session owns the Transport and outlives its threads; a Request is the transport's and valid during handle().
// handle() runs on the transport's threads, several at a time; send() and notify() may be called on any thread.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "fuse/protocol.h"

namespace gpufs::fuse {

class JsonWriter;
struct Statistics;
class Transport;

// One request as it was read.
struct Request {
  fuse_in_header header{};
  // The whole message, header included, header.len bytes. Writable: what is relayed is amended in place.
  std::span<std::byte> message;
  // Page-aligned memory of the transport's, max_write bytes, best effort locked and pinned for devices. The payload of
  // a WRITE lies at its start; an operation that needs the message no longer may build its reply here.
  std::span<std::byte> payload;
};

// The duty to answer one request exactly once. Whoever holds it must reply or pass it on; destroyed without a reply it
// answers EIO, or ENOMEM when an exception has destroyed it, so that no client waits for ever.
class Responder {
 public:
  Responder() = default;
  Responder(Transport& transport, Statistics& statistics, std::uint64_t unique, std::uint32_t opcode)
      : transport_(&transport), statistics_(&statistics), unique_(unique), opcode_(opcode) {}
  Responder(Responder&& other) noexcept;
  Responder& operator=(Responder&& other) noexcept;
  Responder(const Responder&) = delete;
  Responder& operator=(const Responder&) = delete;
  ~Responder();

  [[nodiscard]] std::uint64_t unique() const { return unique_; }
  [[nodiscard]] std::uint32_t opcode() const { return opcode_; }
  [[nodiscard]] bool pending() const { return transport_ != nullptr; }

  void ok() { data({}); }
  void error(int error);
  void data(std::span<const iovec> body);
  template <typename T>
  void body(const T& value) {
    const iovec part{const_cast<T*>(&value), sizeof(T)};  // sent, not written to
    data({&part, 1});
  }
  // For requests that have no reply, and for those whose connection has ended.
  void abandon() { transport_ = nullptr; }

 private:
  void deliver(int error, std::span<const iovec> body);

  Transport* transport_ = nullptr;  // null: answered, or never had a request
  Statistics* statistics_ = nullptr;
  std::uint64_t unique_ = 0;
  std::uint32_t opcode_ = 0;
};

class RequestHandler {
 public:
  virtual ~RequestHandler() = default;
  // Serves the request or hands it on; must not block on a disk, a device's queue or another request.
  virtual void handle(Request& request) = 0;
  // The connection has ended: unmounted, aborted, or failed. Called once at most, on a transport's thread.
  virtual void connection_ended() = 0;
};

class Transport {
 public:
  // Pieces of one reply's body at most.
  static constexpr std::size_t kMaximumPieces = 1000;

  virtual ~Transport() = default;

  [[nodiscard]] virtual const char* name() const = 0;
  // Starts reading, with one thread until initialized() says that the INIT reply has been written.
  virtual Status start(RequestHandler& handler) = 0;
  virtual void initialized() = 0;
  // Ends the threads, in whatever state the connection is; not to be called from handle(). May be called twice.
  virtual void stop() = 0;
  // Closes the connection; after stop(). send() and notify() give ENODEV from then on.
  virtual void close() = 0;

  // One reply; 0 or the errno of the failure (ENOENT: the kernel does not know the request, ENODEV: it is gone).
  virtual int send(std::uint64_t unique, int error, std::span<const iovec> body) = 0;
  // One notification; may block for as long as the kernel likes: call it on the notification thread only.
  virtual int notify(std::int32_t code, std::span<const std::byte> body) = 0;

  virtual void write_statistics(JsonWriter& json) const = 0;
};

}  // namespace gpufs::fuse
