// Ranges of memory by which a handler of SIGBUS or SIGSEGV recognizes an access, and the handler that was there before.
// Ownership: one SignalRanges for each signal, a global variable.
// Thread-safe. find() and pass_on() are for the handler, which may take no lock: so the slots are in a table of fixed
// size.
#pragma once

#include <signal.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace gpufs {

// Detail: what the handler needs of a range.
template <typename Detail, std::size_t kSlots>
class SignalRanges {
 public:
  using Handler = void (*)(int number, siginfo_t* info, void* context);
  struct Slot {
    // Odd while the range is being changed: start and end belong together if they were read between two equal even
    // numbers.
    std::atomic<std::uint32_t> generation{0};
    std::atomic<std::uintptr_t> start{0};
    std::atomic<std::uintptr_t> end{0};  // 0: free
    Detail detail{};
  };
  static_assert(std::atomic<std::uintptr_t>::is_always_lock_free);

  // Once, before the first range. False: errno says why.
  bool install(int signal, int flags, Handler handler) {
    struct sigaction action = {};
    action.sa_sigaction = handler;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | flags;
    ::sigemptyset(&action.sa_mask);
    return ::sigaction(signal, nullptr, &before_) == 0 && ::sigaction(signal, &action, nullptr) == 0;
  }

  // Calls fill(detail) before the handler can find the range. Null: no slot is free.
  template <typename Fill>
  Slot* add(std::uintptr_t start, std::size_t bytes, Fill fill) {
    const std::lock_guard lock(mutex_);
    const std::size_t count = used_.load(std::memory_order_relaxed);
    std::size_t free = 0;
    while (free < count && slots_[free].end.load(std::memory_order_relaxed) != 0) ++free;
    if (free == kSlots) return nullptr;
    Slot& slot = slots_[free];
    fill(slot.detail);
    change_locked(slot, start, start + bytes);
    if (free == count) used_.store(count + 1, std::memory_order_release);
    return &slot;
  }
  void remove(Slot& slot) {
    const std::lock_guard lock(mutex_);
    change_locked(slot, 0, 0);
  }

  // The range with this address; null: none has it. A range that is being changed is nobody's: what is accessed is in
  // the table before and until after that.
  Slot* find(std::uintptr_t address) {
    const std::size_t count = used_.load(std::memory_order_acquire);
    for (std::size_t i = 0; i < count; ++i) {
      Slot& slot = slots_[i];
      const std::uint32_t generation = slot.generation.load(std::memory_order_acquire);
      const std::uintptr_t start = slot.start.load(std::memory_order_acquire);
      const std::uintptr_t end = slot.end.load(std::memory_order_acquire);
      if (address < start || address >= end || generation % 2 != 0) continue;
      if (slot.generation.load(std::memory_order_relaxed) == generation) return &slot;
    }
    return nullptr;
  }
  // Does what would have happened without this handler.
  void pass_on(int number, siginfo_t* info, void* context) const {
    if ((before_.sa_flags & SA_SIGINFO) != 0) return before_.sa_sigaction(number, info, context);
    if (before_.sa_handler == SIG_IGN && info->si_code <= 0) return;
    if (before_.sa_handler != SIG_DFL && before_.sa_handler != SIG_IGN) return before_.sa_handler(number);
    ::signal(number, SIG_DFL);                // the access is repeated, and ends the process
    if (info->si_code <= 0) ::raise(number);  // a process has sent it
  }
  // Has the handler before get the access when that is repeated.
  void step_aside(int number) const { ::sigaction(number, &before_, nullptr); }

 private:
  // Each store releases the one before, so find() sees the odd number if it sees what follows.
  static void change_locked(Slot& slot, std::uintptr_t start, std::uintptr_t end) {
    const std::uint32_t generation = slot.generation.load(std::memory_order_relaxed);
    slot.generation.store(generation + 1, std::memory_order_relaxed);
    slot.start.store(start, std::memory_order_release);
    slot.end.store(end, std::memory_order_release);
    slot.generation.store(generation + 2, std::memory_order_release);
  }

  struct sigaction before_ = {};  // set before the handler is installed
  std::array<Slot, kSlots> slots_;
  std::atomic<std::size_t> used_{0};  // no slot from here on was ever taken
  std::mutex mutex_;                  // held for one change of the table at a time
};

}  // namespace gpufs
