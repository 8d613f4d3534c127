#include "drivers/hip/hip_library.h"

#include <unistd.h>

#include <cerrno>
#include <string_view>

namespace gpufs::hip {
namespace {

Status unavailable(const std::string& why, int code = 0) { return {ENODEV, "hip is not available: " + why, code}; }

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

}  // namespace

const std::vector<std::string>& Library::names() {
  static const std::vector<std::string> all = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5",
                                               "libamdhip64.so", "/opt/rocm/lib/libamdhip64.so"};
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
      // A library that is there and cannot be opened is the news, rather than those that are not there.
      if (!why.starts_with(name + ": cannot open shared object file"))
        note(unavailable(std::string(name).append(": ").append(why)));
      continue;
    }
    // make_shared cannot reach the private constructor.
    std::shared_ptr<Library> library(new Library);
    library->name_ = name;
    if (Status status = library->resolve(handle); !status.ok()) {
      note(std::move(status));
      continue;
    }
    const api::Code code = library->prepare_thread();
    // Without a device hipInit fails in one version and not in the other; counting the devices says it clearly.
    if (code != api::kSuccess && code != api::kNoDevice && code != api::kInvalidDevice) {
      note(unavailable(name + ": hipInit: " + library->describe(code), code));
      continue;
    }
    static const Status watching = gpu::watch_process_end();
    if (!watching.ok()) return watching.with_context("hip");
    return std::shared_ptr<const Library>(std::move(library));
  }
  if (!first_failure.ok()) return first_failure;
  return unavailable(joined(candidates) + (candidates.size() > 1 ? ": none of these was found" : " was not found"));
}

Status Library::resolve(void* handle) {
#define GPUFS_HIP_RESOLVE(member, symbol, ...) \
  if (!gpu::resolve(handle, symbol, functions_.member)) return unavailable(name_ + " lacks " symbol);
  GPUFS_HIP_REQUIRED(GPUFS_HIP_RESOLVE)
  GPUFS_HIP_RESOLVE(error_name, "hipGetErrorName")
  GPUFS_HIP_RESOLVE(error_text, "hipGetErrorString")
#undef GPUFS_HIP_RESOLVE
#define GPUFS_HIP_RESOLVE(member, symbol, ...) gpu::resolve(handle, symbol, functions_.member);
  GPUFS_HIP_OPTIONAL(GPUFS_HIP_RESOLVE)
#undef GPUFS_HIP_RESOLVE
  has_virtual_memory_ = true;
#define GPUFS_HIP_RESOLVE(member, symbol, ...) \
  if (!gpu::resolve(handle, symbol, functions_.member)) has_virtual_memory_ = false;
  GPUFS_HIP_VIRTUAL_MEMORY(GPUFS_HIP_RESOLVE)
#undef GPUFS_HIP_RESOLVE
  has_peers_ = true;
#define GPUFS_HIP_RESOLVE(member, symbol, ...) \
  if (!gpu::resolve(handle, symbol, functions_.member)) has_peers_ = false;
  GPUFS_HIP_PEERS(GPUFS_HIP_RESOLVE)
#undef GPUFS_HIP_RESOLVE

  if (functions_.runtime_version == nullptr || call<&Functions::runtime_version>(&version_) != api::kSuccess) {
    version_ = 0;
  }
  // The interface was there before, in another form.
  if (version_ < kHipVersion6) has_virtual_memory_ = false;
  return {};
}

api::Code Library::prepare_thread() const {
  thread_local api::Code (*prepared)(unsigned) = nullptr;
  if (prepared == functions_.init) return api::kSuccess;
  const api::Code code = call<&Functions::init>(0U);
  if (code == api::kSuccess) prepared = functions_.init;
  return code;
}

void* Library::find_hidden(const char* symbol) const {
  if (functions_.symbol_address == nullptr || version_ == 0) return nullptr;
  void* address = nullptr;
  int found = kHipSymbolFound;
  if (call<&Functions::symbol_address>(symbol, &address, version_, 0ULL, &found) != api::kSuccess) return nullptr;
  return found == kHipSymbolFound ? address : nullptr;
}

bool Library::moves_files() const {
  return ::access(kKernelDriver, R_OK | W_OK) == 0 && find_hidden(kFileRead) != nullptr &&
         find_hidden(kFileWrite) != nullptr;
}

std::string Library::describe(api::Code code) const {
  if (gpu::process_is_ending()) return "code " + std::to_string(code);
  const char* const name = functions_.error_name(code);
  const char* const text = functions_.error_text(code);
  std::string description =
      std::string(name != nullptr ? name : "unknown HIP error") + " (" + std::to_string(code) + ")";
  // Some versions have no words but the name.
  if (text != nullptr && (name == nullptr || std::string_view(text) != name)) description += std::string(": ") + text;
  return description;
}

bool Library::is_fatal(api::Code code) {
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
