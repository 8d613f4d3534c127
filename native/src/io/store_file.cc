#include "io/store_file.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>

#include "io/file_io.h"

namespace gpufs {
namespace {

bool allocation_unsupported(int error) {
  return error == EOPNOTSUPP || error == ENOSYS || error == EINVAL || error == EPERM || error == ENODEV;
}

}  // namespace

void StoreFile::prepare_pages(std::uint64_t bytes) {
  // A byte of the store's own range: setting the size would cut off what another writer has appended by now.
  const std::byte last{};
  by_pages_ = file_.operations().write_at(file_.buffered_fd(), &last, 1, offset_ + bytes - 1) == 1;
  if (by_pages_) preallocated_end_ = offset_ + bytes;
}

Status StoreFile::preallocate(std::uint64_t bytes, const std::atomic<bool>& cancelled) {
  int outcome = 0;
  do {
    outcome = file_.operations().allocate(file_.buffered_fd(), 0, offset_, bytes);
  } while (outcome != 0 && errno == EINTR && !cancelled);
  const int error = outcome == 0 ? 0 : errno;
  if (allocation_unsupported(error)) return {};
  preallocated_end_ = offset_ + bytes;  // after a failure, some of it may be there
  if (error == EINTR) return Status(ECANCELED, "cancelled");
  return error == 0 ? Status{} : Status::from_errno(error, "space in the backing file");
}

Status StoreFile::finish(std::uint64_t reached, std::uint64_t touched) {
  if (file_.facts().block_device) return {};
  const std::uint64_t highest = std::max(preallocated_end_, touched == 0 ? 0 : offset_ + touched);
  const std::uint64_t end = reached == 0 ? original_size_ : offset_ + reached;
  if (highest == 0) return {};
  const std::uint64_t size = TRY(size_of(file_));
  const std::uint64_t wanted_size = std::max(end, original_size_);
  // A larger size was set by another writer.
  const bool too_long = size > wanted_size && size <= highest;
  const bool too_short = reached > 0 && size < end;
  // Written pages do not update the modification time; setting the size does.
  const bool unmarked = by_pages_ && reached > 0 && size == wanted_size;
  if (!too_long && !too_short && !unmarked) return {};
  if (TEMP_FAILURE_RETRY(file_.operations().truncate(file_.buffered_fd(), wanted_size)) == 0) return {};
  return Status::from_errno(errno, "setting the backing file's size");
}

Status StoreFile::sync(bool data_only) {
  if (TEMP_FAILURE_RETRY(file_.operations().sync(file_.buffered_fd(), data_only)) == 0) return {};
  return Status::from_errno(errno, "syncing the backing file");
}

}  // namespace gpufs
