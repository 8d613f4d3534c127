// Hands the descriptors of device memory to the keeper, the process that outlives this one (native/keeper/), and gets
// those back that the last process had handed to it. The journal has what they are descriptors of.
// Ownership: shared by the devices and the mount. Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/keeper_messages.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "drivers/driver.h"
#include "journal/journal.h"

namespace gpufs {

class KeptMemory final : public MemoryKeeper {
 public:
  // The keys of descriptors of memory; the control plane uses lower ones.
  static constexpr std::uint64_t kFirstKey = std::uint64_t{1} << 32;

  struct Held {
    std::uint64_t key;
    UniqueFd descriptor;
  };

  // keeper: the socket, which is the caller's. held: what the last process handed over.
  KeptMemory(std::shared_ptr<journal::Journal> journal, int keeper, std::vector<Held> held);

  std::uint64_t new_memory() override { return memories_.next(); }
  std::uint64_t hold(std::uint64_t memory, std::uint64_t offset, std::uint64_t bytes, int descriptor) override;
  void drop(std::uint64_t key) override;
  void settle() override;
  void lose(const Status& reason) override;
  std::vector<KeptPiece> take(std::uint64_t memory) override;

  // Has the keeper drop what nothing has taken, and what was dropped until now; once everything is restored. Before, it
  // still has all that the last process has kept: if the restore fails, another process can try again.
  void drop_untaken();
  // Hands over everything again: another keeper is at the other end of the socket.
  void hold_again();
  // The mount has ended, and the caller closes the socket: nothing is sent from now on.
  void end();
  // OK while the keeper has everything.
  [[nodiscard]] Status health() const;

 private:
  // What a descriptor is of, in the journal.
  struct Part {
    std::uint64_t memory;
    Extent where;
  };

  void send_locked(keeper::Kind kind, std::uint64_t key, int descriptor);

  const std::shared_ptr<journal::Journal> journal_;
  journal::Numbers memories_;
  journal::Numbers keys_;
  const int keeper_;

  mutable std::mutex mutex_;           // guards all below, over sending; order of locks: docs/design/requests.md#locks
  std::map<std::uint64_t, int> held_;  // descriptors of the callers, which stay open until drop()
  std::map<std::uint64_t, std::vector<KeptPiece>> untaken_;  // of the last process, by memory
  bool restoring_;                                           // until drop_untaken(), if anything was held
  Status health_;                                            // of the keeper
  Status lost_;                                              // see lose()
};

}  // namespace gpufs
