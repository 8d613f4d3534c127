// A vendor's way of moving bytes between a file and device memory without passing them through the host.
// Thread-safe; move() needs the device bound on the calling thread. A Fastpath belongs to the
// TransferEngine, a FastpathFile to its BackingFile; either may be destroyed first.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "drivers/driver.h"
#include "io/io_options.h"

namespace gpufs {

class BackingFile;

enum class Direction : int { kLoad = 0, kStore = 1 };  // file to device, device to file

// Why the fastpath does not take a request. Each reason is counted in the statistics.
enum class Refusal : std::uint32_t {
  kDisabled = 1U << 0,            // a knob or the request's own option switched it off
  kNothingToMove = 1U << 1,       // size 0
  kTooSmall = 1U << 2,            // below the bound in the options, or no whole alignment unit inside it
  kOffsetUnaligned = 1U << 3,     // the file offset is not a multiple of the alignment unit
  kSizeUnaligned = 1U << 4,       // the size is not a multiple of the alignment unit
  kMemoryUnaligned = 1U << 5,     // device address and file offset are not aligned alike
  kOffsetRange = 1U << 6,         // the end exceeds a signed 64-bit offset
  kNoDirectDescriptor = 1U << 7,  // the file cannot be opened with O_DIRECT here
  kFileSystem = 1U << 8,          // the path does not support the file system
  kMountOptions = 1U << 9,        // the right file system, mounted in a way that the path does not support
  kNoVendorCall = 1U << 10,       // the driver has no such call, or its library is missing
  kNoGpuDirect = 1U << 11,        // the library's kernel module is not active, so it would copy through the host
  kNotAccepted = 1U << 12,        // the vendor's library refused this file
  kFailedBefore = 1U << 13,       // it failed in this transfer; the rest went by fallback, if that is allowed
  kMemoryKind = 1U << 14,         // the memory is not the device's own, or virtual
  kNoKernelSupport = 1U << 15,    // the kernel's GPU driver cannot be reached, or has no such interface
};
inline constexpr std::size_t kRefusalCount = 16;

using RefusalMask = std::uint32_t;
constexpr RefusalMask mask_of(Refusal reason) { return static_cast<RefusalMask>(reason); }

// In the order of the bits, for statistics and messages.
inline constexpr std::array<std::string_view, kRefusalCount> kRefusalNames = {
    "disabled",     "nothing_to_move",      "too_small",   "offset_unaligned", "size_unaligned", "memory_unaligned",
    "offset_range", "no_direct_descriptor", "file_system", "mount_options",    "no_vendor_call", "no_gpudirect",
    "not_accepted", "failed_before",        "memory_kind", "no_kernel_support"};

// "file_system, no_vendor_call"; "none" for 0.
std::string describe_refusals(RefusalMask mask);

// The result of moving a range: so many bytes from its front, also after a failure. Success with fewer bytes than
// wanted says only that the call stopped, at the end of the file or before it.
struct Moved {
  std::uint64_t bytes = 0;
  Status status;
  RefusalMask refusals = 0;  // the cause of a failure, if known
};

// Ranges are aligned as the file's facts require.
class FastpathFile {
 public:
  virtual ~FastpathFile() = default;
  virtual Moved move(Direction direction, DeviceAddress memory, std::uint64_t bytes, std::uint64_t file_offset) = 0;
};

class Fastpath {
 public:
  virtual ~Fastpath() = default;
  // Why no request of this driver can use it; 0 if it works, as far as is known.
  [[nodiscard]] virtual RefusalMask refusals() const = 0;
  virtual Result<std::unique_ptr<FastpathFile>> attach(BackingFile& file) = 0;
};

// By the driver's name: host uses O_DIRECT, cuda cuFile, hip hipAmdFile. Loads the vendor's library.
// file_systems: IoOptions::file_systems.
std::shared_ptr<Fastpath> make_fastpath(const std::string& driver_name, const FileSystems& file_systems = {});

// The last of them, for tests: candidates: the first of these libraries that works is used. kernel_driver: /dev/kfd can
// be used. Always returns a path: one that refuses everything, with the reasons, if the runtime lacks one of the calls
// or the kernel's GPU driver cannot be opened. Whether the kernel supports the calls shows only at the first one: if it
// does not, the path refuses from then on. (cuFile: io/cufile.h.)
std::shared_ptr<Fastpath> open_hip_file_path(const std::vector<std::string>& candidates, bool kernel_driver);

// Moves a range by a vendor's calls, none of more than the kernel moves at a time: call(done, part) moves one part,
// with EINTR if it is to be continued. unit: of the file's facts.
Moved move_in_parts(std::uint64_t bytes, std::uint64_t unit,
                    const std::function<Moved(std::uint64_t done, std::uint64_t part)>& call);

// Whether the rest of a request goes by fallback after this failure: the path turned out to be unusable. All others end
// the transfer. What a failure of move() means, by the layer that returns it:
//
//   any vendor   ECANCELED   ends      the process is ending, and the vendor's library with it
//   host         any         as below  what pread(2) and pwrite(2) return for O_DIRECT
//   cuFile       EREMOTEIO   fallback  one of the library's own codes (5000 and more), or a count beyond the request
//   cuFile       any         as below  the errno that the library reports: that of the kernel's module or file system
//   hipAmdFile   EREMOTEIO   fallback  the runtime failed before it called the kernel, or returned nonsense
//   hipAmdFile   ENOTTY      fallback  the kernel's GPU driver has no such interface; never called again
//   hipAmdFile   EOPNOTSUPP  fallback  the runtime or the kernel refused the memory: memory_kind
//   hipAmdFile   EIO         ends      the device failed, or the runtime after some bytes
//   hipAmdFile   any         as below  the kernel's status: that of its GPU driver or of the file system
//   a kernel     ENODEV, EOPNOTSUPP, EREMOTEIO, ENOTTY
//                            fallback  file system or device have no such path
//   a kernel     others      ends      EIO, ENOSPC, EINVAL, ...: the bytes failed, not the path
//
// attach() fails with EOPNOTSUPP (refused before the library was called) or EREMOTEIO (refused by it); either sends
// the whole request by fallback.
bool rerun_on_fallback(int error);

}  // namespace gpufs
