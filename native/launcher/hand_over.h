// Asking a mount's daemon for a copy and handing it to the program that is executed next (gpufs/client/_handed.py):
// both files are open, the request has been sent, and an environment variable says which descriptor is what. A
// HandedCopy belongs to its process, which has one thread.
#pragma once

#include <csignal>
#include <optional>

#include "base/unique_fd.h"

namespace gpufs::launcher {

// Its value is "PROCESS:BEGAN:DIRECTION:SIZE:CONNECTION:SOURCE:DESTINATION:CREATED:SIGNALS:NAME":
//   PROCESS      this process's number, by which a variable that was inherited from another is told
//   BEGAN        nanoseconds of CLOCK_MONOTONIC
//   DIRECTION    load or store
//   SIZE         the source's, in bytes
//   CONNECTION, SOURCE, DESTINATION    descriptors; hello, and a copy with the id 1, has been sent on the first
//   CREATED      1 where the destination was not there before
//   SIGNALS      the numbers of those that have been blocked since, with commas between them
//   NAME         the destination's, also where a directory was given
inline constexpr const char* kVariable = "GPUFS_HANDED";

// Until the program is executed. What it closes, where that fails, ends the copy.
struct HandedCopy {
  UniqueFd connection;
  UniqueFd source;
  UniqueFd destination;
  sigset_t signals_before;
};

// Has one regular file copied, between the host and a mount, by the rules of gpufs/client/_copy.py for a copy without
// options. Nothing where it is another kind of copy, or where anything goes wrong: then nothing has been moved, the
// next program does all of it from its start, and tells what is wrong.
std::optional<HandedCopy> hand_over(const char* source, const char* destination);

}  // namespace gpufs::launcher
