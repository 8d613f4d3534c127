// Reads ahead of programs that go through a mapping from front to back.
// Ownership: the Mount's. Thread-safe, except start() and stop().
//
// The kernel lets the program's own thread allocate the pages that it reads ahead, one by one, and that takes longer
// than to copy them. Here a few threads do it: they open the file on the mount themselves and ask the kernel to read
// it ahead. So the kernel orders these reads and all writes as it does with its own. How far the program has come
// shows in its reads: one page of each window, the probe, is left to it.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "observe/counters.h"

namespace gpufs::fuse {

class ReadAhead {
 public:
  explicit ReadAhead(observe::EngineCounters& counters) : counters_(counters) {}
  ~ReadAhead() { stop(); }

  // directory: where the mount is, which must answer already. piece: bytes to ask the kernel for at a time, at most
  // what it reads ahead on this mount. EPERM unless the process may open files by their handles (open_by_handle_at(2)).
  Status start(const std::string& directory, std::uint64_t piece, std::size_t threads);
  // While requests are still answered: a thread may wait for one.
  void stop();

  // Whether a request with this number of a thread (fuse_in_header::pid) is from a thread of this object. Such an OPEN
  // must keep what the kernel has cached.
  [[nodiscard]] bool is_own(std::uint32_t pid) const;
  // The kernel has read these bytes into its cache. file_bytes: the file's size. writable: by a file open for writing.
  void note_read(std::uint32_t pid, std::uint64_t ino, std::uint64_t offset, std::uint64_t bytes,
                 std::uint64_t file_bytes, bool writable);
  // Whether what these threads read of this inode is for a file that is open for writing.
  [[nodiscard]] bool is_for_writer(std::uint64_t ino);

 private:
  static constexpr std::size_t kMostThreads = 4;

  // How a program goes through a file.
  struct Scan {
    std::uint64_t ino = 0;
    std::uint64_t next = 0;  // where its furthest read ended
    std::uint64_t run = 0;   // bytes that it has read near each other
    bool writable = false;   // its file is open for writing
    // The window that is read ahead, and what is before it as far as the program's reads may still be there.
    std::uint64_t begin = 0;
    std::uint64_t probe = 0;
    std::uint64_t end = 0;
  };
  // Ranges that the threads have not read yet.
  struct Window {
    std::uint64_t ino = 0;
    std::uint64_t next = 0;
    std::uint64_t probe = 0;
    std::uint64_t end = 0;
  };

  void work(std::size_t index);
  // Reads until the windows of the first one's file are done.
  void read_windows(std::unique_lock<std::mutex>& lock, int directory);
  [[nodiscard]] Result<UniqueFd> open_directory() const;

  observe::EngineCounters& counters_;
  std::string directory_;
  std::uint64_t piece_ = 0;
  std::uint64_t file_system_ = 0;  // st_dev
  std::vector<std::thread> threads_;
  std::array<std::atomic<std::uint32_t>, kMostThreads> ids_{};
  std::atomic<bool> running_{false};

  std::mutex mutex_;  // guards all below
  std::condition_variable wanted_;
  std::array<Scan, 64> scans_;  // by inode number
  std::deque<Window> windows_;
  bool stopping_ = false;
};

}  // namespace gpufs::fuse
