#include "fuse/caller.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <csignal>
#include <string>
#include <string_view>

#include "base/unique_fd.h"

namespace gpufs::fuse {

namespace {

constexpr ino_t kFirstUserNamespace = 0xEFFFFFFD;  // its number in /proc, the same on every kernel

std::string process_path(std::uint32_t pid, const char* name) { return "/proc/" + std::to_string(pid) + "/" + name; }

// A line of the process's status without its name; empty if there is none.
std::string status_line(std::uint32_t pid, std::string_view name) {
  if (pid == 0) return {};
  const UniqueFd fd(::open(process_path(pid, "status").c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return {};
  std::string text;
  constexpr std::size_t kPart = 4096;  // the groups alone may take more
  for (;;) {
    const std::size_t before = text.size();
    text.resize(before + kPart);
    const ssize_t got = ::read(fd.get(), text.data() + before, kPart);
    if (got < 0 && errno == EINTR) {
      text.resize(before);
      continue;
    }
    text.resize(before + (got > 0 ? static_cast<std::size_t>(got) : 0));
    if (got <= 0) break;
  }
  const std::string key = "\n" + std::string(name) + ":\t";
  const std::size_t at = text.find(key);
  if (at == std::string::npos) return {};
  const std::size_t begin = at + key.size();
  return text.substr(begin, text.find('\n', begin) - begin);
}

// A bit of a line that is a hexadecimal number.
bool has_bit(const std::string& line, int bit) {
  std::uint64_t bits = 0;
  const auto parsed = std::from_chars(line.data(), line.data() + line.size(), bits, 16);
  return parsed.ec == std::errc() && (bits >> bit & 1) != 0;
}

// Outside of all user namespaces: inside of one everybody may have every capability.
bool has_capability(std::uint32_t pid, int capability) {
  struct stat found {};
  return has_bit(status_line(pid, "CapEff"), capability) && ::stat(process_path(pid, "ns/user").c_str(), &found) == 0 &&
         found.st_ino == kFirstUserNamespace;
}

}  // namespace

bool Caller::in_group(std::uint32_t group) const {
  if (gid == group) return true;
  const std::string line = status_line(pid, "Groups");
  const char* at = line.data();
  const char* const end = at + line.size();
  while (at < end) {
    std::uint32_t found = 0;
    const auto parsed = std::from_chars(at, end, found);
    if (parsed.ec != std::errc()) {
      ++at;  // a blank
      continue;
    }
    if (found == group) return true;
    at = parsed.ptr;
  }
  return false;
}

bool Caller::keeps_set_id() const { return has_capability(pid, CAP_FSETID); }

bool Caller::dying() const {
  // Whichever signal ends a process, each of its threads gets a SIGKILL for that. After that it frees its memory before
  // it closes its files.
  const std::string pending = status_line(pid, "SigPnd");
  return !pending.empty() && (has_bit(pending, SIGKILL - 1) || status_line(pid, "VmSize").empty());
}

bool Caller::administers() const { return has_capability(pid, CAP_SYS_ADMIN); }

}  // namespace gpufs::fuse
