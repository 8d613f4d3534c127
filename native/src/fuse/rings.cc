#include "fuse/rings.h"

#include <liburing.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <future>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "base/cpus.h"
#include "base/log.h"
#include "base/thread.h"
#include "base/unique_fd.h"
#include "fuse/protocol.h"
#include "fuse/transport.h"

namespace gpufs::fuse {

namespace {

// Entries of all queues together. Each is an address range of a request's size, whose memory comes at its first use.
constexpr std::size_t kAllEntries = 8192;
constexpr std::size_t kFewestEntries = 32;  // of a queue
constexpr std::size_t kMostEntries = 1024;  // of a queue
// Entries with populated and pinned memory, of each queue of a CPU that this process may use.
constexpr unsigned kPinnedEntries = 2;
constexpr std::size_t kHeadBytes = 4096;     // of an entry, before its payload
constexpr std::size_t kLeastPayload = 8192;  // FUSE_MIN_READ_BUFFER: the kernel refuses smaller ones
constexpr unsigned kSubmissions = 64;
constexpr unsigned kCompletions = 1024;

// CPUs that the machine may ever have: the kernel has a queue for each.
unsigned possible_cpus() {
  const std::vector<int> listed = listed_cpus("/sys/devices/system/cpu/possible");
  return static_cast<unsigned>(listed.empty() ? std::max(1L, ::sysconf(_SC_NPROCESSORS_CONF)) : listed.back() + 1);
}

}  // namespace

// Memory for one request, which the kernel fills, and the reply to it.
struct RingEntry {
  // The kernel's headers are at the start of the page before the payload.
  [[nodiscard]] UringHeaders& headers() const { return *reinterpret_cast<UringHeaders*>(payload.data() - kHeadBytes); }

  std::span<std::byte> payload;
  RingThread* thread;
  std::uint16_t queue;
  std::uint64_t commit = 0;
  iovec parts[2] = {};
};

// One ring, and the queues that it serves.
class RingThread {
 public:
  RingThread(Rings& rings, std::size_t index) : rings_(rings), index_(index) {}
  ~RingThread() { stop(); }
  RingThread(const RingThread&) = delete;
  RingThread& operator=(const RingThread&) = delete;

  // Before start().
  Status add_queue(std::uint16_t number, std::size_t entries, unsigned pinned);
  Status start();
  void serve(RequestHandler& handler) { begin_.set_value(&handler); }
  void stop();
  int reply(RingEntry& entry, std::uint64_t unique, int error, std::span<const iovec> body);
  [[nodiscard]] std::size_t entries() const { return entries_.size(); }

 private:
  Status prepare();
  Status add_memory(std::uint16_t queue, std::size_t entries, bool pinned);
  void run(RequestHandler& handler);
  io_uring_sqe* submission();
  void command(RingEntry& entry, std::uint32_t command);
  void wait_for_wake();
  // Until something has happened, or it did not pay.
  void spin();
  // Returns when the kernel or another thread has something for this one. False: the ring has failed.
  bool wait();
  void complete(RequestHandler& handler, RingEntry& entry, int outcome);
  void dispatch(RequestHandler& handler, RingEntry& entry);
  void commit_replies();

  Rings& rings_;
  const std::size_t index_;

  // The thread's own after start().
  io_uring ring_{};
  std::vector<PayloadMemory> memory_;
  std::vector<RingEntry> entries_;  // constant: a reply may come late
  std::vector<RingEntry*> own_replies_;
  std::size_t living_ = 0;   // entries that the kernel has or will get back
  std::uint64_t wakes_ = 0;  // what the eventfd is read into
  unsigned long_waits_ = kLongWaits;

  std::promise<RequestHandler*> begin_;  // null: end at once
  UniqueFd wake_;
  std::thread thread_;
  std::thread::id id_;

  std::atomic<bool> handed_{false};  // handed_replies_ has some, or the thread is to stop
  std::mutex mutex_;                 // guards all below
  std::vector<RingEntry*> handed_replies_;
  bool asleep_ = false;
  bool stopping_ = false;
  bool closed_ = false;
};

Status RingThread::start() {
  wake_ = UniqueFd(::eventfd(0, EFD_CLOEXEC));
  if (!wake_.valid()) return Status::from_errno(errno, "eventfd");
  std::promise<Status> prepared;
  std::future<Status> outcome = prepared.get_future();
  Result<std::thread> thread =
      start_thread("gpufs-ring-" + std::to_string(index_),
                   [this, prepared = std::make_shared<std::promise<Status>>(std::move(prepared))] {
                     std::future<RequestHandler*> begin = begin_.get_future();
                     const Status status = prepare();
                     prepared->set_value(status);
                     if (!status.ok()) return;
                     if (RequestHandler* const handler = begin.get(); handler != nullptr) run(*handler);
                     ::io_uring_queue_exit(&ring_);
                   });
  if (!thread.ok()) return thread.status();
  thread_ = thread.take();
  id_ = thread_.get_id();
  return outcome.get();
}

Status RingThread::prepare() {
  io_uring_params parameters{};
  // The last flag spares spin() a system call for each look.
  parameters.flags = IORING_SETUP_SQE128 | IORING_SETUP_CQSIZE | IORING_SETUP_SINGLE_ISSUER |
                     IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_TASKRUN_FLAG;
  parameters.cq_entries = kCompletions;
  if (const int error = ::io_uring_queue_init_params(kSubmissions, &ring_, &parameters); error != 0) {
    return Status::from_errno(-error, "io_uring_setup");
  }
  return {};
}

Status RingThread::add_queue(std::uint16_t number, std::size_t entries, unsigned pinned) {
  // The kernel takes the entry that was free last, first of all the last registered one.
  if (Status status = add_memory(number, entries - pinned, false); !status.ok()) return status;
  for (unsigned i = 0; i < pinned; ++i) {
    if (Status status = add_memory(number, 1, true); !status.ok()) return status;
  }
  return {};
}

Status RingThread::add_memory(std::uint16_t queue, std::size_t entries, bool pinned) {
  const std::size_t stride = kHeadBytes + rings_.payload_bytes_;
  Result<PayloadMemory> memory =
      PayloadMemory::create(entries * stride - kHeadBytes, pinned ? rings_.locks_ : nullptr, pinned);
  if (!memory.ok()) return memory.status();
  memory_.push_back(memory.take());
  for (std::size_t i = 0; i < entries; ++i) {
    entries_.push_back({{memory_.back().payload().data() + i * stride, rings_.payload_bytes_}, this, queue});
  }
  return {};
}

void RingThread::stop() {
  {
    const std::lock_guard lock(mutex_);
    handed_.store(true);
    if (!std::exchange(stopping_, true)) {
      try {
        begin_.set_value(nullptr);
      } catch (const std::future_error&) {  // it serves
      }
    }
  }
  const std::uint64_t one = 1;
  if (wake_.valid()) static_cast<void>(!::write(wake_.get(), &one, sizeof(one)));
  if (thread_.joinable()) thread_.join();
}

void RingThread::run(RequestHandler& handler) {
  forbid_waiting();
  for (RingEntry& entry : entries_) {
    entry.parts[0] = {&entry.headers(), sizeof(UringHeaders)};
    entry.parts[1] = {entry.payload.data(), entry.payload.size()};
    command(entry, kUringRegister);
  }
  wait_for_wake();
  for (;;) {
    commit_replies();
    if (!wait()) break;
    io_uring_cqe* completion = nullptr;
    while (::io_uring_peek_cqe(&ring_, &completion) == 0) {
      if (!own_replies_.empty()) {  // these clients need not wait for the next request
        commit_replies();
        ::io_uring_submit(&ring_);
      }
      auto* const entry = static_cast<RingEntry*>(::io_uring_cqe_get_data(completion));
      const int result = completion->res;
      ::io_uring_cqe_seen(&ring_, completion);
      if (entry == nullptr) {
        wait_for_wake();
      } else {
        complete(handler, *entry, result);
      }
    }
    if (living_ == 0) break;
  }
  bool ended = false;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    ended = !stopping_;
  }
  if (ended) handler.connection_ended();
}

bool RingThread::wait() {
  spin();
  bool sleeps = false;
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return false;
    sleeps = asleep_ = handed_replies_.empty();
  }
  const auto start = std::chrono::steady_clock::now();
  const int outcome = ::io_uring_submit_and_wait(&ring_, sleeps ? 1 : 0);
  if (sleeps) {
    const bool was_long = std::chrono::steady_clock::now() - start > rings_.spin_;
    long_waits_ = was_long ? std::min(long_waits_ + 1, kLongWaits) : 0;
    const std::lock_guard lock(mutex_);
    asleep_ = false;
  }
  if (outcome >= 0 || outcome == -EINTR || outcome == -EAGAIN || outcome == -EBUSY) return true;
  log_error("io_uring failed (errno ", -outcome, "); the mount ends");
  return false;
}

void RingThread::spin() {
  if (rings_.spin_.count() == 0 || long_waits_ >= kLongWaits || rings_.spinning_.exchange(true)) return;
  count(rings_.statistics_.spins);
  ::io_uring_submit(&ring_);
  const auto until = std::chrono::steady_clock::now() + rings_.spin_;
  do {
    io_uring_cqe* completion = nullptr;
    if (::io_uring_peek_cqe(&ring_, &completion) == 0 || handed_.load()) break;
    ::sched_yield();  // other threads on this CPU go first
  } while (std::chrono::steady_clock::now() < until);
  rings_.spinning_.store(false);
}

io_uring_sqe* RingThread::submission() {
  io_uring_sqe* sqe = ::io_uring_get_sqe(&ring_);
  while (sqe == nullptr) {
    ::io_uring_submit(&ring_);
    sqe = ::io_uring_get_sqe(&ring_);
  }
  return sqe;
}

void RingThread::command(RingEntry& entry, std::uint32_t command) {
  io_uring_sqe* const sqe = submission();
  const bool registers = command == kUringRegister;
  ::io_uring_prep_rw(IORING_OP_URING_CMD, sqe, rings_.device_, registers ? entry.parts : nullptr, registers ? 2 : 0, 0);
  sqe->cmd_op = command;
  // The command's arguments are the last 16 bytes of the submission and the 64 bytes after it: flags, which request the
  // reply is for, and the queue.
  sqe->addr3 = 0;
  sqe->__pad2[0] = registers ? 0 : entry.commit;
  std::memset(&sqe[1], 0, sizeof(sqe[1]));
  std::memcpy(&sqe[1], &entry.queue, sizeof(entry.queue));
  ::io_uring_sqe_set_data(sqe, &entry);
  if (registers) ++living_;
}

void RingThread::wait_for_wake() {
  io_uring_sqe* const sqe = submission();
  ::io_uring_prep_read(sqe, wake_.get(), &wakes_, sizeof(wakes_), 0);
  ::io_uring_sqe_set_data(sqe, nullptr);
}

void RingThread::complete(RequestHandler& handler, RingEntry& entry, int outcome) {
  if (outcome == 0) return dispatch(handler, entry);
  --living_;
  if (outcome == -ENOTCONN || outcome == -ECONNABORTED || outcome == -ENODEV) return;  // the connection has ended
  log_error("a ring of the FUSE connection failed (errno ", -outcome, ")");
}

void RingThread::dispatch(RequestHandler& handler, RingEntry& entry) {
  const UringHeaders& headers = entry.headers();
  entry.commit = headers.entry.commit_id;
  Request request;
  std::memcpy(&request.header, headers.in_out, sizeof(request.header));
  const std::size_t payload = headers.entry.payload_bytes;
  const std::size_t whole = request.header.len;
  const std::size_t arguments = whole - sizeof(fuse_in_header) - payload;
  const std::span<std::byte> memory = entry.payload;
  if (whole < sizeof(fuse_in_header) + payload || arguments > sizeof(headers.operation) || payload > memory.size()) {
    count(rings_.statistics_.bad_requests);
    log_error("a request of ", whole, " bytes from the kernel has a wrong length");
    static_cast<void>(reply(entry, request.header.unique, EIO, {}));
    return;
  }
  // The parts are put together as on the device: what is before the payload ends where that begins.
  const std::size_t before = sizeof(fuse_in_header) + arguments;
  std::byte* const message = memory.data() - before;
  std::memcpy(message, headers.in_out, sizeof(fuse_in_header));
  std::memcpy(message + sizeof(fuse_in_header), headers.operation, arguments);
  request.message = {message, whole};
  request.payload = memory;
  request.entry = &entry;
  try {
    handler.handle(request);  // its responder answers ENOMEM when an exception passes
  } catch (const std::exception& failure) {
    log_warning("serving ", opcode_name(request.header.opcode), " failed: ", failure.what());
  }
}

int RingThread::reply(RingEntry& entry, std::uint64_t unique, int error, std::span<const iovec> body) {
  const std::span<std::byte> memory = entry.payload;
  std::size_t total = 0;
  for (const iovec& part : body) {
    if (part.iov_len > memory.size() - total) return EMSGSIZE;
    std::byte* const target = memory.data() + total;
    if (part.iov_base != target) std::memmove(target, part.iov_base, part.iov_len);
    total += part.iov_len;
  }
  UringHeaders& headers = entry.headers();
  const fuse_out_header out{static_cast<std::uint32_t>(sizeof(fuse_out_header) + total), -error, unique};
  std::memcpy(headers.in_out, &out, sizeof(out));
  headers.entry.payload_bytes = static_cast<std::uint32_t>(total);
  if (std::this_thread::get_id() == id_) {
    own_replies_.push_back(&entry);
    return 0;
  }
  bool wake = false;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return ENODEV;
    handed_replies_.push_back(&entry);
    handed_.store(true);
    wake = std::exchange(asleep_, false);
  }
  const std::uint64_t one = 1;
  if (wake) static_cast<void>(!::write(wake_.get(), &one, sizeof(one)));
  return 0;
}

void RingThread::commit_replies() {
  std::vector<RingEntry*> handed;
  {
    const std::lock_guard lock(mutex_);
    handed.swap(handed_replies_);
    handed_.store(stopping_);
  }
  own_replies_.insert(own_replies_.end(), handed.begin(), handed.end());
  for (RingEntry* const entry : own_replies_) command(*entry, kUringCommitAndFetch);
  own_replies_.clear();
}

Rings::Rings(int device, std::size_t payload_bytes, std::chrono::nanoseconds spin,
             const std::shared_ptr<HostLocks>& locks, Statistics& statistics)
    : device_(device),
      payload_bytes_(std::max(payload_bytes, kLeastPayload)),
      spin_(spin),
      locks_(locks),
      statistics_(statistics) {}

Rings::~Rings() { stop(); }

Result<std::unique_ptr<Rings>> Rings::create(int device, std::size_t payload_bytes, std::chrono::nanoseconds spin,
                                             const std::shared_ptr<HostLocks>& locks, Statistics& statistics) {
  std::unique_ptr<Rings> rings(new Rings(device, payload_bytes, spin, locks, statistics));
  std::vector<std::unique_ptr<RingThread>>& threads = rings->threads_;
  const std::vector<int> cpus = allowed_cpus(-1);
  for (std::size_t i = 0; i < cpus.size(); ++i) threads.push_back(std::make_unique<RingThread>(*rings, i));
  const unsigned count = std::min(possible_cpus(), 65536U);
  const std::size_t entries = std::clamp(kAllEntries / count, kFewestEntries, kMostEntries);
  for (unsigned queue = 0; queue < count; ++queue) {
    const auto own = std::ranges::find(cpus, static_cast<int>(queue));
    const bool ours = own != cpus.end();  // or few clients will use it
    const std::size_t at = ours ? static_cast<std::size_t>(own - cpus.begin()) : queue % cpus.size();
    Status status = threads[at]->add_queue(static_cast<std::uint16_t>(queue), entries, ours ? kPinnedEntries : 0);
    if (!status.ok()) return status;
  }
  for (const auto& thread : threads) {
    if (Status status = thread->start(); !status.ok()) return status;
  }
  return rings;
}

void Rings::serve(RequestHandler& handler) {
  for (const auto& thread : threads_) thread->serve(handler);
}

void Rings::stop() {
  for (const auto& thread : threads_) thread->stop();
}

int Rings::reply(RingEntry& entry, std::uint64_t unique, int error, std::span<const iovec> body) {
  return entry.thread->reply(entry, unique, error, body);
}

void Rings::write_statistics(JsonWriter& json) const {
  std::size_t entries = 0;
  for (const auto& thread : threads_) entries += thread->entries();
  json.number("ring_threads", threads_.size());
  json.number("ring_entries", entries);
}

}  // namespace gpufs::fuse
