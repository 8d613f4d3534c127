// A vendor's way of moving bytes between a file and device memory without passing them through the host.
// Thread-safe; load() and store() need the device bound on the calling thread. A DirectPath belongs to the
// TransferEngine, a DirectFile to its BackingFile; either may be destroyed first.
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

// The result of moving a range: so many bytes from its front, also after a failure. Success with fewer bytes than
// wanted says only that the call stopped, at the end of the file or before it.
struct Moved {
  std::uint64_t bytes = 0;
  Status status;
  RefusalMask refusals = 0;  // the cause of a failure, if known
};

// Ranges are aligned as the file's facts require.
class DirectFile {
 public:
  virtual ~DirectFile() = default;
  virtual Moved load(DeviceAddress destination, std::uint64_t bytes, std::uint64_t file_offset) = 0;
  virtual Moved store(DeviceAddress source, std::uint64_t bytes, std::uint64_t file_offset) = 0;
};

class DirectPath {
 public:
  virtual ~DirectPath() = default;
  // Why no request of this driver can use it; 0 if it works, as far as is known.
  [[nodiscard]] virtual RefusalMask refusals() const = 0;
  virtual Result<std::unique_ptr<DirectFile>> attach(BackingFile& file) = 0;
};

// By the driver's name: host uses O_DIRECT, cuda cuFile, hip hipAmdFile. Loads the vendor's library.
// file_systems: IoOptions::file_systems.
std::shared_ptr<DirectPath> make_direct_path(const std::string& driver_name, const FileSystems& file_systems = {});

// Moves a range by a vendor's calls, none of more than the kernel moves at a time: call(done, part) moves one part,
// with EINTR if it is to be continued. unit: of the file's facts.
Moved move_in_parts(std::uint64_t bytes, std::uint64_t unit,
                    const std::function<Moved(std::uint64_t done, std::uint64_t part)>& call);

// Whether the rest of a request goes by fallback after this failure: the path turned out to be unusable.
bool rerun_on_fallback(int error);

}  // namespace gpufs
