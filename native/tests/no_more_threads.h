// A system that gives no more threads, for tests of what then becomes of work.
// Owned by the test that makes it, on its stack.
// One at a time; it holds for all threads of the process.
#pragma once

#include <gtest/gtest.h>
#include <pthread.h>

#include <cstddef>

namespace gpufs::testing {

// While it lives no thread can be started: none has room for its stack.
class NoMoreThreads {
 public:
  NoMoreThreads() {
    EXPECT_EQ(::pthread_getattr_default_np(&before_), 0);
    pthread_attr_t vast = before_;
    EXPECT_EQ(::pthread_attr_setstacksize(&vast, std::size_t{1} << 50), 0);
    EXPECT_EQ(::pthread_setattr_default_np(&vast), 0);
  }
  ~NoMoreThreads() {
    EXPECT_EQ(::pthread_setattr_default_np(&before_), 0);
    ::pthread_attr_destroy(&before_);
  }
  NoMoreThreads(const NoMoreThreads&) = delete;
  NoMoreThreads& operator=(const NoMoreThreads&) = delete;

 private:
  pthread_attr_t before_{};
};

}  // namespace gpufs::testing
