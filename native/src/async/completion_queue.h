// Where operations are submitted and where they are found again once they are over: a batch, or all of a program's.
// Shared by its handle and the operations in it.
// Any thread may call any function. Bounded: operations under way and those that nobody has collected.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "async/operation.h"
#include "base/unique_fd.h"

namespace gpufs {

class CompletionQueue : public std::enable_shared_from_this<CompletionQueue> {
 public:
  CompletionQueue(std::shared_ptr<AsyncEngine> engine, std::size_t capacity);
  ~CompletionQueue() = default;
  CompletionQueue(const CompletionQueue&) = delete;
  CompletionQueue& operator=(const CompletionQueue&) = delete;

  struct Entry {
    OperationRequest request;
    std::shared_ptr<OperationStream> stream;  // null: at once, in no order with others
  };
  // All of them or none: EINVAL, EBADF and others name the first entry that cannot be (its number in *bad), EAGAIN when
  // there is no room for all. A stream that refuses an entry after others have been queued makes that entry end with
  // the stream's failure. *ids: of the operations, in the entries' order (may be null).
  Status submit(std::vector<Entry> entries, std::vector<std::uint64_t>* ids, std::size_t* bad);

  // Collects up to `most` that are over, in the order in which they ended, once there are `fewest` or as many as there
  // can be; waits for that up to `patience`.
  std::vector<Completion> collect(std::size_t fewest, std::size_t most, std::chrono::milliseconds patience);

  // An eventfd of the queue's, readable while there is something to collect; lives as long as the queue.
  Result<int> event_fd();

  // Asks operations to stop: 0 for all of them. One whose stream has not come to it is over at once and moves nothing;
  // one that runs stops at its next piece. ENOENT: no such operation is under way.
  Status cancel(std::uint64_t id);

  // Cancels all, refuses what comes, and waits until none uses its memory any more. ETIMEDOUT: some
  // have not ended within 10 s; they can be collected once they have.
  Status close();

  struct Counts {
    std::size_t under_way = 0;
    std::size_t uncollected = 0;
  };
  [[nodiscard]] Counts counts() const;

 private:
  friend class AsyncEngine;
  class Submission;
  using Node = std::list<Completion>::iterator;
  struct UnderWay {
    std::shared_ptr<Operation> operation;
    Node node;
  };

  [[nodiscard]] std::vector<std::shared_ptr<Operation>> under_way() const;
  // An operation is over.
  void deliver(Completion completion);
  // It never was. False if it is over.
  bool forget(std::uint64_t id);

  const std::shared_ptr<AsyncEngine> engine_;
  const std::size_t capacity_;

  mutable std::mutex mutex_;  // guards all below; no other lock is taken under it
  std::condition_variable changed_;
  std::unordered_map<std::uint64_t, UnderWay> under_way_;
  std::list<Completion> waiting_;  // their places, made beforehand
  std::list<Completion> done_;
  UniqueFd event_;
  bool closed_ = false;
};

}  // namespace gpufs
