#include "launcher/request.h"

#include <bit>
#include <cstdint>
#include <string_view>

namespace gpufs::launcher {
namespace {

constexpr int kVersion = 1;

// What these messages need of msgpack: small maps and lists, short texts, numbers below 128.
class Packer {
 public:
  Packer& map(std::size_t fields) { return byte(0x80 | fields); }
  Packer& list(std::size_t items) { return byte(0x90 | items); }
  Packer& text(std::string_view value) {
    byte(0xA0 | value.size());
    out_.append(value);
    return *this;
  }
  Packer& small(int value) { return byte(static_cast<std::size_t>(value)); }
  Packer& nil() { return byte(0xC0); }
  Packer& number(double value) {
    byte(0xCB);
    const auto bits = std::bit_cast<std::uint64_t>(value);
    for (int shift = 56; shift >= 0; shift -= 8) byte((bits >> shift) & 0xFF);
    return *this;
  }
  std::string take() { return std::move(out_); }

 private:
  Packer& byte(std::size_t value) {
    out_.push_back(static_cast<char>(value));
    return *this;
  }

  std::string out_;
};

}  // namespace

std::string hello_message() {
  Packer packer;
  packer.map(3).text("type").text("hello");
  packer.text("versions").list(1).small(kVersion);
  packer.text("program").text("gpufs " GPUFS_VERSION);
  return packer.take();
}

std::string copy_message(const CopyRequest& request) {
  Packer packer;
  packer.map(9).text("type").text("copy");
  packer.text("id").small(1);
  packer.text("direction").text(request.store ? "store" : "load");
  packer.text("host_offset").small(0);
  packer.text("offset").small(0);
  packer.text("size").nil();
  packer.text("fastpath").nil();
  packer.text("sync").text("none");
  packer.text("progress").number(request.progress_seconds);
  return packer.take();
}

}  // namespace gpufs::launcher
