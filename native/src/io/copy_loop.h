// How one thread moves its part of a transfer: take a chunk of the plan, read the file into a free pinned bounce
// buffer, queue the copy to the device, take the next chunk. So file and device work overlap. Belongs to the thread
// that runs it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "device/device_context.h"
#include "io/bounce_pool.h"
#include "io/plan_cursor.h"
#include "io/target_memory.h"
#include "io/transfer.h"

namespace gpufs {

class CopyLoop {
 public:
  explicit CopyLoop(Transfer& transfer);
  ~CopyLoop() { drain(); }
  CopyLoop(const CopyLoop&) = delete;
  CopyLoop& operator=(const CopyLoop&) = delete;

  // Runs until the transfer has no more chunks or another one needs the thread. Chunks may still be on their way to the
  // device: the destructor waits for them.
  void run();

 private:
  // Bytes of a chunk, from its start, for which the buffer has no memory.
  struct BufferHole {
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
  };
  // A bounce buffer and the chunk in it.
  struct InFlight {
    BounceBuffer buffer;
    std::shared_ptr<Event> event;
    bool busy = false;  // the device works on it
    Chunk chunk;
    std::uint64_t bytes = 0;        // of the chunk, after chunk.done, that are in the buffer
    std::byte* memory = nullptr;    // where they are
    Status file_status;             // load: how reading the file ended
    std::vector<BufferHole> holes;  // store
    TargetMemory::Use use;
    TransferTarget::Pin pin;
    std::uint8_t lane = 0;         // in traces, from 1 on
    std::uint64_t copy_start = 0;  // when the device's work was queued; 0: not traced
    std::uint64_t copy_end = 0;    // when it was seen to be done; 0: not yet
  };
  struct FastOutcome {
    Status status;
    bool fall_back = false;  // the rest goes by fallback
  };

  void move(Chunk& chunk);
  void skip_hole(Chunk& chunk);

  bool move_fast(Chunk& chunk);
  FastOutcome move_by_vendor(Chunk& chunk);
  Moved call_vendor(const Chunk& chunk, const TransferTarget::Piece& piece);
  Status stopped_short(const Chunk& chunk);

  void move_straight(Chunk& chunk);
  Status move_straight_in_use(Chunk& chunk);
  Moved load_straight(const Chunk& chunk, const TransferTarget::Piece& piece, bool direct);

  void load_bounced(const Chunk& chunk);
  void store_bounced(const Chunk& chunk);
  Moved read_file(InFlight& slot);
  Status write_file(InFlight& slot);
  Status copy_to_device(InFlight& slot, bool* queued);
  Status copy_to_host(InFlight& slot, bool* queued);
  Status pin(InFlight& slot);
  void submitted(InFlight& slot, Status status, bool queued);

  Result<InFlight*> free_buffer();
  Status add_buffer(BounceBuffer buffer);
  bool device_lags();
  void drain();
  void wait_for(InFlight& slot);
  Status wait_for_device(InFlight& slot);
  void end(InFlight& slot, const Status& device_status);

  bool wants_direct(const Chunk& chunk);
  bool cached(const Chunk& chunk);
  Moved write_out(const std::byte* memory, std::uint64_t bytes, std::uint64_t offset, bool direct);
  Moved store_hole(Chunk& chunk, std::uint64_t bytes);
  void count_file_bytes(bool direct, std::uint64_t bytes);
  void note_ended_copies();
  void trace_copy(const InFlight& slot, const Status& outcome);

  [[nodiscard]] std::uint64_t file_offset(const Chunk& chunk) const;
  [[nodiscard]] std::uint64_t target_offset(const Chunk& chunk) const;

  Transfer& transfer_;
  BackingFile& file_;
  TargetMemory& memory_;
  const std::shared_ptr<DeviceContext> device_;
  const int device_index_;
  const std::uint64_t trace_id_;
  const bool load_;
  const bool straight_;  // files and the device's memory are read and written without a bounce buffer
  std::shared_ptr<Stream> stream_;
  std::vector<std::unique_ptr<InFlight>> slots_;
  std::size_t turn_ = 0;  // the slot to use next: the one that has been busy longest
};

}  // namespace gpufs
