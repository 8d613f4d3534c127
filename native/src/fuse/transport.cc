#include "fuse/transport.h"

#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <exception>
#include <string>
#include <utility>

#include "base/cpus.h"
#include "base/log.h"
#include "base/math.h"
#include "base/thread.h"
#include "fuse/protocol.h"

namespace gpufs::fuse {
namespace {

using namespace std::chrono_literals;

constexpr auto kTick = 1ms;
constexpr unsigned kGrowTicks = 3;            // requests waiting so often in a row call for another reader
constexpr unsigned kShrinkTicks = 50;         // a reader not needed for so long is sent to sleep
constexpr unsigned kSleepTicks = 200;         // without a request for so long the watcher sleeps, too
constexpr auto kKickInterval = 5ms;           // between two attempts to get a reader out of read()
constexpr std::size_t kBulkBytes = 64 << 10;  // copying a larger message takes longer than waking a thread
constexpr std::size_t kMinimumReaders = 4;
constexpr std::size_t kMaximumReaders = 64;
constexpr std::size_t kPinnedInTurn = 2;  // memory of a reader; four made no difference

std::size_t choose_readers(std::size_t asked) {
  if (asked != 0) return std::min<std::size_t>(asked, 1024);
  return std::clamp<std::size_t>(std::thread::hardware_concurrency(), kMinimumReaders, kMaximumReaders);
}

// The signal that gets a reader out of a blocking read(). Its handler does nothing; it is installed once, for a
// real-time signal that the process does not use, and never removed, since a late one would end the process.
int kick_signal() {
  static const int chosen = [] {
    for (int signal = SIGRTMAX - 1; signal > SIGRTMIN; --signal) {
      struct sigaction current {};
      if (::sigaction(signal, nullptr, &current) != 0 || current.sa_handler != SIG_DFL) continue;
      struct sigaction ours {};
      ours.sa_handler = [](int) {};
      ::sigemptyset(&ours.sa_mask);  // no SA_RESTART: read() is to return
      if (::sigaction(signal, &ours, nullptr) == 0) return signal;
    }
    return 0;
  }();
  return chosen;
}

void accept_kicks() {
  sigset_t set;
  ::sigemptyset(&set);
  ::sigaddset(&set, kick_signal());
  ::pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
}

constexpr std::size_t kLargestPage = 65536;  // a multiple of the page size wherever Linux runs
static_assert(kWriteHeaderBytes <= kLargestPage);

}  // namespace

Transport::Transport(UniqueFd device, const TransportOptions& options, observe::EngineCounters& counters)
    : device_(std::move(device)),
      reader_limit_(choose_readers(options.reader_threads)),
      payload_bytes_(options.payload_bytes),
      spin_(usable_cpus(-1) > 1 ? options.spin : std::chrono::nanoseconds{0}),
      locks_(options.locks),
      counters_(counters) {
  readers_.reserve(reader_limit_);
  idle_.reserve(reader_limit_);
}

Status Transport::start(RequestHandler& handler) {
  if (kick_signal() == 0) return Status(EAGAIN, "no real-time signal is free for the reader threads");
  handler_ = &handler;
  TRY(spawn_reader());
  Status watching = watcher_.start();
  if (!watching.ok()) stop();
  return watching;
}

void Transport::stop() {
  stopping_.store(true);
  watcher_.stop();

  // No reader is added any more: the watcher is gone and allow_one_more() checks stopping_ under the lock.
  std::vector<std::unique_ptr<Reader>> readers;
  {
    const std::lock_guard lock(mutex_);
    readers.swap(readers_);
    idle_.clear();
  }
  for (const auto& reader : readers) reader->wake.release();
  for (const auto& reader : readers) {
    // A kick that comes just before read() is lost, so it is repeated.
    while (!reader->finished.load()) {
      ::pthread_kill(reader->thread.native_handle(), kick_signal());
      std::this_thread::sleep_for(kKickInterval);
    }
    reader->thread.join();
  }
}

Status Transport::spawn_reader() {
  auto reader = std::make_unique<Reader>();
  do {
    PayloadMemory memory = TRY(PayloadMemory::create(payload_bytes_, locks_));
    reader->memory.push_back(std::move(memory));
  } while (locks_ != nullptr && reader->memory.size() < kPinnedInTurn);
  Reader* raw = reader.get();

  const std::lock_guard lock(mutex_);
  if (stopping_.load()) return Status(ESHUTDOWN, "the mount is closing");
  // The thread waits for the lock before its first read, so stop() finds its handle in place.
  Result<std::thread> thread = start_thread("gpufs-read-" + std::to_string(readers_.size()), [this, raw] {
    { const std::lock_guard started(mutex_); }
    accept_kicks();
    read_loop(*raw);
    raw->finished.store(true);
  });
  if (!thread.ok()) return thread.status();
  reader->thread = thread.take();
  readers_.push_back(std::move(reader));
  ++active_;
  start_failed_.store(false);
  return {};
}

void Transport::read_loop(Reader& reader) {
  while (!stopping_.load(std::memory_order_relaxed)) {
    pause_if_surplus(reader);
    if (stopping_.load(std::memory_order_relaxed)) return;
    if (!read_one(reader)) return;
  }
}

void Transport::pause_if_surplus(Reader& reader) {
  if (allowed_.load(std::memory_order_relaxed) >= reader_limit_) return;
  {
    const std::lock_guard lock(mutex_);
    if (active_ <= allowed_.load() || stopping_.load()) return;
    --active_;
    idle_.push_back(&reader);
  }
  if (std::exchange(reader.bulk, false)) busy_.fetch_sub(kBulk, std::memory_order_relaxed);
  reader.wake.acquire();  // by allow_one_more(), which has counted this reader as active again, or stop()
}

bool Transport::read_one(Reader& reader) {
  const PayloadMemory& memory = reader.memory[reader.turn++ % reader.memory.size()];
  const ssize_t got = wait_and_read(reader, memory.message());
  if (got > 0) {
    serve(reader, memory, static_cast<std::size_t>(got));
    return true;
  }
  const int error = got == 0 ? ENODEV : errno;
  switch (error) {
    case EINTR:   // a kick
    case EAGAIN:  // another process made the descriptor non-blocking: the poll below waits
    case ENOENT:  // the request was taken back while it was being read
      if (error == EAGAIN) {
        pollfd waiting{device_.get(), POLLIN, 0};
        static_cast<void>(::poll(&waiting, 1, -1));
      }
      return true;
    case ENOMEM:
      std::this_thread::sleep_for(kKickInterval);
      return true;
    case ENODEV:
    case ECONNABORTED:
      break;
    default:
      log_error("reading from the FUSE device failed (errno ", error, "); the mount ends");
  }
  if (!ended_.exchange(true)) handler_->connection_ended();
  return false;
}

ssize_t Transport::wait_and_read(Reader& reader, std::span<std::byte> memory) {
  if (spin_.count() == 0) return ::read(device_.get(), memory.data(), memory.size());
  const auto start = std::chrono::steady_clock::now();
  const bool spins = reader.long_waits < kLongWaits;
  if (spins && sleeping_.load(std::memory_order_relaxed) == 0 && !spinning_.exchange(true)) {
    spin_for_request(start + spin_);
    spinning_.store(false);
  }
  sleeping_.fetch_add(1, std::memory_order_relaxed);
  const ssize_t got = ::read(device_.get(), memory.data(), memory.size());
  const int error = errno;
  sleeping_.fetch_sub(1, std::memory_order_relaxed);
  const bool was_long = std::chrono::steady_clock::now() - start > spin_;
  reader.long_waits = was_long ? std::min(reader.long_waits + 1, kLongWaits) : 0;
  errno = error;
  return got;
}

void Transport::spin_for_request(std::chrono::steady_clock::time_point until) {
  count(counters_.reader_spins);
  while (!stopping_.load(std::memory_order_relaxed) && sleeping_.load(std::memory_order_relaxed) == 0) {
    pollfd device{device_.get(), POLLIN, 0};
    if (::poll(&device, 1, 0) != 0 || std::chrono::steady_clock::now() >= until) return;
    ::sched_yield();  // other threads on this CPU go first
  }
}

void Transport::serve(Reader& reader, const PayloadMemory& memory, std::size_t bytes) {
  const std::uint64_t before = busy_.fetch_add(kServing - (reader.bulk ? kBulk : 0), std::memory_order_relaxed);
  const std::uint64_t serving = before % kBulk + kServing;
  if (serving > busy_peak_.load(std::memory_order_relaxed)) busy_peak_.store(serving, std::memory_order_relaxed);
  // In one total order with the watcher's own pair (sets the flag, then reads the count): one of the two sees the
  // other, so the watcher never sleeps through a request that could block the only reader.
  served_.fetch_add(1);
  if (watcher_asleep_.load() && watcher_asleep_.exchange(false)) watcher_.wake();

  Request request;
  request.message = memory.message().first(bytes);
  request.payload = memory.payload();
  if (!read_struct(request.message, 0, &request.header) || request.header.len != bytes) {
    count(counters_.bad_requests);
    log_error("a message of ", bytes, " bytes from the kernel has a wrong length");
    if (bytes >= sizeof(fuse_in_header)) static_cast<void>(send(request.header.unique, EIO, {}));
  } else {
    try {
      handler_->handle(request);  // the responder answers ENOMEM when an exception passes
    } catch (const std::exception& failure) {
      log_warning("serving ", opcode_name(request.header.opcode), " failed: ", failure.what());
    }
  }
  reader.bulk = bytes >= kBulkBytes;
  busy_.fetch_add((reader.bulk ? kBulk : 0) - kServing, std::memory_order_relaxed);
}

void Transport::allow_one_more() {
  {
    const std::lock_guard lock(mutex_);
    if (stopping_.load() || active_ >= reader_limit_) return;
    allowed_.store(std::max(allowed_.load(), active_ + 1));
    if (!idle_.empty()) {
      Reader* reader = idle_.back();
      idle_.pop_back();
      ++active_;
      reader->wake.release();
      return;
    }
  }
  if (const Status status = spawn_reader(); !status.ok() && status.error() != ESHUTDOWN) {
    if (!start_failed_.exchange(true)) log_warning("no further reader thread: ", status.message());
    const std::lock_guard lock(mutex_);
    allowed_.store(std::max<std::size_t>(1, active_));
  }
}

Worker::Clock::time_point Transport::watch() {
  if (ended_.load()) return Worker::kNever;
  if (!watch_tick()) {
    idle_ticks_ = 0;
    watcher_asleep_.store(true);
    // A request that was served before a reader could see the flag is seen here.
    if (served_.load() == seen_served_) return Worker::kNever;
    watcher_asleep_.store(false);
  }
  return Worker::Clock::now() + kTick;
}

bool Transport::watch_tick() {
  const std::uint64_t served = served_.load();
  const std::size_t allowed = allowed_.load();
  const std::uint64_t busy = busy_.load(std::memory_order_relaxed);
  const std::uint64_t serving = busy % kBulk;
  idle_ticks_ = served == seen_served_ && serving == 0 ? idle_ticks_ + 1 : 0;
  seen_served_ = served;
  if (!ready_.load()) return true;

  bool backlog = false;
  if (serving + busy / kBulk >= allowed && allowed < reader_limit_) {
    pollfd waiting{device_.get(), POLLIN, 0};
    backlog = ::poll(&waiting, 1, 0) == 1 && (waiting.revents & POLLIN) != 0;
  }
  // Once proves nothing: a reader may have replied and not come back yet, while its only client has sent again.
  backlog_ticks_ = backlog ? backlog_ticks_ + 1 : 0;
  if (backlog_ticks_ >= kGrowTicks) {
    backlog_ticks_ = 0;
    window_ticks_ = 0;
    window_peak_ = 0;
    busy_peak_.store(0, std::memory_order_relaxed);
    allow_one_more();
    return true;
  }

  window_peak_ = std::max({window_peak_, busy_peak_.exchange(serving, std::memory_order_relaxed), serving});
  if (++window_ticks_ >= kShrinkTicks) {
    if (allowed > 1 && window_peak_ < allowed) allowed_.store(allowed - 1);
    window_ticks_ = 0;
    window_peak_ = 0;
  }
  return idle_ticks_ < kSleepTicks;
}

int Transport::notify(std::int32_t code, std::span<const std::byte> body) {
  const iovec part{const_cast<std::byte*>(body.data()), body.size()};  // sent, not written to
  return write_message(0, code, {&part, 1});
}

int Transport::write_message(std::uint64_t unique, std::int32_t error, std::span<const iovec> body) {
  if (body.size() > Responder::kMaximumPieces) return EMSGSIZE;
  if (!device_.valid()) return ENODEV;
  fuse_out_header header{};
  std::array<iovec, Responder::kMaximumPieces + 1> parts;  // not initialised: only what is used is touched
  parts[0] = {&header, sizeof(header)};
  std::size_t total = sizeof(header);
  for (std::size_t i = 0; i < body.size(); ++i) {
    parts[i + 1] = body[i];
    total += body[i].iov_len;
  }
  if (total > UINT32_MAX) return EMSGSIZE;
  header.len = static_cast<std::uint32_t>(total);
  header.error = error;
  header.unique = unique;
  for (;;) {
    const ssize_t sent = ::writev(device_.get(), parts.data(), static_cast<int>(body.size() + 1));
    if (sent == static_cast<ssize_t>(total)) return 0;
    if (sent >= 0) return EIO;  // the device takes a message whole
    if (errno == EINTR) continue;
    return errno == EPIPE || errno == ECONNABORTED ? ENODEV : errno;
  }
}

Result<PayloadMemory> PayloadMemory::create(std::size_t payload_bytes, const std::shared_ptr<HostLocks>& locks) {
  const std::size_t bytes = kLargestPage + round_up(payload_bytes, kLargestPage);
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (base == MAP_FAILED) return Status::from_errno(errno, "memory for requests");
  // A forked child must not share pages that a device reads: copy-on-write would replace them here.
  static_cast<void>(::madvise(base, bytes, MADV_DONTFORK));
  static_cast<void>(::madvise(base, bytes, MADV_DONTDUMP));  // users' data
  static_cast<void>(::mlock(base, bytes));                   // plain users have a limit; only speed is lost
  PayloadMemory memory(static_cast<std::byte*>(base), bytes);
  if (locks != nullptr) {
    const std::span<std::byte> payload = memory.payload();
    const Status status =
        locks->lock(payload.data(), payload.size(), HostLocks::Access::kBoth, HostLocks::Owner::kMount);
    if (!status.ok() && locks->policy() == LockPolicy::kMandatory) {
      return status.with_context("locking the memory for requests is mandatory");
    }
    if (status.ok()) {
      memory.locks_ = locks;
    } else {
      log_warning("request memory is not locked: ", status.message());
    }
  }
  return memory;
}

PayloadMemory::PayloadMemory(PayloadMemory&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)), bytes_(other.bytes_), locks_(std::move(other.locks_)) {}

PayloadMemory::~PayloadMemory() {
  if (base_ == nullptr) return;
  if (locks_ != nullptr) {
    const Status status = locks_->unlock(payload().data(), payload().size());
    if (!status.ok()) log_warning(status.message());
  }
  ::munmap(base_, bytes_);
}

std::span<std::byte> PayloadMemory::message() const {
  return {base_ + kLargestPage - kWriteHeaderBytes, bytes_ - kLargestPage + kWriteHeaderBytes};
}

std::span<std::byte> PayloadMemory::payload() const { return {base_ + kLargestPage, bytes_ - kLargestPage}; }

}  // namespace gpufs::fuse
