// A wish to stop, handed to an operation that runs on other threads.
// Shared by who may cancel and who waits; owned by the caller of the operation, which must keep it until that returns.
// Any thread may call any function.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

namespace gpufs {

class CancelToken {
 public:
  // Once and for ever; runs what was registered, on the calling thread. Never blocks for long.
  void cancel() {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
    for (const auto& [key, wish] : wishes_) wish();
    wishes_.clear();
  }

  [[nodiscard]] bool cancelled() const {
    const std::lock_guard lock(mutex_);
    return cancelled_;
  }

  // While the registration lives, cancel() calls `wish`, at most once; at once if it was called before. When the
  // registration has gone, `wish` is neither running nor will it run. `wish` must not touch the token.
  class Registration {
   public:
    Registration(CancelToken* token, std::function<void()> wish) : token_(token) {
      if (token_ == nullptr) return;
      const std::lock_guard lock(token_->mutex_);
      if (token_->cancelled_) {
        wish();
        return;
      }
      key_ = ++token_->last_key_;
      token_->wishes_.emplace(key_, std::move(wish));
    }
    ~Registration() {
      if (token_ == nullptr) return;
      const std::lock_guard lock(token_->mutex_);
      token_->wishes_.erase(key_);
    }
    Registration(const Registration&) = delete;
    Registration& operator=(const Registration&) = delete;

   private:
    CancelToken* const token_;
    std::uint64_t key_ = 0;
  };

 private:
  // Guards all below. Outermost: wishes run under it and take the locks of the operation that they stop.
  mutable std::mutex mutex_;
  bool cancelled_ = false;
  std::uint64_t last_key_ = 0;
  std::map<std::uint64_t, std::function<void()>> wishes_;
};

}  // namespace gpufs
