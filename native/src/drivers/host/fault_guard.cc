#include "drivers/host/fault_guard.h"

#include <sys/mman.h>

#include <cerrno>

#include "base/pages.h"

namespace gpufs {
namespace {

constinit FaultGuard::Ranges guarded;
std::uintptr_t bytes_of_page = 0;  // set before the handler is installed

void on_bus_error(int number, siginfo_t* info, void* context) {
  const int saved = errno;
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  // A signal that a process sent (si_code <= 0) has no address.
  FaultGuard::Ranges::Slot* const found = info->si_code > 0 ? guarded.find(address) : nullptr;
  void* zeros = MAP_FAILED;
  if (found != nullptr) {
    found->detail.store(true, std::memory_order_release);
    // Up to the end of the range: a file that was cut off has nothing there either.
    const std::uintptr_t page = address & ~(bytes_of_page - 1);
    zeros = ::mmap(reinterpret_cast<void*>(page), found->end.load(std::memory_order_acquire) - page,
                   PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  }
  errno = saved;
  if (zeros == MAP_FAILED) guarded.pass_on(number, info, context);
}

Status install() {
  bytes_of_page = page_bytes();
  if (guarded.install(SIGBUS, SA_RESTART, on_bus_error)) return {};
  return Status::from_errno(errno, "installing a handler for SIGBUS");
}

}  // namespace

Result<std::unique_ptr<FaultGuard>> FaultGuard::watch(std::uintptr_t start, std::size_t bytes) {
  static const Status installed = install();
  if (!installed.ok()) return installed;
  Ranges::Slot* const slot = guarded.add(start, bytes, [](std::atomic<bool>& broken) { broken = false; });
  if (slot == nullptr) return Status(ENFILE, "this process shares memory of too many files with other programs");
  return std::unique_ptr<FaultGuard>(new FaultGuard(*slot));
}

FaultGuard::~FaultGuard() { guarded.remove(slot_); }

}  // namespace gpufs
