#include "io/backing_file.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <linux/stat.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <string_view>
#include <utility>

#include "base/pages.h"
#include "io/file_io.h"
#include "io/io_options.h"

namespace gpufs {
namespace {

constexpr std::string_view kOwnType = "fuse.gpufs";

// Types whose files exist in the page cache alone.
constexpr std::array<std::string_view, 4> kInMemory = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"};
// On local disks. A file system that is not listed may stop responding.
constexpr std::array<std::string_view, 18> kLocal = {"ext2",  "ext3",     "ext4", "xfs",     "btrfs",   "zfs",
                                                     "f2fs",  "bcachefs", "vfat", "exfat",   "ntfs3",   "jfs",
                                                     "erofs", "squashfs", "udf",  "iso9660", "overlay", "nilfs2"};
constexpr std::array<std::string_view, 13> kRemote = {
    "nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "beegfs", "wekafs", "gpfs", "afs", "orangefs", "virtiofs"};

template <std::size_t N>
bool contains(const std::array<std::string_view, N>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Whether opening a file again checks its mode and owner alone. Elsewhere it may grant more than the descriptor does:
// /proc/PID/mem is bound to a program when it is opened, so opening it again after that process has become a set-id
// program would expose that program's memory.
bool may_open_again(const BackingFacts& facts) {
  const std::string& type = facts.file_system;
  return facts.block_device || contains(kInMemory, type) || contains(kLocal, type) || contains(kRemote, type) ||
         type == "fuse" || type.starts_with("fuse.");
}

// Opens the file behind `fd` again, with a description of its own: a client could change the flags of a shared one
// during a transfer. O_NONBLOCK: a file lease must not block us.
UniqueFd open_again(int fd, int flags, int more) {
  const int kept = flags & (O_ACCMODE | O_SYNC | O_DSYNC);
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  UniqueFd opened(::open(path.c_str(), kept | more | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
  if (opened.valid() && ::fcntl(opened.get(), F_SETFL, kept | more) != 0) opened.reset();
  return opened;
}

struct MountEntry {
  std::string type;     // "ext4"; "" if the mount is not visible to this process
  std::string options;  // of the file system: "rw,data=journal"
};

// Looks the file's mount up in /proc/self/mountinfo, where a line is
// "36 35 98:0 /root /mount/point rw,noatime shared:1 master:2 - ext4 /dev/sda rw,data=ordered".
Result<MountEntry> find_mount(const struct statx& status) {
  std::ifstream table("/proc/self/mountinfo");
  if (!table) return Status::from_errno(errno, "/proc/self/mountinfo");
  std::string found;
  for (std::string line; std::getline(table, line);) {
    std::uint64_t id = 0;
    unsigned major = 0;
    unsigned minor = 0;
    if (std::sscanf(line.c_str(), "%" SCNu64 " %*u %u:%u", &id, &major, &minor) != 3) continue;
    if (id == status.stx_mnt_id) {
      found = line;
      break;
    }
    // Mounted in another namespace, or moved: the device number is the same everywhere.
    if (found.empty() && major == status.stx_dev_major && minor == status.stx_dev_minor) found = line;
  }
  MountEntry mount;
  // The number of fields before the dash varies. Blanks in paths are written as \040.
  const std::size_t dash = found.find(" - ");
  if (dash != std::string::npos) {
    std::string source;
    std::istringstream(found.substr(dash + 3)) >> mount.type >> source >> mount.options;
  }
  return mount;
}

// The value of "name=value" in a comma separated list; empty if it is not there.
std::string option_value(const std::string& options, const std::string& name) {
  std::istringstream list(options);
  for (std::string option; std::getline(list, option, ',');) {
    if (option.starts_with(name + "=")) return option.substr(name.size() + 1);
  }
  return {};
}

constexpr std::uint32_t kUniqueMountId = 0x4000;  // STATX_MNT_ID_UNIQUE, since Linux 6.8: never given twice
constexpr std::size_t kMostMounts = 1000;

// As find_mount(), which reads a line for each mount of the machine, once for each mount.
Result<MountEntry> known_mount(int fd, const struct statx& status) {
  static std::mutex mutex;
  static std::map<std::uint64_t, MountEntry> known;
  struct statx unique {};
  const bool lasts = ::statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, kUniqueMountId, &unique) == 0 &&
                     (unique.stx_mask & kUniqueMountId) != 0;
  if (!lasts) return find_mount(status);
  {
    const std::lock_guard lock(mutex);
    if (const auto found = known.find(unique.stx_mnt_id); found != known.end()) return found->second;
  }
  MountEntry mount = TRY(find_mount(status));
  const std::lock_guard lock(mutex);
  if (known.size() >= kMostMounts) known.clear();
  return known.insert_or_assign(unique.stx_mnt_id, std::move(mount)).first->second;
}

struct Looked {
  int flags = 0;
  struct statx status = {};
  MountEntry mount;
};

// Finds what a descriptor refers to, without a request to its file system.
Result<Looked> look_at(int fd) {
  Looked looked;
  looked.flags = ::fcntl(fd, F_GETFL);
  if (looked.flags < 0) return Status::from_errno(errno, "the backing file's descriptor");
  if ((looked.flags & O_PATH) != 0) return Status(EBADF, "a descriptor opened with O_PATH cannot be read or written");
  if ((looked.flags & O_ACCMODE) == O_ACCMODE) {
    return Status(EBADF, "the descriptor is open for neither reading nor writing");
  }
  // Without synchronising, so that the kernel answers for a file of our own mount.
  if (::statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_TYPE | STATX_INO | STATX_MNT_ID | STATX_DIOALIGN,
              &looked.status) != 0) {
    return Status::from_errno(errno, "the backing file's attributes");
  }
  Result<MountEntry> mount = known_mount(fd, looked.status);
  if (!mount.ok()) return mount.status();
  looked.mount = mount.take();
  if (looked.mount.type == kOwnType) {
    return Status(EDEADLK, "the backing file is on a mount of gpufs: a transfer would wait for itself");
  }
  return looked;
}

std::uint32_t valid_alignment(std::uint32_t value, std::uint32_t otherwise) {
  return std::has_single_bit(value) ? value : otherwise;
}

}  // namespace

void judge_file_system(const std::string& type, const std::string& super_options, BackingFacts& facts) {
  facts.file_system = type;
  facts.always_hot = contains(kInMemory, type);
  facts.may_hang = !facts.always_hot && !contains(kLocal, type);
  if (facts.block_device) return;  // the file system of its node does not matter
  if (type == "xfs") return;
  if (type != "ext4") {
    facts.fastpath_refusals |= mask_of(Refusal::kFileSystem);
    return;
  }
  const std::string journal = option_value(super_options, "data");  // not listed if it is the default, ordered
  if (!journal.empty() && journal != "ordered") facts.fastpath_refusals |= mask_of(Refusal::kMountOptions);
}

Result<std::shared_ptr<BackingFile>> BackingFile::open(int fd) { return open(fd, FileOps::system()); }

Result<std::shared_ptr<BackingFile>> BackingFile::open(int fd, FileOps& operations) {
  // Before `fd` is duplicated, since even closing a duplicate sends a request to a mount of our own.
  Looked seen = TRY(look_at(fd));
  UniqueFd held(::fcntl(fd, F_DUPFD_CLOEXEC, 3));
  if (!held.valid()) return Status::from_errno(errno, "the backing file's descriptor");
  const struct statx& status = seen.status;
  const int flags = seen.flags;
  const int access = flags & O_ACCMODE;
  if (S_ISDIR(status.stx_mode)) return Status(EISDIR, "the backing file is a directory");
  if (!S_ISREG(status.stx_mode) && !S_ISBLK(status.stx_mode)) {
    return Status(EINVAL, "the backing file is neither a regular file nor a block device");
  }

  BackingFacts facts;
  facts.block_device = S_ISBLK(status.stx_mode);
  facts.readable = access != O_WRONLY;
  facts.writable = access != O_RDONLY;
  facts.append = (flags & O_APPEND) != 0;
  facts.disk = facts.block_device ? ::makedev(status.stx_rdev_major, status.stx_rdev_minor)
                                  : ::makedev(status.stx_dev_major, status.stx_dev_minor);
  judge_file_system(seen.mount.type, seen.mount.options, facts);
  if (facts.block_device) {
    // The node's file system says nothing about the device.
    facts.always_hot = false;
    facts.may_hang = false;
  }

  bool direct_possible = !facts.always_hot;
  if ((status.stx_mask & STATX_DIOALIGN) != 0) {
    if (status.stx_dio_offset_align == 0) direct_possible = false;
    facts.offset_align = valid_alignment(status.stx_dio_offset_align, kPageBytes);
    facts.memory_align = valid_alignment(status.stx_dio_mem_align, kPageBytes);
  } else if (facts.block_device) {
    int sector = 0;
    if (::ioctl(held.get(), BLKSSZGET, &sector) == 0 && sector > 0) {
      facts.offset_align = valid_alignment(static_cast<std::uint32_t>(sector), kPageBytes);
    }
  }
  if (facts.offset_align > kSmallestChunk) {
    direct_possible = false;
    facts.offset_align = kPageBytes;
  }
  facts.unit = std::max(facts.offset_align, kPageBytes);

  UniqueFd buffered;
  UniqueFd direct;
  if (may_open_again(facts)) buffered = open_again(held.get(), flags, 0);
  if (buffered.valid()) {
    if (direct_possible) direct = open_again(held.get(), flags, O_DIRECT);
  } else {
    buffered = std::move(held);
  }
  if (!direct.valid()) facts.fastpath_refusals |= mask_of(Refusal::kNoDirectDescriptor);
  return adopt(std::move(buffered), std::move(direct), std::move(facts), operations);
}

std::shared_ptr<BackingFile> BackingFile::adopt(UniqueFd buffered, UniqueFd direct, BackingFacts facts,
                                                FileOps& operations) {
  return std::shared_ptr<BackingFile>(
      new BackingFile(std::move(buffered), std::move(direct), std::move(facts), operations));
}

Result<FastpathFile*> BackingFile::fastpath_file(Fastpath& path) {
  const std::lock_guard lock(fastpath_mutex_);
  if (!fastpath_status_.ok()) return fastpath_status_;
  if (fastpath_file_ == nullptr) {
    Result<std::unique_ptr<FastpathFile>> attached = path.attach(*this);
    if (!attached.ok()) {
      fastpath_status_ = attached.status();
      return fastpath_status_;
    }
    fastpath_file_ = attached.take();
  }
  return fastpath_file_.get();
}

}  // namespace gpufs
