// What the data plane's tests use in place of the kernel and the control plane. A fake belongs to the thread that
// created it.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "bytes.h"
#include "faulty_driver.h"
#include "fuse/inode_table.h"
#include "fuse/mount.h"
#include "fuse/protocol.h"
#include "fuse/relay.h"
#include "results.h"
#include "waiting.h"

namespace gpufs::fuse {

using namespace std::chrono_literals;

inline constexpr auto kQuiet = 100ms;       // for what must not
constexpr std::uint64_t kInterruptBit = 1;  // of the number of an INTERRUPT, which else is its request's

using Bytes = std::vector<std::byte>;

template <typename T>
void append(Bytes& bytes, const T& value) {
  const auto* raw = reinterpret_cast<const std::byte*>(&value);
  bytes.insert(bytes.end(), raw, raw + sizeof(T));
}

inline void append_text(Bytes& bytes, std::string_view text) {
  for (const char c : text) bytes.push_back(static_cast<std::byte>(c));
  bytes.push_back(std::byte{0});
}

template <typename T>
Bytes bytes_of(const T& value) {
  Bytes bytes;
  append(bytes, value);
  return bytes;
}

using testing::Door;
using testing::kPatience;
using testing::pattern;
using testing::soon;

inline bool readable(int fd, std::chrono::milliseconds timeout) {
  pollfd waiting{fd, POLLIN, 0};
  return ::poll(&waiting, 1, static_cast<int>(timeout.count())) == 1;
}

// Megabytes in one message need as much kernel memory in one piece, which a busy machine may not have at once.
inline ssize_t send_message(int fd, const Bytes& message) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  for (;;) {
    const ssize_t sent = ::send(fd, message.data(), message.size(), MSG_NOSIGNAL);
    if (sent >= 0 || (errno != ENOBUFS && errno != ENOMEM) || std::chrono::steady_clock::now() > end) return sent;
    std::this_thread::sleep_for(5ms);
  }
}

// The next message of a socket that keeps them apart; empty at its end.
inline Bytes receive_message(int fd) {
  const ssize_t length = ::recv(fd, nullptr, 0, MSG_PEEK | MSG_TRUNC);
  Bytes message(length > 0 ? static_cast<std::size_t>(length) : 0);
  const ssize_t got = message.empty() ? 0 : ::recv(fd, message.data(), message.size(), 0);
  message.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
  return message;
}

inline gpufs_attributes file_attributes(std::uint64_t ino, std::uint32_t mode = S_IFREG | 0644,
                                        std::int32_t device = 0) {
  gpufs_attributes attributes{};
  attributes.ino = ino;
  attributes.mode = mode;
  attributes.nlink = 1;
  attributes.uid = 1000;
  attributes.gid = 1000;
  attributes.blksize = 1 << 20;
  attributes.atime = attributes.mtime = attributes.ctime = 1'000'000;
  attributes.device = device;
  return attributes;
}

struct Reply {
  fuse_out_header header{};
  Bytes body;

  [[nodiscard]] int error() const { return -header.error; }
  template <typename T>
  [[nodiscard]] T as(std::size_t at = 0) const {
    T value{};
    EXPECT_TRUE(read_struct(std::span<const std::byte>(body), at, &value)) << "the reply is too short";
    return value;
  }
};

// Plays the kernel at the other end of a socket that the mount takes for /dev/fuse.
class FakeKernel {
 public:
  explicit FakeKernel(UniqueFd fd) : fd_(std::move(fd)) {}

  std::uint64_t next_unique() { return unique_ += 2; }

  static Bytes message(std::uint32_t opcode, std::uint64_t unique, std::uint64_t nodeid, const Bytes& body) {
    fuse_in_header header{};
    header.len = static_cast<std::uint32_t>(sizeof(header) + body.size());
    header.opcode = opcode;
    header.unique = unique;
    header.nodeid = nodeid;
    Bytes message;
    append(message, header);
    message.insert(message.end(), body.begin(), body.end());
    return message;
  }
  void send_raw(const Bytes& message) {
    ASSERT_EQ(send_message(fd_.get(), message), static_cast<ssize_t>(message.size())) << std::strerror(errno);
  }
  std::uint64_t send(std::uint32_t opcode, std::uint64_t nodeid, const Bytes& body) {
    const std::uint64_t unique = next_unique();
    std::uint64_t fh = 0;
    if (opcode == FUSE_FLUSH && read_struct(std::span<const std::byte>(body), 0, &fh) && (fh & kBufferHandle) != 0) {
      ADD_FAILURE() << "the kernel sends no FLUSH for a buffer: it is opened with FOPEN_NOFLUSH";
    }
    send_raw(message(opcode, unique, nodeid, body));
    return unique;
  }

  // The next message of any kind; nothing when none comes. INTERRUPTs that the mount asks for again are repeated, as
  // long as their requests have no reply.
  std::optional<Reply> receive(std::chrono::milliseconds timeout = kPatience) {
    const auto end = std::chrono::steady_clock::now() + timeout;
    for (;;) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
      if (!readable(fd_.get(), std::max(left, 0ms))) return std::nullopt;
      const Bytes buffer = receive_message(fd_.get());
      if (buffer.empty()) return std::nullopt;
      Reply reply;
      EXPECT_TRUE(read_struct(std::span<const std::byte>(buffer), 0, &reply.header));
      EXPECT_EQ(reply.header.len, buffer.size());
      if (reply.header.unique != 0 && (reply.header.unique & kInterruptBit) != 0) {
        EXPECT_EQ(reply.error(), EAGAIN);
        const std::uint64_t unique = reply.header.unique & ~kInterruptBit;
        if (interrupted_.contains(unique)) interrupt(unique);
        continue;
      }
      interrupted_.erase(reply.header.unique);
      reply.body.assign(buffer.begin() + sizeof(reply.header), buffer.end());
      return reply;
    }
  }
  // The reply to this request; others that come before it are kept.
  Reply wait(std::uint64_t unique) {
    const auto kept = kept_.find(unique);
    if (kept != kept_.end()) {
      Reply reply = std::move(kept->second);
      kept_.erase(kept);
      return reply;
    }
    for (;;) {
      std::optional<Reply> reply = receive();
      if (!reply) {
        ADD_FAILURE() << "no reply to request " << unique;
        return {};
      }
      if (reply->header.unique == unique) return std::move(*reply);
      EXPECT_TRUE(kept_.emplace(reply->header.unique, *reply).second) << "two replies to one request";
    }
  }
  Reply call(std::uint32_t opcode, std::uint64_t nodeid, const Bytes& body) { return wait(send(opcode, nodeid, body)); }
  void interrupt(std::uint64_t unique) {
    interrupted_.insert(unique);
    send_raw(message(FUSE_INTERRUPT, unique | kInterruptBit, 0, bytes_of(fuse_interrupt_in{unique})));
  }

  Reply read(std::uint64_t nodeid, std::uint64_t fh, std::uint64_t offset, std::uint32_t size,
             std::uint32_t flags = 0) {
    fuse_read_in in{};
    in.fh = fh;
    in.offset = offset;
    in.size = size;
    in.flags = flags;
    return call(FUSE_READ, nodeid, bytes_of(in));
  }
  Reply write(std::uint64_t nodeid, std::uint64_t fh, std::uint64_t offset, const Bytes& data,
              std::uint32_t write_flags = 0) {
    return call(FUSE_WRITE, nodeid, write_body(fh, offset, data, write_flags));
  }
  static Bytes write_body(std::uint64_t fh, std::uint64_t offset, const Bytes& data, std::uint32_t write_flags = 0) {
    fuse_write_in in{};
    in.fh = fh;
    in.offset = offset;
    in.size = static_cast<std::uint32_t>(data.size());
    in.write_flags = write_flags;
    Bytes body = bytes_of(in);
    body.insert(body.end(), data.begin(), data.end());
    return body;
  }

  [[nodiscard]] int fd() const { return fd_.get(); }
  void hang_up() { fd_.reset(); }

 private:
  UniqueFd fd_;
  std::uint64_t unique_ = 0;
  std::map<std::uint64_t, Reply> kept_;
  std::set<std::uint64_t> interrupted_;  // requests without a reply
};

struct RelayedRequest {
  fuse_in_header header{};
  Bytes body;
  template <typename T>
  [[nodiscard]] T as(std::size_t at = 0) const {
    T value{};
    EXPECT_TRUE(read_struct(std::span<const std::byte>(body), at, &value)) << "the request is too short";
    return value;
  }
};

// Plays the control plane at the other end of the relay.
class FakeControlPlane {
 public:
  explicit FakeControlPlane(UniqueFd fd) : fd_(std::move(fd)) {}

  std::optional<RelayedRequest> receive(std::chrono::milliseconds timeout = kPatience) {
    if (!readable(fd_.get(), timeout)) return std::nullopt;
    const Bytes buffer = receive_message(fd_.get());
    if (buffer.empty()) return std::nullopt;
    EXPECT_LE(buffer.size(), (1U << 20) + 4096U) << "the control plane, which reads no more, would cut the message";
    RelayedRequest request;
    EXPECT_TRUE(read_struct(std::span<const std::byte>(buffer), 0, &request.header));
    EXPECT_EQ(request.header.len, buffer.size());
    request.body.assign(buffer.begin() + sizeof(request.header), buffer.end());
    return request;
  }
  RelayedRequest expect(std::uint32_t opcode) {
    std::optional<RelayedRequest> request = receive();
    if (!request) {
      ADD_FAILURE() << "nothing was relayed";
      return {};
    }
    EXPECT_EQ(request->header.opcode, opcode);
    return std::move(*request);
  }
  void reply(std::uint64_t unique, int error, const Bytes& body = {}) {
    fuse_out_header header{};
    header.len = static_cast<std::uint32_t>(sizeof(header) + body.size());
    header.error = -error;
    header.unique = unique;
    Bytes message;
    append(message, header);
    message.insert(message.end(), body.begin(), body.end());
    send_raw(message);
  }
  void send_raw(const Bytes& message) {
    ASSERT_EQ(send_message(fd_.get(), message), static_cast<ssize_t>(message.size())) << std::strerror(errno);
  }

  [[nodiscard]] int fd() const { return fd_.get(); }
  void die() { fd_.reset(); }

 private:
  UniqueFd fd_;
};

inline constexpr std::uint64_t kInitPassthrough = 1ULL << 37;
inline constexpr std::uint64_t kInitOverIoUring = 1ULL << 41;  // which the mount does not take
inline constexpr std::uint64_t kKernelFlags =
    0x73fffffbULL | (kInitDirectIoAllowMmap | kInitPassthrough | kInitOverIoUring | (0xfULL << 32));

// Two devices of the host driver, whose calls a test can hold up.
class DevicesTest : public ::testing::Test {
 protected:
  static constexpr std::uint64_t kMemory = 256 << 20;
  static constexpr std::uint64_t kGranule = 2 << 20;

  DevicesTest() {
    const std::shared_ptr<Driver> driver = testing::make_faulty_driver(plan, kMemory, 2);
    for (std::size_t index = 0; index < 2; ++index) contexts.push_back(DeviceContext::create(driver, index).take());
    plan->on_copy = [this] { copies.pass(); };
    plan->on_free = [this] { frees.pass(); };
  }

  std::uint64_t held(std::size_t device = 0) { return contexts[device]->held_bytes(); }
  // Takes all memory of a device that is free now.
  std::shared_ptr<Buffer> fill_device(std::size_t device) {
    std::shared_ptr<Buffer> filler = std::make_shared<ExtentBuffer>(contexts[device]);
    EXPECT_TRUE(filler->allocate(0, contexts[device]->device().memory().value().free_bytes, true).ok());
    return filler;
  }

  Door copies{/*open=*/true};  // between buffers
  Door frees{/*open=*/true};   // of a buffer's memory
  std::shared_ptr<testing::FaultPlan> plan = std::make_shared<testing::FaultPlan>();
  std::vector<std::shared_ptr<DeviceContext>> contexts;
  Responder nobody;  // for calls without a request
};

// A mount between a fake kernel and a fake control plane.
class MountTest : public DevicesTest {
 protected:
  void TearDown() override {
    copies.open();
    frees.open();
    if (mount) mount->close();
    mount.reset();
  }

  void open(const MountOptions& options = {}) {
    RelayPair device = testing::must(make_relay_pair());
    RelayPair relay = testing::must(make_relay_pair());
    kernel.emplace(std::move(device.control));
    control.emplace(std::move(relay.control));
    mount = testing::must(Mount::create(std::move(device.native), std::move(relay.native), contexts, options));
    table = &mount->table();
    ASSERT_TRUE(mount->start().ok());
  }

  static fuse_init_in init_request(std::uint64_t flags) {
    fuse_init_in in{};
    in.major = FUSE_KERNEL_VERSION;
    in.minor = 45;
    in.max_readahead = 131072;
    in.flags = static_cast<std::uint32_t>(flags);
    in.flags2 = static_cast<std::uint32_t>(flags >> 32);
    return in;
  }
  // The whole exchange; gives what the kernel gets.
  fuse_init_out initialize(std::uint64_t flags = kKernelFlags) {
    const Reply reply = kernel->call(FUSE_INIT, 0, bytes_of(init_request(flags)));
    EXPECT_EQ(reply.error(), 0);
    return reply.as<fuse_init_out>();
  }
  void open_and_initialize(const MountOptions& options = {}) {
    open(options);
    if (HasFatalFailure()) return;
    initialize();
  }

  std::uint64_t add_file(std::uint64_t ino, std::uint32_t mode = S_IFREG | 0644, std::int32_t device = 0) {
    // With the kernel's reference.
    EXPECT_TRUE(table->add({.attributes = file_attributes(ino, mode, device), .references = 1}).ok());
    return open_file(ino);
  }
  void unlink_file(std::uint64_t ino) { EXPECT_TRUE(table->set_links(table->find(ino), 0).ok()); }
  std::uint64_t open_file(std::uint64_t ino, int flags = O_RDWR) {
    return testing::must(table->open(table->find(ino), flags, nobody));
  }
  bool ended(std::chrono::milliseconds timeout) { return readable(mount->ended_fd(), timeout); }
  observe::EngineCounters& counted() { return contexts[0]->counters().region().counters(); }

  static Bytes copy_body(std::uint64_t from, std::uint64_t to, std::uint64_t bytes, std::uint64_t from_offset = 0,
                         std::uint64_t to_offset = 0) {
    fuse_copy_file_range_in in{};
    in.fh_in = from;
    in.off_in = from_offset;
    in.fh_out = to;
    in.off_out = to_offset;
    in.len = bytes;
    return bytes_of(in);
  }

  InodeTable* table = nullptr;  // the mount's
  std::optional<FakeKernel> kernel;
  std::optional<FakeControlPlane> control;
  std::shared_ptr<Mount> mount;
};

}  // namespace gpufs::fuse
