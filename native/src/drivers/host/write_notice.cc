#include "drivers/host/write_notice.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <string>

namespace gpufs {
namespace {

constinit WriteNotice::Ranges notices;
std::atomic<bool> explained{false};

void on_violation(int number, siginfo_t* info, void* context) {
  const WriteNotice::Ranges::Slot* const found =
      info->si_code == SEGV_ACCERR ? notices.find(reinterpret_cast<std::uintptr_t>(info->si_addr)) : nullptr;
  if (found == nullptr) return notices.pass_on(number, info, context);
  const int saved = errno;
  if (!explained.exchange(true)) {
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, found->detail.text.data(), found->detail.length);
  }
  notices.step_aside(number);
  errno = saved;
}

}  // namespace

std::unique_ptr<WriteNotice> WriteNotice::watch(std::uintptr_t start, std::size_t bytes, std::string_view text) {
  static const bool installed = notices.install(SIGSEGV, 0, on_violation);
  if (!installed) return nullptr;
  Ranges::Slot* const slot = notices.add(start, bytes, [text](Line& notice) {
    std::string line = "gpufs: ";
    const std::size_t space = notice.text.size() - line.size() - 1;
    line += text.size() > space ? text.substr(text.size() - space) : text;
    line += '\n';
    std::copy(line.begin(), line.end(), notice.text.begin());
    notice.length = line.size();
  });
  return slot != nullptr ? std::unique_ptr<WriteNotice>(new WriteNotice(*slot)) : nullptr;
}

WriteNotice::~WriteNotice() { notices.remove(slot_); }

}  // namespace gpufs
