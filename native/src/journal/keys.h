// All keys of the journal: kinds of values, and numbers of which each is given once.
// docs/internals/journal.md says what the values are.
#pragma once

#include <compare>
#include <cstdint>

namespace gpufs::journal {

// What a value describes. The journal does not interpret them.
enum Kind : std::uint32_t {
  kInit = 1,
  // An inode has up to four values, which change apart from each other; the id is its number.
  kInode,      // attributes, references
  kTarget,     // of a symbolic link
  kExtended,   // extended attributes
  kContents,   // where a file's memory is
  kName,       // id: see NumbersOf
  kOpenFile,   // id: its handle
  kUserLimit,  // id: user_key()
  kDirectoryLimit,
  kOutcome,  // id: used again, see Records::done()
  kMemory,   // a descriptor; id: the keeper's key
  kNumbers,  // id: NumbersOf
};

enum class NumbersOf : std::uint64_t { kInodes = 1, kFiles, kDirectories, kNames, kMemories, kMemoryKeys };

// A user of a device.
constexpr std::uint64_t user_key(std::int32_t device, std::uint32_t uid) {
  return std::uint64_t{static_cast<std::uint32_t>(device)} << 32 | uid;
}
constexpr std::int32_t device_of(std::uint64_t user) { return static_cast<std::int32_t>(user >> 32); }
constexpr std::uint32_t uid_of(std::uint64_t user) { return static_cast<std::uint32_t>(user); }

// A kind, and which of its values.
struct Key {
  std::uint32_t kind = 0;
  std::uint64_t id = 0;
  // clang-tidy takes the 0 of the generated comparison for a pointer.
  friend auto operator<=>(const Key&, const Key&) = default;  // NOLINT(modernize-use-nullptr)
};

}  // namespace gpufs::journal
