#include "drivers/host/host_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "base/log.h"
#include "base/math.h"
#include "drivers/host/host_device.h"

namespace gpufs {
namespace {

// A signal makes fallocate(2) of a memfd undo all its work. In steps, a signal costs one step only.
constexpr std::uint64_t kAllocateStep = std::uint64_t{256} << 20;

int retrying_fallocate(int fd, int mode, std::uint64_t offset, std::uint64_t bytes) {
  while (::fallocate(fd, mode, static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

int punch(int fd, std::uint64_t offset, std::uint64_t bytes) {
  return retrying_fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes);
}

}  // namespace

HostFile::HostFile(UniqueFd fd, std::shared_ptr<Ledger> limit, std::shared_ptr<SharedHostFiles> shared,
                   std::shared_ptr<MemoryKeeper> keeper, std::uint64_t number, std::uint64_t key)
    : keeper_(std::move(keeper)),
      number_(number),
      key_(key),
      fd_(std::move(fd)),
      limit_(std::move(limit)),
      all_shared_(std::move(shared)) {}

HostFile::~HostFile() {
  if (number_ != 0) keeper_->drop(key_);
  limit_->give(own_.size() * kHostGranule);
}

Result<std::shared_ptr<HostFile>> HostFile::create(std::shared_ptr<Ledger> limit,
                                                   std::shared_ptr<SharedHostFiles> shared,
                                                   std::shared_ptr<MemoryKeeper> keeper) {
  UniqueFd fd(::memfd_create("gpufs-buffer", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return Status::from_errno(errno, "creating a memfd");
  // Other programs get descriptors of it (export_memory()). They must not be able to open a read-only one for writing,
  // nor to make the memory smaller under this process, which would die of SIGBUS.
  if (::fchmod(fd.get(), S_IRUSR) != 0) return Status::from_errno(errno, "setting the mode of a memfd");
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL) != 0) {
    return Status::from_errno(errno, "sealing a memfd");
  }
  std::uint64_t number = 0;
  std::uint64_t key = 0;
  if (keeper != nullptr) {
    number = keeper->new_memory();
    key = keeper->hold(number, 0, 0, fd.get());
  }
  return std::shared_ptr<HostFile>(
      new HostFile(std::move(fd), std::move(limit), std::move(shared), std::move(keeper), number, key));
}

Result<std::shared_ptr<HostFile>> HostFile::restore(std::shared_ptr<Ledger> limit,
                                                    std::shared_ptr<SharedHostFiles> shared,
                                                    std::shared_ptr<MemoryKeeper> keeper, std::uint64_t number,
                                                    std::span<const Extent> populated) {
  std::vector<MemoryKeeper::Piece> kept = keeper->take(number);
  if (kept.size() != 1) return Status(ENOENT, "memory " + std::to_string(number) + " was not kept");
  const std::shared_ptr<HostFile> file(new HostFile(std::move(kept.front().descriptor), std::move(limit),
                                                    std::move(shared), std::move(keeper), number, kept.front().key));
  for (const auto& [offset, bytes] : populated) {
    if (!file->limit_->take(bytes)) return Status(ENOSPC, "the device has become smaller than its files");
    for (std::uint64_t granule = offset; granule < offset + bytes; granule += kHostGranule) file->own_.insert(granule);
  }
  file->share();  // other programs may have it still
  file->release_foreign();
  return file;
}

Status HostFile::allocate(std::uint64_t offset, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (!limit_->take(bytes)) {
    return Status(ENOSPC, "No space left on device for " + std::to_string(bytes) + " bytes more");
  }
  int error = shared_ ? punch(fd(), offset, bytes) : 0;
  for (std::uint64_t done = 0; done < bytes && error == 0; done += kAllocateStep) {
    error = retrying_fallocate(fd(), 0, offset + done, std::min(kAllocateStep, bytes - done));
  }
  if (error != 0) {
    limit_->give(bytes);
    const int undone = punch(fd(), offset, bytes);
    if (undone != 0) log_error("releasing memory after a failure: errno ", undone);
    // The machine has less than the limit promised, or a limit of the process (RLIMIT_FSIZE) is lower: to a file's
    // user both are a full device.
    if (error == ENOMEM || error == EFBIG) error = ENOSPC;
    return Status::from_errno(error, "taking " + std::to_string(bytes) + " bytes of memory");
  }
  for (std::uint64_t granule = offset; granule < offset + bytes; granule += kHostGranule) own_.insert(granule);
  return {};
}

int HostFile::release(std::uint64_t offset, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const int error = punch(fd(), offset, bytes);
  own_.erase(own_.lower_bound(offset), own_.lower_bound(offset + bytes));
  limit_->give(bytes);
  return error;
}

void HostFile::share() {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(shared_, true)) return;
  }
  all_shared_->add(weak_from_this());
}

void HostFile::release_foreign() {
  const std::lock_guard lock(mutex_);
  struct stat found = {};
  if (::fstat(fd(), &found) != 0) return;
  if (static_cast<std::uint64_t>(found.st_blocks) * 512 <= own_.size() * kHostGranule) return;
  std::uint64_t at = 0;
  for (const std::uint64_t granule : own_) {
    if (granule > at) static_cast<void>(punch(fd(), at, granule - at));
    at = granule + kHostGranule;
  }
  const auto end = static_cast<std::uint64_t>(found.st_size);
  if (end > at) static_cast<void>(punch(fd(), at, end - at));
}

void SharedHostFiles::add(std::weak_ptr<HostFile> file) {
  const std::lock_guard lock(mutex_);
  files_.push_back(std::move(file));
}

void SharedHostFiles::release_foreign() {
  std::vector<std::shared_ptr<HostFile>> alive;  // the last reference may go here: after the lock
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(files_, [&alive](const std::weak_ptr<HostFile>& file) {
      alive.push_back(file.lock());
      return alive.back() == nullptr;
    });
  }
  for (const std::shared_ptr<HostFile>& file : alive) {
    if (file != nullptr) file->release_foreign();
  }
}

}  // namespace gpufs
