#include "drivers/host/fault_guard.h"

#include <signal.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <mutex>

#include "base/pages.h"

namespace gpufs {
namespace {

// The handler may take no lock, so the ranges are in a table of fixed size. A slot whose start is 0 is free or being
// changed.
struct GuardSlot {
  std::atomic<std::uintptr_t> start{0};
  std::atomic<std::uintptr_t> end{0};
  std::atomic<bool> broken{false};
};
static_assert(std::atomic<std::uintptr_t>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);

constexpr std::size_t kSlots = 8192;
std::array<GuardSlot, kSlots> slots;
std::atomic<std::size_t> used{0};  // no slot from here on was ever taken
std::mutex change_mutex;           // one change of the table at a time
std::uintptr_t bytes_of_page = 0;  // set before the handler is installed
struct sigaction before;           // the same

void on_bus_error(int number, siginfo_t* info, void* context) {
  const int saved = errno;
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  // A signal that a process sent (si_code <= 0) has no address.
  const std::size_t count = info->si_code > 0 ? used.load(std::memory_order_acquire) : 0;
  for (std::size_t i = 0; i < count; ++i) {
    GuardSlot& slot = slots[i];
    const std::uintptr_t start = slot.start.load(std::memory_order_acquire);
    const std::uintptr_t end = slot.end.load(std::memory_order_acquire);
    if (start == 0 || address < start || address >= end) continue;
    slot.broken.store(true, std::memory_order_release);
    // Up to the end of the range: a file that was cut off has nothing there either.
    const std::uintptr_t page = address & ~(bytes_of_page - 1);
    void* const zeros = ::mmap(reinterpret_cast<void*>(page), end - page, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    if (zeros == MAP_FAILED) break;
    errno = saved;
    return;
  }
  errno = saved;
  // Not ours: what would have happened without this handler.
  if ((before.sa_flags & SA_SIGINFO) != 0) return before.sa_sigaction(number, info, context);
  if (before.sa_handler == SIG_IGN && info->si_code <= 0) return;
  if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) return before.sa_handler(number);
  ::signal(number, SIG_DFL);                // the access is repeated, and ends the process
  if (info->si_code <= 0) ::raise(number);  // a process has sent it
}

Status install() {
  bytes_of_page = page_bytes();
  struct sigaction action = {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  ::sigemptyset(&action.sa_mask);
  if (::sigaction(SIGBUS, nullptr, &before) != 0 || ::sigaction(SIGBUS, &action, nullptr) != 0) {
    return Status::from_errno(errno, "installing a handler for SIGBUS");
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<FaultGuard>> FaultGuard::watch(std::uintptr_t start, std::size_t bytes) {
  const std::lock_guard lock(change_mutex);
  static const Status installed = install();
  if (!installed.ok()) return installed;
  const std::size_t count = used.load(std::memory_order_relaxed);
  std::size_t free = 0;
  while (free < count && slots[free].end.load(std::memory_order_relaxed) != 0) ++free;
  if (free == kSlots) return Status(ENFILE, "this process shares memory of too many files with other programs");
  GuardSlot& slot = slots[free];
  slot.broken.store(false, std::memory_order_relaxed);
  slot.end.store(start + bytes, std::memory_order_release);
  slot.start.store(start, std::memory_order_release);
  if (free == count) used.store(count + 1, std::memory_order_release);
  return std::unique_ptr<FaultGuard>(new FaultGuard(free));
}

FaultGuard::~FaultGuard() {
  const std::lock_guard lock(change_mutex);
  slots[slot_].start.store(0, std::memory_order_release);
  slots[slot_].end.store(0, std::memory_order_release);
}

bool FaultGuard::broken() const { return slots[slot_].broken.load(std::memory_order_acquire); }

}  // namespace gpufs
