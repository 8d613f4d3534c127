#include "io/cufile.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <utility>

#include "base/log.h"
#include "drivers/gpu/vendor_library.h"
#include "io/backing_file.h"

namespace gpufs {
namespace {

constexpr int kDescriptorType = 1;
// cuFile's own errors start here. They do not distinguish a bad file from a bad setup, and the fallback reports what is
// wrong with a file by errno: so all of them mean "not by this path".
constexpr int kFirstLibraryError = 5000;
constexpr const char* kModuleVersion = "/proc/driver/nvidia-fs/version";
constexpr const char* kModuleDevice = "/dev/nvidia-fs0";
constexpr unsigned kLocalStorage = kCufileNvme | kCufileNvmeFabrics | kCufileScsi;
// The library's bits for file systems, by the kernel's names of them.
constexpr std::array<std::pair<std::string_view, unsigned>, 7> kFileSystemBits = {{{"lustre", 1U << 0},
                                                                                   {"wekafs", 1U << 1},
                                                                                   {"nfs", 1U << 2},
                                                                                   {"nfs4", 1U << 2},
                                                                                   {"gpfs", 1U << 3},
                                                                                   {"beegfs", 1U << 9},
                                                                                   {"scatefs", 1U << 12}}};

struct CufileCalls {
  CufileError (*driver_open)() = nullptr;
  CufileError (*driver_properties)(CufileProperties*) = nullptr;
  CufileError (*handle_register)(void** handle, CufileDescriptor*) = nullptr;
  void (*handle_deregister)(void* handle) = nullptr;
  ssize_t (*read)(void* handle, void* device_base, std::size_t bytes, off_t file_offset, off_t device_offset) = nullptr;
  ssize_t (*write)(void* handle, const void* device_base, std::size_t bytes, off_t file_offset,
                   off_t device_offset) = nullptr;
};

Status failure(const char* what, const CufileError& error) {
  return Status(EREMOTEIO, std::string(what) + " failed (" + std::to_string(error.library) + ")",
                error.driver != 0 ? error.driver : error.library);
}

class CufileFile final : public FastpathFile {
 public:
  CufileFile(const CufileCalls& calls, void* handle, std::uint64_t unit)
      : calls_(calls), handle_(handle), unit_(unit) {}
  ~CufileFile() override {
    if (!gpu::process_is_ending()) calls_.handle_deregister(handle_);
  }
  CufileFile(const CufileFile&) = delete;
  CufileFile& operator=(const CufileFile&) = delete;

  Moved move(Direction direction, DeviceAddress memory, std::uint64_t bytes, std::uint64_t file_offset) override {
    const bool load = direction == Direction::kLoad;
    const std::string what = load ? "cuFileRead" : "cuFileWrite";
    return move_in_parts(bytes, unit_, [&](std::uint64_t done, std::uint64_t part) -> Moved {
      // Offsets in memory apply to memory that was registered with the library; ours is not.
      auto* const at = reinterpret_cast<void*>(memory + done);
      const auto offset = static_cast<off_t>(file_offset + done);
      errno = 0;
      const ssize_t count =
          load ? calls_.read(handle_, at, part, offset, 0) : calls_.write(handle_, at, part, offset, 0);
      if (count < 0) {
        const int code = count == -1 ? 0 : static_cast<int>(-count);
        const int error = code >= kFirstLibraryError || errno == 0 ? EREMOTEIO : errno;
        return {0, Status(error, Status::from_errno(error, what).message(), code)};
      }
      if (static_cast<std::uint64_t>(count) > part) {
        return {0, Status(EREMOTEIO, what + " reported more bytes than were requested")};
      }
      return {static_cast<std::uint64_t>(count), {}};
    });
  }

 private:
  const CufileCalls calls_;  // a copy, since a file may outlive the path
  void* const handle_;
  const std::uint64_t unit_;
};

// The path in sysfs of the block device that a file is on, or is; empty if it has none.
std::string place_of(int fd) {
  struct stat status = {};
  if (::fstat(fd, &status) != 0) return {};
  const dev_t device = S_ISBLK(status.st_mode) ? status.st_rdev : status.st_dev;
  const std::string link = "/sys/dev/block/" + std::to_string(::major(device)) + ":" + std::to_string(::minor(device));
  std::array<char, 4096> place{};
  const ssize_t length = ::readlink(link.c_str(), place.data(), place.size());
  return length < 0 ? std::string() : std::string(place.data(), static_cast<std::size_t>(length));
}

class CufilePath final : public Fastpath {
 public:
  CufilePath(const CufileCalls& calls, RefusalMask refusals, unsigned storage)
      : calls_(calls), refusals_(refusals), storage_(storage) {}

  [[nodiscard]] RefusalMask refusals() const override { return refusals_; }

  Result<std::unique_ptr<FastpathFile>> attach(BackingFile& file) override {
    if (refusals_ != 0) return Status(EOPNOTSUPP, "cuFile: " + describe_refusals(refusals_));
    const unsigned kinds = cufile_file_system(file.facts().file_system) | cufile_storage(place_of(file.direct_fd()));
    if (storage_ != 0 && (kinds & storage_) == 0) {
      return Status(EOPNOTSUPP,
                    "cuFile: the file is not on storage that GPUDirect serves, and cuFile may copy it through the host "
                    "(allow_compat_mode in cufile.json)");
    }
    CufileDescriptor descriptor = {};
    descriptor.type = kDescriptorType;
    descriptor.handle.fd = file.direct_fd();
    void* handle = nullptr;
    const CufileError error = calls_.handle_register(&handle, &descriptor);
    if (error.library != 0) return failure("cuFileHandleRegister", error);
    return std::unique_ptr<FastpathFile>(std::make_unique<CufileFile>(calls_, handle, file.facts().unit));
  }

 private:
  const CufileCalls calls_;
  const RefusalMask refusals_;
  const unsigned
      storage_;  // kinds of storage that files must be on; 0: any, since the library does not copy through the host
};

std::shared_ptr<Fastpath> refusing(Refusal reason) {
  return std::make_shared<CufilePath>(CufileCalls{}, mask_of(reason), 0);
}

}  // namespace

unsigned cufile_file_system(std::string_view type) {
  for (const auto& [name, bit] : kFileSystemBits) {
    if (name == type) return bit;
  }
  return 0;
}

unsigned cufile_storage(const std::string& place) {
  const auto within = [&](const char* part) { return place.find(part) != std::string::npos; };
  if (within("/nvme-fabrics/")) return kCufileNvmeFabrics;
  // Several ways to one device, by fabrics or not.
  if (within("/nvme-subsystem/")) return kCufileNvme | kCufileNvmeFabrics;
  if (within("/nvme/")) return kCufileNvme;
  if (within("/host") && within("/target")) return kCufileScsi;
  return 0;
}

bool cufile_module_present() {
  return ::access(kModuleVersion, F_OK) == 0 && ::access(kModuleDevice, R_OK | W_OK) == 0;
}

std::shared_ptr<Fastpath> open_cufile_path(const FileSystems& file_systems, bool module_present,
                                           const std::string& library) {
  if (!module_present) return refusing(Refusal::kNoGpuDirect);
  std::string why;
  void* const handle = gpu::open_library(library, &why);
  if (handle == nullptr) {
    log_info("cuFile is not used: ", why);
    return refusing(Refusal::kNoVendorCall);
  }
  CufileCalls calls;
  const bool complete = gpu::resolve(handle, "cuFileDriverOpen", calls.driver_open) &&
                        gpu::resolve(handle, "cuFileDriverGetProperties", calls.driver_properties) &&
                        gpu::resolve(handle, "cuFileHandleRegister", calls.handle_register) &&
                        gpu::resolve(handle, "cuFileHandleDeregister", calls.handle_deregister) &&
                        gpu::resolve(handle, "cuFileRead", calls.read) &&
                        gpu::resolve(handle, "cuFileWrite", calls.write);
  if (!complete) {
    log_info("cuFile is not used: ", library, " lacks a function");
    return refusing(Refusal::kNoVendorCall);
  }
  const CufileError opened = calls.driver_open();
  // A program that uses cuFile itself has opened it for the whole process.
  if (opened.library != 0 && opened.library != kCufileAlreadyOpen) {
    log_info("cuFile is not used: cuFileDriverOpen failed with ", opened.library);
    return refusing(Refusal::kNoGpuDirect);
  }
  gpu::watch_process_end();
  CufileProperties properties = {};
  const CufileError asked = calls.driver_properties(&properties);
  unsigned wanted = kLocalStorage;
  for (const auto& [name, bit] : kFileSystemBits) {
    if (file_systems.allow(name)) wanted |= bit;
  }
  const unsigned storage = properties.module.supported & wanted;
  if (asked.library != 0 || properties.module.major_version == 0 || storage == 0) {
    log_info("cuFile is not used: it reports no storage that its kernel module serves");
    return refusing(Refusal::kNoGpuDirect);
  }
  const bool may_copy = (properties.module.control & kCufileMayCopyThroughHost) != 0;
  return std::make_shared<CufilePath>(calls, 0, may_copy ? storage : 0);
}

}  // namespace gpufs
