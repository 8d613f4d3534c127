#include "drivers/host/streaming_copy.h"

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace gpufs {

#ifdef __SSE2__

namespace {

constexpr std::size_t kLeast = std::size_t{256} << 10;  // smaller blocks may stay in a core's own cache
constexpr std::size_t kLine = 64;

}  // namespace

void copy_to_memory(void* destination, const void* source, std::size_t bytes) {
  if (bytes < kLeast) {
    std::memcpy(destination, source, bytes);
    return;
  }
  auto* to = static_cast<std::byte*>(destination);
  const auto* from = static_cast<const std::byte*>(source);
  // Whole lines only: the CPU would read a line that is written in part.
  const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
  std::memcpy(to, from, head);
  to += head;
  from += head;
  bytes -= head;
  for (; bytes >= kLine; to += kLine, from += kLine, bytes -= kLine) {
    const auto* lanes = reinterpret_cast<const __m128i*>(from);
    auto* line = reinterpret_cast<__m128i*>(to);
    const __m128i first = _mm_loadu_si128(lanes);
    const __m128i second = _mm_loadu_si128(lanes + 1);
    const __m128i third = _mm_loadu_si128(lanes + 2);
    const __m128i fourth = _mm_loadu_si128(lanes + 3);
    _mm_stream_si128(line, first);
    _mm_stream_si128(line + 1, second);
    _mm_stream_si128(line + 2, third);
    _mm_stream_si128(line + 3, fourth);
  }
  _mm_sfence();  // nothing else orders such stores
  std::memcpy(to, from, bytes);
}

#else

void copy_to_memory(void* destination, const void* source, std::size_t bytes) {
  std::memcpy(destination, source, bytes);
}

#endif

}  // namespace gpufs
