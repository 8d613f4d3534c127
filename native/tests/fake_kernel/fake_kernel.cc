// Preloaded into a program, shows it the files that a kernel with a vendor's modules has: an absolute path that exists
// below FAKE_KERNEL_ROOT is taken from there. For the calls that the engine uses: access(), readlink(), and fopen64(),
// which opens C++ streams.

#include <dlfcn.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

using Access = int (*)(const char*, int);
using ReadLink = ssize_t (*)(const char*, char*, std::size_t);

template <typename Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

int real_access(const char* path, int mode) {
  static const auto call = next<Access>("access");
  return call(path, mode);
}

ssize_t real_readlink(const char* path, char* target, std::size_t bytes) {
  static const auto call = next<ReadLink>("readlink");
  return call(path, target, bytes);
}

// The path below the root if there is something there, links that lead nowhere included.
std::string shown(const char* path) {
  const char* const root = std::getenv("FAKE_KERNEL_ROOT");
  if (root == nullptr || path == nullptr || path[0] != '/') return {};
  std::string there = std::string(root) + path;
  char target[2];
  return real_access(there.c_str(), F_OK) == 0 || real_readlink(there.c_str(), target, 1) == 1 ? there : std::string();
}

}  // namespace

extern "C" {

int access(const char* path, int mode) noexcept {
  const std::string there = shown(path);
  return real_access(there.empty() ? path : there.c_str(), mode);
}

ssize_t readlink(const char* path, char* target, std::size_t bytes) noexcept {
  const std::string there = shown(path);
  return real_readlink(there.empty() ? path : there.c_str(), target, bytes);
}

FILE* fopen64(const char* path, const char* mode) {
  using Open = FILE* (*)(const char*, const char*);
  static const auto call = next<Open>("fopen64");
  const std::string there = shown(path);
  return call(there.empty() ? path : there.c_str(), mode);
}

FILE* fopen(const char* path, const char* mode) { return fopen64(path, mode); }

}  // extern "C"
