// Moves a transfer's chunks on one thread, so that its file and its device work at the same time. pipeline.cc begins
// with the steps.
// Ownership: the thread that runs it, which alone uses it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "device/device_context.h"
#include "io/bounce_pool.h"
#include "io/copy_batches.h"
#include "io/transfer.h"

namespace gpufs {

class Pipeline {
 public:
  explicit Pipeline(Transfer& transfer);
  ~Pipeline() { drain(); }
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  // Runs until the transfer has no more chunks or the turn is over. Chunks may still be on their way to the device: the
  // destructor waits for them.
  void run(const Scheduler::Turn& turn);

 private:
  // A chunk, and for the counters of its path when that began, with how much was moved and skipped already.
  struct Work : ChunkProgress {
    std::uint64_t path_start = 0;
    std::uint64_t done_before = 0;
    std::uint64_t skipped_before = 0;

    [[nodiscard]] std::uint64_t rest() const { return chunk.bytes - done; }
    void count(Path path, std::uint64_t bytes) { path_bytes[static_cast<std::size_t>(path)] += bytes; }
  };
  // A bounce buffer, and the chunk in it.
  struct Slot {
    BounceBuffer buffer;
    bool busy = false;                                // the device works on it
    std::shared_ptr<const CopyBatches::Batch> batch;  // which has the slot's copies; null if there are none
    Work work;
    std::uint64_t bytes = 0;      // of the chunk, after work.done, that are in the buffer
    std::byte* memory = nullptr;  // where they are
    Status file_status;           // load: how reading the file ended
    Extents holes;                // store: from the chunk's start, where the buffer has no memory
    TargetMemory::AccessGuard access;
    TransferTarget::Pin pin;
    std::uint8_t lane = 0;         // in traces, from 1 on
    std::uint64_t copy_start = 0;  // when the device's work was queued; 0: not traced
    std::uint64_t copy_end = 0;    // when it was seen to be done; 0: not yet
  };
  struct FastOutcome {
    Status status;
    bool fall_back = false;  // the rest goes by fallback
  };

  void move(const Chunk& chunk);
  void begin_path(Work& work, Path path) const;
  void end_path(const Work& work, bool failed) const;
  void complete(const Work& work, const Status& status);
  void skip_hole(const Chunk& chunk);

  // Through bounce buffers.
  void load(const Work& work);
  void store(const Work& work);
  Status pin(Slot& slot);
  void submit(Slot& slot, std::span<const HostCopy> copies);
  void finish(Slot& slot, const Status& device_status);
  Moved read_file(Slot& slot);
  Moved read_rest(const Moved& direct, std::byte* memory, std::uint64_t bytes, std::uint64_t offset);
  Status write_file(Slot& slot);

  // Where the CPU addresses the device's memory.
  void move_without_bounce_buffer(Work& work);
  Status move_in_place(Work& work);
  Moved read_in_place(const Work& work, const TransferTarget::Piece& piece, bool direct);

  bool move_fast(Work& work);
  FastOutcome move_by_vendor(Work& work);
  Moved call_vendor(const Work& work, const TransferTarget::Piece& piece);
  Status stopped_short(const Work& work);

  Result<Slot*> next_slot();
  void add_slot(BounceBuffer buffer);
  bool done(const Slot& slot);
  void drain();
  void wait_for(Slot& slot);

  bool wants_direct(const Work& work);
  bool cached(const Work& work);
  Moved write_out(const std::byte* memory, std::uint64_t bytes, std::uint64_t offset, bool direct);
  Moved store_hole(Work& work, std::uint64_t bytes);
  void count_file_bytes(bool direct, std::uint64_t bytes);
  void note_ended_copies();
  void trace_copy(const Slot& slot, const Status& outcome);

  [[nodiscard]] std::uint64_t file_offset(const Work& work) const {
    return facts_.request.file_offset + work.chunk.offset + work.done;
  }
  [[nodiscard]] std::uint64_t target_offset(const Work& work) const {
    return facts_.request.target_offset + work.chunk.offset + work.done;
  }

  Transfer& transfer_;
  const TransferFacts& facts_;
  BackingFile& file_;
  TargetMemory& memory_;
  DeviceContext& device_;
  const int device_index_;
  const bool without_bounce_buffer_;  // files and the device's memory are read and written directly
  std::shared_ptr<CopyBatches> batches_;
  std::vector<std::unique_ptr<Slot>> slots_;
  std::size_t turn_ = 0;  // the slot to use next: the one that has been busy longest
};

}  // namespace gpufs
