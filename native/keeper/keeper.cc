// gpufs-keeper MOUNTPOINT: holds the descriptors of one mount, and starts the mount's daemon again when it has died.
//
// The daemon starts the keeper with one end of a SEQPACKET socket pair as standard input. A message is a kind, a count,
// and that many 64-bit numbers; descriptors come with it by SCM_RIGHTS. From the daemon:
//
//   HOLD keys          Keep each of the descriptors, one for each key, in place of what was held under that key.
//   DROP keys          Close what is held under the keys.
//   RESTART [words]    The program that takes over from a daemon that has died: a memfd has its arguments (the first
//                      `words` of the strings there) and its environment (the others), each ending with a zero byte.
//                      Without a number there is none.
//   GIVE_UP [words]    The same for the program that runs if the mount cannot be saved.
//   SETTLE [0]         Add 1 to the eventfd that comes with it: everything before has been handled.
//   HAND_OVER          The daemon ends next, so that RESTART takes over. That does not count as a death.
//   END                The mount ends: the keeper closes everything and exits.
//   SERVES             The daemon answers requests, and has taken note of RELEASED.
//   WHY text           Why the daemon ends next, in the bytes of the numbers, padded with zeros.
//
// To a daemon that takes over, whose descriptor 3 is the other end of a new pair:
//
//   HELD keys          What is held, one descriptor for each key, in as many messages as it takes.
//   RELEASED handles   Files that were closed while the keeper answered the kernel's requests.
//   READY time         That was all. The time is when the death was noticed, in nanoseconds of CLOCK_MONOTONIC.
//
// A daemon that has answered requests is replaced at once. After one that has died before, or soon after twenty in a
// row, the keeper waits: a second, and twice as long each time, up to a minute. In a long pause it answers the kernel's
// requests with EIO, so that programs do not hang, and that a request that the daemon dies of goes away. SIGUSR1 ends
// the pause. A memfd with the name gpufs-keeper-state has lines for `gpufs status`: how many daemons have failed, when
// the next one starts (nanoseconds of CLOCK_MONOTONIC; 0: not by itself), and what the last one died of. In a memfd
// that it holds for daemons the keeper notes all deaths: lines say how many, when the last one was (seconds since
// 1970), and why.
//
// Where there is no RESTART, the keeper closes everything and becomes GIVE_UP. Without that it goes on holding until
// the mount is unmounted, and answers with EIO. One that was sent neither ends with its daemon. SIGTERM ends it while
// no daemon runs. It takes no notice of other signals: it ends with the mount. What it does is in the system's log. A
// daemon that is alive is never replaced, whatever it does or does not do. One that was killed counts as dead once its
// descriptors are closed, or for a second each of its threads has waited in the kernel: for a reply of this very mount,
// which only the next daemon can give, or for a server that does not answer.

#include <dirent.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <syslog.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/keeper_messages.h"
#include "base/unique_fd.h"

namespace {

using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC
using gpufs::UniqueFd;
using gpufs::keeper::kBatch;
using gpufs::keeper::kHeaderBytes;
using gpufs::keeper::Kind;
using gpufs::keeper::Message;

constexpr std::uint64_t kConnection = 1;  // the key of /dev/fuse
constexpr std::uint64_t kDeaths = 6;      // the key of a memfd that has what the keeper notes of deaths
constexpr int kDaemonSocket = 3;          // the number of a new daemon's end
constexpr std::int32_t kNotifyResend = 7;
// The largest WRITE of a mount, and a page for its headers.
constexpr std::size_t kRequestBytes = std::size_t{gpufs::keeper::kLargestMaxWrite} + 4096;
constexpr auto kBriefly = std::chrono::seconds(1);        // a daemon that has answered for longer counts as a good one
constexpr unsigned kBriefAtOnce = 20;                     // so many others are replaced at once, too
constexpr auto kLongestPause = std::chrono::seconds(60);  // before a start
constexpr auto kRefusesFrom = std::chrono::seconds(4);    // in pauses of this length requests are answered with EIO
constexpr int kLookMilliseconds = 500;                    // between looks whether the daemon is ending
constexpr int kCloseLookMilliseconds = 20;                // if it is
constexpr auto kStuck = std::chrono::seconds(1);          // nothing of it has run for so long: it cannot end

[[noreturn]] void fail(const char* what) {
  ::syslog(LOG_ERR, "%s: %s: the mount does not survive its daemon", what, std::strerror(errno));
  std::exit(EXIT_FAILURE);
}

UniqueFd checked(int fd, const char* what) {
  if (fd < 0) fail(what);
  return UniqueFd(fd);
}

int open_process(pid_t process) { return static_cast<int>(::syscall(SYS_pidfd_open, process, 0)); }

sigset_t set_of(std::initializer_list<int> signals) {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int signal : signals) ::sigaddset(&set, signal);
  return set;
}

// Blocks these signals alone.
void block(const sigset_t& signals) { ::sigprocmask(SIG_SETMASK, &signals, nullptr); }

// The process that made a socket pair.
pid_t maker_of(int socket) {
  ucred maker{};
  socklen_t bytes = sizeof maker;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &maker, &bytes) < 0) fail("standard input is not a socket");
  return maker.pid;
}

// Returns a descriptor that becomes readable when the parent ends.
UniqueFd watch_parent(pid_t parent) {
  UniqueFd process(open_process(parent));
  // While it is the parent, the number is certainly its own.
  if (process.valid() && ::getppid() == parent) return process;
  return checked(::eventfd(1, EFD_CLOEXEC), "eventfd");  // readable at once: it has died already
}

// What the kernel says of a thread: proc_pid_stat(5).
struct ThreadState {
  char state = '?';           // unknown
  std::uint64_t flags = 0;    // PF_
  std::uint64_t pending = 0;  // signals, of the lowest 31
  int status = 0;             // of wait(2), of a process that has ended

  explicit ThreadState(const std::string& directory) {
    char text[1024];
    const UniqueFd file(::open((directory + "/stat").c_str(), O_RDONLY | O_CLOEXEC));
    const ssize_t bytes = ::read(file.get(), text, sizeof text);
    std::string_view rest(text, static_cast<std::size_t>(std::max<ssize_t>(bytes, 0)));
    rest.remove_prefix(std::min(rest.rfind(')'), rest.size()));  // the name may have blanks
    for (int field = 2; !rest.empty(); ++field) {
      const std::string_view word = rest.substr(0, rest.find(' '));
      if (field == 3) state = word[0];
      if (field == 9) std::from_chars(word.begin(), word.end(), flags);
      if (field == 31) std::from_chars(word.begin(), word.end(), pending);
      if (field == 52) std::from_chars(word.begin(), word.end(), status);
      rest.remove_prefix(std::min(word.size() + 1, rest.size()));
    }
  }
  // Whether it runs no instruction of its program any more.
  [[nodiscard]] bool is_ending() const {
    constexpr std::uint64_t kExiting = 4;  // PF_EXITING
    return state == 'Z' || state == 'X' || (flags & kExiting) != 0 || (pending >> (SIGKILL - 1) & 1) != 0;
  }
};

std::string directory_of(pid_t process) { return "/proc/" + std::to_string(process); }

std::string text_of(int status) {
  if (WIFSIGNALED(status)) return "killed by signal " + std::to_string(WTERMSIG(status));
  return "exited with " + std::to_string(WEXITSTATUS(status));
}

// Returns what a process that is not a child has ended with; nothing if the kernel does not say (before Linux 6.15).
std::string end_of(pid_t process, int descriptor) {
  if (const ThreadState main(directory_of(process)); main.state == 'Z') return text_of(main.status);
  struct {  // pidfd_info, which is in the headers of new kernels
    std::uint64_t mask = 1 << 3;
    std::uint64_t cgroup = 0;
    std::uint32_t ids[11] = {};
    std::int32_t status = 0;
  } info;
  const bool known = ::ioctl(descriptor, _IOWR(0xFF, 11, info), &info) == 0 && (info.mask & 1 << 3) != 0;
  return known ? text_of(info.status) : "";
}

// Whether no thread of a process runs in the kernel either.
bool all_wait(pid_t process) {
  const std::string directory = directory_of(process) + "/task/";
  const std::unique_ptr<DIR, int (*)(DIR*)> threads(::opendir(directory.c_str()), ::closedir);
  if (threads == nullptr) return false;
  while (const dirent* const thread = ::readdir(threads.get())) {
    if (thread->d_name[0] == '.') continue;
    const char state = ThreadState(directory + thread->d_name).state;
    if (state != 'D' && state != 'Z' && state != 'X') return false;
  }
  return true;
}

// A program with its arguments and environment.
class Program {
 public:
  Program() = default;

  Program(int memfd, std::size_t arguments) : arguments_(arguments) {
    struct stat status {};
    if (::fstat(memfd, &status) < 0) fail("a program cannot be read");
    text_.resize(static_cast<std::size_t>(status.st_size));
    if (::pread(memfd, text_.data(), text_.size(), 0) != static_cast<ssize_t>(text_.size()))
      fail("a program cannot be read");
  }

  [[nodiscard]] bool empty() const { return text_.empty() || arguments_ == 0; }

  // Replaces this process by the program.
  [[noreturn]] void run() {
    std::vector<char*> arguments;
    std::vector<char*> environment;
    for (std::size_t at = 0; at < text_.size(); at += std::strlen(&text_[at]) + 1)
      (arguments.size() < arguments_ ? arguments : environment).push_back(&text_[at]);
    arguments.push_back(nullptr);
    environment.push_back(nullptr);
    ::execve(arguments[0], arguments.data(), environment.data());
    ::syslog(LOG_ERR, "cannot start %s: %s", arguments[0], std::strerror(errno));
    ::_exit(127);
  }

 private:
  std::string text_;
  std::size_t arguments_ = 0;
};

class Keeper {
 public:
  Keeper(UniqueFd socket, UniqueFd signals)
      : socket_(std::move(socket)),
        process_(maker_of(socket_.get())),
        daemon_(watch_parent(process_)),
        signals_(std::move(signals)),
        state_(::memfd_create("gpufs-keeper-state", MFD_CLOEXEC)) {}

  // Returns the exit status, once there is nothing left to keep.
  int run() {
    for (;;) {
      const short requests = refuses_ ? POLLIN : short{0};  // POLLERR comes in any case
      pollfd polled[] = {{socket_.get(), POLLIN, 0},
                         {daemon_.get(), POLLIN, 0},
                         {signals_.get(), POLLIN, 0},
                         {daemon_.valid() ? -1 : connection(), requests, 0}};
      const auto& [socket, daemon, signals, mount] = polled;
      if (::poll(polled, std::size(polled), until_look()) < 0) fail("poll");
      // Messages first: those that a dead daemon has sent still count.
      if (socket.revents != 0) {
        if (!receive()) return EXIT_SUCCESS;
      } else if (daemon.revents != 0 || (daemon_.valid() && cannot_end())) {
        if (!replace_daemon()) return EXIT_FAILURE;
      }
      if (signals.revents != 0) {
        signalfd_siginfo signal;
        if (::read(signals_.get(), &signal, sizeof signal) < 0) fail("signalfd");
        if (signal.ssi_signo == SIGTERM) {
          if (!daemon_.valid()) return EXIT_FAILURE;
          continue;
        }
        unanswered_ = brief_ = 0;
        if (!daemon_.valid() && !start_daemon()) return EXIT_FAILURE;
      }
      if ((mount.revents & POLLERR) != 0) return EXIT_FAILURE;  // unmounted
      if ((mount.revents & POLLIN) != 0 && !daemon_.valid()) refuse_request();
      if (!daemon_.valid() && next_start_ && Clock::now() >= *next_start_ && !start_daemon()) return EXIT_FAILURE;
    }
  }

 private:
  // Handles one message. False at the end of the mount.
  bool receive() {
    Message message{};
    alignas(cmsghdr) char control[CMSG_SPACE(kBatch * sizeof(int))];
    iovec part{&message, sizeof message};
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    const ssize_t bytes = ::recvmsg(socket_.get(), &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    // The daemon has died before it had read everything. What it has sent is read next.
    if (bytes < 0 && errno == ECONNRESET) return true;
    if (bytes < 0) fail("the daemon's socket");
    if (bytes == 0) {
      socket_.reset();
      return true;
    }
    std::vector<UniqueFd> descriptors;
    for (cmsghdr* one = CMSG_FIRSTHDR(&header); one != nullptr; one = CMSG_NXTHDR(&header, one)) {
      if (one->cmsg_level != SOL_SOCKET || one->cmsg_type != SCM_RIGHTS) continue;
      for (std::size_t at = CMSG_LEN(0); at < one->cmsg_len; at += sizeof(int)) {
        int fd = -1;
        std::memcpy(&fd, reinterpret_cast<const char*>(one) + at, sizeof fd);
        descriptors.emplace_back(fd);
      }
    }
    errno = EMFILE;
    if ((header.msg_flags & MSG_CTRUNC) != 0) fail("no descriptor is free");
    errno = EBADMSG;
    if (message.count > kBatch ||
        static_cast<std::size_t>(bytes) != kHeaderBytes + message.count * sizeof(std::uint64_t))
      fail("a message of the daemon");
    switch (message.kind) {
      case Kind::kHold:
        if (descriptors.size() != message.count) fail("a message of the daemon");
        for (std::size_t i = 0; i < message.count; ++i) held_[message.numbers[i]] = std::move(descriptors[i]);
        break;
      case Kind::kDrop:
        for (std::size_t i = 0; i < message.count; ++i) held_.erase(message.numbers[i]);
        break;
      case Kind::kRestart:
      case Kind::kGiveUp: {
        Program program;
        if (message.count == 1 && descriptors.size() == 1) program = Program(descriptors[0].get(), message.numbers[0]);
        (message.kind == Kind::kRestart ? restart_ : give_up_) = std::move(program);
        is_instructed_ = true;
        break;
      }
      case Kind::kSettle:
        for (const UniqueFd& settled : descriptors) {
          const std::uint64_t one = 1;
          [[maybe_unused]] const ssize_t written = ::write(settled.get(), &one, sizeof one);
        }
        break;
      case Kind::kHandOver:
        handing_over_ = true;
        break;
      case Kind::kServes:
        serves_since_ = Clock::now();
        released_.clear();
        write_lines(state_.get(), "");
        break;
      case Kind::kWhy: {
        const auto* const text = reinterpret_cast<const char*>(message.numbers);
        reason_.assign(text, ::strnlen(text, message.count * sizeof(std::uint64_t)));
        break;
      }
      case Kind::kEnd:
        return false;
      default:  // of a newer daemon
        ::syslog(LOG_WARNING, "a message of an unknown kind: %u", static_cast<unsigned>(message.kind));
    }
    return true;
  }

  // replace_daemon(), and the next two functions, return false if there is nothing left to keep.
  bool replace_daemon() {
    noticed_ = Clock::now();
    ::syslog(LOG_NOTICE, "the daemon %d has died", process_);
    std::string end;
    int status = 0;  // of each daemon that this process has started
    for (pid_t ended = 0; (ended = ::waitpid(-1, &status, WNOHANG)) > 0;) {
      end = text_of(status);
      ::syslog(LOG_NOTICE, "process %d: %s", ended, end.c_str());
    }
    if (reason_.empty()) reason_ = end.empty() ? end_of(process_, daemon_.get()) : end;
    daemon_.reset();
    socket_.reset();
    if (is_unmounted()) return false;
    const std::optional<Clock::time_point> served = std::exchange(serves_since_, std::nullopt);
    const bool hands_over = std::exchange(handing_over_, false);
    if (!hands_over) note_death();
    if (hands_over || (served && noticed_ - *served >= kBriefly)) {
      unanswered_ = brief_ = 0;
    } else {
      ++(served ? brief_ : unanswered_);
    }
    return start_soon();
  }

  // Starts a daemon, at once or after a pause: what the last one died of may pass, as a lack of memory does.
  bool start_soon() {
    if (restart_.empty()) return give_up();
    const unsigned failures = unanswered_ + (brief_ > kBriefAtOnce ? brief_ - kBriefAtOnce : 0);
    if (failures == 0) return start_daemon();
    const auto pause =
        std::min<Clock::duration>(kLongestPause, std::chrono::seconds(1) * (1U << std::min(failures - 1, 6U)));
    next_start_ = Clock::now() + pause;
    const auto at = std::chrono::nanoseconds(next_start_->time_since_epoch()).count();
    write_lines(state_.get(), std::to_string(unanswered_ + brief_) + "\n" + std::to_string(at) + "\n" + reason_ + "\n");
    ::syslog(LOG_WARNING, "the daemon has died %u times, the next one starts in %lld s: %s", unanswered_ + brief_,
             static_cast<long long>(std::chrono::ceil<std::chrono::seconds>(pause).count()), reason_.c_str());
    if (pause >= kRefusesFrom) refuse_requests();
    return true;
  }

  bool start_daemon() {
    next_start_.reset();
    if (restart_.empty()) return give_up();
    if (fork_daemon()) {
      refuses_ = false;
      reason_.clear();
      send_held();
      return true;
    }
    reason_ = std::string("cannot start the daemon: ") + std::strerror(errno);
    ++unanswered_;
    return start_soon();
  }

  bool give_up() {
    if (!give_up_.empty()) {
      block(set_of({SIGTERM, SIGINT, SIGHUP}));  // it is brief
      give_up_.run();                            // which closes everything that is held
    }
    if (connection() < 0 || !is_instructed_) return false;
    write_lines(state_.get(), std::to_string(unanswered_ + brief_) + "\n0\n" + reason_ + "\n");
    refuse_requests();
    return true;
  }

  void refuse_requests() {
    if (std::exchange(refuses_, true)) return;
    // Requests that the daemon had read and not answered come again, to refuse_request().
    const fuse_out_header resend{sizeof resend, kNotifyResend, 0};
    if (::write(connection(), &resend, sizeof resend) < 0)
      ::syslog(LOG_WARNING, "some programs wait: %s", std::strerror(errno));
  }

  // Whether the daemon was killed, and only the next one can end what is left of it.
  bool cannot_end() {
    const bool ends = ThreadState(directory_of(process_)).is_ending();
    const Clock::time_point now = Clock::now();
    if (!std::exchange(is_ending_, ends) || !ends || !all_wait(process_)) ran_ = now;
    return is_ending_ && (!socket_.valid() || now - ran_ >= kStuck);
  }

  // Milliseconds for poll(2).
  [[nodiscard]] int until_look() const {
    if (daemon_.valid()) return is_ending_ || !socket_.valid() ? kCloseLookMilliseconds : kLookMilliseconds;
    if (!next_start_) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(*next_start_ - Clock::now()).count();
    return static_cast<int>(std::max<std::int64_t>(left, 0));
  }

  static void write_lines(int memfd, const std::string& text) {
    [[maybe_unused]] const int emptied = ::ftruncate(memfd, 0);
    [[maybe_unused]] const ssize_t written = ::pwrite(memfd, text.data(), text.size(), 0);
  }

  // The number before is read in the memfd: another keeper may have noted it.
  void note_death() const {
    const auto found = held_.find(kDeaths);
    if (found == held_.end()) return;
    char former[20];
    const ssize_t bytes = ::pread(found->second.get(), former, sizeof former, 0);
    std::uint64_t deaths = 0;
    std::from_chars(former, former + std::max<ssize_t>(bytes, 0), deaths);
    const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
    write_lines(found->second.get(),
                std::to_string(deaths + 1) + "\n" + std::to_string(now.count()) + "\n" + reason_ + "\n");
  }

  // Answers a request of the kernel with EIO.
  void refuse_request() {
    if (request_ == nullptr) request_ = std::make_unique_for_overwrite<char[]>(kRequestBytes);
    fuse_in_header request{};
    const ssize_t bytes = ::read(connection(), request_.get(), kRequestBytes);
    if (bytes < static_cast<ssize_t>(sizeof request)) return;  // taken back, or unmounted
    std::memcpy(&request, request_.get(), sizeof request);
    for (const std::uint32_t without_reply : {FUSE_FORGET, FUSE_BATCH_FORGET, FUSE_INTERRUPT, FUSE_NOTIFY_REPLY}) {
      if (request.opcode == without_reply) return;
    }
    // The file is closed whatever the answer is, but only the next daemon can note that.
    if (request.opcode == FUSE_RELEASE || request.opcode == FUSE_RELEASEDIR) {
      fuse_release_in closed{};
      std::memcpy(&closed, request_.get() + sizeof request, sizeof closed);
      released_.push_back(closed.fh);
    }
    const fuse_out_header reply{sizeof reply, -EIO, request.unique};
    [[maybe_unused]] const ssize_t written = ::write(connection(), &reply, sizeof reply);
  }

  bool fork_daemon() {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0) return false;
    UniqueFd ours(ends[0]);
    const UniqueFd theirs(ends[1]);
    const pid_t child = ::fork();
    if (child < 0) return false;
    if (child == 0) {
      ::setsid();
      block(set_of({SIGTERM, SIGINT, SIGHUP}));  // which end the mount: the daemon unblocks them when it can do that
      if (::dup2(theirs.get(), kDaemonSocket) < 0 || ::fcntl(kDaemonSocket, F_SETFD, 0) < 0) ::_exit(127);
      restart_.run();
    }
    UniqueFd daemon(open_process(child));
    if (!daemon.valid()) {
      const int error = errno;
      ::kill(child, SIGKILL);
      errno = error;
      return false;
    }
    daemon_ = std::move(daemon);
    is_ending_ = false;
    process_ = child;
    socket_ = std::move(ours);
    return true;
  }

  // Blocks until the daemon has read almost everything, or has died.
  void send_held() {
    std::vector<std::uint64_t> keys;
    std::vector<int> descriptors;
    for (auto one = held_.begin(); one != held_.end();) {
      keys.push_back(one->first);
      descriptors.push_back(one->second.get());
      if (++one != held_.end() && keys.size() < kBatch) continue;
      if (!send(Kind::kHeld, keys, descriptors)) return;
      keys.clear();
      descriptors.clear();
    }
    for (std::span<const std::uint64_t> left = released_; !left.empty();
         left = left.subspan(std::min(left.size(), kBatch))) {
      if (!send(Kind::kReleased, left.first(std::min(left.size(), kBatch)), {})) return;
    }
    const auto time = std::chrono::nanoseconds(noticed_.time_since_epoch()).count();
    const std::uint64_t numbers[] = {static_cast<std::uint64_t>(time)};
    send(Kind::kReady, numbers, {});
  }

  // A daemon whose message cannot be sent sees the end of the socket in its place.
  bool send(Kind kind, std::span<const std::uint64_t> numbers, std::span<const int> descriptors) {
    if (gpufs::keeper::send(socket_.get(), kind, numbers, descriptors) >= 0) return true;
    if (errno != EPIPE && errno != ECONNRESET)
      ::syslog(LOG_ERR, "cannot pass on what is held: %s", std::strerror(errno));
    socket_.reset();
    return false;
  }

  [[nodiscard]] int connection() const {
    const auto found = held_.find(kConnection);
    return found == held_.end() ? -1 : found->second.get();
  }

  [[nodiscard]] bool is_unmounted() const {
    pollfd mount{connection(), 0, 0};
    return ::poll(&mount, 1, 0) > 0 && (mount.revents & POLLERR) != 0;
  }

  UniqueFd socket_;
  pid_t process_;    // the present daemon, or the last one
  UniqueFd daemon_;  // readable once it has ended; none if no daemon runs
  UniqueFd signals_;
  std::map<std::uint64_t, UniqueFd> held_;
  Program restart_;
  Program give_up_;
  bool is_instructed_ = false;       // else the daemon has another keeper, which this one was to replace
  std::unique_ptr<char[]> request_;  // memory for one, once it is needed
  bool is_ending_ = false;           // the daemon, as far as is known
  Clock::time_point ran_;            // when something of it was last seen running, if it is
  bool handing_over_ = false;
  UniqueFd state_;
  std::optional<Clock::time_point> serves_since_;  // the present daemon
  std::optional<Clock::time_point> next_start_;    // during a pause
  bool refuses_ = false;                           // answers requests
  unsigned unanswered_ = 0;                        // daemons one after the other that died before they answered
  unsigned brief_ = 0;                             // and soon after
  std::string reason_;                             // what the last daemon died of
  std::vector<std::uint64_t> released_;            // handles
  Clock::time_point noticed_;                      // when the last daemon had ended
};

}  // namespace

int main(int count, char** words) {
  if (count != 2) {
    static constexpr char kUsage[] = "usage: gpufs-keeper MOUNTPOINT (the daemon of a mount starts it)\n";
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, kUsage, sizeof kUsage - 1);
    return 2;
  }
  // Blocked, and not ignored: the programs that it starts begin without that.
  sigset_t all;
  ::sigfillset(&all);
  block(all);
  const std::string name = std::string("gpufs-keeper ") + words[1];
  ::openlog(name.c_str(), LOG_PID, LOG_DAEMON);
  const sigset_t read = set_of({SIGUSR1, SIGTERM});
  UniqueFd signals = checked(::signalfd(-1, &read, SFD_CLOEXEC), "signalfd");
  UniqueFd socket = checked(::fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, kDaemonSocket), "standard input");
  ::setsid();
  [[maybe_unused]] const int moved = ::chdir("/");
  // Descriptors 0 to 2 of the programs that it starts: what standard output is.
  if (::dup2(STDOUT_FILENO, STDIN_FILENO) < 0) fail("standard output");
  return Keeper(std::move(socket), std::move(signals)).run();
}
