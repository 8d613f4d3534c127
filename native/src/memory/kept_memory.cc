#include "memory/kept_memory.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "base/log.h"

namespace gpufs {

KeptMemory::KeptMemory(std::shared_ptr<journal::Journal> journal, std::shared_ptr<KeeperLink> keeper)
    : journal_(std::move(journal)),
      memories_(journal_.get(), journal::NumbersOf::kMemories, 1),
      keys_(journal_.get(), journal::NumbersOf::kMemoryKeys, KeeperLink::kFirstMemory),
      keeper_(std::move(keeper)) {
  const KeeperLink::Held own{KeeperLink::kJournal, journal_->fd()};
  std::map<std::uint64_t, UniqueFd> descriptors;
  for (const auto& [key, descriptor] : keeper_->held_from(KeeperLink::kFirstMemory)) {
    descriptors.emplace(key, UniqueFd(descriptor));
  }
  restoring_ = !descriptors.empty();
  keeper_->hold({&own, 1});
  journal_->each(journal::kMemory, [&](std::uint64_t key, std::span<const std::byte> value) {
    Part part{};
    std::memcpy(&part, value.data(), std::min(value.size(), sizeof part));
    const auto found = descriptors.find(key);
    if (found == descriptors.end()) return;  // the memory was being released
    untaken_[part.memory].push_back({part.where, key, std::move(found->second)});
    descriptors.erase(found);
  });
  for (const auto& [key, descriptor] : descriptors) {
    keeper_->forget(key);
    untaken_[0].push_back({{}, key, {}});
  }
}

std::uint64_t KeptMemory::hold(std::uint64_t memory, std::uint64_t offset, std::uint64_t bytes, int descriptor) {
  const Part part{memory, {offset, bytes}};
  const KeeperLink::Held held{keys_.next(), descriptor};
  keeper_->hold({&held, 1});
  journal::Transaction change(*journal_);
  change.put({journal::kMemory, held.key}, std::as_bytes(std::span(&part, 1)));
  change.commit();
  return held.key;
}

void KeptMemory::drop(std::uint64_t key) {
  {
    const std::lock_guard lock(mutex_);
    if (lost_.erase(key) != 0) return;
    if (restoring_) {
      untaken_[0].push_back({{}, key, {}});
      keeper_->forget(key);  // the caller closes it
      return;
    }
  }
  journal::Transaction change(*journal_);
  change.remove({journal::kMemory, key});
  change.commit();
  keeper_->drop({&key, 1});
}

std::uint64_t KeptMemory::lose(const Status& reason) {
  const std::uint64_t key = keys_.next();
  const std::lock_guard lock(mutex_);
  if (lost_.empty()) log_warning("this mount does not survive its daemon at the moment: ", reason.message());
  lost_.insert(key);
  reason_ = reason;
  return key;
}

std::vector<MemoryKeeper::KeptPiece> KeptMemory::take(std::uint64_t memory) {
  const std::lock_guard lock(mutex_);
  std::vector<KeptPiece> pieces;
  if (auto found = untaken_.extract(memory)) pieces = std::move(found.mapped());
  std::ranges::sort(pieces, {}, &KeptPiece::offset);
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

Status KeptMemory::health() const {
  const std::lock_guard lock(mutex_);
  return lost_.empty() ? Status() : reason_;
}

}  // namespace gpufs
