// Random operations on a Buffer and on a plain model of a file, side by side.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>

#include "buffer_fixture.h"
#include "bytes.h"

namespace gpufs::testing {
namespace {

// With GPUFS_TEST_LONG in the environment, as scripts/check sets it, ten times the steps. Under a sanitizer, where a
// step costs many times as much, they stay as they are.
int steps_of(int steps) { return kSanitized || std::getenv("GPUFS_TEST_LONG") == nullptr ? steps : 10 * steps; }

struct Setting {
  const char* name;
  int steps;
  std::uint64_t slab_file_bytes;
  bool reserve_copies;
  std::uint64_t span;
};

class BufferModelTest : public BufferFixture, public ::testing::WithParamInterface<Setting> {
 protected:
  // Bytes, and which granules must be memory (those that were written or allocated and not released since).
  struct Model {
    std::vector<std::byte> bytes;
    void write(std::uint64_t offset, std::span<const std::byte> data) {
      if (offset + data.size() > bytes.size()) bytes.resize(offset + data.size());
      std::copy(data.begin(), data.end(), bytes.begin() + static_cast<std::ptrdiff_t>(offset));
    }
    void zero(std::uint64_t offset, std::uint64_t end) {
      end = std::min<std::uint64_t>(end, bytes.size());
      if (offset < end) {
        std::fill(bytes.begin() + static_cast<std::ptrdiff_t>(offset), bytes.begin() + static_cast<std::ptrdiff_t>(end),
                  std::byte{0});
      }
    }
  };

  std::mt19937_64 random{20240607};
  std::uint64_t below(std::uint64_t limit) { return random() % limit; }

  // Sizes and offsets where mistakes live: around slots, pages and granules.
  std::uint64_t place() {
    static constexpr std::uint64_t kEdges[] = {0,      512,  1024,     4096,         65536,
                                               131072, kMiB, kGranule, 2 * kGranule, 3 * kGranule};
    const std::uint64_t edge = kEdges[below(std::size(kEdges))];
    switch (below(4)) {
      case 0:
        return edge;
      case 1:
        return edge + below(700);
      case 2:
        return edge - std::min(edge, below(700));
      default:
        return below(below(2) == 0 ? 100'000 : 4 * kGranule);
    }
  }
  std::uint64_t length() { return 1 + (below(3) == 0 ? below(3 * kMiB) : below(below(2) == 0 ? 600 : 70'000)); }

  void check(Buffer& buffer, const Model& model) {
    ASSERT_EQ(buffer.size(), model.bytes.size());
    const std::vector<std::byte> all = contents(buffer);
    ASSERT_TRUE(same_bytes(all, model.bytes));
  }

  // Every byte of the model that is not zero is inside what SEEK_DATA and SEEK_HOLE call data.
  void check_holes(Buffer& buffer, const Model& model) {
    std::uint64_t at = 0;
    std::uint64_t checked = 0;
    while (true) {
      const Result<std::uint64_t> data = buffer.seek_data(at);
      const std::uint64_t hole_end = data.ok() ? data.value() : model.bytes.size();
      if (!data.ok()) {
        ASSERT_EQ(data.error(), ENXIO);
      }
      ASSERT_TRUE(all_zero(std::span(model.bytes).subspan(checked, hole_end - checked)));
      if (!data.ok()) return;
      const Result<std::uint64_t> hole = buffer.seek_hole(data.value());
      ASSERT_TRUE(hole.ok());
      ASSERT_GT(hole.value(), data.value());
      checked = hole.value();
      at = hole.value();
      if (at >= model.bytes.size()) return;
    }
  }
};

TEST_P(BufferModelTest, RandomSteps) {
  plan->reserve_copies = GetParam().reserve_copies;
  plan->span = GetParam().span;
  start(64 * kMiB, GetParam().slab_file_bytes, 2);
  const std::vector<std::byte> source = pattern(4 * kMiB, 7);
  std::vector<std::shared_ptr<Buffer>> buffers{make(0), make(0), make(1)};
  std::vector<Model> models(buffers.size());
  const int steps = steps_of(GetParam().steps);
  for (int step = 0; step < steps && !HasFatalFailure(); ++step) {
    const std::size_t which = below(buffers.size());
    Buffer& buffer = *buffers[which];
    Model& model = models[which];
    const std::uint64_t offset = place();
    const std::uint64_t bytes = length();
    switch (below(below(4) == 0 ? 16 : 8)) {
      case 0:
      case 1:
      case 2: {
        const auto data = std::span(source).subspan(below(4096), bytes);
        write(buffer, offset, data);
        model.write(offset, data);
        break;
      }
      case 3: {
        const std::vector<std::byte> read = contents(buffer, offset, bytes);
        const std::uint64_t size = model.bytes.size();
        const std::uint64_t expected = offset >= size ? 0 : std::min(bytes, size - offset);
        ASSERT_EQ(read.size(), expected);
        ASSERT_TRUE(same_bytes(read, std::span(model.bytes).subspan(std::min(offset, size), expected)));
        break;
      }
      case 4: {
        ASSERT_TRUE(buffer.resize(offset).ok());
        model.bytes.resize(offset);
        break;
      }
      case 5: {
        ASSERT_TRUE(buffer.punch(offset, bytes).ok());
        model.zero(offset, offset + bytes);
        break;
      }
      case 6: {
        const bool keep = below(2) == 0;
        ASSERT_TRUE(buffer.allocate(offset, bytes, keep).ok());
        if (!keep && offset + bytes > model.bytes.size()) model.bytes.resize(offset + bytes);
        break;
      }
      case 7: {
        const bool keep = below(2) == 0;
        ASSERT_TRUE(buffer.zero_range(offset, bytes, keep).ok());
        model.zero(offset, offset + bytes);
        if (!keep && offset + bytes > model.bytes.size()) model.bytes.resize(offset + bytes);
        break;
      }
      case 8:
      case 9:
      case 10: {
        const std::size_t other = below(buffers.size());
        const std::uint64_t from = place();
        const Model before = models[other];
        const std::uint64_t size = before.bytes.size();
        const std::uint64_t clipped = from >= size ? 0 : std::min(bytes, size - from);
        const Result<std::uint64_t> copied = buffer.copy_from(*buffers[other], from, offset, bytes, nullptr);
        if (which == other && clipped > 0 && from < offset + clipped && offset < from + clipped) {
          ASSERT_EQ(copied.error(), EINVAL);
          break;
        }
        ASSERT_TRUE(copied.ok()) << copied.status().message();
        ASSERT_EQ(copied.value(), clipped);
        if (clipped > 0) model.write(offset, std::span(before.bytes).subspan(from, clipped));
        break;
      }
      case 11: {
        // A write of which only a part arrives.
        const std::uint64_t size = buffer.size();
        Result<std::unique_ptr<Buffer::Pinned>> pin = buffer.pin_for_write(offset, bytes);
        ASSERT_TRUE(pin.ok());
        ASSERT_EQ(buffer.size(), size);
        ASSERT_EQ(pin.value()->pieces().size(), 1U);
        const std::uint64_t arrived = below(bytes);
        ASSERT_TRUE(contexts[which == 2 ? 1 : 0]
                        ->device()
                        .copy_in(pin.value()->pieces()[0].address, source.data(), bytes)
                        .ok());
        if (arrived > 0) buffer.publish(offset + arrived);
        pin.value().reset();
        ASSERT_TRUE(buffer.discard_above_size(offset + arrived, bytes - arrived).ok());
        if (arrived > 0) model.write(offset, std::span(source).first(arrived));
        // Below the old end all was overwritten.
        const std::uint64_t end = std::min<std::uint64_t>(offset + bytes, size);
        if (offset < end) model.write(offset, std::span(source).first(end - offset));
        break;
      }
      case 12: {
        if (!plan->cpu_addressable) break;
        Result<Buffer::Gathered> gathered = buffer.gather(offset, bytes);
        ASSERT_TRUE(gathered.ok());
        std::uint64_t at = offset;
        for (const iovec& piece : gathered.value().pieces) {
          ASSERT_EQ(std::memcmp(piece.iov_base, model.bytes.data() + at, piece.iov_len), 0);
          at += piece.iov_len;
        }
        ASSERT_EQ(at - offset, gathered.value().bytes);
        break;
      }
      case 13:
        check_holes(buffer, model);
        break;
      case 14:
        check(buffer, model);
        break;
      case 15:
        if (below(8) != 0) break;
        buffers[which] = make(which == 2 ? 1 : 0);
        model = Model{};
        break;
      default:
        break;
    }
    if (step % 500 == 0) {
      for (std::size_t index = 0; index < buffers.size(); ++index) check(*buffers[index], models[index]);
      if (GetParam().slab_file_bytes == 0) {
        ASSERT_EQ(buffers[0]->bytes_held() + buffers[1]->bytes_held(), contexts[0]->held_bytes());
      }
      ASSERT_EQ(used(0), contexts[0]->held_bytes());
      ASSERT_EQ(used(1), contexts[1]->held_bytes());
    }
  }
  buffers.clear();
  expect_nothing_left();
}

INSTANTIATE_TEST_SUITE_P(Settings, BufferModelTest,
                         ::testing::Values(Setting{"plain", 2000, 0, false, 0}, Setting{"slabs", 3000, 65536, false, 0},
                                           Setting{"copying", 1000, 0, true, 0},
                                           Setting{"pieces", 1000, 65536, false, 4 * kGranule}),
                         [](const ::testing::TestParamInfo<Setting>& setting) {
                           return std::string(setting.param.name);
                         });

}  // namespace
}  // namespace gpufs::testing
