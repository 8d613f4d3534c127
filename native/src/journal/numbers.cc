#include "journal/numbers.h"

#include <algorithm>
#include <cstring>
#include <span>

namespace gpufs::journal {
namespace {

constexpr std::uint32_t kKind = 101;          // of the journal's values
constexpr std::uint64_t kReservation = 4096;  // numbers for each record

}  // namespace

Numbers::Numbers(Journal* journal, Of of, std::uint64_t first)
    : journal_(journal), of_(of), next_(first), reserved_(journal == nullptr ? UINT64_MAX : first) {
  if (journal == nullptr) return;
  journal->each(kKind, [&](std::uint64_t id, std::span<const std::byte> value) {
    std::uint64_t reserved = 0;
    if (id != of || value.size() != sizeof reserved) return;
    std::memcpy(&reserved, value.data(), sizeof reserved);
    next_ = reserved_ = std::max(first, reserved);
  });
}

std::uint64_t Numbers::next() {
  const std::uint64_t number = next_.fetch_add(1, std::memory_order_relaxed);
  if (number >= reserved_.load(std::memory_order_acquire)) reserve(number);
  return number;
}

void Numbers::reserve(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  if (number < reserved_.load(std::memory_order_relaxed)) return;
  const std::uint64_t reserved = number + kReservation;
  Transaction change(*journal_);
  change.put({kKind, of_}, std::as_bytes(std::span(&reserved, 1)));
  change.commit();
  reserved_.store(reserved, std::memory_order_release);
}

}  // namespace gpufs::journal
