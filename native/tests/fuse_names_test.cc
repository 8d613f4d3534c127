// Requests about names, and the references that the kernel gets.

#include <gtest/gtest.h>

#include "fuse_fakes.h"

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
  EXPECT_EQ(open.open_flags, kOpenDirectIo | kOpenParallelDirectWrites | kOpenNoFlush);
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
  EXPECT_TRUE(eventually([&] { return table->find(entry.nodeid) == nullptr; }));
  EXPECT_FALSE(control->receive(kQuiet));
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
  const std::shared_ptr<Inode> inner = names.create(*root, "inner", {.mode = S_IFDIR | 0755}).take();
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (unsigned i = 0; i < 500; ++i) {
        const std::string name(1, static_cast<char>('a' + (i * 7 + t) % 5));
        Inode& from = i % 2 == 0 ? *root : *inner;
        Inode& to = i % 3 == 0 ? *root : *inner;
        const auto made = names.create(from, name, {.mode = S_IFREG | 0644});
        if (const auto found = names.look_up(root, name); found && found->hold()) {
          static_cast<void>(names.path_of(*found));
          static_cast<void>(names.link(found, to, "link"));
          table->forget(found->ino(), 1);
        }
        static_cast<void>(names.rename(from, name, to, "moved", i % 5 == 0 ? RENAME_EXCHANGE : 0, 0, 0));
        names.list(*root, 0, UINT64_MAX,
                   [](std::uint64_t, const std::string&, Inode& inode) { return inode.attributes().nlink > 0; });
        static_cast<void>(names.unlink(to, i % 4 == 0 ? "link" : name));
        if (made.ok()) table->forget(made.value()->ino(), 1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (Inode* const directory : {root.get(), inner.get()}) {
    for (const char* const name : {"a", "b", "c", "d", "e", "link", "moved"}) {
      static_cast<void>(names.unlink(*directory, name));
    }
  }
  EXPECT_EQ(table->counts().inodes, 3U);
  EXPECT_EQ(table->file_count(0), 0U);
}

}  // namespace
}  // namespace gpufs::fuse
