#include "launcher/hand_over.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/mount_table.h"
#include "launcher/daemon_socket.h"
#include "launcher/request.h"

namespace gpufs::launcher {
namespace {

// As in gpufs/client/_copy.py: up to here one read and one write are faster than the daemon.
constexpr off_t kSmallBytes = 128 << 10;
constexpr double kProgressSeconds = 0.1;
// What Python may need at once, of shared libraries and modules that it loads.
constexpr rlim_t kSpareDescriptors = 16;
// They wait for Python, which has the copy cancelled and says what has been copied.
constexpr std::array<int, 2> kSignals = {SIGINT, SIGTERM};

// A copy that may be handed over, as its files were found.
struct Plan {
  const char* source = nullptr;
  struct stat from = {};
  std::string destination;
  bool exists = false;  // the destination
  dev_t to = 0;         // its device; that of its directory where it does not exist
  bool store = false;   // from the mount to the host
  std::vector<MountEntry> mounts;

  [[nodiscard]] dev_t mount() const { return store ? from.st_dev : to; }
};

bool is_worth_it(const struct stat& file) { return S_ISREG(file.st_mode) && file.st_size > kSmallBytes; }

// The name that a directory's entry gets from its source.
std::string name_in(std::string directory, std::string_view source) {
  if (directory.back() != '/') directory += '/';
  return directory.append(source.substr(source.rfind('/') + 1));
}

std::string directory_of(const std::string& name) {
  const std::size_t slash = name.rfind('/');
  return slash == std::string::npos ? "." : name.substr(0, slash + 1);
}

// What is at the destination, or where it is to be made. False where it is nothing that may be overwritten.
bool find_destination(const char* given, Plan* plan) {
  plan->destination = given;
  struct stat there = {};
  bool found = ::stat(given, &there) == 0;
  if (found && S_ISDIR(there.st_mode)) {
    plan->destination = name_in(given, plan->source);
    found = ::stat(plan->destination.c_str(), &there) == 0;
  }
  if (!found) {
    if (errno != ENOENT || ::stat(directory_of(plan->destination).c_str(), &there) != 0) return false;
    plan->to = there.st_dev;
    return true;
  }
  plan->exists = true;
  plan->to = there.st_dev;
  return S_ISREG(there.st_mode);
}

std::optional<Plan> plan_of(const char* source, const char* destination) {
  Plan plan;
  plan.source = source;
  if (::stat(source, &plan.from) != 0 || !is_worth_it(plan.from) || !find_destination(destination, &plan)) {
    return std::nullopt;
  }
  Result<std::vector<MountEntry>> mounts = read_mount_table();
  if (!mounts.ok()) return std::nullopt;
  plan.mounts = mounts.take();
  plan.store = is_mounted_gpufs(plan.mounts, plan.from.st_dev);
  if (plan.store == is_mounted_gpufs(plan.mounts, plan.to)) return std::nullopt;
  return plan;
}

// Also looks at it anew: it may be another file by now.
bool open_source(Plan* plan, UniqueFd* opened) {
  const dev_t device = plan->from.st_dev;
  *opened = UniqueFd(::open(plan->source, O_RDONLY | O_CLOEXEC | O_NOCTTY));
  return opened->valid() && ::fstat(opened->get(), &plan->from) == 0 && plan->from.st_dev == device &&
         is_worth_it(plan->from);
}

bool open_destination(const Plan& plan, UniqueFd* opened) {
  int flags = (plan.store ? O_RDWR : O_WRONLY) | O_CLOEXEC | O_NOCTTY;  // _ends.open_destination() says why
  flags |= plan.exists ? O_TRUNC : O_CREAT | O_EXCL;
  *opened = UniqueFd(::open(plan.destination.c_str(), flags, plan.from.st_mode & 0777));
  struct stat status = {};
  return opened->valid() && ::fstat(opened->get(), &status) == 0 && S_ISREG(status.st_mode) && status.st_dev == plan.to;
}

bool send(int connection, const std::string& message, std::span<const int> descriptors) {
  iovec part = {.iov_base = const_cast<char*>(message.data()), .iov_len = message.size()};
  msghdr header = {};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(2 * sizeof(int))> control = {};
  if (!descriptors.empty()) {
    header.msg_control = control.data();
    header.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(rights), descriptors.data(), descriptors.size_bytes());
  }
  return ::sendmsg(connection, &header, MSG_NOSIGNAL) == static_cast<ssize_t>(message.size());
}

bool ask(const HandedCopy& copy, bool store) {
  const CopyRequest request{.store = store, .progress_seconds = ::isatty(STDERR_FILENO) == 1 ? kProgressSeconds : 0};
  std::array<int, 2> ends = {copy.source.get(), copy.destination.get()};  // the host's first
  if (store) std::swap(ends[0], ends[1]);
  return send(copy.connection.get(), hello_message(), {}) && send(copy.connection.get(), copy_message(request), ends);
}

std::string blocked_since(const sigset_t& before) {
  std::string numbers;
  for (const int number : kSignals) {
    if (sigismember(&before, number) == 0) numbers += (numbers.empty() ? "" : ",") + std::to_string(number);
  }
  return numbers;
}

bool tell_next_program(const HandedCopy& copy, const Plan& plan, std::int64_t began) {
  std::string value = std::to_string(::getpid()) + ':' + std::to_string(began) + (plan.store ? ":store:" : ":load:");
  value += std::to_string(plan.from.st_size);
  for (const UniqueFd* fd : {&copy.connection, &copy.source, &copy.destination}) {
    if (::fcntl(fd->get(), F_SETFD, 0) != 0) return false;  // not closed on exec
    value += ':' + std::to_string(fd->get());
  }
  value += plan.exists ? ":0:" : ":1:";
  value += blocked_since(copy.signals_before) + ':' + plan.destination;
  return ::setenv(kVariable, value.c_str(), 1) == 0;
}

std::int64_t monotonic_now() {
  timespec now = {};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

bool standard_streams_are_open() {
  for (int fd = 0; fd <= 2; ++fd) {
    if (::fcntl(fd, F_GETFD) < 0) return false;
  }
  return true;
}

// With another one open; the numbers below the last one are taken.
bool python_can_open_files(int last) {
  rlimit limit = {};
  return ::getrlimit(RLIMIT_NOFILE, &limit) == 0 && static_cast<rlim_t>(last) + kSpareDescriptors < limit.rlim_cur;
}

}  // namespace

std::optional<HandedCopy> hand_over(const char* source, const char* destination) {
  const std::int64_t began = monotonic_now();
  if (!standard_streams_are_open()) return std::nullopt;  // else these files would become one of them
  std::optional<Plan> plan = plan_of(source, destination);
  if (!plan) return std::nullopt;
  HandedCopy copy;
  copy.connection = connect_to_daemon(plan->mounts, plan->mount());
  if (!copy.connection.valid() || !open_source(&*plan, &copy.source)) return std::nullopt;
  if (!python_can_open_files(copy.source.get())) return std::nullopt;
  const bool opened = open_destination(*plan, &copy.destination);

  // Not before: a signal ends an open() that a file system does not answer.
  sigset_t held;
  sigemptyset(&held);
  for (const int number : kSignals) sigaddset(&held, number);
  ::sigprocmask(SIG_BLOCK, &held, &copy.signals_before);
  // The request comes last: what fails before it has moved nothing.
  if (opened && tell_next_program(copy, *plan, began) && ask(copy, plan->store)) return copy;
  ::sigprocmask(SIG_SETMASK, &copy.signals_before, nullptr);
  ::unsetenv(kVariable);
  // Made with its source's mode, it might not be open to its maker a second time.
  if (!plan->exists && copy.destination.valid()) ::unlink(plan->destination.c_str());
  return std::nullopt;
}

}  // namespace gpufs::launcher
