#include "memory/kept_memory.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <span>
#include <utility>

#include "base/log.h"

namespace gpufs {
namespace {

constexpr int kQueueTimeout = 5000;   // milliseconds
constexpr int kSettleTimeout = 1000;  // milliseconds

}  // namespace

KeptMemory::KeptMemory(std::shared_ptr<journal::Journal> journal, int keeper, std::vector<Held> held)
    : journal_(std::move(journal)),
      memories_(journal_.get(), journal::NumbersOf::kMemories, 1),
      keys_(journal_.get(), journal::NumbersOf::kMemoryKeys, kFirstKey),
      keeper_(keeper),
      restoring_(!held.empty()) {
  std::map<std::uint64_t, UniqueFd> descriptors;
  for (Held& each : held) {
    descriptors.emplace(each.key, std::move(each.descriptor));
  }
  journal_->each(journal::kMemory, [&](std::uint64_t key, std::span<const std::byte> value) {
    Part part{};
    std::memcpy(&part, value.data(), std::min(value.size(), sizeof part));
    const auto found = descriptors.find(key);
    if (found == descriptors.end()) return;  // the memory was being released
    untaken_[part.memory].push_back({part.where, key, std::move(found->second)});
    descriptors.erase(found);
  });
  for (const auto& [key, descriptor] : descriptors) untaken_[0].push_back({{}, key, {}});
}

std::uint64_t KeptMemory::hold(std::uint64_t memory, std::uint64_t offset, std::uint64_t bytes, int descriptor) {
  const Part part{memory, {offset, bytes}};
  const std::uint64_t key = keys_.next();
  const std::lock_guard lock(mutex_);
  held_.emplace(key, descriptor);
  send_locked(keeper::Kind::kHold, key, descriptor);
  journal::Transaction change(*journal_);
  change.put({journal::kMemory, key}, std::as_bytes(std::span(&part, 1)));
  change.commit();
  return key;
}

void KeptMemory::drop(std::uint64_t key) {
  const std::lock_guard lock(mutex_);
  held_.erase(key);
  if (restoring_) {
    untaken_[0].push_back({{}, key, {}});
    return;
  }
  journal::Transaction change(*journal_);
  change.remove({journal::kMemory, key});
  change.commit();
  send_locked(keeper::Kind::kDrop, key, -1);
}

void KeptMemory::settle() {
  const UniqueFd settled(::eventfd(0, EFD_CLOEXEC));
  if (!settled.valid()) return;
  {
    const std::lock_guard lock(mutex_);
    send_locked(keeper::Kind::kSettle, 0, settled.get());
    if (!health_.ok()) return;
  }
  pollfd answer{settled.get(), POLLIN, 0};
  static_cast<void>(::poll(&answer, 1, kSettleTimeout));
}

void KeptMemory::lose(const Status& reason) {
  const std::lock_guard lock(mutex_);
  if (!lost_.ok()) return;
  lost_ = reason;
  log_warning("this mount does not survive its daemon: ", reason.message());
}

std::vector<MemoryKeeper::KeptPiece> KeptMemory::take(std::uint64_t memory) {
  const std::lock_guard lock(mutex_);
  std::vector<KeptPiece> pieces;
  if (auto found = untaken_.extract(memory)) pieces = std::move(found.mapped());
  std::ranges::sort(pieces, {}, &KeptPiece::offset);
  for (const KeptPiece& piece : pieces) held_.emplace(piece.key, piece.descriptor.get());
  return pieces;
}

void KeptMemory::drop_untaken() {
  std::map<std::uint64_t, std::vector<KeptPiece>> untaken;
  {
    const std::lock_guard lock(mutex_);
    restoring_ = false;
    untaken.swap(untaken_);
  }
  for (const auto& [memory, pieces] : untaken) {
    for (const KeptPiece& piece : pieces) drop(piece.key);
  }
}

void KeptMemory::hold_again() {
  const std::lock_guard lock(mutex_);
  health_ = {};
  for (const auto& [key, descriptor] : held_) send_locked(keeper::Kind::kHold, key, descriptor);
}

void KeptMemory::end() {
  const std::lock_guard lock(mutex_);
  health_ = Status(ESHUTDOWN, "the mount has ended");
}

Status KeptMemory::health() const {
  const std::lock_guard lock(mutex_);
  return lost_.ok() ? health_ : lost_;
}

void KeptMemory::send_locked(keeper::Kind kind, std::uint64_t key, int descriptor) {
  if (!health_.ok()) return;  // until hold_again()
  const std::span<const int> descriptors(&descriptor, descriptor >= 0 ? 1 : 0);
  ssize_t sent = 0;
  for (;;) {
    sent = keeper::send(keeper_, kind, {&key, 1}, descriptors);
    if (sent >= 0 || (errno != EINTR && errno != EAGAIN)) break;
    // The socket does not block: its queue is full.
    pollfd queue{keeper_, POLLOUT, 0};
    if (errno == EAGAIN && ::poll(&queue, 1, kQueueTimeout) == 0) break;
  }
  if (sent >= 0) return;
  health_ = Status::from_errno(errno, "the keeper does not take descriptors");
  ::shutdown(keeper_, SHUT_RDWR);  // the control plane sees that, and starts another one
  log_warning("this mount does not survive its daemon at the moment: ", health_.message());
}

}  // namespace gpufs
