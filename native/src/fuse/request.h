// One request of the kernel, and the duty to reply to it.
// Ownership: a Request is the transport's and valid while it is handled; a Responder belongs to the thread that serves
// the request, or to a job.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "fuse/protocol.h"

namespace gpufs::fuse {

class Transport;

// One request as it was read.
struct Request {
  fuse_in_header header{};
  // The whole message with its header, header.len bytes. Writable: what is relayed is changed in place.
  std::span<std::byte> message;
  // Page-aligned memory of the transport, max_write bytes, mostly locked and pinned for devices. The payload of a WRITE
  // is at its start; once the message is no longer needed, a reply can be built here.
  std::span<std::byte> payload;

  // The structure behind the header; its presence was checked when the request was dispatched.
  template <typename T>
  [[nodiscard]] T arguments() const {
    T value{};
    static_cast<void>(read_struct(message, kBodyOffset, &value));
    return value;
  }
  // The text behind so many bytes of arguments, up to its zero; nullopt: there is none.
  [[nodiscard]] std::optional<std::string_view> text(std::size_t arguments) const;
};

// The duty to answer one request exactly once. Its owner must reply or pass it on; destroyed without a reply it answers
// EIO, or ENOMEM if an exception destroys it, so no client waits forever.
class Responder {
 public:
  // The largest number of pieces in one reply's body.
  static constexpr std::size_t kMaximumPieces = 1000;

  Responder() = default;
  // client: the thread that waits for the reply; 0: unknown. user: in whose name it asks.
  Responder(Transport& transport, std::uint64_t unique, std::uint32_t opcode, std::uint32_t client = 0,
            std::uint32_t user = 0)
      : transport_(&transport), unique_(unique), opcode_(opcode), client_(client), user_(user) {}
  Responder(Responder&& other) noexcept;
  Responder& operator=(Responder&& other) noexcept;
  ~Responder();

  [[nodiscard]] std::uint64_t unique() const { return unique_; }
  [[nodiscard]] std::uint32_t opcode() const { return opcode_; }
  [[nodiscard]] std::uint32_t client() const { return client_; }
  [[nodiscard]] std::uint32_t user() const { return user_; }
  // The record in the journal that Records::done() has taken for the request; null: none.
  [[nodiscard]] std::shared_ptr<std::uint64_t>& outcome() { return outcome_; }
  [[nodiscard]] bool pending() const { return transport_ != nullptr; }

  void ok() { deliver(0, {}); }
  // 0: ok().
  void answer(int error) { error == 0 ? ok() : this->error(error); }
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
  std::uint64_t unique_ = 0;
  std::uint32_t opcode_ = 0;
  std::uint32_t client_ = 0;
  std::uint32_t user_ = 0;
  std::shared_ptr<std::uint64_t> outcome_;
};

}  // namespace gpufs::fuse
