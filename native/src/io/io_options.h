// The options of an engine's transfers; the table of knobs has the same defaults.
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

// The types of file systems, as /proc/self/mountinfo names them ("nfs4", "lustre"), that the fastpath may use in
// addition to ext4, xfs and block devices. "any" allows all.
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

// Chunks hold at least one unit of each file's O_DIRECT.
inline constexpr std::size_t kSmallestChunk = std::size_t{64} << 10;

struct IoOptions {
  // What a thread moves at a time, and the size of a pinned slot: a power of two of at least kSmallestChunk.
  std::size_t chunk_bytes = std::size_t{2} << 20;
  // The most host memory that all transfers together may pin.
  std::uint64_t pinned_bytes = std::uint64_t{192} << 20;
  // Threads that one client has at most on a NUMA node; 0: by the number of CPUs. Half as many more exist there, so
  // that a client whose files hang does not stop the others.
  int workers = 0;
  int slots = 2;  // pinned slots of a thread at most: file and device use different ones at the same time
  FastpathMode fastpath = FastpathMode::kAuto;
  FileSystems file_systems;
  // O_DIRECT on the fallback path: auto decides for each chunk by what is cached, on uses it wherever alignment allows.
  Switch direct = Switch::kAuto;
  // Stores to files in memory through their pages, several at a time (see FileOps::write_pages_at): auto uses it if
  // there are enough CPUs to gain by it, since each byte costs more. Not a knob.
  Switch write_pages = Switch::kAuto;
  // How long a cancelled transfer waits for file operations before it leaves them behind.
  std::chrono::milliseconds cancel_grace{50};
  // How long shutdown() waits for threads that hang in a file operation before it leaves them behind.
  std::chrono::milliseconds shutdown_grace{5000};
};

}  // namespace gpufs
