#include "drivers/hip/hip_library.h"

#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <system_error>

namespace gpufs::hip {
namespace {

Status unavailable(const std::string& why, int code = 0) { return {ENODEV, "hip is not available: " + why, code}; }

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

}  // namespace

std::vector<std::string> Library::names(const std::string& rocm) {
  std::vector<std::string> all;
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t /*bytes*/, void* found) {
        const std::string_view path = info->dlpi_name;
        if (path.substr(path.rfind('/') + 1).starts_with("libamdhip64")) {
          static_cast<std::vector<std::string>*>(found)->emplace_back(path);
        }
        return 0;
      },
      &all);
  for (const char* name :
       {"libamdhip64.so.8", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"}) {
    all.emplace_back(name);
  }
  all.push_back(rocm + "/lib/libamdhip64.so");
  // From ROCm 10 on each version has a folder.
  std::vector<std::string> versions;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(rocm, ignored)) {
    if (entry.path().filename().string().starts_with("core-")) versions.push_back(entry.path().string());
  }
  std::ranges::sort(versions,
                    [](const std::string& a, const std::string& b) { return ::strverscmp(a.c_str(), b.c_str()) > 0; });
  for (const std::string& version : versions) all.push_back(version + "/lib/libamdhip64.so");
  return all;
}

Result<std::shared_ptr<const Library>> Library::load(const std::vector<std::string>& candidates) {
  Status first_failure;
  const auto note = [&first_failure](Status status) {
    if (first_failure.ok()) first_failure = std::move(status);
  };
  for (const std::string& name : candidates) {
    std::string why;
    void* const handle = gpu::open_library(name, &why);
    if (handle == nullptr) {
      // A library that exists but cannot be opened is reported rather than those that do not exist.
      if (!why.starts_with(name + ": cannot open shared object file"))
        note(unavailable(std::string(name).append(": ").append(why)));
      continue;
    }
    auto library = std::make_shared<Library>();
    library->name_ = name;
    if (Status status = library->resolve(handle); !status.ok()) {
      note(std::move(status));
      continue;
    }
    const api::Code code = library->prepare_thread();
    // Without a device hipInit fails in some versions only; counting the devices reports it clearly.
    if (code != api::kSuccess && code != api::kNoDevice && code != api::kInvalidDevice) {
      note(unavailable(name + ": hipInit: " + library->describe(code), code));
      continue;
    }
    gpu::watch_process_end();
    return std::shared_ptr<const Library>(std::move(library));
  }
  if (!first_failure.ok()) return first_failure;
  return unavailable(joined(candidates) + (candidates.size() > 1 ? ": none of these was found" : " was not found"));
}

Status Library::resolve(void* handle) {
  handle_ = handle;
  const char* missing = VendorLibrary::resolve(handle, Vendor::kHip);
  if (!device_current.resolve(handle, "hipGetDevice")) missing = "hipGetDevice";
  if (!device_set.resolve(handle, "hipSetDevice")) missing = "hipSetDevice";
  if (!gpu::resolve(handle, "hipGetErrorName", error_name_)) missing = "hipGetErrorName";
  if (!gpu::resolve(handle, "hipGetErrorString", error_text_)) missing = "hipGetErrorString";
  if (missing != nullptr) return unavailable(name_ + " lacks " + missing);

  // Copies between devices need all three functions. Without them such copies go through the host.
  const bool enables_peers = device_enable_peer.resolve(handle, "hipDeviceEnablePeerAccess");
  const bool copies_to_peers = copy_to_peer.resolve(handle, "hipMemcpyPeerAsync");
  if (!enables_peers || !copies_to_peers) functions_.device_can_access_peer = {};
  pointer_attributes.resolve(handle, "hipPointerGetAttributes");
  stream_wait_value.resolve(handle, "hipStreamWaitValue32");
  stream_device.resolve(handle, "hipStreamGetDevice");
  device_uuid.resolve(handle, "hipDeviceGetUuid");
  symbol_address_.resolve(handle, "hipGetProcAddress");

  Function<int*> runtime_version;
  if (!runtime_version.resolve(handle, "hipRuntimeGetVersion") || runtime_version(&version_) != api::kSuccess) {
    version_ = 0;
  }
  // Earlier versions have virtual memory management in another form.
  if (version_ < kHipVersion6) has_virtual_memory_ = false;
  return {};
}

api::Code Library::prepare_thread() const {
  // The key is the library, since a process may have opened two.
  thread_local const void* prepared = nullptr;
  if (prepared == handle_) return api::kSuccess;
  const api::Code code = functions_.init(0);
  if (code == api::kSuccess) prepared = handle_;
  return code;
}

void* Library::find_hidden(const char* symbol) const {
  if (!symbol_address_ || version_ == 0) return nullptr;
  void* address = nullptr;
  int found = kHipSymbolFound;
  if (symbol_address_(symbol, &address, version_, 0, &found) != api::kSuccess) return nullptr;
  return found == kHipSymbolFound ? address : nullptr;
}

bool Library::moves_files() const {
  return ::access(kKernelDriver, R_OK | W_OK) == 0 && find_hidden(kFileRead) != nullptr &&
         find_hidden(kFileWrite) != nullptr;
}

std::string Library::uuid(int ordinal) const {
  HipUuid text{};
  if (!device_uuid || device_uuid(&text, ordinal) != api::kSuccess) return "";
  // Chips without a number of their own have another text.
  const bool hexadecimal = std::all_of(text.begin(), text.end(), [](unsigned char one) { return std::isxdigit(one); });
  return hexadecimal ? "GPU-" + std::string(text.begin(), text.end()) : "";
}

std::string Library::describe(api::Code code) const {
  if (gpu::process_is_ending()) return "code " + std::to_string(code);
  const char* const name = error_name_(code);
  const char* const text = error_text_(code);
  std::string description =
      std::string(name != nullptr ? name : "unknown HIP error") + " (" + std::to_string(code) + ")";
  // Some versions have no text other than the name.
  if (text != nullptr && (name == nullptr || std::string_view(text) != name)) description += std::string(": ") + text;
  return description;
}

bool Library::is_fatal(api::Code code) const {
  switch (code) {
    case kHipPriorLaunchFailure:
    case api::kEccUncorrectable:
    case api::kIllegalAddress:
    case api::kLaunchTimeout:
    case api::kContextIsDestroyed:
    case api::kAssert:
    case api::kLaunchFailed:
      return true;
    default:
      return false;
  }
}

}  // namespace gpufs::hip
