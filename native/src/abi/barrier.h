// The wall that each function of the C interface stands behind: no exception passes, every failure leaves its text.
// The text belongs to the calling thread.
// Any thread may call it.
#pragma once

#include <cerrno>
#include <exception>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#include "abi/handles.h"
#include "base/status.h"
#include "gpufs.h"

namespace gpufs {

// Keeps a failure's text for gpufs_message() and gives the codes in the C interface's form.
gpufs_status report(const Status& status) noexcept;

// Runs `body`, which returns a Status.
template <typename Body>
gpufs_status guarded(Body&& body) noexcept {
  static_assert(std::is_same_v<std::invoke_result_t<Body>, Status>);
  try {
    return report(std::forward<Body>(body)());
  } catch (const std::bad_alloc&) {
    return report(Status(ENOMEM, ""));  // an empty text needs no memory
  } catch (const std::exception& failure) {
    try {
      return report(Status(EIO, std::string("internal failure: ") + failure.what()));
    } catch (...) {
      return report(Status(EIO, ""));
    }
  } catch (...) {
    return report(Status(EIO, ""));
  }
}

// The one answer to a null pointer where the interface needs one.
inline Status null_argument() { return Status(EFAULT, "a required pointer is null"); }

// Runs `body` on the object behind a handle: body(T&) returns a Status. EBADF if the handle does not name a T.
template <typename T, typename Body>
gpufs_status with(gpufs_handle handle, Body&& body) noexcept {
  return guarded([&]() -> Status {
    Result<std::shared_ptr<T>> found = HandleTable::instance().get<T>(handle);
    return found.ok() ? std::forward<Body>(body)(*found.value()) : found.status();
  });
}

}  // namespace gpufs
