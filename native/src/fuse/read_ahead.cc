#include "fuse/read_ahead.h"

#include <fcntl.h>
#include <linux/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "base/log.h"
#include "base/pages.h"
#include "base/thread.h"
#include "fuse/protocol.h"

namespace gpufs::fuse {

namespace {

// So much in a row makes a scan. A fault at a random place reads up to 4 MiB around it.
constexpr std::uint64_t kScanBytes = std::uint64_t{8} << 20;
// The kernel sends several requests at once, and they may arrive in any order.
constexpr std::uint64_t kNearBytes = std::uint64_t{4} << 20;
// Several times what a reader takes in the time that a request needs.
constexpr std::uint64_t kWindowBytes = std::uint64_t{32} << 20;
constexpr std::size_t kMostWindows = 16;
constexpr std::chrono::milliseconds kLinger{20};

// A handle of a file on FUSE as exportfs has it: the number of the inode, high half first, and its generation.
constexpr int kHandleType = 0x81;  // FILEID_INO64_GEN
struct FileHandle {
  unsigned int bytes = 3 * sizeof(std::uint32_t);
  int type = kHandleType;
  std::uint32_t ino_high = 0;
  std::uint32_t ino_low = 0;
  std::uint32_t generation = 0;
};
static_assert(offsetof(FileHandle, ino_high) == sizeof(file_handle));

UniqueFd open_inode(int directory, std::uint64_t ino) {
  FileHandle handle;
  handle.ino_high = static_cast<std::uint32_t>(ino >> 32);
  handle.ino_low = static_cast<std::uint32_t>(ino);
  constexpr int kFlags = O_RDONLY | O_CLOEXEC | O_NOATIME | O_NONBLOCK;
  return UniqueFd(::open_by_handle_at(directory, reinterpret_cast<file_handle*>(&handle), kFlags));
}

}  // namespace

Status ReadAhead::start(const std::string& directory, std::uint64_t piece, std::size_t threads) {
  directory_ = directory;
  piece_ = piece;
  const Status possible = run_apart("gpufs-ahead", [this]() -> Status {
    struct stat found {};
    if (::stat(directory_.c_str(), &found) != 0) return Status::from_errno(errno, directory_);
    file_system_ = found.st_dev;
    const UniqueFd root = TRY(open_directory());
    return open_inode(root.get(), FUSE_ROOT_ID).valid() ? Status() : Status::from_errno(errno, "opening by a handle");
  });
  if (!possible.ok()) return possible;
  running_ = true;
  for (std::size_t index = 0; index < std::min(threads, kMostThreads); ++index) {
    threads_.push_back(TRY(start_thread("gpufs-ahead-" + std::to_string(index), [this, index] { work(index); })));
  }
  return {};
}

void ReadAhead::stop() {
  running_ = false;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wanted_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

bool ReadAhead::is_own(std::uint32_t pid) const {
  return running_ && std::ranges::any_of(ids_, [pid](const auto& id) { return id == pid; });
}

void ReadAhead::note_read(std::uint32_t pid, std::uint64_t ino, std::uint64_t offset, std::uint64_t bytes,
                          std::uint64_t file_bytes, bool writable) {
  if (!running_ || is_own(pid)) return;
  const std::lock_guard lock(mutex_);
  Scan& scan = scans_[ino % scans_.size()];
  if (scan.ino != ino) scan = Scan{.ino = ino};
  scan.writable = writable;
  if (offset >= scan.begin && offset < scan.end) {
    if (offset < scan.probe) return;
  } else {
    const bool continues = offset <= scan.next + kNearBytes && offset + kNearBytes >= scan.next;
    scan.run = continues ? scan.run + bytes : bytes;
    scan.next = continues ? std::max(scan.next, offset + bytes) : offset + bytes;
    if (scan.run < kScanBytes) return;
    scan.end = scan.next;
  }
  const Window window{ino, scan.end, scan.end + kWindowBytes / 2, std::min(scan.end + kWindowBytes, file_bytes)};
  scan.begin = offset;
  scan.probe = window.probe;
  scan.end += kWindowBytes;
  if (window.next >= window.end || windows_.size() >= kMostWindows) return;
  windows_.push_back(window);
  wanted_.notify_all();
}

bool ReadAhead::is_for_writer(std::uint64_t ino) {
  const std::lock_guard lock(mutex_);
  const Scan& scan = scans_[ino % scans_.size()];
  return scan.ino == ino && scan.writable;
}

void ReadAhead::work(std::size_t index) {
  if (const Status apart = leave_descriptors(); !apart.ok()) {
    return log_warning("no reading ahead of mappings: ", apart.message());
  }
  ids_[index] = static_cast<std::uint32_t>(::gettid());
  UniqueFd directory;
  std::unique_lock lock(mutex_);
  const auto anything = [this] { return stopping_ || !windows_.empty(); };
  for (;;) {
    // Without work nothing stays open: the mount's connection would outlive an unmount.
    if (!wanted_.wait_for(lock, kLinger, anything)) {
      directory.reset();
      wanted_.wait(lock, anything);
    }
    if (stopping_) return;
    if (!directory.valid()) {
      lock.unlock();
      Result<UniqueFd> opened = open_directory();
      if (opened.ok()) directory = opened.take();
      lock.lock();
    }
    if (!windows_.empty()) read_windows(lock, directory.get());
  }
}

void ReadAhead::read_windows(std::unique_lock<std::mutex>& lock, int directory) {
  const std::uint64_t ino = windows_.front().ino;
  lock.unlock();
  const UniqueFd file = open_inode(directory, ino);
  lock.lock();
  while (!stopping_ && !windows_.empty() && windows_.front().ino == ino) {
    Window& window = windows_.front();
    if (window.next == window.probe) window.next += kPageBytes;
    const std::uint64_t start = window.next;
    const std::uint64_t limit = start < window.probe ? std::min(window.probe, window.end) : window.end;
    const std::uint64_t end = std::min(start + piece_, limit);
    window.next = end;
    if (end >= window.end) windows_.pop_front();
    if (!file.valid() || start >= end) continue;
    lock.unlock();
    const auto bytes = static_cast<off_t>(end - start);
    (void)::posix_fadvise(file.get(), static_cast<off_t>(start), bytes, POSIX_FADV_WILLNEED);
    count(counters_.read_ahead_bytes, end - start);
    lock.lock();
  }
}

// The root of the mount, by way of a copy of the mount that is nowhere in the tree of files: what is open there does
// not keep the mount itself busy.
Result<UniqueFd> ReadAhead::open_directory() const {
  const UniqueFd copy(static_cast<int>(::syscall(SYS_open_tree, AT_FDCWD, directory_.c_str(),
                                                 OPEN_TREE_CLONE | static_cast<unsigned>(OPEN_TREE_CLOEXEC))));
  if (!copy.valid()) return Status::from_errno(errno, "a copy of the mount at " + directory_);
  UniqueFd directory(::openat(copy.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOATIME));
  struct statx found {};
  if (!directory.valid() || ::statx(directory.get(), "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_TYPE, &found) != 0) {
    return Status::from_errno(errno, directory_);
  }
  if (::makedev(found.stx_dev_major, found.stx_dev_minor) != file_system_) {
    return Status(ENOENT, "another file system is mounted at " + directory_);
  }
  return directory;
}

}  // namespace gpufs::fuse
