#include "base/thread.h"

#include <pthread.h>
#include <signal.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <memory>
#include <system_error>

namespace gpufs {
namespace {

// Each size of block that the C library keeps ready for the thread that has freed it, from 24 bytes on in such steps.
// The variables of one library lie in one block: ours take 700 bytes, those of the C++ library 32.
constexpr std::size_t kSmallestRoom = 24;
constexpr std::size_t kRoomStep = 16;
constexpr std::size_t kRooms = 64;

// Whether a new thread has what it needs; told by itself, waited for by who starts it.
struct Beginning {
  std::atomic<int> outcome{0};  // 0: not known yet, 1: it runs, -1: it has ended

  void tell(bool good) {
    outcome.store(good ? 1 : -1);
    outcome.notify_one();
  }
  bool wait() const {
    outcome.wait(0);
    return outcome.load() > 0;
  }
};

thread_local bool may_wait = true;

}  // namespace

void forbid_waiting() { may_wait = false; }

bool this_thread_may_wait() { return may_wait; }

bool make_room_for_own_variables() noexcept {
  // What is freed here lies ready for this thread alone, and nobody else gets it before the next lines.
  std::array<void*, kRooms> blocks{};
  bool complete = true;
  for (std::size_t i = 0; i < blocks.size() && complete; ++i) {
    blocks[i] = std::malloc(kSmallestRoom + i * kRoomStep);
    complete = blocks[i] != nullptr;
  }
  for (void* const block : blocks) std::free(block);
  if (!complete) return false;
  thread_local std::atomic<bool> used{false};
  used.store(true, std::memory_order_relaxed);
  static std::atomic<int> unused;
  unused.store(std::uncaught_exceptions(), std::memory_order_relaxed);  // the C++ library's own
  return true;
}

Result<std::thread> start_thread_function(const std::string& name, std::function<void()> body) {
  const auto beginning = std::make_shared<Beginning>();
  // A new thread inherits the mask, so it is blocked from its first instruction on.
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread;
  int error = 0;
  try {
    thread = std::thread([short_name = name.substr(0, 15), run = std::move(body), beginning] {
      const bool good = make_room_for_own_variables();
      beginning->tell(good);
      if (!good) return;
      ::pthread_setname_np(::pthread_self(), short_name.c_str());
      run();
    });
  } catch (const std::system_error& failure) {
    error = failure.code().value();
  } catch (const std::bad_alloc&) {
    error = ENOMEM;
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error == 0 && !beginning->wait()) {
    thread.join();
    error = ENOMEM;
  }
  if (error != 0) return Status::from_errno(error, "starting thread " + name);
  return thread;
}

}  // namespace gpufs
