// What the operator can set about transfers; the knob table's defaults are these.
// A value, fixed when the TransferEngine is made.
// Any thread may read it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gpufs {

enum class FastpathMode : int { kAuto, kOff, kRequire };
enum class Switch : int { kAuto, kOn, kOff };

// Kinds of file systems, as /proc/self/mountinfo names them ("nfs4", "lustre"), which the fastpath is allowed on beside
// ext4, xfs and block devices. "any" is all of them.
class FileSystems {
 public:
  FileSystems() = default;
  explicit FileSystems(std::vector<std::string> types) : types_(std::move(types)) {}
  [[nodiscard]] bool allow(std::string_view type) const {
    return std::any_of(types_.begin(), types_.end(),
                       [&](const std::string& allowed) { return allowed == "any" || allowed == type; });
  }

 private:
  std::vector<std::string> types_;
};

struct IoOptions {
  // One piece of work of a worker, and the size of a pinned slot: a power of two of at least 64 KiB.
  std::size_t chunk_bytes = std::size_t{4} << 20;
  // Host memory that may be pinned at most, by all transfers and the mount together.
  std::uint64_t pinned_bytes = std::uint64_t{192} << 20;
  // Threads that one transfer can have on a NUMA node; 0: by the number of CPUs. Half as many more exist there so that
  // a client whose files hang does not stop the others.
  int workers = 0;
  int slots = 3;  // of a worker, at most: file and device work on different ones at the same time
  FastpathMode fastpath = FastpathMode::kAuto;
  FileSystems file_systems;
  bool fallback = true;
  // Copying straight from registered pages of the page cache instead of through slots: auto takes it where there is
  // one CPU only.
  Switch pagecache = Switch::kAuto;
  // O_DIRECT on the fallback path: auto decides for each chunk by what is cached; on wherever alignment allows.
  Switch direct = Switch::kAuto;
  // Stores to files in memory through their pages, several at a time (see FileOps::write_pages_at): auto where there
  // are CPUs enough to gain by it, since each byte costs more. Not a knob.
  Switch write_pages = Switch::kAuto;
  // How long a cancelled transfer waits for file operations under way before it leaves them behind.
  std::chrono::milliseconds cancel_grace{50};
  // How long shutdown() waits for threads that hang in a file operation before it leaves them behind.
  std::chrono::milliseconds shutdown_grace{5000};
};

}  // namespace gpufs
