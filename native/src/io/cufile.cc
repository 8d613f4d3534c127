#include "io/cufile.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/log.h"
#include "io/backing_file.h"

namespace gpufs {
namespace {

constexpr int kDescriptorType = 1;
// cuFile's own failures start here. It says of none of them whether the file or its setup is at fault, and the fallback
// reports what is wrong with a file by errno: so all of them mean "not by this path".
constexpr int kFirstLibraryError = 5000;
constexpr const char* kModuleVersion = "/proc/driver/nvidia-fs/version";
constexpr unsigned kLocalStorage = 1U << 4 | 1U << 5 | 1U << 6;  // NVMe, NVMe over fabrics, SCSI

Status failure(const char* what, const CufileError& error) {
  return Status(EREMOTEIO, std::string(what) + " failed", error.driver != 0 ? error.driver : error.library);
}

class CufileFile final : public DirectFile {
 public:
  CufileFile(const CufileCalls& calls, void* handle) : calls_(calls), handle_(handle) {}
  ~CufileFile() override { calls_.handle_deregister(handle_); }
  CufileFile(const CufileFile&) = delete;
  CufileFile& operator=(const CufileFile&) = delete;

  Moved load(DeviceAddress destination, std::uint64_t bytes, std::uint64_t file_offset) override {
    return move(bytes, "cuFileRead", [&](std::uint64_t done) {
      return calls_.read(handle_, reinterpret_cast<void*>(destination), bytes - done,
                         static_cast<off_t>(file_offset + done), static_cast<off_t>(done));
    });
  }
  Moved store(DeviceAddress source, std::uint64_t bytes, std::uint64_t file_offset) override {
    return move(bytes, "cuFileWrite", [&](std::uint64_t done) {
      return calls_.write(handle_, reinterpret_cast<const void*>(source), bytes - done,
                          static_cast<off_t>(file_offset + done), static_cast<off_t>(done));
    });
  }

 private:
  template <typename Call>
  static Moved move(std::uint64_t bytes, const char* what, Call call) {
    Moved moved;
    while (moved.bytes < bytes) {
      errno = 0;
      const ssize_t count = call(moved.bytes);
      if (count == -1 && errno == EINTR) continue;
      if (count < 0) {
        const int code = count == -1 ? 0 : static_cast<int>(-count);
        const int error = code >= kFirstLibraryError || errno == 0 ? EREMOTEIO : errno;
        moved.status = Status(error, std::string(what) + " failed", code);
        return moved;
      }
      if (count == 0) return moved;
      moved.bytes += std::min(static_cast<std::uint64_t>(count), bytes - moved.bytes);
    }
    return moved;
  }

  const CufileCalls calls_;  // its own copy: a file may outlive the path
  void* const handle_;
};

class CufilePath final : public DirectPath {
 public:
  CufilePath(const CufileCalls& calls, RefusalMask refusals) : calls_(calls), refusals_(refusals) {}

  [[nodiscard]] const char* name() const override { return "cuFile"; }
  [[nodiscard]] RefusalMask refusals() const override { return refusals_; }

  Result<std::unique_ptr<DirectFile>> attach(BackingFile& file) override {
    if (refusals_ != 0) return Status(EOPNOTSUPP, "cuFile: " + describe_refusals(refusals_));
    CufileDescriptor descriptor = {};
    descriptor.type = kDescriptorType;
    descriptor.handle.fd = file.direct_fd();
    void* handle = nullptr;
    const CufileError error = calls_.handle_register(&handle, &descriptor);
    if (error.library != 0) return failure("cuFileHandleRegister", error);
    return std::unique_ptr<DirectFile>(std::make_unique<CufileFile>(calls_, handle));
  }

 private:
  const CufileCalls calls_;
  const RefusalMask refusals_;
};

template <typename Function>
bool resolve(void* library, const char* name, Function** function) {
  *function = reinterpret_cast<Function*>(::dlsym(library, name));
  return *function != nullptr;
}

std::shared_ptr<DirectPath> refusing(Refusal reason) {
  return std::make_shared<CufilePath>(CufileCalls{}, mask_of(reason));
}

}  // namespace

std::shared_ptr<DirectPath> make_cufile_path(const CufileCalls& calls, bool module_present) {
  if (!module_present) return refusing(Refusal::kNoGpuDirect);
  const CufileError opened = calls.driver_open();
  if (opened.library != 0) {
    log_info("cuFile is not used: cuFileDriverOpen failed with " + std::to_string(opened.library));
    return refusing(Refusal::kNoGpuDirect);
  }
  CufileProperties properties = {};
  const CufileError asked = calls.driver_properties(&properties);
  const bool active =
      asked.library == 0 && properties.module.major_version > 0 && (properties.module.supported & kLocalStorage) != 0;
  if (!active) {
    log_info("cuFile is not used: it reports no storage that its kernel module serves");
    return refusing(Refusal::kNoGpuDirect);
  }
  return std::make_shared<CufilePath>(calls, 0);
}

std::shared_ptr<DirectPath> open_cufile_path() {
  if (::access(kModuleVersion, F_OK) != 0 || ::access("/dev/nvidia-fs0", F_OK) != 0) {
    return refusing(Refusal::kNoGpuDirect);
  }
  void* const library = ::dlopen("libcufile.so.0", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return refusing(Refusal::kNoVendorCall);
  CufileCalls calls;
  const bool complete = resolve(library, "cuFileDriverOpen", &calls.driver_open) &&
                        resolve(library, "cuFileDriverGetProperties", &calls.driver_properties) &&
                        resolve(library, "cuFileHandleRegister", &calls.handle_register) &&
                        resolve(library, "cuFileHandleDeregister", &calls.handle_deregister) &&
                        resolve(library, "cuFileRead", &calls.read) && resolve(library, "cuFileWrite", &calls.write);
  if (!complete) return refusing(Refusal::kNoVendorCall);
  return make_cufile_path(calls, /*module_present=*/true);
}

}  // namespace gpufs
