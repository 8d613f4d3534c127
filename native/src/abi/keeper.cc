// The functions of the C interface for the keeper of descriptors.

#include <span>
#include <vector>

#include "abi/barrier.h"
#include "abi/handles.h"
#include "base/keeper_messages.h"
#include "base/unique_fd.h"
#include "gpufs.h"
#include "journal/keeper_link.h"

namespace gpufs {
namespace {

std::vector<KeeperLink::Held> all_of(const gpufs_kept_fd* held, uint64_t count) {
  std::vector<KeeperLink::Held> all;
  for (const gpufs_kept_fd& each : std::span(held, count)) all.push_back({each.key, each.fd});
  return all;
}

}  // namespace

extern "C" {

gpufs_status gpufs_keeper_open(const char* program, const char* mountpoint, int32_t socket, const gpufs_kept_fd* held,
                               uint64_t count, gpufs_handle* keeper) {
  return catch_all([&] {
    return open_handle<KeeperLink>(KeeperLink::open(program, mountpoint, UniqueFd(socket), all_of(held, count)), 0,
                                   keeper);
  });
}

gpufs_status gpufs_keeper_hold(gpufs_handle keeper, const gpufs_kept_fd* held, uint64_t count) {
  return with_handle<KeeperLink>(keeper, [&](KeeperLink& link) { link.hold(all_of(held, count)); });
}

gpufs_status gpufs_keeper_drop(gpufs_handle keeper, const uint64_t* keys, uint64_t count) {
  return with_handle<KeeperLink>(keeper, [&](KeeperLink& link) { link.drop(std::span(keys, count)); });
}

gpufs_status gpufs_keeper_note(gpufs_handle keeper, uint32_t kind, const uint64_t* numbers, uint64_t count,
                               int32_t fd) {
  return with_handle<KeeperLink>(keeper, [&](KeeperLink& link) -> Status {
    UniqueFd descriptor(fd);
    link.note(static_cast<keeper::Kind>(kind), std::span(numbers, count), std::move(descriptor));
    return {};
  });
}

gpufs_status gpufs_keeper_health(gpufs_handle keeper) {
  return with_handle<KeeperLink>(keeper, [&](KeeperLink& link) { return link.health(); });
}

gpufs_status gpufs_keeper_end(gpufs_handle keeper) {
  return with_handle<KeeperLink>(keeper, [&](KeeperLink& link) { link.end(); });
}

}  // extern "C"

}  // namespace gpufs
