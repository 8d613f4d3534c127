// Moving whole ranges between a backing file and host memory: resumed after EINTR, continued after short counts.
// Pure functions over a BackingFile.
// Any thread may call any function; each blocks for as long as the file does.
#pragma once

#include <cstddef>
#include <cstdint>

#include "io/backing_file.h"

namespace gpufs {

// Through the page cache. Fewer bytes with success: the end of the file.
Moved read_buffered(BackingFile& file, std::byte* destination, std::uint64_t bytes, std::uint64_t offset);
Moved write_buffered(BackingFile& file, const std::byte* source, std::uint64_t bytes, std::uint64_t offset);

// By O_DIRECT; all three aligned. Stops with success at a short count that ends off the alignment, which is what the
// end of a file gives.
Moved read_direct(BackingFile& file, std::byte* destination, std::uint64_t bytes, std::uint64_t offset);
Moved write_direct(BackingFile& file, const std::byte* source, std::uint64_t bytes, std::uint64_t offset);

// True if the range can be read or written by O_DIRECT as it stands.
bool direct_fits(const BackingFile& file, const void* memory, std::uint64_t bytes, std::uint64_t offset);

// Writes by O_DIRECT what is aligned and the edges through the page cache.
Moved write_split(BackingFile& file, const std::byte* source, std::uint64_t bytes, std::uint64_t offset);

// Through the pages of a file in memory, which several threads can do at once; what does not go that way, and why it
// did not, is write_buffered()'s.
Moved write_pages(BackingFile& file, const std::byte* source, std::uint64_t bytes, std::uint64_t offset);

// Makes a range read as zeros: a hole where `sparse` and the file system can, zeros that are written elsewhere.
// holed: bytes for which no zeros were written.
Moved write_zeros(BackingFile& file, std::uint64_t bytes, std::uint64_t offset, bool sparse, std::uint64_t* holed);

}  // namespace gpufs
