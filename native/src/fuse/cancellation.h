// Which long operations are under way, so that an INTERRUPT can end them; one that comes before its request (another
// reader was faster) is remembered.
// Owned by the Session; an Operation is shared with the job that serves it.
// Any thread may call any function.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace gpufs::fuse {

struct Operation {
  std::uint64_t unique = 0;
  std::atomic<bool> cancelled{false};
};

class Cancellations {
 public:
  // Registers an operation; it is cancelled already if its INTERRUPT has come.
  std::shared_ptr<Operation> begin(std::uint64_t unique);
  void end(std::uint64_t unique);

  // True if the operation is under way and now cancelled; else the number is remembered.
  bool interrupt(std::uint64_t unique);

  // Cancels everything that is under way, and all that begins from now on.
  void cancel_all();

 private:
  // Most interrupts are for short operations that have already ended; only the youngest can still be early.
  static constexpr std::size_t kRemembered = 256;

  // Guards all below.
  std::mutex mutex_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Operation>> running_;
  std::deque<std::uint64_t> early_;
  bool closed_ = false;
};

}  // namespace gpufs::fuse
