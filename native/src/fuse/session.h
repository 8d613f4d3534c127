// One mount's data plane: the transport, the native operations, the relay and the notification thread put together.
// Owned by the Mount, which also owns the inode table; the table outlives the Session.
// start() and close() are the owner's, neither on a thread of the session's; any thread may call the rest.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"
#include "base/unique_fd.h"
#include "fuse/attribute_operations.h"
#include "fuse/backing_operations.h"
#include "fuse/cancellation.h"
#include "fuse/executor.h"
#include "fuse/init_negotiation.h"
#include "fuse/inode_table.h"
#include "fuse/long_operation.h"
#include "fuse/notifier.h"
#include "fuse/operations.h"
#include "fuse/payload_memory.h"
#include "fuse/relay.h"
#include "fuse/statistics.h"
#include "fuse/transport.h"
#include "io/transfer_engine.h"

namespace gpufs::fuse {

struct SessionOptions {
  std::string transport = "auto";  // "auto" or "device"
  std::size_t reader_threads = 0;  // 0: chosen by the number of CPUs
  bool adaptive_readers = true;
  std::chrono::nanoseconds reader_spin{0};
  std::size_t worker_threads = 0;  // most for one device; 0: default
  std::uint32_t max_write = 0;     // page multiple; 0: default
  std::uint64_t mask_flags = 0;
  OperationOptions operations;
  PinHooks pin_hooks;
  std::shared_ptr<TransferEngine> transfers;  // null: copies between buffers and files of the host are the kernel's
};

class Session final : private RequestHandler, private RelayHandler {
 public:
  // Takes over both descriptors, also when it fails. EINVAL for options that make no sense.
  static Result<std::unique_ptr<Session>> create(UniqueFd device, UniqueFd relay, InodeTable& table,
                                                 const SessionOptions& options);
  ~Session() override;
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  Status start();

  // Readable once the connection has ended. Valid for the session's life.
  [[nodiscard]] int ended_fd() const { return ended_.get(); }

  // Ends everything, in whatever state: requests under way are answered, threads joined, descriptors closed. The first
  // caller does it, others wait.
  void close();

  Status invalidate_inode(std::uint64_t ino) { return notifier_->invalidate_inode(ino); }
  Status invalidate_entry(std::uint64_t parent, std::string_view name) {
    return notifier_->invalidate_entry(parent, name);
  }
  // The host's files that are open below backing/.
  [[nodiscard]] BackingTable& backing_files() { return backing_->files(); }
  [[nodiscard]] std::string statistics() const;

 private:
  Session(InodeTable& table, const SessionOptions& options);

  void handle(Request& request) override;
  void connection_ended() override;
  std::span<const std::byte> amend(std::uint32_t opcode, std::span<std::byte> reply) override;
  void replied(std::uint32_t opcode, bool success) override;
  void notification(std::span<const std::byte> message) override;
  void unheard(std::uint32_t opcode, std::span<const std::byte> reply) override;
  void orphaned(Request& request, Responder& responder) override;

  void handle_init(Request& request, Responder responder);
  void handle_tmpfile(Request& request, Responder responder);
  // Relays what the control plane's library knows in another form only.
  void relay_statx(Request& request, Responder responder);
  void relay_setxattr(Request& request, Responder responder);
  void relay_statfs(Request& request, Responder responder);
  void handle_interrupt(Request& request);
  void handle_batch_forget(Request& request);

  InodeTable& table_;
  const SessionOptions options_;
  mutable Statistics statistics_;
  UniqueFd ended_;
  std::atomic<bool> init_done_{false};

  // In the order of their making; taken down in the reverse by close().
  std::unique_ptr<Transport> transport_;
  Cancellations cancellations_;
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<LongOperations> long_operations_;
  std::unique_ptr<InitNegotiation> init_;
  std::unique_ptr<Operations> operations_;
  std::unique_ptr<AttributeOperations> attributes_;
  StatxOut statx_reply_{};  // used on the relay's thread alone
  std::unique_ptr<BackingOperations> backing_;
  std::unique_ptr<Notifier> notifier_;
  std::unique_ptr<Relay> relay_;

  std::mutex close_mutex_;  // guards closed_; outermost, held while everything ends
  bool closed_ = false;
};

}  // namespace gpufs::fuse
