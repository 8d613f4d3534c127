#include "launcher/daemon_socket.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <string>

namespace gpufs::launcher {
namespace {

constexpr time_t kConnectSeconds = 1;

bool shows(const MountEntry& entry, dev_t device) {
  return entry.type == "fuse.gpufs" && makedev(entry.major, entry.minor) == device;
}

// What the mount says; "" where something else has been mounted over it.
std::string socket_path(const MountEntry& entry, dev_t device) {
  const std::string name = entry.path + "/.gpufs/socket";
  const UniqueFd file(::open(name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  struct stat status = {};
  if (!file.valid() || ::fstat(file.get(), &status) != 0 || status.st_dev != device) return "";
  std::array<char, sizeof(sockaddr_un::sun_path)> text;
  const ssize_t count = ::read(file.get(), text.data(), text.size());
  if (count <= 0 || text[static_cast<std::size_t>(count) - 1] != '\n') return "";
  return {text.data(), static_cast<std::size_t>(count) - 1};
}

bool trusted(int connection) {
  ucred peer = {};
  socklen_t length = sizeof peer;
  if (::getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return false;
  return peer.uid == 0 || peer.uid == ::geteuid();
}

}  // namespace

bool is_mounted_gpufs(const std::vector<MountEntry>& mounts, dev_t device) {
  for (const MountEntry& entry : mounts) {
    if (shows(entry, device)) return true;
  }
  return false;
}

UniqueFd connect_to_daemon(const std::vector<MountEntry>& mounts, dev_t device) {
  std::string path;
  for (const MountEntry& entry : mounts) {
    if (!shows(entry, device) || entry.root != "/") continue;
    path = socket_path(entry, device);
    if (!path.empty()) break;
  }
  sockaddr_un address = {};
  if (path.empty() || path.size() >= sizeof address.sun_path) return {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());

  UniqueFd connection(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  const timeval patience = {.tv_sec = kConnectSeconds, .tv_usec = 0};
  const timeval forever = {};
  const bool connected =
      connection.valid() && ::setsockopt(connection.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience) == 0 &&
      ::connect(connection.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
      ::setsockopt(connection.get(), SOL_SOCKET, SO_SNDTIMEO, &forever, sizeof forever) == 0;
  if (!connected || !trusted(connection.get())) return {};
  return connection;
}

}  // namespace gpufs::launcher
