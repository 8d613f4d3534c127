// One mount's data plane: the transport, the inode table, the operations, the relay and the executor put together.
// Ownership: shared by its handle and calls under way.
// start() and close() are the owner's, neither on a thread of the mount's; any thread may call the rest.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "fuse/attribute_operations.h"
#include "fuse/backing_operations.h"
#include "fuse/buffer_operations.h"
#include "fuse/executor.h"
#include "fuse/inode_table.h"
#include "fuse/long_requests.h"
#include "fuse/name_operations.h"
#include "fuse/namespace.h"
#include "fuse/notifier.h"
#include "fuse/read_ahead.h"
#include "fuse/relay.h"
#include "fuse/request.h"
#include "fuse/transport.h"
#include "io/transfer_engine.h"
#include "journal/journal.h"
#include "memory/kept_memory.h"
#include "observe/counters.h"

namespace gpufs::fuse {

struct MountOptions {
  std::size_t reader_threads = 0;     // 0: chosen by the number of CPUs
  std::uint32_t max_write = 1 << 20;  // page multiple
  std::uint64_t mask_flags = 0;       // INIT flags treated as not offered
  std::uint64_t metadata_bytes = 0;   // memory for names and attributes; 0: no limit
  std::uint64_t user_bytes = 0;       // device memory for each plain user on each device; 0: no limit
  // How long a write that finds the device full waits for memory of removed files to come back.
  std::chrono::milliseconds space_timeout{3000};
  std::shared_ptr<HostLocks> locks;  // of the memory of requests; null: no device copies from and to it
  // Where the mount's state is kept; one that Journal::restore() returned has the state of a mount that this one
  // continues. Null: it dies with the process.
  std::shared_ptr<journal::Journal> journal;
  std::shared_ptr<KeptMemory> kept;           // with a journal: the memory of the devices
  std::shared_ptr<TransferEngine> transfers;  // null: the kernel copies between buffers and files of the host
};

class Mount final : private RequestHandler {
 public:
  // Takes over both descriptors, also when it fails. EINVAL for impossible options.
  static Result<std::shared_ptr<Mount>> create(UniqueFd device, UniqueFd relay,
                                               std::vector<std::shared_ptr<DeviceContext>> devices,
                                               MountOptions options);
  ~Mount() override { close(); }

  Status start();
  [[nodiscard]] bool started() const { return started_; }
  // Frees the memory of restored files that the kernel has forgotten without this process's knowledge: call it from
  // time to time.
  void release_forgotten();
  // Closes a file or directory that the last process had open; see gpufs_mount_close_handles.
  void close_handle(std::uint64_t handle);

  // OK if another process can continue the mount; else the reason for users.
  [[nodiscard]] Status survives() const;
  [[nodiscard]] const journal::Journal* journal() const { return records_.journal(); }

  // Readable once the connection has ended. Valid for the mount's life.
  [[nodiscard]] int ended_fd() const { return ended_.get(); }

  // Ends everything, whatever its state: requests under way are answered, threads joined, descriptors closed. The first
  // caller does it, others wait.
  void close();

  [[nodiscard]] InodeTable& table() { return table_; }
  [[nodiscard]] Namespace& names() { return names_; }
  [[nodiscard]] Notifier& notifier() { return notifier_; }
  // Reads ahead of programs that go through mappings: as ReadAhead::start(), by the end of the first request.
  Status read_ahead(const std::string& directory, std::uint64_t piece);
  [[nodiscard]] BackingTable& backing_files() { return backing_.files(); }
  // Writes the gauges of the mount beside the counters of its devices.
  void publish_gauges();

 private:
  struct Handler;
  struct FileHandler;
  // Null: the request is relayed.
  static const Handler* handler_of(std::uint32_t opcode);

  Mount(UniqueFd device, UniqueFd relay, UniqueFd ended, std::vector<std::shared_ptr<DeviceContext>> devices,
        MountOptions options);
  Status restore();
  // Has the kernel send again what the last process has not answered. It would send what this process has read, too.
  Status resume();

  void handle(Request& request) override;
  void connection_ended() override;

  void serve(const Handler& handler, Request& request, Responder responder);
  void serve_file(const Handler& handler, const FileHandler& file, Request& request, Responder responder);
  // Answers a request that the last process has carried out, and may have answered.
  void answer_from_state(const Handler& handler, const Outcome& outcome, Request& request, Responder responder);
  // For files of the control plane, which does not know these requests: its ENOSYS would end them on the whole mount.
  void lseek_control_file(Request& request, Responder responder);
  void refuse_fallocate(Request& request, Responder responder);
  void refuse_ioctl(Request& request, Responder responder);
  // A copy is about two files.
  void copy_file_range(Request& request, Responder responder);
  void initialize(Request& request, Responder responder);
  void open(Request& request, Responder responder);
  void release(Request& request, Responder responder);
  void forget(const Request& request);
  void interrupt(const Request& request);
  void ignore(const Request& request);

  UniqueFd ended_;
  const std::chrono::steady_clock::time_point created_ = std::chrono::steady_clock::now();
  observe::Region& region_;  // of the devices
  // Each uses those above it.
  Executor executor_;
  const std::shared_ptr<KeptMemory> kept_;  // null without a keeper
  Records records_;
  InodeTable table_;
  Namespace names_;
  Transport transport_;
  LongRequests long_requests_;
  ReadAhead read_ahead_;
  Notifier notifier_;
  BackingOperations backing_;
  Relay relay_;
  BufferOperations buffers_;
  AttributeOperations attributes_;
  NameOperations name_operations_;

  bool restored_ = false;  // constant once it is created
  std::atomic<bool> started_{false};

  // Guards closed_, and is held while everything ends. Order 1 of docs/design/requests.md#locks
  std::mutex close_mutex_;
  bool closed_ = false;
};

}  // namespace gpufs::fuse
