#include "journal/keeper_link.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "base/thread.h"

namespace gpufs {
namespace {

using Clock = std::chrono::steady_clock;
using keeper::kBatch;
using keeper::Kind;

constexpr int kQueueTimeout = 5000;   // milliseconds that a keeper may read nothing
constexpr int kSettleTimeout = 1000;  // milliseconds
constexpr int kEndTimeout = 5000;     // milliseconds until a keeper that does not end is killed
// The first replacement comes at once. The pause before the next ones grows, and ends when a keeper has lived for long.
constexpr auto kFirstPause = std::chrono::milliseconds(100);
constexpr auto kLongestPause = std::chrono::milliseconds(2000);

// Whether the socket takes a message again, or has been shut down.
bool wait_for_queue(int socket) {
  pollfd queue{socket, POLLOUT, 0};
  return ::poll(&queue, 1, kQueueTimeout) != 0;
}

// Waits for a full queue. Returns 0 or the errno. No descriptor: -1.
int send_one(int socket, Kind kind, std::span<const std::uint64_t> numbers, int descriptor) {
  while (keeper::send(socket, kind, numbers, {&descriptor, descriptor >= 0 ? 1U : 0U}) < 0) {
    if (errno != EINTR && (errno != EAGAIN || !wait_for_queue(socket))) return errno;
  }
  return 0;
}

// Returns 0 once the keeper has handled everything that was sent, or an errno.
int wait_until_handled(int socket, int timeout) {
  const UniqueFd settled(::eventfd(0, EFD_CLOEXEC));
  if (!settled.valid()) return errno;
  const std::uint64_t number = 0;
  if (const int error = send_one(socket, Kind::kSettle, {&number, 1}, settled.get())) return error;
  pollfd answers[] = {{settled.get(), POLLIN, 0}, {socket, 0, 0}};
  if (::poll(answers, std::size(answers), timeout) == 0) return ETIMEDOUT;
  return answers[0].revents != 0 ? 0 : ECONNRESET;
}

// Of a child, or of the process that has started this one.
bool is_alive(pid_t number) {
  return number > 0 && (number == ::getppid() || ::waitpid(number, nullptr, WNOHANG) == 0);
}

}  // namespace

Result<std::shared_ptr<KeeperLink>> KeeperLink::open(std::string program, std::string mountpoint, UniqueFd socket,
                                                     std::span<const Held> held) {
  const std::shared_ptr<KeeperLink> link(new KeeperLink(std::move(program), std::move(mountpoint)));
  if (socket.valid()) {
    ucred maker{};
    socklen_t bytes = sizeof maker;
    if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &maker, &bytes) != 0 ||
        ::fcntl(socket.get(), F_SETFL, O_NONBLOCK) != 0 || ::fcntl(socket.get(), F_SETFD, FD_CLOEXEC) != 0) {
      return Status::from_errno(errno, "the keeper's socket");
    }
    link->keeper_ = {std::move(socket), maker.pid};
    for (const Held& each : held) link->held_.emplace(each.key, each.descriptor);
  } else {
    link->keeper_ = TRY(link->start_keeper());
  }
  link->thread_ = TRY(start_thread("gpufs-keeper", [own = link.get()] { own->run(); }));
  return link;
}

KeeperLink::~KeeperLink() {
  stop();
  ::shutdown(keeper_.socket.get(), SHUT_RDWR);
  if (thread_.joinable()) thread_.join();
}

Result<KeeperLink::Process> KeeperLink::start_keeper() const {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) {
    return Status::from_errno(errno, "a socket for the keeper");
  }
  Process started{UniqueFd(ends[0])};
  const UniqueFd theirs(ends[1]);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, theirs.get(), STDIN_FILENO);
  ::posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_RDWR, 0);
  ::posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
  ::posix_spawn_file_actions_addclosefrom_np(&actions, STDERR_FILENO + 1);
  char* const arguments[] = {const_cast<char*>(program_.c_str()), const_cast<char*>(mountpoint_.c_str()), nullptr};
  const int error = ::posix_spawn(&started.number, program_.c_str(), &actions, nullptr, arguments, environ);
  ::posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return Status::from_errno(error, "starting " + program_);
  return started;
}

void KeeperLink::hold(std::span<const Held> held) {
  std::unique_lock lock(mutex_);
  for (const Held& each : held) {
    held_[each.key] = each.descriptor;
    change_locked(each.key);
  }
  lose_locked(flush(lock, keeper_.socket.get(), State::kHeld));
}

void KeeperLink::drop(std::span<const std::uint64_t> keys) {
  std::unique_lock lock(mutex_);
  for (const std::uint64_t key : keys) {
    held_.erase(key);
    change_locked(key);
  }
  lose_locked(flush(lock, keeper_.socket.get(), State::kHeld));
}

void KeeperLink::forget(std::uint64_t key) {
  const std::lock_guard lock(mutex_);
  held_.erase(key);
}

std::vector<KeeperLink::Held> KeeperLink::held_from(std::uint64_t key) {
  const std::lock_guard lock(mutex_);
  std::vector<Held> found;
  for (auto each = held_.lower_bound(key); each != held_.end(); ++each) found.push_back({each->first, each->second});
  return found;
}

void KeeperLink::note(Kind kind, std::span<const std::uint64_t> numbers, UniqueFd descriptor) {
  const std::lock_guard lock(mutex_);
  Note& noted = notes_[kind];
  noted = {{numbers.begin(), numbers.end()}, std::move(descriptor)};
  if (state_ != State::kHeld) return;
  lose_locked(send_one(keeper_.socket.get(), kind, noted.numbers, noted.descriptor.get()));
}

void KeeperLink::settle() {
  if (health().ok()) static_cast<void>(wait_until_handled(keeper_.socket.get(), kSettleTimeout));
}

void KeeperLink::stop() {
  const std::lock_guard lock(mutex_);
  state_ = State::kEnding;
  changed_.notify_all();
}

void KeeperLink::end() {
  stop();
  const int socket = keeper_.socket.get();
  static_cast<void>(keeper::send(socket, Kind::kEnd, {}, {}));
  pollfd ended{socket, 0, 0};
  static_cast<void>(::poll(&ended, 1, kEndTimeout));
  ::shutdown(socket, SHUT_RDWR);
  if (thread_.joinable()) thread_.join();
  kill_keeper(keeper_.number);  // it may not have got the message
  reap();
}

Status KeeperLink::health() const {
  switch (state_.load()) {
    case State::kHeld:
      return {};
    case State::kEnding:
      return Status(ESHUTDOWN, "the mount has ended");
    default:
      return Status::from_errno(error_, "its keeper is being replaced");
  }
}

void KeeperLink::run() {
  Clock::duration pause{};
  Clock::time_point since = Clock::now();
  std::unique_lock lock(mutex_);
  while (state_ != State::kEnding) {
    if (state_ == State::kHeld) {
      lock.unlock();
      reap();
      pollfd keeper{keeper_.socket.get(), 0, 0};  // the end of the socket alone: POLLHUP
      const bool ended = ::poll(&keeper, 1, -1) > 0;
      lock.lock();
      if (ended) lose_locked(ECONNRESET);
      if (Clock::now() - since > kLongestPause) pause = {};
      continue;
    }
    if (changed_.wait_for(lock, pause, [this] { return state_ == State::kEnding; })) return;
    pause = std::clamp<Clock::duration>(2 * pause, kFirstPause, kLongestPause);
    if (const int error = replace(lock)) {
      error_ = error;
      log_warning("the keeper cannot be replaced at the moment: ", std::strerror(error));
    }
    since = Clock::now();
  }
}

int KeeperLink::replace(std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  Result<Process> started = start_keeper();
  lock.lock();
  if (!started.ok()) return started.error();  // the former one still has what it got
  Process fresh = started.take();
  const int socket = fresh.socket.get();
  // Nothing else acts when this process ends now.
  if (!is_alive(keeper_.number)) send_notes(socket);
  if (state_ == State::kLost) state_ = State::kReplacing;
  unsent_.clear();
  for (const auto& [key, descriptor] : held_) unsent_.insert(unsent_.end(), key);
  int error = flush(lock, socket, State::kReplacing);
  if (error == 0) {
    lock.unlock();
    error = wait_until_handled(socket, kQueueTimeout);
    lock.lock();
  }
  if (error == 0) error = flush(lock, socket, State::kReplacing);
  // Only now: should this process die before, a former keeper that lives starts the next daemon, and the fresh one,
  // which does not know what to start, ends. After a failure the former one ends, too: what it has not read counts
  // against the limit of descriptors that are under way.
  kill_keeper(keeper_.number);
  keeper_.number = -1;
  if (error != 0 || state_ != State::kReplacing) {
    kill_keeper(fresh.number);
    if (state_ == State::kReplacing) state_ = State::kLost;
    return error;
  }
  ::dup3(socket, keeper_.socket.get(), O_CLOEXEC);
  keeper_.number = fresh.number;
  state_ = State::kHeld;
  lose_locked(send_notes(socket));
  return 0;
}

int KeeperLink::flush(std::unique_lock<std::mutex>& lock, int socket, State state) {
  std::vector<std::uint64_t> keys;
  std::vector<int> descriptors;
  while (state_ == state && !unsent_.empty()) {
    keys.clear();
    descriptors.clear();
    auto next = unsent_.begin();
    for (; next != unsent_.end() && keys.size() < kBatch; ++next) {
      const auto found = held_.find(*next);
      if ((found != held_.end() ? keys.size() : 0) != descriptors.size()) break;  // of the other kind
      keys.push_back(*next);
      if (found != held_.end()) descriptors.push_back(found->second);
    }
    if (keeper::send(socket, descriptors.empty() ? Kind::kDrop : Kind::kHold, keys, descriptors) >= 0) {
      unsent_.erase(unsent_.begin(), next);
    } else if (errno == EAGAIN) {
      lock.unlock();
      const bool goes_on = wait_for_queue(socket);
      lock.lock();
      if (!goes_on) return ETIMEDOUT;
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

void KeeperLink::change_locked(std::uint64_t key) {
  if (state_ == State::kHeld || state_ == State::kReplacing) unsent_.insert(key);  // else the next keeper gets all
}

int KeeperLink::send_notes(int socket) const {
  for (const auto& [kind, note] : notes_) {
    if (const int error = send_one(socket, kind, note.numbers, note.descriptor.get())) return error;
  }
  return 0;
}

void KeeperLink::lose_locked(int error) {
  if (error == 0 || state_ != State::kHeld) return;
  state_ = State::kLost;
  error_ = error;
  ::shutdown(keeper_.socket.get(), SHUT_RDWR);  // which wakes the thread, and all that wait for the queue
  if (error == EPIPE || error == ECONNRESET) {
    log_warning("the keeper has ended: another one takes its place");
  } else {
    log_warning("the keeper is replaced, since it does not take what is sent: ", std::strerror(error));
  }
}

void KeeperLink::kill_keeper(pid_t number) {
  if (!is_alive(number)) return;
  ::kill(number, SIGKILL);
  if (number != ::getppid()) killed_.push_back(number);
}

void KeeperLink::reap() {
  for (const pid_t child : std::exchange(killed_, {})) TEMP_FAILURE_RETRY(::waitpid(child, nullptr, 0));
}

}  // namespace gpufs
