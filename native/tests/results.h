// Results that must be there, and calls that must succeed.
// Owned by the tests that include it.
// Any thread.
#pragma once

#include <gtest/gtest.h>

#include <stdexcept>

#include "base/status.h"

namespace gpufs::testing {

template <typename T>
T must(Result<T> result) {
  if (!result.ok()) throw std::runtime_error(result.status().message());
  return result.take();
}

#define ASSERT_OK(expression)                                 \
  do {                                                        \
    const ::gpufs::Status status_of_it = (expression);        \
    ASSERT_TRUE(status_of_it.ok()) << status_of_it.message(); \
  } while (false)
#define EXPECT_OK(expression)                                 \
  do {                                                        \
    const ::gpufs::Status status_of_it = (expression);        \
    EXPECT_TRUE(status_of_it.ok()) << status_of_it.message(); \
  } while (false)

}  // namespace gpufs::testing
