// Runs the body of each C function: turns exceptions into error codes, keeps the text of a failure, stores results.
// Ownership: the text belongs to the calling thread.
// Thread-safe.
#pragma once

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <type_traits>
#include <utility>

#include "abi/handles.h"
#include "base/status.h"
#include "gpufs.h"

namespace gpufs {

// Stores a failure's text for gpufs_message() and returns its codes.
gpufs_status report(const Status& status) noexcept;

// The Status that a call returns; one that cannot fail returns nothing.
template <typename Call>
Status status_of(Call&& call) {
  if constexpr (std::is_void_v<std::invoke_result_t<Call>>) {
    std::forward<Call>(call)();
    return {};
  } else {
    return std::forward<Call>(call)();
  }
}

// Calls body(), see status_of(). Running out of memory is ENOMEM, any other exception EIO.
template <typename Body>
gpufs_status catch_all(Body&& body) noexcept {
  try {
    return report(status_of(std::forward<Body>(body)));
  } catch (const std::bad_alloc&) {
    return report(Status(ENOMEM, ""));
  } catch (const std::exception& failure) {
    return report(Status(EIO, std::string("internal failure: ") + failure.what()));
  }
}

// Stores a result where the caller wants it. A failure stores nothing.
template <typename T, typename Output>
Status store_result(Result<T> result, Output* output) {
  if (result.ok()) *output = result.take();
  return result.status();
}

// Opens a handle of an object, see HandleTable::put().
template <typename T>
Status open_handle(Result<std::shared_ptr<T>> object, gpufs_handle owner, gpufs_handle* handle,
                   std::function<Status(T&)> close = nullptr) {
  std::shared_ptr<T> made = TRY(std::move(object));
  *handle = TRY(HandleTable::instance().put<T>(std::move(made), owner, std::move(close)));
  return {};
}

// Closes the object of a handle, for most kinds of objects.
template <typename T>
Status close_of(T& object) {
  return status_of([&] { return object.close(); });
}

// How long a call with this timeout waits: a negative one for a year, since a longer wait would overflow the clock and
// end at once.
inline std::chrono::milliseconds timeout_of(std::int64_t milliseconds) {
  constexpr std::int64_t kLongest = std::int64_t{1000} * 60 * 60 * 24 * 365;
  return std::chrono::milliseconds(milliseconds < 0 ? kLongest : std::min(milliseconds, kLongest));
}

// Calls body(T&), see status_of(), with the object of a handle. EBADF if the handle does not name a T.
template <typename T, typename Body>
gpufs_status with_handle(gpufs_handle handle, Body&& body) noexcept {
  return catch_all([&]() -> Status {
    Result<std::shared_ptr<T>> found = HandleTable::instance().get<T>(handle);
    return found.ok() ? status_of([&] { return std::forward<Body>(body)(*found.value()); }) : found.status();
  });
}

}  // namespace gpufs
