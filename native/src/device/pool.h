// A bounded pool of driver objects (events, streams) that are created in batches and used again.
// Owned by its DeviceContext; objects in use keep the pool's state and the driver alive, not the context.
// Any thread may call any function. Creation and destruction happen on the device's worker.
#pragma once

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "base/caught.h"
#include "base/status.h"
#include "drivers/driver.h"

namespace gpufs {

template <typename T>
class DevicePool {
 public:
  struct Hooks {
    // Makes up to `count` objects with the device current; at least one, or the failure.
    std::function<Result<std::vector<std::unique_ptr<T>>>(std::size_t count)> create;
    // Makes an object fit for its next user; a failure has it destroyed and another taken. May wait for the object.
    std::function<Status(T&)> reset;
    // Destroys objects with the device current. Also called after the context has gone.
    std::function<void(std::vector<std::unique_ptr<T>>)> destroy;
  };

  DevicePool(std::size_t batch, std::size_t limit, Hooks hooks) : state_(std::make_shared<State>()) {
    state_->batch = batch == 0 ? 1 : batch;
    state_->limit = limit == 0 ? 1 : limit;
    state_->hooks = std::move(hooks);
  }
  ~DevicePool() { close(); }
  DevicePool(const DevicePool&) = delete;
  DevicePool& operator=(const DevicePool&) = delete;

  // An object of the caller's own until the last copy of the pointer goes; only then does it return to the pool, so
  // nobody can still be looking at it. Waits while all are in use. Fails with what creating one gave, ESHUTDOWN after
  // close().
  Result<std::shared_ptr<T>> acquire() { return acquire_until(nullptr); }

  // As acquire(), but waits at most this long: EAGAIN when none came free.
  Result<std::shared_ptr<T>> acquire_for(std::chrono::milliseconds patience) {
    const auto end = std::chrono::steady_clock::now() + patience;
    return acquire_until(&end);
  }

  // Makes objects until so many exist (or the limit), if nobody else has made them.
  Status make(std::size_t count) {
    std::vector<std::shared_ptr<T>> taken;
    while (existing() < std::min(count, state_->limit)) {
      Result<std::shared_ptr<T>> object = acquire_for({});
      if (!object.ok()) return object.status();
      taken.push_back(object.take());
    }
    return {};
  }

  // Ends the pool: waiting callers get ESHUTDOWN, idle objects are destroyed now and those in use when they come back.
  void close() {
    std::vector<std::unique_ptr<T>> idle;
    {
      const std::lock_guard lock(state_->mutex);
      state_->closed = true;
      idle.swap(state_->idle);
      state_->existing -= idle.size();
    }
    state_->changed.notify_all();
    if (!idle.empty()) state_->hooks.destroy(std::move(idle));
  }

  [[nodiscard]] std::size_t existing() const {
    const std::lock_guard lock(state_->mutex);
    return state_->existing;
  }
  [[nodiscard]] std::size_t idle() const {
    const std::lock_guard lock(state_->mutex);
    return state_->idle.size();
  }

 private:
  using TimePoint = std::chrono::steady_clock::time_point;

  struct State {
    Hooks hooks;  // constant after construction
    std::size_t batch = 0;
    std::size_t limit = 0;

    // Guards all below; no hook is called under it.
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<std::unique_ptr<T>> idle;
    std::size_t existing = 0;  // idle, in use, or being created
    bool closed = false;

    // Room for all objects, before there is one: what comes back must find its place.
    void reserve() {
      const std::lock_guard lock(mutex);
      idle.reserve(limit);
    }
  };

  // The end of an object's use: the deleter of the pointers that acquire() gives.
  struct Return {
    std::shared_ptr<State> state;
    void operator()(T* raw) const {
      std::unique_ptr<T> object(raw);
      {
        const std::lock_guard lock(state->mutex);
        if (!state->closed) {
          state->idle.push_back(std::move(object));  // has room: reserved when the object was created
        } else {
          --state->existing;
        }
      }
      state->changed.notify_one();
      if (object) destroy_one(*state, std::move(object));
    }
  };

  static void destroy_one(State& state, std::unique_ptr<T> object) {
    std::vector<std::unique_ptr<T>> doomed;
    doomed.push_back(std::move(object));
    state.hooks.destroy(std::move(doomed));
  }

  Result<std::shared_ptr<T>> acquire_until(const TimePoint* end) {
    State& state = *state_;
    std::unique_lock lock(state.mutex);
    for (;;) {
      if (state.closed) return Status(ESHUTDOWN, "the device is being closed");
      if (!state.idle.empty()) {
        std::unique_ptr<T> object = std::move(state.idle.back());
        state.idle.pop_back();
        lock.unlock();
        if (state.hooks.reset(*object).ok()) return std::shared_ptr<T>(object.release(), Return{state_});
        destroy_one(state, std::move(object));
        lock.lock();
        --state.existing;
        continue;
      }
      if (state.existing < state.limit) {
        const std::size_t count = std::min(state.batch, state.limit - state.existing);
        state.existing += count;
        lock.unlock();
        Result<std::vector<std::unique_ptr<T>>> made = caught([&] {
          state.reserve();
          return state.hooks.create(count);
        });
        lock.lock();
        const std::size_t got = made.ok() ? made.value().size() : 0;
        state.existing -= count - got;
        if (got == 0) {
          state.changed.notify_all();  // the room that this call had claimed is there again
          return made.ok() ? Status(ENOMEM, "the driver created nothing") : made.status();
        }
        for (std::unique_ptr<T>& object : made.value()) state.idle.push_back(std::move(object));
        state.changed.notify_all();
        continue;
      }
      if (end == nullptr) {
        state.changed.wait(lock);
      } else if (state.changed.wait_until(lock, *end) == std::cv_status::timeout && state.idle.empty() &&
                 state.existing >= state.limit && !state.closed) {
        return Status(EAGAIN, "all are in use");
      }
    }
  }

  std::shared_ptr<State> state_;
};

}  // namespace gpufs
