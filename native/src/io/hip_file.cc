// AMD's hipAmdFileRead and hipAmdFileWrite as a fastpath: the kernel's GPU driver moves bytes between storage and
// the device. Thread-safe. The runtime stays loaded.

#include <atomic>
#include <cerrno>
#include <utility>

#include "base/log.h"
#include "drivers/hip/hip_library.h"
#include "io/backing_file.h"
#include "io/fastpath.h"

namespace gpufs {
namespace {

constexpr int kLargestErrno = 133;  // EHWPOISON; larger numbers are not errnos

// Shared by a path and its files, which may outlive it.
struct HipFileCalls {
  std::shared_ptr<const hip::Library> library;  // null if there is none
  hip::HipFileCall read = nullptr;
  hip::HipFileCall write = nullptr;
  std::atomic<RefusalMask> refusals{0};
  std::atomic<bool> worked{false};  // a call has moved bytes
};

class HipFile final : public FastpathFile {
 public:
  HipFile(std::shared_ptr<HipFileCalls> calls, BackingFile& file)
      : calls_(std::move(calls)), fd_(file.direct_fd()), unit_(file.facts().unit) {}

  Moved move(Direction direction, DeviceAddress memory, std::uint64_t bytes, std::uint64_t file_offset) override {
    const bool load = direction == Direction::kLoad;
    const hip::api::Code prepared = calls_->library->prepare_thread();
    if (prepared != hip::api::kSuccess) {
      return {0, Status(EREMOTEIO, "hipInit: " + calls_->library->describe(prepared), prepared)};
    }
    return move_in_parts(bytes, unit_, [&](std::uint64_t done, std::uint64_t part) {
      return load ? call_once(calls_->read, hip::kFileRead, memory + done, part, file_offset + done)
                  : call_once(calls_->write, hip::kFileWrite, memory + done, part, file_offset + done);
    });
  }

 private:
  Moved call_once(hip::HipFileCall call, const char* name, DeviceAddress address, std::uint64_t bytes,
                  std::uint64_t file_offset) {
    hip::HipFileHandle handle{};
    handle.handle = nullptr;  // all of it, before the smaller member
    handle.fd = fd_;
    // Early failures leave these as they are.
    std::uint64_t copied = 0;
    std::int32_t status = 0;
    errno = 0;
    const hip::api::Code result =
        call(handle, reinterpret_cast<void*>(address), bytes, static_cast<std::int64_t>(file_offset), &copied, &status);
    const int error = errno;
    // The status is more exact: for most failures the result is just "unknown".
    if (result == hip::api::kSuccess && status == 0 && copied <= bytes) {
      if (copied > 0) calls_->worked.store(true, std::memory_order_relaxed);
      return {copied, {}};
    }
    const auto failed = [&](int code, const std::string& why) {
      return Status(code, std::string(name) + ": " + why, result);
    };
    if (result != hip::api::kSuccess && error == ENOTTY) {
      // Once the interface has worked it is there, and this error means the one request.
      if (!calls_->worked.load(std::memory_order_relaxed)) no_kernel_interface();
      return {0, failed(ENOTTY, "the kernel's GPU driver has no such interface")};  // and the outputs are garbage
    }
    if (copied > bytes || status > 0 || status < -kLargestErrno) {
      return {0, failed(EREMOTEIO, "made no sense (status " + std::to_string(status) + ")")};
    }
    if (status == -EINVAL && copied == 0) {
      // For example virtual memory, for which the runtime has no handle of the kernel's.
      return {0, failed(EOPNOTSUPP, "the kernel's GPU driver refused the memory (Invalid argument)"),
              mask_of(Refusal::kMemoryKind)};
    }
    if (status != 0) return {copied, Status(-status, Status::from_errno(-status, name).message(), result)};
    const std::string text = calls_->library->describe(result);
    if (calls_->library->is_fatal(result)) return {copied, failed(EIO, text)};
    // The runtime failed before it called the kernel, for example because it does not know the memory. The fallback may
    // still reach it.
    if (copied == 0) return {0, failed(result == hip::api::kNotSupported ? EOPNOTSUPP : EREMOTEIO, text)};
    return {copied, failed(EIO, text)};
  }

  // From now on no request tries it.
  void no_kernel_interface() {
    const RefusalMask reason = mask_of(Refusal::kNoKernelSupport);
    if ((calls_->refusals.fetch_or(reason) & reason) == 0) {
      log_info("hipAmdFile is not used: the kernel's GPU driver has no interface for it");
    }
  }

  const std::shared_ptr<HipFileCalls> calls_;
  const int fd_;  // of the file that owns this
  const std::uint64_t unit_;
};

class HipFilePath final : public Fastpath {
 public:
  explicit HipFilePath(std::shared_ptr<HipFileCalls> calls) : calls_(std::move(calls)) {}

  [[nodiscard]] RefusalMask refusals() const override { return calls_->refusals; }

  Result<std::unique_ptr<FastpathFile>> attach(BackingFile& file) override {
    const RefusalMask refused = calls_->refusals;
    if (refused != 0) return Status(EOPNOTSUPP, "hipAmdFile: " + describe_refusals(refused));
    return std::unique_ptr<FastpathFile>(std::make_unique<HipFile>(calls_, file));
  }

 private:
  const std::shared_ptr<HipFileCalls> calls_;
};

}  // namespace

std::shared_ptr<Fastpath> open_hip_file_path(const std::vector<std::string>& candidates, bool kernel_driver) {
  auto calls = std::make_shared<HipFileCalls>();
  if (!kernel_driver) calls->refusals |= mask_of(Refusal::kNoKernelSupport);
  Result<std::shared_ptr<const hip::Library>> library = hip::Library::load(candidates);
  if (library.ok()) {
    calls->library = library.take();
    calls->read = reinterpret_cast<hip::HipFileCall>(calls->library->find_hidden(hip::kFileRead));
    calls->write = reinterpret_cast<hip::HipFileCall>(calls->library->find_hidden(hip::kFileWrite));
  }
  if (calls->read == nullptr || calls->write == nullptr) calls->refusals |= mask_of(Refusal::kNoVendorCall);
  return std::make_shared<HipFilePath>(std::move(calls));
}

}  // namespace gpufs
