// The command `gpufs`: it becomes the Python program beside it, which is all of the command but for one thing. Python
// takes 15 ms and more to start, as long as a gigabyte takes to copy; so a plain `gpufs cp SOURCE DEST` is asked for
// here (hand_over.h), and Python starts while its bytes move.
#include <sys/auxv.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "launcher/hand_over.h"

namespace {

// Without links, so that one to this program works as well. "" where it cannot be told.
std::string own_path() {
  std::array<char, PATH_MAX> path;
  const ssize_t length = ::readlink("/proc/self/exe", path.data(), path.size());
  if (length > 0) return {path.data(), static_cast<std::size_t>(length)};
  // Where no /proc is mounted.
  const char* started_as = reinterpret_cast<const char*>(::getauxval(AT_EXECFN));
  return started_as != nullptr && ::realpath(started_as, path.data()) != nullptr ? path.data() : "";
}

std::string python_program() {
  const std::string own = own_path();
  return own.empty() ? own : own.substr(0, own.rfind('/') + 1) + "gpufs-python";
}

bool is_name(std::string_view word) { return !word.empty() && word.front() != '-'; }

}  // namespace

int main(int count, char** words) {
  const std::string program = python_program();
  ::unsetenv(gpufs::launcher::kVariable);
  std::optional<gpufs::launcher::HandedCopy> copy;
  const bool plain = count == 4 && std::string_view(words[1]) == "cp" && is_name(words[2]) && is_name(words[3]);
  if (plain && ::access(program.c_str(), X_OK) == 0) {
    copy = gpufs::launcher::hand_over(words[2], words[3]);
  }
  ::execv(program.c_str(), words);
  const int error = errno;
  const char* name = program.empty() ? "/proc/self/exe" : program.c_str();
  std::fprintf(stderr, "gpufs: %s: %s (it belongs to gpufs: install gpufs again)\n", name, std::strerror(error));
  return 1;
}
