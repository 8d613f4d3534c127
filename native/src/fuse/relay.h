// The way to the control plane and back: requests that native code does not serve go over a socket, replies come back.
// Owned by the Session; owns the native end of the socket.
// Any thread may forward; replies come on the relay's own thread, which never waits for anything but the socket.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "fuse/statistics.h"
#include "fuse/transport.h"

namespace gpufs::fuse {

// What the Session does with messages from the control plane; called on the relay's thread.
class RelayHandler {
 public:
  virtual ~RelayHandler() = default;
  // A reply that fits its request, as long as its header says. It may be changed in place; the body that the kernel
  // gets is what is returned, valid until the next call.
  virtual std::span<const std::byte> amend(std::uint32_t opcode, std::span<std::byte> reply) = 0;
  // The same reply has been written to the kernel.
  virtual void replied(std::uint32_t opcode, bool success) = 0;
  virtual void notification(std::span<const std::byte> message) = 0;
  // A request has succeeded that was answered EINTR before: the kernel has none of what its reply hands out.
  virtual void unheard(std::uint32_t opcode, std::span<const std::byte> reply) = 0;
  // A request that the control plane, being gone, cannot answer any more. The responder answers ENOTCONN unless used.
  virtual void orphaned(Request& request, Responder& responder) = 0;
};

class Relay {
 public:
  Relay(UniqueFd socket, Statistics& statistics);
  ~Relay() { stop(); }
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  Status start(RelayHandler& handler);
  // Answers what is pending and all that comes later with ENOTCONN, and ends the threads. May be called twice.
  void stop();

  // A request that will have a reply. Shortened where its reply or payload would not fit into a message.
  void forward(Request& request, Responder responder);
  // A message without a reply; dropped when the control plane is gone.
  void forward_one_way(std::span<const std::byte> message);
  // A request whose reply nobody needs.
  void forward_unheard(std::span<const std::byte> message);
  // An INTERRUPT: a request that the control plane does not answer soon is answered EINTR. A client that is killed
  // cannot end before. False if the control plane owes no reply to it.
  [[nodiscard]] bool interrupt(std::uint64_t unique);

  // Bytes of payload that a relayed request or reply can carry.
  [[nodiscard]] std::size_t payload_limit() const { return payload_limit_; }
  [[nodiscard]] bool alive() const;
  void write_statistics(JsonWriter& json) const;

 private:
  // Whether a request waits for its reply now, with its responder; or the control plane is dead; or it waits already.
  enum class Admission { kPending, kDead, kTwice };
  Admission admit(std::uint64_t unique, Responder& responder);
  // Shortens the request in place; returns the part of the message to send.
  std::span<std::byte> clip(Request& request);
  // 0, or why it could be neither sent nor queued.
  int send(std::span<const std::byte> message);
  void receive_loop(std::span<std::byte> buffer);
  void receive(std::span<std::byte> message, bool truncated);
  void overflow_loop();
  // Answers those whose time is over, and sets the timer for the next one.
  void answer_interrupted();
  void die();
  // answered: whether it has been answered EINTR. A responder that is not pending where there is none.
  Responder take_pending(std::uint64_t unique, bool* answered = nullptr);

  const UniqueFd socket_;
  const std::size_t message_limit_;
  const std::size_t payload_limit_;
  Statistics& statistics_;
  RelayHandler* handler_ = nullptr;  // constant once start() has been called
  std::thread receiver_;             // the Session's start and stop alone touch these two
  std::thread sender_;

  std::atomic<std::uint64_t> unheard_{0};  // replies to come of requests that were answered when they were sent
  UniqueFd timer_;                         // a timerfd: somebody is to be answered EINTR

  // Guards the three below; no reply is written under it.
  mutable std::mutex pending_mutex_;
  std::unordered_map<std::uint64_t, Responder> pending_;  // one that is not pending has been answered EINTR
  std::deque<std::pair<std::chrono::steady_clock::time_point, std::uint64_t>> interrupted_;  // and when that is due
  bool dead_ = false;

  // Guards the order of messages and all below; only sends that do not block are made under it.
  mutable std::mutex send_mutex_;
  std::condition_variable overflow_wanted_;
  std::deque<std::vector<std::byte>> overflow_;
  std::size_t overflow_bytes_ = 0;
  bool sending_overflow_ = false;  // its first message is on its way: later ones must queue behind it
  bool stopping_ = false;
};

}  // namespace gpufs::fuse
