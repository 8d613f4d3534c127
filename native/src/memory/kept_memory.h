// Has the keeper hold the descriptors of device memory, and gets those back that it held for the last process. The
// journal has what they are descriptors of.
// Ownership: shared by the devices and the mount. Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "drivers/driver.h"
#include "journal/journal.h"
#include "journal/keeper_link.h"

namespace gpufs {

class KeptMemory final : public MemoryKeeper {
 public:
  // Takes over the descriptors of memory that the keeper holds for the last process.
  KeptMemory(std::shared_ptr<journal::Journal> journal, std::shared_ptr<KeeperLink> keeper);

  std::uint64_t new_memory() override { return memories_.next(); }
  std::uint64_t hold(std::uint64_t memory, std::uint64_t offset, std::uint64_t bytes, int descriptor) override;
  void drop(std::uint64_t key) override;
  void settle() override { keeper_->settle(); }
  std::uint64_t lose(const Status& reason) override;
  std::vector<KeptPiece> take(std::uint64_t memory) override;

  // Has the keeper drop what nothing has taken, and what was dropped until now; once everything is restored. Before, it
  // still has all that the last process has kept: if the restore fails, another process can try again.
  void drop_untaken();
  // The mount has ended: nothing is sent from now on.
  void end() { keeper_->stop(); }
  // Why some memory cannot be held; OK if all can.
  [[nodiscard]] Status health() const;

 private:
  // What a descriptor is of, in the journal.
  struct Part {
    std::uint64_t memory;
    Extent where;
  };

  const std::shared_ptr<journal::Journal> journal_;
  journal::Numbers memories_;
  journal::Numbers keys_;
  const std::shared_ptr<KeeperLink> keeper_;

  mutable std::mutex mutex_;  // guards all below; order 8 of docs/design/requests.md#locks
  std::map<std::uint64_t, std::vector<KeptPiece>> untaken_;  // of the last process, by memory
  bool restoring_ = false;                                   // until drop_untaken(), if anything was held
  std::set<std::uint64_t> lost_;                             // see lose()
  Status reason_;                                            // the last one
};

}  // namespace gpufs
