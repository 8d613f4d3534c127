#include "async/completion_queue.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <string>
#include <utility>

#include "async/async_engine.h"
#include "observe/trace.h"

namespace gpufs {

CompletionQueue::CompletionQueue(std::shared_ptr<AsyncEngine> engine, std::size_t capacity)
    : engine_(std::move(engine)), capacity_(capacity) {}

// Operations that are being submitted. Unless they are kept, each goes as if it had never been.
class CompletionQueue::Submission {
 public:
  Submission(CompletionQueue& queue, std::size_t count) : queue_(queue), count_(count) {}
  ~Submission() {
    if (kept_) return;
    for (const std::shared_ptr<Operation>& operation : operations) {
      // One that somebody cancels at this moment is delivered and counted there.
      if (!AsyncEngine::retract(*operation)) continue;
      (void)queue_.forget(operation->id());
      queue_.engine_->unreserve(1);
    }
    queue_.engine_->unreserve(count_ - operations.size());
  }
  Submission(const Submission&) = delete;
  Submission& operator=(const Submission&) = delete;

  void keep() { kept_ = true; }

  std::vector<std::shared_ptr<Operation>> operations;

 private:
  CompletionQueue& queue_;
  const std::size_t count_;
  bool kept_ = false;
};

Status CompletionQueue::submit(std::vector<Entry> entries, std::vector<std::uint64_t>* ids, std::size_t* bad) {
  for (std::size_t number = 0; number < entries.size(); ++number) {
    *bad = number;
    Status checked = engine_->check(entries[number].request, entries[number].stream.get());
    if (!checked.ok()) return checked;
  }
  *bad = 0;
  if (ids != nullptr) ids->reserve(ids->size() + entries.size());
  Status reserved = engine_->reserve(entries.size());
  if (!reserved.ok()) return reserved;
  Submission submission(*this, entries.size());
  std::vector<std::shared_ptr<Operation>>& operations = submission.operations;
  operations.reserve(entries.size());
  for (Entry& entry : entries) {
    auto operation = std::make_shared<Operation>(std::move(entry.request), ++engine_->last_id_);
    const BackingFile& file = *operation->request_.transfer.file;
    operation->queue_ = shared_from_this();
    operation->stream_ = std::move(entry.stream);
    operation->may_hang_ = file.facts().may_hang;
    operation->device_ = operation->request_.transfer.target.device();
    if (observe::trace::on()) {
      operation->trace_name_ = observe::trace::name_of_file(file.buffered_fd());
      operation->submitted_at_ = observe::now_ns();
    }
    operations.push_back(std::move(operation));
  }
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return Status(ESHUTDOWN, "the batch is being closed");
    if (capacity_ - std::min(capacity_, under_way_.size() + done_.size()) < operations.size()) {
      return Status(EAGAIN, "the batch has room for " + std::to_string(capacity_) + " operations");
    }
    for (const std::shared_ptr<Operation>& operation : operations) {
      const Node node = waiting_.emplace(waiting_.end());
      try {
        under_way_.emplace(operation->id(), UnderWay{operation, node});
      } catch (...) {
        waiting_.erase(node);
        throw;
      }
    }
  }
  for (std::size_t number = 0; number < operations.size(); ++number) {
    Status status;
    try {
      status = engine_->submit(operations[number]);
    } catch (const std::bad_alloc&) {  // its stream has not got it
      status = Status(ENOMEM, "");
    }
    if (number == 0) {
      if (!status.ok()) return status;
      submission.keep();
    } else if (!status.ok()) {
      Completion completion;
      completion.status = std::move(status);
      (void)engine_->end(operations[number], std::move(completion));
    }
  }
  if (ids != nullptr) {
    for (const std::shared_ptr<Operation>& operation : operations) ids->push_back(operation->id());
  }
  return {};
}

std::vector<Completion> CompletionQueue::collect(std::size_t fewest, std::size_t most,
                                                 std::chrono::milliseconds patience) {
  std::vector<Completion> collected;
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, patience, [&] { return done_.size() >= fewest || under_way_.empty(); });
  collected.reserve(std::min(most, done_.size()));
  while (!done_.empty() && collected.size() < most) {
    collected.push_back(std::move(done_.front()));
    done_.pop_front();
  }
  if (done_.empty() && event_.valid()) {
    std::uint64_t counted = 0;
    (void)!::read(event_.get(), &counted, sizeof counted);
  }
  return collected;
}

Result<int> CompletionQueue::event_fd() {
  const std::lock_guard lock(mutex_);
  if (!event_.valid()) {
    event_ = UniqueFd(::eventfd(done_.empty() ? 0 : 1, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!event_.valid()) return Status::from_errno(errno, "an eventfd for operations");
  }
  return event_.get();
}

Status CompletionQueue::cancel(std::uint64_t id) {
  std::vector<std::shared_ptr<Operation>> wanted;
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = under_way_.find(id); found != under_way_.end()) wanted.push_back(found->second.operation);
  }
  if (id == 0) wanted = under_way();
  bool any = id == 0;
  for (const std::shared_ptr<Operation>& operation : wanted) any = engine_->cancel(operation) || any;
  return any ? Status{} : Status(ENOENT, "no such operation is under way");
}

Status CompletionQueue::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  (void)cancel(0);
  std::unique_lock lock(mutex_);
  if (changed_.wait_for(lock, engine_->stall_timeout(), [&] { return under_way_.empty(); })) return {};
  return Status(ETIMEDOUT, std::to_string(under_way_.size()) +
                               " cancelled operations have not ended in time: their device or file does not respond, and"
                               " their memory is in use");
}

std::vector<std::shared_ptr<Operation>> CompletionQueue::under_way() const {
  std::vector<std::shared_ptr<Operation>> found;
  const std::lock_guard lock(mutex_);
  found.reserve(under_way_.size());
  for (const auto& [id, under_way] : under_way_) found.push_back(under_way.operation);
  return found;
}

CompletionQueue::Counts CompletionQueue::counts() const {
  const std::lock_guard lock(mutex_);
  return {under_way_.size(), done_.size()};
}

void CompletionQueue::deliver(Completion completion) {
  std::shared_ptr<Operation> operation;  // let go without the lock
  const std::lock_guard lock(mutex_);
  const auto found = under_way_.find(completion.id);
  if (found == under_way_.end()) return;
  operation = std::move(found->second.operation);
  *found->second.node = std::move(completion);
  done_.splice(done_.end(), waiting_, found->second.node);
  under_way_.erase(found);
  if (done_.size() == 1 && event_.valid()) {
    const std::uint64_t one = 1;
    (void)!::write(event_.get(), &one, sizeof one);
  }
  changed_.notify_all();
}

bool CompletionQueue::forget(std::uint64_t id) {
  std::shared_ptr<Operation> operation;
  const std::lock_guard lock(mutex_);
  const auto found = under_way_.find(id);
  if (found == under_way_.end()) return false;
  operation = std::move(found->second.operation);
  waiting_.erase(found->second.node);
  under_way_.erase(found);
  changed_.notify_all();
  return true;
}

}  // namespace gpufs
