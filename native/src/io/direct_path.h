// The vendor's way of moving bytes between a file and device memory without passing them through the host.
// A DirectPath belongs to the TransferEngine, a DirectFile to its BackingFile; either may go first.
// Any thread may call any function; load and store need the device bound on the calling thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/status.h"
#include "drivers/driver.h"
#include "io/io_options.h"
#include "io/refusal.h"

namespace gpufs {

class BackingFile;

// bytes were moved from the front on, also when the status is a failure. Success with fewer bytes than asked for says
// only that the call stopped: at the end of the file or before it.
struct Moved {
  std::uint64_t bytes = 0;
  Status status;
  RefusalMask refusals = 0;  // of a failure, where its cause is known
};

// Ranges are aligned as the file's facts demand.
class DirectFile {
 public:
  virtual ~DirectFile() = default;
  virtual Moved load(DeviceAddress destination, std::uint64_t bytes, std::uint64_t file_offset) = 0;
  virtual Moved store(DeviceAddress source, std::uint64_t bytes, std::uint64_t file_offset) = 0;
};

class DirectPath {
 public:
  virtual ~DirectPath() = default;
  [[nodiscard]] virtual const char* name() const = 0;
  // Why no request of this driver can take it; 0 where it works, as far as is known by now.
  [[nodiscard]] virtual RefusalMask refusals() const = 0;
  virtual Result<std::unique_ptr<DirectFile>> attach(BackingFile& file) = 0;
};

// By the driver's name: host has O_DIRECT, cuda has cuFile, hip has hipAmdFile. Nothing is loaded before this call.
// file_systems: IoOptions::file_systems.
std::shared_ptr<DirectPath> make_direct_path(const std::string& driver_name, const FileSystems& file_systems = {});

// The failures after which the rest of a request goes by fallback: the path is not usable after all.
bool rerun_on_fallback(int error);

}  // namespace gpufs
