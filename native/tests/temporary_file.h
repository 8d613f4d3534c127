// A file of a test's own that has no name, so that a test which is ended leaves nothing behind.
// The descriptor is the caller's.
// Any thread may call any function.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "base/unique_fd.h"

namespace gpufs::testing {

// Opens the same file again.
inline UniqueFd reopen(int fd, int flags) {
  return UniqueFd(::open(("/proc/self/fd/" + std::to_string(fd)).c_str(), flags | O_CLOEXEC));
}

// Not valid where the directory takes no files.
inline UniqueFd temporary_file(const std::string& directory = "/tmp", int flags = O_RDWR) {
  std::string path = directory + "/gpufs-test-XXXXXX";
  UniqueFd fd(::mkostemp(path.data(), O_CLOEXEC));
  if (!fd.valid()) return fd;
  ::unlink(path.c_str());
  return flags == O_RDWR ? std::move(fd) : reopen(fd.get(), flags);
}

}  // namespace gpufs::testing
