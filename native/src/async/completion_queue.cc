#include "async/completion_queue.h"

#include <cerrno>
#include <string>
#include <utility>

namespace gpufs {

Status CompletionQueue::add(const std::vector<std::shared_ptr<Operation>>& operations) {
  const std::lock_guard lock(mutex_);
  if (closed_) return Status(ESHUTDOWN, "the batch is being closed");
  if (under_way_.size() + done_.size() + operations.size() > capacity_) {
    return Status(EAGAIN, "the batch has space for " + std::to_string(capacity_) + " operations");
  }
  for (const std::shared_ptr<Operation>& operation : operations) under_way_.emplace(operation->id(), operation);
  return {};
}

void CompletionQueue::remove(std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  under_way_.erase(id);
  changed_.notify_all();
}

void CompletionQueue::deliver(Completion completion) {
  std::shared_ptr<Operation> operation;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  const auto found = under_way_.find(completion.id);
  if (found == under_way_.end()) return;
  operation = std::move(found->second);
  under_way_.erase(found);
  done_.push_back(std::move(completion));
  changed_.notify_all();
}

std::vector<Completion> CompletionQueue::collect(std::size_t fewest, std::size_t most,
                                                 std::chrono::milliseconds timeout) {
  std::vector<Completion> collected;
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, timeout, [&] { return done_.size() >= fewest || under_way_.empty(); });
  while (!done_.empty() && collected.size() < most) {
    collected.push_back(std::move(done_.front()));
    done_.pop_front();
  }
  return collected;
}

Status CompletionQueue::cancel(std::uint64_t id) {
  std::vector<std::shared_ptr<Operation>> wanted;
  if (id == 0) {
    wanted = under_way();
  } else {
    const std::lock_guard lock(mutex_);
    if (const auto found = under_way_.find(id); found != under_way_.end()) wanted.push_back(found->second);
  }
  bool any = id == 0;
  for (const std::shared_ptr<Operation>& operation : wanted) any = operation->cancel() || any;
  return any ? Status{} : Status(ENOENT, "no such operation is under way");
}

Status CompletionQueue::close(std::chrono::milliseconds timeout) {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  (void)cancel(0);
  std::unique_lock lock(mutex_);
  if (changed_.wait_for(lock, timeout, [&] { return under_way_.empty(); })) return {};
  return Status(ETIMEDOUT,
                std::to_string(under_way_.size()) +
                    " cancelled operations have not ended in time: their device or file does not respond, and"
                    " their memory is in use");
}

std::vector<std::shared_ptr<Operation>> CompletionQueue::under_way() const {
  std::vector<std::shared_ptr<Operation>> found;
  const std::lock_guard lock(mutex_);
  found.reserve(under_way_.size());
  for (const auto& [id, operation] : under_way_) found.push_back(operation);
  return found;
}

}  // namespace gpufs
