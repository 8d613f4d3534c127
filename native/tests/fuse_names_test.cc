// Requests about names, and the references that the kernel gets.

#include <gtest/gtest.h>
#include <linux/fs.h>
#include <sys/xattr.h>

#include "fuse_fakes.h"
#include "journal/keeper_link.h"
#include "memory/kept_memory.h"

namespace gpufs::fuse {
namespace {

class NamesTest : public MountTest {
 protected:
  void SetUp() override {
    open_and_initialize();
    ASSERT_TRUE(mount->names().place(0, "", file_attributes(0, S_IFDIR | 0755, -1), {}).ok());
    gpu = mount->names().place(1, "gpu0", file_attributes(0, S_IFDIR | 0755), {}).take()->ino();
  }

  static Bytes with_name(Bytes body, std::string_view name) {
    append_text(body, name);
    return body;
  }
  fuse_entry_out look_up(std::string_view name) {
    return kernel->call(FUSE_LOOKUP, gpu, with_name({}, name)).as<fuse_entry_out>();
  }
  Reply create(std::string_view name, std::uint32_t flags = O_CREAT | O_RDWR) {
    fuse_create_in in{};
    in.flags = flags;
    in.mode = S_IFREG | 0644;
    return kernel->call(FUSE_CREATE, gpu, with_name(bytes_of(in), name));
  }
  void close(std::uint64_t fh) {
    fuse_release_in release{};
    release.fh = fh;
    EXPECT_EQ(kernel->call(FUSE_RELEASE, gpu, bytes_of(release)).error(), 0);
  }
  // The names in the order of a listing whose replies have this size.
  std::vector<std::string> list(std::uint32_t size) {
    const auto opened = kernel->call(FUSE_OPENDIR, gpu, bytes_of(fuse_open_in{})).as<fuse_open_out>();
    std::vector<std::string> names;
    fuse_read_in in{};
    in.fh = opened.fh;
    in.size = size;
    for (;;) {
      const Reply reply = kernel->call(FUSE_READDIRPLUS, gpu, bytes_of(in));
      EXPECT_LE(reply.body.size(), size);
      if (reply.body.empty()) break;
      fuse_direntplus entry{};
      for (std::size_t at = 0; at < reply.body.size(); at += FUSE_DIRENTPLUS_SIZE(&entry)) {
        std::memcpy(&entry, reply.body.data() + at, FUSE_NAME_OFFSET_DIRENTPLUS);
        names.emplace_back(reinterpret_cast<const char*>(reply.body.data() + at + FUSE_NAME_OFFSET_DIRENTPLUS),
                           entry.dirent.namelen);
        in.offset = entry.dirent.off;
      }
      if (names.size() == 3) create("later");  // not in this listing
    }
    fuse_release_in release{};
    release.fh = opened.fh;
    EXPECT_EQ(kernel->call(FUSE_RELEASEDIR, gpu, bytes_of(release)).error(), 0);
    return names;
  }

  std::uint64_t gpu = 0;
};

TEST_F(NamesTest, CreateOpensWithOneReference) {
  const Reply created = create("some");
  const auto entry = created.as<fuse_entry_out>();
  const auto open = created.as<fuse_open_out>(sizeof(fuse_entry_out));
  EXPECT_EQ(open.open_flags, FOPEN_DIRECT_IO | FOPEN_PARALLEL_DIRECT_WRITES | FOPEN_NOFLUSH);
  EXPECT_EQ(entry.attr.mode, S_IFREG | 0644U);
  EXPECT_EQ(entry.entry_valid, 1U);
  EXPECT_EQ(create("some").error(), ESTALE);
  EXPECT_EQ(create("some", O_CREAT | O_EXCL).error(), EEXIST);
  EXPECT_EQ(look_up("some").nodeid, entry.nodeid);  // a second reference
  EXPECT_EQ(kernel->call(FUSE_UNLINK, gpu, with_name({}, "some")).error(), 0);
  const auto missing = look_up("some");
  EXPECT_EQ(missing.nodeid, 0U);
  EXPECT_EQ(missing.entry_valid, 1U);
  close(open.fh);
  Bytes forgotten = bytes_of(fuse_batch_forget_in{1, 0});
  append(forgotten, fuse_forget_one{entry.nodeid, 1});
  kernel->send(FUSE_BATCH_FORGET, 0, forgotten);
  EXPECT_EQ(kernel->call(FUSE_GETATTR, entry.nodeid, bytes_of(fuse_getattr_in{})).error(), 0);
  kernel->send(FUSE_FORGET, entry.nodeid, bytes_of(fuse_forget_in{1}));
  EXPECT_TRUE(soon([&] { return table->find(entry.nodeid) == nullptr; }));
  EXPECT_FALSE(control->receive(kQuiet));
}

TEST_F(NamesTest, NamesThatGoWithoutTheKernelsKnowledgeAreNotCached) {
  EXPECT_EQ(create("to be registered", O_CREAT | O_EXCL | O_RDWR | O_NOATIME).as<fuse_entry_out>().entry_valid, 0U);
  const std::uint64_t ino = create("registered", O_CREAT | O_EXCL | O_RDWR).as<fuse_entry_out>().nodeid;
  EXPECT_EQ(look_up("registered").entry_valid, 1U);
  ASSERT_TRUE(table->replace_buffer(ino, std::make_shared<ExtentBuffer>(contexts[0]), false).ok());
  EXPECT_EQ(look_up("registered").entry_valid, 0U);
  const auto linked = kernel->call(FUSE_LINK, gpu, with_name(bytes_of(fuse_link_in{ino}), "link"));
  EXPECT_EQ(linked.as<fuse_entry_out>().entry_valid, 0U);
}

// A process dies between what it has done and the reply, and the next one gets the request again.
class SentAgainTest : public NamesTest {
 protected:
  void SetUp() override {
    options.journal = journal::Journal::create().take();
    open_and_initialize(options);
    ASSERT_TRUE(mount->names().place(0, "", file_attributes(0, S_IFDIR | 0755, -1), {}).ok());
    gpu = mount->names().place(1, "gpu0", file_attributes(0, S_IFDIR | 0755), {}).take()->ino();
  }

  // Its reply, which another process repeats.
  Reply call_twice(const char* what, std::uint32_t opcode, std::uint64_t nodeid, const Bytes& body) {
    SCOPED_TRACE(what);
    const std::uint64_t unique = kernel->next_unique();
    kernel->send_raw(FakeKernel::message(opcode, unique, nodeid, body));
    Reply first = kernel->wait(unique);
    EXPECT_EQ(first.error(), 0);
    options.journal = journal::Journal::restore(UniqueFd(::fcntl(mount->journal()->fd(), F_DUPFD_CLOEXEC, 3))).take();
    mount->close();
    mount.reset();
    open(options);
    kernel->send_raw(FakeKernel::message(opcode, unique | kSentAgain, nodeid, body));
    const Reply again = kernel->wait(unique | kSentAgain);
    EXPECT_EQ(again.error(), 0);
    EXPECT_EQ(again.body, first.body);
    return first;
  }
  static Bytes set_attribute(std::string_view name, std::string_view value, std::uint32_t flags) {
    fuse_setxattr_in in{};
    in.size = static_cast<std::uint32_t>(value.size());
    in.flags = flags;
    Bytes body = bytes_of(in);
    append_text(body, name);
    for (const char c : value) body.push_back(static_cast<std::byte>(c));
    return body;
  }

  MountOptions options;
};

TEST_F(SentAgainTest, WhatHasBeenDoneIsNotDoneAgain) {
  fuse_create_in new_file{};
  new_file.flags = O_CREAT | O_EXCL | O_RDWR;
  new_file.mode = S_IFREG | 0644;
  const Reply created = call_twice("CREATE", FUSE_CREATE, gpu, with_name(bytes_of(new_file), "file"));
  const std::uint64_t ino = created.as<fuse_entry_out>().nodeid;
  call_twice("TMPFILE", FUSE_TMPFILE, gpu, with_name(bytes_of(new_file), "file"));
  call_twice("OPEN", FUSE_OPEN, ino, bytes_of(fuse_open_in{O_RDWR, 0}));
  call_twice("MKDIR", FUSE_MKDIR, gpu, with_name(bytes_of(fuse_mkdir_in{0755, 0}), "directory"));
  call_twice("OPENDIR", FUSE_OPENDIR, gpu, bytes_of(fuse_open_in{}));
  fuse_mknod_in fifo{};
  fifo.mode = S_IFIFO | 0644;
  call_twice("MKNOD", FUSE_MKNOD, gpu, with_name(bytes_of(fifo), "fifo"));
  call_twice("SYMLINK", FUSE_SYMLINK, gpu, with_name(with_name({}, "symlink"), "target"));
  call_twice("LINK", FUSE_LINK, gpu, with_name(bytes_of(fuse_link_in{ino}), "link"));
  call_twice("LOOKUP", FUSE_LOOKUP, gpu, with_name({}, "file"));
  call_twice("SETXATTR", FUSE_SETXATTR, ino, set_attribute("user.one", "1", XATTR_CREATE));
  call_twice("SETXATTR", FUSE_SETXATTR, ino, set_attribute("user.one", "2", XATTR_REPLACE));
  call_twice("REMOVEXATTR", FUSE_REMOVEXATTR, ino, with_name({}, "user.one"));
  fuse_setattr_in attributes{};
  attributes.valid = FATTR_MODE | FATTR_SIZE;
  attributes.mode = S_IFREG | 0600;
  attributes.size = 12345;
  call_twice("SETATTR", FUSE_SETATTR, ino, bytes_of(attributes));
  attributes.size = 1234;  // less: by another thread than the one that has read the request
  call_twice("SETATTR", FUSE_SETATTR, ino, bytes_of(attributes));
  call_twice("RENAME", FUSE_RENAME, gpu, with_name(with_name(bytes_of(fuse_rename_in{gpu}), "file"), "other"));
  fuse_rename2_in exchange{};
  exchange.newdir = gpu;
  exchange.flags = RENAME_EXCHANGE;
  call_twice("RENAME2", FUSE_RENAME2, gpu, with_name(with_name(bytes_of(exchange), "fifo"), "symlink"));
  EXPECT_EQ(look_up("fifo").attr.mode & S_IFMT, S_IFLNK * 1U);
  call_twice("UNLINK", FUSE_UNLINK, gpu, with_name({}, "link"));
  call_twice("RMDIR", FUSE_RMDIR, gpu, with_name({}, "directory"));
  EXPECT_EQ(look_up("other").attr.nlink, 1U);
  EXPECT_EQ(look_up("other").attr.size, 1234U);
}

TEST_F(SentAgainTest, OutcomesOfRequestsThatHaveEndedTakeNoSpace) {
  const std::uint64_t ino = create("file").as<fuse_entry_out>().nodeid;
  fuse_setattr_in attributes{};
  attributes.valid = FATTR_SIZE;
  for (std::uint64_t size = 200; size > 0; --size) {
    attributes.size = size % 2 == 0 ? size + 10 : size;
    EXPECT_EQ(kernel->call(FUSE_SETATTR, ino, bytes_of(attributes)).error(), 0);
  }
  std::size_t outcomes = 0;
  mount->journal()->each(journal::kOutcome, [&](std::uint64_t, std::span<const std::byte>) { ++outcomes; });
  EXPECT_LE(outcomes, 10U);
}

TEST_F(SentAgainTest, TheKernelNeedNotAskForFsync) {
  const std::uint64_t ino = create("file").as<fuse_entry_out>().nodeid;
  fuse_fsync_in file{};
  file.fh = open_file(ino, O_RDWR);
  EXPECT_EQ(kernel->call(FUSE_FSYNC, ino, bytes_of(file)).error(), ENOSYS);
  fuse_fsync_in directory{};
  directory.fh = kernel->call(FUSE_OPENDIR, gpu, bytes_of(fuse_open_in{})).as<fuse_open_out>().fh;
  EXPECT_EQ(kernel->call(FUSE_FSYNCDIR, gpu, bytes_of(directory)).error(), ENOSYS);
}

// ---- records that are damaged, or that a program closed while no process could note it ----

TEST_F(SentAgainTest, ABadRecordDoesNotLoseTheOthers) {
  const std::uint64_t ino = create("file").as<fuse_entry_out>().nodeid;
  const std::uint64_t fh = open_file(ino, O_RDWR);
  Records& records = table->records();
  records.put_file(fh + 1000, {ino + 1000, true});
  records.put_name(records.new_name(), {gpu, 1000, ino + 1000, "without an inode"});
  records.put_name(records.new_name(), {gpu, 1001, ino, "file"});
  records.put_limit({journal::kDirectoryLimit, ino + 1000}, 1 << 20);
  InodeRecord lost;
  lost.attributes = file_attributes(ino + 2000);
  lost.attributes.size = 10;
  records.put_inode(lost);
  KeptContents nowhere;
  nowhere.memory = 4711;
  nowhere.slot = {0, 512};
  records.put_contents(ino + 2000, nowhere);
  RelayPair ends = make_relay_pair().take();
  const auto keeper = testing::must(KeeperLink::open("/bin/false", "", std::move(ends.native), {}));
  for (int round = 0; round < 2; ++round) {
    options.journal = journal::Journal::restore(UniqueFd(::fcntl(mount->journal()->fd(), F_DUPFD_CLOEXEC, 3))).take();
    options.kept = std::make_shared<KeptMemory>(options.journal, keeper);
    mount->close();
    mount.reset();
    open(options);
    ASSERT_FALSE(HasFatalFailure());
    EXPECT_EQ(look_up("file").nodeid, ino);
    EXPECT_EQ(look_up("without an inode").nodeid, 0U);
    EXPECT_EQ(table->find(ino + 2000), nullptr);
    EXPECT_NE(table->file(fh), nullptr);
  }
  mount->close_handle(fh);
  EXPECT_EQ(table->file(fh), nullptr);
}

TEST_F(SentAgainTest, AChangeRecordsNoOtherPartOfTheInode) {
  const std::uint64_t ino = create("file").as<fuse_entry_out>().nodeid;
  const std::string value(60000, 'v');
  ASSERT_EQ(kernel->call(FUSE_SETXATTR, ino, set_attribute("user.one", value, 0)).error(), 0);
  const std::shared_ptr<Inode> inode = table->find(ino);
  const auto grow = [&] {
    const std::uint64_t size = inode->buffer()->size();
    ASSERT_TRUE(inode->buffer()->write(size, pattern(100, 1)).ok());
    inode->was_written(SetIdLoss::kNone);
  };
  const auto places = [&] {  // of the values, which move when they are written
    std::map<journal::Kind, const std::byte*> found;
    for (const journal::Kind kind : {journal::kInode, journal::kExtended, journal::kContents}) {
      mount->journal()->each(kind, [&](std::uint64_t id, std::span<const std::byte> bytes) {
        if (id == ino) found[kind] = bytes.data();
      });
    }
    return found;
  };
  grow();  // gets memory
  auto before = places();
  ASSERT_EQ(before.size(), 3U);
  grow();
  auto after = places();
  EXPECT_NE(after[journal::kInode], before[journal::kInode]);
  EXPECT_EQ(after[journal::kExtended], before[journal::kExtended]);
  EXPECT_EQ(after[journal::kContents], before[journal::kContents]);
  ASSERT_EQ(kernel->call(FUSE_GETATTR, ino, bytes_of(fuse_getattr_in{})).error(), 0);
  EXPECT_EQ(places(), after);
}

TEST_F(SentAgainTest, ManyFilesAreRestoredByThreads) {
  constexpr std::size_t kFiles = 5000;
  const std::shared_ptr<Inode> root = table->find(gpu);
  for (std::size_t i = 0; i < kFiles; ++i) {
    const NewInode wanted{.mode = S_IFREG | 0600, .uid = static_cast<std::uint32_t>(i % 7)};
    ASSERT_TRUE(mount->names().create(*root, std::to_string(i), wanted, nobody).ok());
  }
  const auto before = table->counts();
  options.journal = journal::Journal::restore(UniqueFd(::fcntl(mount->journal()->fd(), F_DUPFD_CLOEXEC, 3))).take();
  mount->close();
  mount.reset();
  open(options);
  EXPECT_EQ(table->counts().inodes, before.inodes);
  EXPECT_EQ(table->counts().metadata_bytes, before.metadata_bytes);
  EXPECT_EQ(table->file_count(0), kFiles);
  for (std::size_t i = 0; i < kFiles; ++i) {
    const std::shared_ptr<Inode> found = mount->names().find("gpu0/" + std::to_string(i));
    ASSERT_NE(found, nullptr) << i;
    EXPECT_EQ(found->attributes().uid, i % 7);
    EXPECT_EQ(found->attributes().nlink, 1U);
  }
}

// Whatever one record says, all other files stay, each with a name.
TEST_F(SentAgainTest, OneBadRecordOfAnyKindLosesNothingElse) {
  const std::uint64_t ino = create("file").as<fuse_entry_out>().nodeid;
  open_file(ino, O_RDWR);
  const auto directory = kernel->call(FUSE_MKDIR, gpu, with_name(bytes_of(fuse_mkdir_in{0755, 0}), "directory"))
                             .as<fuse_entry_out>()
                             .nodeid;
  fuse_create_in new_file{};
  new_file.flags = O_CREAT | O_RDWR;
  new_file.mode = S_IFREG | 0644;
  ASSERT_EQ(kernel->call(FUSE_CREATE, directory, with_name(bytes_of(new_file), "inner")).error(), 0);
  ASSERT_EQ(kernel->call(FUSE_TMPFILE, gpu, with_name(bytes_of(new_file), "file")).error(), 0);
  ASSERT_EQ(kernel->call(FUSE_SYMLINK, gpu, with_name(with_name({}, "symlink"), "target")).error(), 0);
  ASSERT_EQ(kernel->call(FUSE_OPENDIR, gpu, bytes_of(fuse_open_in{})).error(), 0);
  ASSERT_EQ(kernel->call(FUSE_SETXATTR, ino, set_attribute("user.one", "1", 0)).error(), 0);
  ASSERT_TRUE(table->limit_user(0, 1000, 1 << 30).ok());
  ASSERT_TRUE(mount->names().limit_directory(directory, 1 << 30).ok());
  const std::size_t inodes = table->counts().inodes;
  const auto copy = [this] {
    struct stat status {};
    EXPECT_EQ(::fstat(mount->journal()->fd(), &status), 0);
    std::vector<char> bytes(static_cast<std::size_t>(status.st_size));
    EXPECT_EQ(::pread(mount->journal()->fd(), bytes.data(), bytes.size(), 0), status.st_size);
    UniqueFd fd(::memfd_create("copy", MFD_CLOEXEC));
    EXPECT_EQ(::write(fd.get(), bytes.data(), bytes.size()), status.st_size);
    return std::shared_ptr<journal::Journal>(journal::Journal::restore(std::move(fd)).take());
  };
  std::vector<std::pair<journal::Key, std::size_t>> records;  // and their sizes
  for (std::uint32_t kind = 1; kind < 200; ++kind) {
    mount->journal()->each(kind, [&](std::uint64_t id, std::span<const std::byte> value) {
      records.emplace_back(journal::Key{kind, id}, value.size());
    });
  }
  ASSERT_GT(records.size(), 15U);
  RelayPair ends = make_relay_pair().take();
  const auto keeper = testing::must(KeeperLink::open("/bin/false", "", std::move(ends.native), {}));
  for (const auto& [key, size] : records) {
    for (const int damage : {0x00, 0xff, 0x5a, 0x01, -1, -2}) {  // of all bytes, or half of them or all are missing
      SCOPED_TRACE(std::to_string(key.kind) + " " + std::to_string(key.id) + " " + std::to_string(damage));
      Bytes value(size, static_cast<std::byte>(damage));
      options.journal = copy();
      if (damage < 0) {
        options.journal->each(key.kind, [&](std::uint64_t id, std::span<const std::byte> whole) {
          if (id == key.id) value.assign(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size / 2));
        });
        if (damage == -2) value.clear();
      }
      journal::Transaction change(*options.journal);
      change.put(key, value);
      change.commit();
      options.kept = std::make_shared<KeptMemory>(options.journal, keeper);
      RelayPair device = make_relay_pair().take();
      RelayPair relay = make_relay_pair().take();
      const auto restored =
          testing::must(Mount::create(std::move(device.native), std::move(relay.native), contexts, options));
      Namespace& names = restored->names();
      std::size_t named = 0;
      for (const std::shared_ptr<Inode>& inode : restored->table().all()) {
        const std::optional<std::string> path = names.path_of(*inode);
        if (path && names.find(*path) == inode) ++named;
      }
      EXPECT_GE(named, inodes - 2);  // one has no name
      restored->close();
    }
  }
}

TEST_F(SentAgainTest, AMissingDeviceIsAnError) {
  create("file");
  for (const std::uint64_t ino : {1000, 1001}) {
    InodeRecord elsewhere;
    elsewhere.attributes = file_attributes(ino);
    elsewhere.attributes.device = 5;
    table->records().put_inode(elsewhere);
    table->records().put_contents(ino, KeptContents{});
  }
  options.journal = journal::Journal::restore(UniqueFd(::fcntl(mount->journal()->fd(), F_DUPFD_CLOEXEC, 3))).take();
  mount->close();
  mount.reset();
  RelayPair device = make_relay_pair().take();
  RelayPair relay = make_relay_pair().take();
  const Result<std::shared_ptr<Mount>> created =
      Mount::create(std::move(device.native), std::move(relay.native), contexts, options);
  EXPECT_EQ(created.error(), ENODEV);
  EXPECT_NE(created.status().message().find("gpu5"), std::string::npos);
}

TEST_F(NamesTest, MalformedNames) {
  for (const std::uint32_t opcode : {FUSE_LOOKUP, FUSE_UNLINK, FUSE_RMDIR, FUSE_SYMLINK}) {
    EXPECT_EQ(kernel->call(opcode, gpu, Bytes(4, std::byte{'x'})).error(), EINVAL);
  }
  EXPECT_EQ(kernel->call(FUSE_LOOKUP, gpu, with_name({}, std::string(256, 'x'))).error(), ENAMETOOLONG);
  EXPECT_EQ(kernel->call(FUSE_CREATE, gpu, Bytes(8)).error(), EINVAL);
  EXPECT_EQ(kernel->call(FUSE_RENAME2, gpu, with_name(bytes_of(fuse_rename2_in{gpu, 0, 0}), "one")).error(), EINVAL);
  EXPECT_EQ(kernel->call(FUSE_MKDIR, 1, with_name(bytes_of(fuse_mkdir_in{0755, 0}), "name")).error(), EPERM);
}

TEST_F(NamesTest, ListingsInParts) {
  std::vector<std::string> expected{".", ".."};
  for (int i = 0; i < 50; ++i) {
    expected.push_back("file" + std::string(static_cast<std::size_t>(i), 'x'));
    ASSERT_EQ(create(expected.back()).error(), 0);
  }
  EXPECT_EQ(list(300), expected);
  expected.emplace_back("later");
  EXPECT_EQ(list(4096), expected);
}

TEST_F(NamesTest, ManyThreads) {
  Namespace& names = mount->names();
  const std::shared_ptr<Inode> root = table->find(gpu);
  const std::shared_ptr<Inode> inner = names.create(*root, "inner", {.mode = S_IFDIR | 0755}, nobody).take();
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (unsigned i = 0; i < 500; ++i) {
        const std::string name(1, static_cast<char>('a' + (i * 7 + t) % 5));
        Inode& from = i % 2 == 0 ? *root : *inner;
        Inode& to = i % 3 == 0 ? *root : *inner;
        const auto made = names.create(from, name, {.mode = S_IFREG | 0644}, nobody);
        if (const auto found = names.look_up(root, name); found && found->hold()) {
          static_cast<void>(names.path_of(*found));
          static_cast<void>(names.link(found, to, "link", nobody));
          table->forget(found->ino(), 1);
        }
        static_cast<void>(names.rename(from, name, to, "moved", i % 5 == 0 ? RENAME_EXCHANGE : 0, 0, 0, nobody));
        names.list(*root, 0, UINT64_MAX,
                   [](std::uint64_t, const std::string&, Inode& inode) { return inode.attributes().nlink > 0; });
        static_cast<void>(names.remove(to, i % 4 == 0 ? "link" : name, /*removes_directory=*/false, nobody));
        if (made.ok()) table->forget(made.value()->ino(), 1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (Inode* const directory : {root.get(), inner.get()}) {
    for (const char* const name : {"a", "b", "c", "d", "e", "link", "moved"}) {
      static_cast<void>(names.remove(*directory, name, /*removes_directory=*/false, nobody));
    }
  }
  EXPECT_EQ(table->counts().inodes, 3U);
  EXPECT_EQ(table->file_count(0), 0U);
}

}  // namespace
}  // namespace gpufs::fuse
