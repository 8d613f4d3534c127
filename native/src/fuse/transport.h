// How requests come from the kernel and replies go back, whatever the mechanism: the rest of the mount sees only this.
// Ownership: the Mount owns the Transport; a Request is the transport's and valid during handle().
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
  // The whole message with its header, header.len bytes. Writable: what is relayed is changed in place.
  std::span<std::byte> message;
  // Page-aligned memory of the transport, max_write bytes, locked and pinned for devices if possible. The payload of a
  // WRITE is at its start; once the message is no longer needed, a reply can be built here.
  std::span<std::byte> payload;

  // The structure behind the header; its presence was checked when the request was dispatched.
  template <typename T>
  [[nodiscard]] T arguments() const {
    T value{};
    static_cast<void>(read_struct(message, sizeof(fuse_in_header), &value));
    return value;
  }
};

// The duty to answer one request exactly once. Its owner must reply or pass it on; destroyed without a reply it answers
// EIO, or ENOMEM if an exception destroys it, so no client waits forever.
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

  void ok() { deliver(0, {}); }
  void error(int error);
  void data(std::span<const iovec> body);
  void data(std::span<const std::byte> body);
  template <typename T>
  void body(const T& value) {
    data(std::as_bytes(std::span(&value, 1)));
  }
  // For requests that have no reply.
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
  // The connection has ended: unmounted, aborted or failed. Called at most once, on a thread of the transport.
  virtual void connection_ended() = 0;
};

class Transport {
 public:
  // The largest number of pieces in one reply's body.
  static constexpr std::size_t kMaximumPieces = 1000;

  virtual ~Transport() = default;

  [[nodiscard]] virtual const char* name() const = 0;
  // Starts reading, with one thread until initialized() reports that the INIT reply has been written.
  virtual Status start(RequestHandler& handler) = 0;
  virtual void initialized() = 0;
  // Ends the threads, whatever the state of the connection; not to be called from handle(). May be called twice.
  virtual void stop() = 0;
  // Closes the connection; after stop(). send() and notify() return ENODEV from then on.
  virtual void close() = 0;

  // One reply; 0 or the errno of the failure (ENOENT: the kernel does not know the request, ENODEV: it is gone).
  virtual int send(std::uint64_t unique, int error, std::span<const iovec> body) = 0;
  // One notification; may block as long as the kernel likes, so only the notification lane calls it.
  virtual int notify(std::int32_t code, std::span<const std::byte> body) = 0;

  virtual void write_statistics(JsonWriter& json) const = 0;
};

}  // namespace gpufs::fuse
