#include "device/device_context.h"

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/thread.h"
#include "device/event_pool.h"
#include "device/stream_pool.h"

namespace gpufs {
namespace {

// How long those who need memory wait until it is given back by others who hold it ahead of use.
constexpr std::chrono::milliseconds kReclaimPatience{1000};

// Work is other people's code: what it throws becomes a status, so that its callback runs and the worker lives on.
Status run_caught(const DeviceContext::Work& work, Device& device) {
  try {
    return work(device);
  } catch (const std::bad_alloc&) {
    return Status(ENOMEM, "");
  } catch (const std::exception& failure) {
    return Status(EIO, std::string("work on a device failed: ") + failure.what());
  } catch (...) {
    return Status(EIO, "work on a device failed");
  }
}

void call_caught(const DeviceContext::Callback& done, const Status& outcome) {
  if (!done) return;
  try {
    done(outcome);
  } catch (...) {
    log_error("a callback of work on a device failed");
  }
}

}  // namespace

// The thread and its queue. Shared by the context and the thread: when the last reference to the context goes on the
// worker itself, inside a callback, the thread outlives the context by what is still queued.
struct DeviceContext::Worker {
  struct Item {
    Work work;
    Callback done;
  };

  std::shared_ptr<Driver> driver;
  Device* device = nullptr;  // the driver's
  std::thread thread;
  std::thread::id id;  // written before the context is shared

  // Guards all below; nothing queued runs under it.
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Item> items;
  bool ending = false;
  bool started = false;  // bind_outcome is there
  Status bind_outcome;

  // False, and nothing taken, once the worker is ending.
  bool enqueue(Work& work, Callback& done) {
    {
      const std::lock_guard lock(mutex);
      if (ending) return false;
      items.push_back(Item{std::move(work), std::move(done)});
    }
    changed.notify_all();
    return true;
  }

  static Status run(const std::shared_ptr<Worker>& self, const Work& work) {
    Device& target_device = *self->device;
    if (!target_device.info().binds_threads || std::this_thread::get_id() == self->id) {
      return run_caught(work, target_device);
    }
    // Shared with the worker, which may still be inside notify when this thread has seen the end.
    struct Waiter {
      std::mutex mutex;
      std::condition_variable changed;
      bool done = false;
      Status outcome;
    };
    const auto waiter = std::make_shared<Waiter>();
    Work queued = [&work](Device& target) { return work(target); };
    Callback done = [waiter](const Status& outcome) {
      const std::lock_guard lock(waiter->mutex);
      waiter->outcome = outcome;
      waiter->done = true;
      waiter->changed.notify_all();
    };
    if (!self->enqueue(queued, done)) {
      // Only the last destructors come here, when there is no worker any more.
      const Status bound = target_device.bind_thread();
      return bound.ok() ? run_caught(work, target_device) : bound;
    }
    std::unique_lock lock(waiter->mutex);
    waiter->changed.wait(lock, [&] { return waiter->done; });
    return waiter->outcome;
  }

  static void loop(const std::shared_ptr<Worker>& self) {
    Status bound = run_caught([](Device& bound_device) { return bound_device.bind_thread(); }, *self->device);
    const bool usable = bound.ok();
    std::unique_lock lock(self->mutex);
    self->bind_outcome = std::move(bound);
    self->started = true;
    self->changed.notify_all();
    if (!usable) return;
    for (;;) {
      self->changed.wait(lock, [&] { return self->ending || !self->items.empty(); });
      if (self->items.empty()) return;
      {
        Item item = std::move(self->items.front());
        self->items.pop_front();
        lock.unlock();
        const Status outcome = run_caught(item.work, *self->device);
        call_caught(item.done, outcome);
        // The item, and with it perhaps the last reference to the context, goes before the lock is taken again.
      }
      lock.lock();
    }
  }
};

DeviceContext::DeviceContext(std::shared_ptr<Driver> driver, Device* device, std::uint64_t copy_chunk_bytes)
    : driver_(std::move(driver)),
      device_(device),
      copy_chunk_bytes_(copy_chunk_bytes),
      pinned_(*device),
      worker_(std::make_shared<Worker>()) {
  worker_->driver = driver_;
  worker_->device = device;
}

Result<std::shared_ptr<DeviceContext>> DeviceContext::create(std::shared_ptr<Driver> driver, std::size_t index,
                                                             const DeviceContextOptions& options) {
  if (index >= driver->devices().size()) return Status(EINVAL, "no such device");
  Device* const device = driver->devices()[index].get();
  Result<std::shared_ptr<observe::Region>> region = observe::Region::create(1, "");
  if (!region.ok()) return region.status();
  std::shared_ptr<DeviceContext> context(new DeviceContext(std::move(driver), device, options.copy_chunk_bytes));
  context->counters_ = observe::DeviceCounters(region.take(), 0);
  const std::shared_ptr<Worker> worker = context->worker_;
  Result<std::thread> thread =
      start_thread("gpufs-dev" + std::to_string(device->info().index), [worker] { Worker::loop(worker); });
  if (!thread.ok()) return thread.status();
  worker->thread = thread.take();
  worker->id = worker->thread.get_id();
  {
    std::unique_lock lock(worker->mutex);
    worker->changed.wait(lock, [&] { return worker->started; });
    if (!worker->bind_outcome.ok()) return worker->bind_outcome.with_context("starting the device's worker");
  }

  // The hooks refer to the worker's part, which outlives the context, since leases may.
  const auto on_worker = [worker](const Work& work) { return Worker::run(worker, work); };
  DevicePool<Event>::Hooks events;
  events.create = [on_worker](std::size_t count) -> Result<std::vector<std::unique_ptr<Event>>> {
    std::vector<std::unique_ptr<Event>> made;
    const Status outcome = on_worker([&](Device& target) {
      for (std::size_t number = 0; number < count; ++number) {
        Result<std::unique_ptr<Event>> event = target.create_event();
        // Fewer than asked for are a success: the pool asks again when it needs more.
        if (!event.ok()) return made.empty() ? event.status() : Status();
        made.push_back(event.take());
      }
      return Status();
    });
    if (!outcome.ok()) return outcome;
    return made;
  };
  events.reset = [](Event&) { return Status(); };
  events.destroy = [on_worker](std::vector<std::unique_ptr<Event>> doomed) {
    (void)on_worker([&doomed](Device&) {
      doomed.clear();
      return Status();
    });
  };
  DevicePool<Stream>::Hooks streams;
  streams.create = [on_worker](std::size_t count) -> Result<std::vector<std::unique_ptr<Stream>>> {
    std::vector<std::unique_ptr<Stream>> made;
    const Status outcome = on_worker([&](Device& target) {
      for (std::size_t number = 0; number < count; ++number) {
        Result<std::unique_ptr<Stream>> stream = target.create_stream();
        if (!stream.ok()) return made.empty() ? stream.status() : Status();
        made.push_back(stream.take());
      }
      return Status();
    });
    if (!outcome.ok()) return outcome;
    return made;
  };
  streams.reset = [on_worker](Stream& stream) {
    return on_worker([&stream](Device&) { return stream.synchronize(); });
  };
  streams.destroy = [on_worker](std::vector<std::unique_ptr<Stream>> doomed) {
    (void)on_worker([&doomed](Device&) {
      doomed.clear();
      return Status();
    });
  };
  context->events_ = std::make_unique<EventPool>(options.event_batch, options.event_limit, std::move(events));
  context->streams_ = std::make_unique<StreamPool>(options.stream_batch, options.stream_limit, std::move(streams));
  return context;
}

DeviceContext::~DeviceContext() {
  slabs_.reset();
  if (streams_) streams_->close();
  if (events_) events_->close();
  shutdown();
}

void DeviceContext::submit(Work work, Callback done) {
  if (worker_->enqueue(work, done)) return;
  call_caught(done, Status(ESHUTDOWN, "the device is being closed"));
}

Status DeviceContext::run(const Work& work) { return Worker::run(worker_, work); }

void DeviceContext::shutdown() {
  {
    const std::lock_guard lock(worker_->mutex);
    worker_->ending = true;
  }
  worker_->changed.notify_all();
  if (!worker_->thread.joinable()) return;
  if (std::this_thread::get_id() == worker_->id) {
    worker_->thread.detach();
  } else {
    worker_->thread.join();
  }
}

void DeviceContext::set_counters(observe::DeviceCounters counters) { counters_ = std::move(counters); }

void DeviceContext::hold_ahead(std::weak_ptr<AheadHolder> holder, const AheadHolder* key) {
  const std::lock_guard lock(ahead_mutex_);
  ahead_holders_[key] = std::move(holder);
}

void DeviceContext::drop_ahead(const AheadHolder* key) {
  const std::lock_guard lock(ahead_mutex_);
  ahead_holders_.erase(key);
  ahead_returns_.fetch_add(1, std::memory_order_release);
}

bool DeviceContext::reclaim_ahead(std::uint64_t noted) {
  std::map<const AheadHolder*, std::weak_ptr<AheadHolder>> holders;
  {
    const std::lock_guard lock(ahead_mutex_);
    holders = ahead_holders_;
  }
  // For all of them together.
  const auto deadline = std::chrono::steady_clock::now() + kReclaimPatience;
  bool ending = false;  // some holder, which takes along what it has
  for (const auto& [key, weak] : holders) {
    if (const std::shared_ptr<AheadHolder> holder = weak.lock()) {
      holder->give_back_ahead(deadline);
    } else {
      ending = true;
    }
  }
  return ending || ahead_returns() != noted;
}

void DeviceContext::set_host_locks(std::shared_ptr<HostLocks> locks) { host_locks_ = std::move(locks); }

void DeviceContext::set_slabs(std::shared_ptr<SlabPool> slabs) { slabs_ = std::move(slabs); }

}  // namespace gpufs
