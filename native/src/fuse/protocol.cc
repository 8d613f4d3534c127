#include "fuse/protocol.h"

#include <array>

namespace gpufs::fuse {

const char* opcode_name(std::uint32_t opcode) {
  static constexpr std::array<const char*, kOpcodeNames> kNames = {
      nullptr,        "lookup",        "forget",      "getattr",  "setattr",  "readlink",
      "symlink",      nullptr,         "mknod",       "mkdir",    "unlink",   "rmdir",
      "rename",       "link",          "open",        "read",     "write",    "statfs",
      "release",      nullptr,         "fsync",       "setxattr", "getxattr", "listxattr",
      "removexattr",  "flush",         "init",        "opendir",  "readdir",  "releasedir",
      "fsyncdir",     "getlk",         "setlk",       "setlkw",   "access",   "create",
      "interrupt",    "bmap",          "destroy",     "ioctl",    "poll",     "notify_reply",
      "batch_forget", "fallocate",     "readdirplus", "rename2",  "lseek",    "copy_file_range",
      "setupmapping", "removemapping", "syncfs",      "tmpfile",  "statx",    "copy_file_range_64",
  };
  const char* name = opcode < kNames.size() ? kNames[opcode] : nullptr;
  return name != nullptr ? name : "other";
}

}  // namespace gpufs::fuse
