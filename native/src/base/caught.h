// Going on where there is no memory: exceptions of allocation as what the engine's functions return otherwise.
// Functions; nobody owns them.
// Any thread may call any function.
#pragma once

#include <cerrno>
#include <new>
#include <type_traits>
#include <utility>

#include "base/status.h"

namespace gpufs {

// What body() gives, a Status or a Result; ENOMEM, with no text, where it finds no memory.
template <typename Body>
std::invoke_result_t<Body> caught(Body&& body) {
  try {
    return std::forward<Body>(body)();
  } catch (const std::bad_alloc&) {
    return Status(ENOMEM, "");
  }
}

// place = status; without its text where there is no memory for that.
inline void keep(Status& place, const Status& status) noexcept {
  try {
    place = status;
  } catch (const std::bad_alloc&) {
    place = Status(status.error(), "", status.device_code());
  }
}

}  // namespace gpufs
