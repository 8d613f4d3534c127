// The two planes together: which requests are relayed, how messages are changed, and how a mount ends.

#include <gtest/gtest.h>

#include "fuse_fakes.h"
#include "temporary_file.h"

namespace gpufs::fuse {
namespace {

class RelayTest : public MountTest {
 protected:
  void SetUp() override { open_and_initialize(); }

  Reply relay_reply(std::uint32_t opcode, std::uint64_t nodeid, const Bytes& request, const Bytes& reply) {
    const std::uint64_t unique = kernel->send(opcode, nodeid, request);
    EXPECT_EQ(control->expect(opcode).header.unique, unique);
    control->reply(unique, 0, reply);
    return kernel->wait(unique);
  }
  Bytes name() {
    Bytes bytes;
    append_text(bytes, "name");
    return bytes;
  }
};

TEST_F(RelayTest, StatxOfAnUnknownInodeIsRelayedAsGetattr) {
  fuse_attr_out out{};
  out.attr_valid = 4;
  out.attr.ino = 9;
  out.attr.mode = S_IFBLK | 0600;
  out.attr.size = 77;
  out.attr.rdev = (8U << 8) | 0x31 | (0x12U << 20);
  out.attr.mtime = 5;
  const std::uint64_t unique = kernel->send(kOpcodeStatx, 9, Bytes(24));
  const RelayedRequest request = control->expect(FUSE_GETATTR);
  EXPECT_EQ(request.body.size(), sizeof(fuse_getattr_in));
  control->reply(unique, 0, bytes_of(out));
  const StatxOut got = kernel->wait(unique).as<StatxOut>();
  EXPECT_EQ(got.attr_valid, 4U);
  EXPECT_EQ(got.stat.stx_size, 77U);
  EXPECT_EQ(got.stat.stx_mode, S_IFBLK | 0600);
  EXPECT_EQ(got.stat.stx_mtime.tv_sec, 5);
  EXPECT_EQ(got.stat.stx_rdev_major, 8U);
  EXPECT_EQ(got.stat.stx_rdev_minor, 0x1231U);
  EXPECT_EQ(got.stat.stx_mask, 0x7ffU);  // no birth
  EXPECT_EQ(kernel->call(kOpcodeStatx, 9, Bytes(8)).error(), EINVAL);
}

TEST_F(RelayTest, BuffersOpenForDirectIo) {
  fuse_open_out open{};
  open.fh = add_file(2);
  open.open_flags = FOPEN_KEEP_CACHE;
  const auto opened = kernel->call(FUSE_OPEN, 2, bytes_of(fuse_open_in{})).as<fuse_open_out>();
  EXPECT_EQ(opened.open_flags, FOPEN_DIRECT_IO | FOPEN_PARALLEL_DIRECT_WRITES | FOPEN_NOFLUSH);
  EXPECT_NE(opened.fh, open.fh);
}

TEST_F(RelayTest, FilesOfTheHostOpenForDirectIo) {
  const UniqueFd file = testing::temporary_file();
  fuse_open_out out{};
  out.fh = mount->backing_files().open(file.get()).take();
  out.open_flags = FOPEN_KEEP_CACHE;
  out = relay_reply(FUSE_OPEN, 50, bytes_of(fuse_open_in{}), bytes_of(out)).as<fuse_open_out>();
  EXPECT_EQ(out.open_flags, FOPEN_DIRECT_IO | FOPEN_PARALLEL_DIRECT_WRITES);
}

TEST_F(RelayTest, ControlFilesNeverKeepTheirCache) {
  fuse_open_out open{};
  open.fh = 17;
  open.open_flags = FOPEN_KEEP_CACHE | FOPEN_DIRECT_IO;
  const Reply opened = relay_reply(FUSE_OPEN, 5, bytes_of(fuse_open_in{}), bytes_of(open));
  EXPECT_EQ(opened.as<fuse_open_out>().open_flags, FOPEN_DIRECT_IO);
}

TEST_F(RelayTest, NamesOfTheHostAreTheControlPlanes) {
  ASSERT_TRUE(mount->names().place(0, "", file_attributes(0, S_IFDIR | 0755, -1), {}).ok());
  ASSERT_TRUE(mount->names().place(1, "backing", file_attributes(kFirstHostInode, S_IFDIR | 0755, -1), {}).ok());
  for (const std::uint64_t inode : {kFirstHostInode, kFirstHostInode + 1}) {
    kernel->send(FUSE_LOOKUP, inode, name());
    control->expect(FUSE_LOOKUP);
  }
  Bytes link = bytes_of(fuse_link_in{kFirstHostInode + 1});
  append_text(link, "name");
  EXPECT_EQ(kernel->call(FUSE_LINK, 1, link).error(), EXDEV);
  EXPECT_FALSE(control->receive(kQuiet));
}

TEST_F(RelayTest, LargeBatchesOfForgetsAreSplit) {
  constexpr std::uint32_t kCount = 60'000;  // as many as a reader's memory takes
  Bytes body = bytes_of(fuse_batch_forget_in{kCount, 0});
  for (std::uint64_t i = 0; i < kCount; ++i) append(body, fuse_forget_one{100 + i, i});
  kernel->send(FUSE_BATCH_FORGET, 0, body);
  std::uint64_t seen = 0;
  while (seen < kCount) {
    const RelayedRequest part = control->expect(FUSE_BATCH_FORGET);
    const auto count = part.as<fuse_batch_forget_in>().count;
    ASSERT_GT(count, 0U);
    ASSERT_EQ(part.body.size(), sizeof(fuse_batch_forget_in) + count * sizeof(fuse_forget_one));
    ASSERT_LE(part.body.size(), 100'000U);
    for (std::uint32_t i = 0; i < count; ++i, ++seen) {
      const auto one = part.as<fuse_forget_one>(sizeof(fuse_batch_forget_in) + i * sizeof(fuse_forget_one));
      ASSERT_EQ(one.nodeid, 100 + seen);
      ASSERT_EQ(one.nlookup, seen);
    }
  }
  EXPECT_FALSE(kernel->receive(kQuiet));
}

TEST_F(RelayTest, ATruncatedBatchOfForgetsIsDropped) {
  Bytes body = bytes_of(fuse_batch_forget_in{1000, 0});
  append(body, fuse_forget_one{1, 1});
  kernel->send(FUSE_BATCH_FORGET, 0, body);
  EXPECT_FALSE(control->receive(kQuiet));
  EXPECT_TRUE(soon([&] { return counted().bad_requests == 1; }));
}

TEST_F(RelayTest, ARequestThatIsAnsweredSoonIsNotInterrupted) {
  const std::uint64_t unique = kernel->send(FUSE_LOOKUP, 1, name());
  control->expect(FUSE_LOOKUP);
  kernel->interrupt(unique);
  EXPECT_FALSE(control->receive(kQuiet));
  control->reply(unique, ENOENT);
  EXPECT_EQ(kernel->wait(unique).error(), ENOENT);
  kernel->interrupt(unique);  // too late
  EXPECT_FALSE(control->receive(kQuiet));
}

TEST_F(RelayTest, LateRepliesToInterruptedRequestsAreTakenBack) {
  fuse_entry_out entry{};
  entry.nodeid = 77;
  fuse_open_out opened{};
  opened.fh = 5;
  Bytes listed;
  for (const std::string_view found : {".", "..", "a", "another"}) {
    fuse_direntplus each{};
    each.entry_out.nodeid = 100 + found.size();
    each.dirent.namelen = static_cast<std::uint32_t>(found.size());
    const std::size_t at = listed.size();
    listed.resize(at + FUSE_DIRENTPLUS_SIZE(&each));
    std::memcpy(listed.data() + at, &each, FUSE_NAME_OFFSET_DIRENTPLUS);
    std::memcpy(listed.data() + at + FUSE_NAME_OFFSET_DIRENTPLUS, found.data(), found.size());
  }
  Bytes created = bytes_of(entry);
  append(created, opened);
  struct Case {
    std::uint32_t opcode;
    Bytes reply;
    std::vector<std::uint64_t> forgotten;
    std::uint32_t released;
  };
  const Case cases[] = {{FUSE_LOOKUP, bytes_of(entry), {77}, 0},
                        {FUSE_CREATE, created, {77}, FUSE_RELEASE},
                        {FUSE_OPENDIR, bytes_of(opened), {}, FUSE_RELEASEDIR},
                        {FUSE_READDIRPLUS, listed, {101, 107}, 0},
                        {FUSE_MKDIR, {}, {}, 0}};
  std::vector<std::uint64_t> uniques;
  for (const Case& each : cases) {
    uniques.push_back(kernel->send(each.opcode, 1, Bytes(64)));
    control->expect(each.opcode);
    kernel->interrupt(uniques.back());
  }
  for (const std::uint64_t unique : uniques) EXPECT_EQ(kernel->wait(unique).error(), EINTR);
  for (std::size_t i = 0; i < uniques.size(); ++i) {
    const Case& each = cases[i];
    control->reply(uniques[i], each.opcode == FUSE_MKDIR ? EIO : 0, each.reply);
    if (each.released != 0) {
      const RelayedRequest release = control->expect(each.released);
      EXPECT_EQ(release.as<fuse_release_in>().fh, 5U);
      control->reply(release.header.unique, 0);
    }
    if (each.forgotten.empty()) continue;
    const RelayedRequest forget = control->expect(FUSE_BATCH_FORGET);
    EXPECT_EQ(forget.as<fuse_batch_forget_in>().count, each.forgotten.size());
    for (std::size_t one = 0; one < each.forgotten.size(); ++one) {
      const std::size_t at = sizeof(fuse_batch_forget_in) + one * sizeof(fuse_forget_one);
      EXPECT_EQ(forget.as<fuse_forget_one>(at).nodeid, each.forgotten[one]);
    }
  }
  EXPECT_FALSE(control->receive(kQuiet));
  EXPECT_FALSE(kernel->receive(kQuiet));
  EXPECT_EQ(counted().relay_bad_replies, 0U);
}

TEST_F(RelayTest, LongMessagesAreShortened) {
  MountOptions options;
  options.max_write = 4 << 20;
  TearDown();
  open_and_initialize(options);
  fuse_read_in in{};
  in.fh = 17;
  in.size = 4 << 20;
  for (const std::uint32_t opcode : {FUSE_READ, FUSE_READDIRPLUS}) {
    const std::uint64_t unique = kernel->send(opcode, 5, bytes_of(in));
    EXPECT_LE(control->expect(opcode).as<fuse_read_in>().size, opcode == FUSE_READ ? 1U << 20 : 64U << 10);
    control->reply(unique, 0, Bytes(100));
    EXPECT_EQ(kernel->wait(unique).body.size(), 100U);
  }
  const Bytes data = pattern(3 << 20, 1);
  const std::uint64_t unique = kernel->send(FUSE_WRITE, 5, FakeKernel::write_body(17, 0, data));
  const RelayedRequest request = control->expect(FUSE_WRITE);
  const auto write = request.as<fuse_write_in>();
  ASSERT_LE(write.size, 1U << 20);
  ASSERT_EQ(request.body.size(), sizeof(write) + write.size);
  EXPECT_TRUE(std::equal(request.body.begin() + sizeof(write), request.body.end(), data.begin()));
  control->reply(unique, 0, bytes_of(fuse_write_out{write.size, 0}));
  EXPECT_EQ(kernel->wait(unique).as<fuse_write_out>().size, write.size);
  // Anything else of that size is answered.
  EXPECT_EQ(kernel->call(FUSE_SETXATTR, 5, Bytes(3 << 20)).error(), EMSGSIZE);
}

TEST_F(RelayTest, TooLargeAndMalformedRepliesAreReplaced) {
  const auto attempt = [&](const std::function<void(std::uint64_t)>& answer) {
    const std::uint64_t unique = kernel->send(FUSE_LOOKUP, 1, name());
    control->expect(FUSE_LOOKUP);
    answer(unique);
    return kernel->wait(unique).error();
  };
  const auto raw = [&](std::uint64_t unique, std::uint32_t length, int error, std::size_t body) {
    Bytes message = bytes_of(fuse_out_header{length, error, unique});
    message.resize(message.size() + body);
    control->send_raw(message);
  };
  EXPECT_EQ(attempt([&](std::uint64_t unique) { control->reply(unique, 0, Bytes(3 << 20)); }), EIO);
  EXPECT_EQ(counted().relay_bad_replies, 1U);
  EXPECT_EQ(attempt([&](std::uint64_t unique) { raw(unique, 17, 0, 100); }), EIO);
  EXPECT_EQ(attempt([&](std::uint64_t unique) { raw(unique, 1000, 0, 100); }), EIO);
  EXPECT_EQ(attempt([&](std::uint64_t unique) { raw(unique, 16, 5, 0); }), EIO);
  EXPECT_EQ(attempt([&](std::uint64_t unique) { raw(unique, 16, -512, 0); }), EIO);
  EXPECT_EQ(attempt([&](std::uint64_t unique) { raw(unique, 24, -5, 8); }), EIO);
  // Nobody asked.
  raw(123456, 16, -5, 0);
  control->send_raw(Bytes(7));
  EXPECT_FALSE(kernel->receive(kQuiet));
  EXPECT_EQ(attempt([&](std::uint64_t unique) { control->reply(unique, EACCES); }), EACCES);
}

TEST_F(RelayTest, ABusyControlPlaneDelaysNoNativeRequest) {
  MountOptions options;
  options.reader_threads = 1;  // several may overtake each other
  TearDown();
  open_and_initialize(options);
  const std::uint64_t fh = add_file(2);
  Bytes body(60'000);
  constexpr unsigned kRequests = 400;  // 24 MB: several times what the socket holds
  std::vector<std::uint64_t> uniques;
  for (unsigned i = 0; i < kRequests; ++i) {
    std::memcpy(body.data(), &i, sizeof(i));
    uniques.push_back(kernel->send(FUSE_SETXATTR, 5, body));
    if (i % 50 == 0) {
      EXPECT_EQ(kernel->write(2, fh, 0, pattern(100, i)).as<fuse_write_out>().size, 100U);
    }
  }
  EXPECT_EQ(kernel->read(2, fh, 0, 100).body.size(), 100U);
  EXPECT_GT(counted().relay_overflows, 0U);
  for (unsigned i = 0; i < kRequests; ++i) {
    const RelayedRequest request = control->expect(FUSE_SETXATTR);
    EXPECT_EQ(request.as<unsigned>(), i);  // in their order, though several queues were passed
    control->reply(request.header.unique, 0);
  }
  for (const std::uint64_t unique : uniques) EXPECT_EQ(kernel->wait(unique).error(), 0);
  mount->publish_gauges();
  EXPECT_EQ(contexts[0]->counters().region().gauges().requests_relayed, 0U);
}

TEST_F(RelayTest, ClosingWhileTheControlPlaneIsBusy) {
  for (unsigned i = 0; i < 200; ++i) kernel->send(FUSE_SETXATTR, 5, Bytes(60'000));
  ASSERT_TRUE(soon([&] { return counted().relay_overflows > 0; }));
  mount->close();  // must not wait for it
  for (unsigned i = 0; i < 200; ++i) {
    std::optional<Reply> reply = kernel->receive(kQuiet);
    if (!reply) break;  // those that no reader had come to
    EXPECT_EQ(reply->error(), ENOTCONN);
  }
}

TEST_F(RelayTest, TheControlPlaneEnds) {
  const std::uint64_t fh = add_file(2);
  const UniqueFd file = testing::temporary_file();
  const std::uint64_t backing = mount->backing_files().open(file.get()).take();
  kernel->write(2, fh, 0, pattern(100, 1));
  std::vector<std::uint64_t> pending;
  for (int i = 0; i < 5; ++i) pending.push_back(kernel->send(FUSE_LOOKUP, 1, name()));
  control->expect(FUSE_LOOKUP);
  control->die();
  for (const std::uint64_t unique : pending) EXPECT_EQ(kernel->wait(unique).error(), ENOTCONN);
  EXPECT_EQ(kernel->call(FUSE_LOOKUP, 1, name()).error(), ENOTCONN);
  kernel->send(FUSE_FORGET, 2, bytes_of(fuse_forget_in{1}));
  // Open buffers go on, and their memory comes back.
  EXPECT_EQ(kernel->read(2, fh, 0, 100).body.size(), 100U);
  fuse_release_in release{};
  release.fh = fh;
  EXPECT_EQ(kernel->call(FUSE_RELEASE, 2, bytes_of(release)).error(), 0);
  EXPECT_TRUE(soon([&] { return table->counts().files == 0; }));           // another reader may have the FORGET
  EXPECT_EQ(kernel->call(FUSE_RELEASE, 2, bytes_of(release)).error(), 0);  // as one that is sent again
  release.fh = backing;
  EXPECT_EQ(kernel->call(FUSE_RELEASE, 2, bytes_of(release)).error(), 0);
  EXPECT_TRUE(soon([&] { return mount->backing_files().size() == 0; }));
  EXPECT_FALSE(ended(kQuiet));  // the connection has not ended
}

TEST_F(RelayTest, TheConnectionEnds) {
  EXPECT_FALSE(ended(kQuiet));
  kernel->hang_up();
  EXPECT_TRUE(ended(kPatience));
  mount->close();
  EXPECT_TRUE(ended(0ms));
}

TEST_F(RelayTest, ClosingAnswersPendingRequests) {
  const std::uint64_t from = add_file(2);
  const std::uint64_t to = add_file(3);
  kernel->write(2, from, 0, pattern(1 << 20, 9));
  copies.close();
  // Each has its own part of the file: what programs write to the same bytes at once is theirs to order.
  for (std::uint64_t i = 0; i < 8; ++i) kernel->send(FUSE_COPY_FILE_RANGE, 2, copy_body(from, to, 100, 0, i * 100));
  const std::uint64_t lookup = kernel->send(FUSE_LOOKUP, 1, name());
  ASSERT_TRUE(copies.await(4));
  control->expect(FUSE_LOOKUP);
  std::thread opener([&] {
    EXPECT_EQ(kernel->wait(lookup).error(), ENOTCONN);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(kernel->receive()->error(), EINTR);  // those that had not begun
    copies.open();
  });
  mount->close();
  opener.join();
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(kernel->receive());
  EXPECT_TRUE(ended(0ms));
}

TEST_F(MountTest, ClosedBeforeAnythingHappened) {
  open();
  mount->close();
  mount->close();
  EXPECT_EQ(mount->notifier().invalidate_inode(2).error(), ESHUTDOWN);
}

TEST_F(MountTest, ClosedWithoutAStart) {
  Result<RelayPair> device = make_relay_pair();
  Result<RelayPair> relay = make_relay_pair();
  ASSERT_TRUE(Mount::create(std::move(device.value().native), std::move(relay.value().native), contexts, {}).ok());
}

// Whatever comes, each request has exactly one reply and the session goes on.
TEST_F(RelayTest, ConfusedMessages) {
  const std::uint64_t fh = add_file(2);
  std::atomic<bool> stop{false};
  std::thread answers([&] {
    unsigned round = 0;
    while (!stop) {
      std::optional<RelayedRequest> request = control->receive(5ms);
      if (!request || request->header.opcode == FUSE_FORGET || request->header.opcode == FUSE_BATCH_FORGET ||
          request->header.opcode == FUSE_INTERRUPT) {
        continue;
      }
      const bool success = ++round % 3 == 0;
      control->reply(request->header.unique, success ? 0 : ENOSYS, Bytes(success ? round % 200 : 0));
    }
  });
  unsigned state = 12345;
  const auto random = [&](unsigned limit) {
    state = state * 1664525U + 1013904223U;
    return (state >> 8) % limit;
  };
  std::set<std::uint64_t> open_requests;
  const auto take = [&](std::chrono::milliseconds timeout) {
    std::optional<Reply> reply = kernel->receive(timeout);
    if (reply && reply->header.unique != 0) {
      EXPECT_EQ(open_requests.erase(reply->header.unique), 1U) << reply->header.unique;
    }
    return reply.has_value();
  };
  for (unsigned i = 0; i < 3000; ++i) {
    const std::uint32_t opcode = random(60);
    if (opcode == FUSE_INIT || opcode == FUSE_INTERRUPT || opcode == FUSE_RELEASE) continue;
    Bytes body = pattern(random(4) == 0 ? random(3000) : random(120), state);
    if (random(2) == 0 && body.size() >= 8) std::memcpy(body.data(), &fh, sizeof(fh));
    // Small offsets and sizes for half of the rest, so that something is done.
    if (random(2) == 0 && body.size() >= 48) {
      for (const std::size_t at : {8UL, 16UL, 24UL, 32UL, 40UL}) {
        const std::uint64_t value = random(100'000);
        std::memcpy(body.data() + at, &value, sizeof(value));
      }
    }
    const std::uint64_t unique = kernel->next_unique();
    const bool answered = opcode != FUSE_FORGET && opcode != FUSE_BATCH_FORGET && opcode != FUSE_NOTIFY_REPLY;
    if (answered) open_requests.insert(unique);
    kernel->send_raw(FakeKernel::message(opcode, unique, random(6), body));
    if (random(10) == 0) kernel->interrupt(unique);
    while (open_requests.size() > 16) ASSERT_TRUE(take(kPatience));
  }
  while (!open_requests.empty()) ASSERT_TRUE(take(kPatience)) << open_requests.size() << " requests without a reply";
  EXPECT_FALSE(take(kQuiet));
  stop = true;
  answers.join();
  // The file is served as before; the handle may have been closed by a RELEASE among them.
  const auto again = testing::must(table->open(table->find(2), O_RDWR, nobody));
  EXPECT_EQ(kernel->read(2, again, 0, 0).error(), 0);
}

}  // namespace
}  // namespace gpufs::fuse
