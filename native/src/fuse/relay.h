// The connection to the control plane: requests that native code does not serve go over a socket, replies come back.
// Ownership: the Mount's; owns the native end of the socket.
// Any thread may forward; replies come on the relay's own thread, which waits for nothing but the socket.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "fuse/backing_table.h"
#include "fuse/executor.h"
#include "fuse/init_negotiation.h"
#include "fuse/inode_table.h"
#include "fuse/protocol.h"
#include "fuse/request.h"
#include "fuse/transport.h"
#include "observe/counters.h"

namespace gpufs::fuse {

struct RelayPair {
  UniqueFd native;
  UniqueFd control;
};

// A SOCK_SEQPACKET pair, close-on-exec, with space for messages of a megabyte at both ends, or for as much as the
// system allows (net.core.wmem_max).
Result<RelayPair> make_relay_pair();

// The largest message that a socket with this send buffer carries, with its header.
[[nodiscard]] std::size_t largest_message(int socket);

class Relay {
 public:
  Relay(UniqueFd socket, Transport& transport, InodeTable& table, BackingTable& backing_files, Executor& executor,
        const InitNegotiation::Options& init, observe::EngineCounters& counters);
  ~Relay() { stop(); }

  Status start();
  // Answers what is pending and all that comes later with ENOTCONN, and ends the thread. May be called twice.
  void stop();

  // Answers INIT.
  void initialize(const Request& request, Responder responder);
  // The last process has answered it.
  void restore_init(std::uint64_t offered, std::uint64_t granted);
  // A request that will have a reply. Shortened if its reply or payload would not fit into a message.
  void forward(Request& request, Responder responder);
  // References that the kernel drops. They are forwarded soon, many together; dropped when the control plane is gone.
  void forget(std::span<const fuse_forget_one> dropped);
  // An INTERRUPT: if the control plane does not answer the request soon, it is answered EINTR, because a killed client
  // cannot end before. False if the request is not pending here.
  [[nodiscard]] bool interrupt(std::uint64_t unique);

  [[nodiscard]] const InitNegotiation& init() const { return init_; }
  // How many requests the control plane has not answered.
  [[nodiscard]] std::size_t pending() const;

 private:
  enum class Admission { kPending, kDead, kTwice };
  Admission admit(std::uint64_t unique, Responder& responder);
  // Shortens the request in place; returns the part of the message to send.
  std::span<std::byte> clip(Request& request);
  void forward_forgotten();
  // 0, or why it could be neither sent nor queued.
  int send(std::span<const std::byte> message);
  void send_waiting(std::span<const std::byte> message);
  void receive_loop(std::span<std::byte> buffer);
  void receive(std::span<std::byte> message, bool truncated);
  void answer_interrupted(std::uint64_t unique);
  void die();
  // answered: whether it has been answered EINTR. Returns a responder that is not pending if there is none.
  Responder take_pending(std::uint64_t unique, bool* answered = nullptr);

  const UniqueFd socket_;
  const std::size_t message_limit_;
  const std::size_t payload_limit_;
  Transport& transport_;
  InodeTable& table_;
  BackingTable& backing_files_;
  Executor& executor_;
  InitNegotiation init_;
  observe::EngineCounters& counters_;
  std::thread receiver_;  // only start() and stop() touch it
  StatxOut statx_{};      // used by the receiver alone

  // Guards the two below; no reply is written under it.
  mutable std::mutex pending_mutex_;
  std::unordered_map<std::uint64_t, Responder> pending_;  // one that is not pending has been answered EINTR
  bool dead_ = false;

  std::mutex forget_mutex_;  // guards what is below; the executor's mutex is taken under it
  std::vector<fuse_forget_one> forgotten_;

  // Guards the order of messages and all below; only sends that do not block are made under it. The executor's mutex is
  // taken under it.
  mutable std::mutex send_mutex_;
  std::size_t overflow_ = 0;  // messages that wait on the executor: later ones must queue behind them
  bool stopping_ = false;
};

}  // namespace gpufs::fuse
