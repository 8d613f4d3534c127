#include "drivers/host/write_notice.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <string>

namespace gpufs {
namespace {

// The handler may take no lock, so the texts are in a table of fixed size. A slot whose start is 0 is free or being
// changed. Longer texts lose their beginning, as the directories of a path.
struct NoticeSlot {
  std::atomic<std::uintptr_t> start{0};
  std::atomic<std::uintptr_t> end{0};
  std::atomic<std::size_t> length{0};
  std::array<char, 1000> text{};
};
static_assert(std::atomic<std::uintptr_t>::is_always_lock_free && std::atomic<std::size_t>::is_always_lock_free);

constexpr std::size_t kNotices = 4096;
std::array<NoticeSlot, kNotices> notices;
std::atomic<std::size_t> notices_used{0};  // no slot from here on was ever taken
std::mutex notices_mutex;                  // one change of the table at a time
std::atomic<bool> explained{false};
struct sigaction handler_before;  // set before the handler is installed

bool explain(std::uintptr_t address) {
  const std::size_t count = notices_used.load(std::memory_order_acquire);
  for (std::size_t i = 0; i < count; ++i) {
    NoticeSlot& slot = notices[i];
    const std::uintptr_t start = slot.start.load(std::memory_order_acquire);
    if (start == 0 || address < start || address >= slot.end.load(std::memory_order_acquire)) continue;
    if (!explained.exchange(true)) {
      [[maybe_unused]] const ssize_t written =
          ::write(STDERR_FILENO, slot.text.data(), slot.length.load(std::memory_order_relaxed));
    }
    return true;
  }
  return false;
}

void on_violation(int number, siginfo_t* info, void* context) {
  const int saved = errno;
  const bool ours = info->si_code == SEGV_ACCERR && explain(reinterpret_cast<std::uintptr_t>(info->si_addr));
  if (ours) ::sigaction(number, &handler_before, nullptr);  // the handler before gets the write when that is repeated
  errno = saved;
  if (ours) return;
  if ((handler_before.sa_flags & SA_SIGINFO) != 0) return handler_before.sa_sigaction(number, info, context);
  if (handler_before.sa_handler == SIG_IGN && info->si_code <= 0) return;
  if (handler_before.sa_handler != SIG_DFL && handler_before.sa_handler != SIG_IGN) {
    return handler_before.sa_handler(number);
  }
  ::signal(number, SIG_DFL);                // the access is repeated, and ends the process
  if (info->si_code <= 0) ::raise(number);  // a process has sent it
}

bool install_handler() {
  struct sigaction action = {};
  action.sa_sigaction = on_violation;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  ::sigemptyset(&action.sa_mask);
  return ::sigaction(SIGSEGV, nullptr, &handler_before) == 0 && ::sigaction(SIGSEGV, &action, nullptr) == 0;
}

}  // namespace

std::unique_ptr<WriteNotice> WriteNotice::watch(std::uintptr_t start, std::size_t bytes, std::string_view text) {
  const std::lock_guard lock(notices_mutex);
  static const bool installed = install_handler();
  const std::size_t count = notices_used.load(std::memory_order_relaxed);
  std::size_t free = 0;
  while (free < count && notices[free].end.load(std::memory_order_relaxed) != 0) ++free;
  if (!installed || free == kNotices) return nullptr;
  NoticeSlot& slot = notices[free];
  std::string line = "gpufs: ";
  const std::size_t space = slot.text.size() - line.size() - 1;
  line += text.size() > space ? text.substr(text.size() - space) : text;
  line += '\n';
  std::copy(line.begin(), line.end(), slot.text.begin());
  slot.length.store(line.size(), std::memory_order_relaxed);
  slot.end.store(start + bytes, std::memory_order_release);
  slot.start.store(start, std::memory_order_release);
  if (free == count) notices_used.store(count + 1, std::memory_order_release);
  return std::unique_ptr<WriteNotice>(new WriteNotice(free));
}

WriteNotice::~WriteNotice() {
  const std::lock_guard lock(notices_mutex);
  notices[slot_].start.store(0, std::memory_order_release);
  notices[slot_].end.store(0, std::memory_order_release);
}

}  // namespace gpufs
