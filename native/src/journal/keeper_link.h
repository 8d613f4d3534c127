// The daemon's side of the keeper, the process that holds descriptors for the next daemon. native/keeper/keeper.cc
// describes the messages. All of them are sent here, except the reason of a daemon that could not start. And every
// failure has the same consequence: the socket is shut down, and a thread replaces the keeper by another one, which
// gets everything again. It tries until that works.
// Ownership: shared by the mount and the control plane.
// Thread-safe.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/keeper_messages.h"
#include "base/status.h"
#include "base/unique_fd.h"

namespace gpufs {

class KeeperLink {
 public:
  struct Held {
    std::uint64_t key;
    int descriptor;
  };
  // Keys: the engine has the journal's and those from kFirstMemory on, the control plane the others.
  static constexpr std::uint64_t kJournal = 2;
  static constexpr std::uint64_t kFirstMemory = std::uint64_t{1} << 32;

  // Starts a keeper: the program, with the mount's path. With a socket it continues with the keeper at the other end,
  // which has started this process and holds `held`.
  static Result<std::shared_ptr<KeeperLink>> open(std::string program, std::string mountpoint, UniqueFd socket,
                                                  std::span<const Held> held);
  // The keeper goes on: it acts when this process ends.
  ~KeeperLink();

  // Holds descriptors, each under its key, in place of what is held there. They stay the caller's, and open until
  // drop(). On return the keeper has them, or another keeper will get them: see health(). Waits for one that is slow.
  void hold(std::span<const Held> held);
  void drop(std::span<const std::uint64_t> keys);
  // As drop(), but this keeper goes on holding it.
  void forget(std::uint64_t key);
  // Sends a message, and to later keepers the last one of each kind.
  void note(keeper::Kind kind, std::span<const std::uint64_t> numbers, UniqueFd descriptor);
  // What is held now, from a key on.
  [[nodiscard]] std::vector<Held> held_from(std::uint64_t key);
  // Waits a moment until the keeper has handled what was sent.
  void settle();

  // Sends nothing from now on, except END by end().
  void stop();
  // Ends the keeper, which closes everything that it holds. When no other call is in progress.
  void end();
  // OK while the keeper has everything. Waits for no lock.
  [[nodiscard]] Status health() const;

 private:
  enum class State : std::uint8_t {
    kHeld,       // the keeper has everything
    kLost,       // it has ended, or lacks something
    kReplacing,  // the next one is getting everything
    kEnding,
  };
  struct Note {
    std::vector<std::uint64_t> numbers;
    UniqueFd descriptor;
  };
  struct Process {
    UniqueFd socket;
    pid_t number = -1;  // of a child, or of the process that has started this one
  };

  KeeperLink(std::string program, std::string mountpoint)
      : program_(std::move(program)), mountpoint_(std::move(mountpoint)) {}
  [[nodiscard]] Result<Process> start_keeper() const;
  // The thread.
  void run();
  // Returns 0, or the errno.
  int replace(std::unique_lock<std::mutex>& lock);
  // Sends what the keeper at this socket lacks, as long as the state is this one, and releases the lock while it waits.
  // Returns 0, or the errno.
  int flush(std::unique_lock<std::mutex>& lock, int socket, State state);
  void change_locked(std::uint64_t key);
  // Returns 0, or the errno.
  int send_notes(int socket) const;
  void lose_locked(int error);
  void kill_keeper(pid_t number);
  void reap();

  const std::string program_;
  const std::string mountpoint_;
  std::atomic<State> state_ = State::kHeld;  // changes with the lock
  std::atomic<int> error_ = 0;               // the last one

  std::mutex mutex_;  // guards all below; order 9 of docs/design/requests.md#locks
  std::condition_variable changed_;
  Process keeper_;  // the socket's number never changes
  std::map<std::uint64_t, int> held_;
  std::set<std::uint64_t> unsent_;  // keys under which the keeper has something else than held_ says
  std::map<keeper::Kind, Note> notes_;
  std::vector<pid_t> killed_;  // children that reap() waits for
  std::thread thread_;
};

}  // namespace gpufs
