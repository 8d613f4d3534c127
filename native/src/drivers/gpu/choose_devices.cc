#include "drivers/gpu/choose_devices.h"

#include <strings.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <cstddef>
#include <numeric>
#include <string>

namespace gpufs::gpu {
namespace {

// "0 = GPU-4f3e... (NVIDIA H200), 1 = ...".
std::string list(const VendorLibrary& library, int found) {
  std::string text;
  for (int ordinal = 0; ordinal < found; ++ordinal) {
    std::array<char, 256> name{};
    library.functions().device_name(name.data(), int{name.size()}, ordinal);
    const std::string uuid = library.uuid(ordinal);
    text += (ordinal == 0 ? "" : ", ") + std::to_string(ordinal);
    if (!uuid.empty()) text += " = " + uuid;
    text += std::string(" (") + name.data() + ")";
  }
  return text;
}

// The devices that a number or the beginning of a UUID stands for.
std::vector<int> matches(const VendorLibrary& library, int found, const std::string& word) {
  constexpr std::size_t kDigits = 4;  // more than any number of devices has
  std::vector<int> ordinals;
  if (std::all_of(word.begin(), word.end(), [](unsigned char letter) { return std::isdigit(letter); })) {
    if (word.empty() || word.size() > kDigits) return {};
    if (const int number = std::stoi(word); number < found) ordinals.push_back(number);
    return ordinals;
  }
  for (int ordinal = 0; ordinal < found; ++ordinal) {
    if (::strncasecmp(library.uuid(ordinal).c_str(), word.c_str(), word.size()) == 0) ordinals.push_back(ordinal);
  }
  return ordinals;
}

}  // namespace

Result<std::vector<int>> choose_devices(const char* driver, const VendorLibrary& library, int found,
                                        const DriverOptions& options) {
  const std::string prefix = std::string(driver) + ": ";
  if (options.devices < 0) return Status{EINVAL, prefix + "the number of devices cannot be negative"};
  const auto exist = [&] { return ": there are " + list(library, found); };
  if (options.devices > found) {
    return Status{ENXIO, prefix + std::to_string(options.devices) + " GPUs are asked for" + exist()};
  }
  std::vector<int> ordinals;
  if (options.chosen.empty()) {
    ordinals.resize(static_cast<std::size_t>(options.devices != 0 ? options.devices : found));
    std::iota(ordinals.begin(), ordinals.end(), 0);
  }
  for (const std::string& word : options.chosen) {
    const std::vector<int> fitting = matches(library, found, word);
    const auto refusal = [&](int error, const char* before, const char* after) {
      return Status(error, std::string(prefix).append(before).append(word).append(after).append(exist()));
    };
    if (fitting.empty()) return refusal(ENXIO, "there is no GPU \"", "\"");
    if (fitting.size() > 1) return refusal(EINVAL, "several GPUs begin with \"", "\"");
    if (std::find(ordinals.begin(), ordinals.end(), fitting.front()) != ordinals.end()) {
      return refusal(EINVAL, "the GPU \"", "\" is chosen twice");
    }
    ordinals.push_back(fitting.front());
  }
  return ordinals;
}

}  // namespace gpufs::gpu
