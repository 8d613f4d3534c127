// The inode table: attributes, open files, and the memory of removed files.

#include <gtest/gtest.h>

#include "fuse_fakes.h"

namespace gpufs::fuse {
namespace {

class InodeTableTest : public DevicesTest {
 protected:
  void TearDown() override {
    frees.open();
    executor.stop(0ms);
  }

  void write(std::uint64_t ino, std::size_t bytes) {
    ASSERT_TRUE(table.find(ino)->buffer()->write(0, pattern(bytes, 1)).ok());
  }
  void set_links(std::uint64_t ino, std::uint32_t links) {
    gpufs_attributes attributes{};
    attributes.nlink = links;
    ASSERT_TRUE(table.set(ino, kSetNlink, &attributes).ok());
  }

  Executor executor{Executor::Limits{}};
  InodeTable table{source, executor};
};

TEST_F(InodeTableTest, AFailedSizeChangesNothing) {
  ASSERT_TRUE(table.add(file_attributes(2)).ok());
  gpufs_attributes attributes{};
  attributes.size = Buffer::kMaximumBytes + 1;
  attributes.mode = 0;
  EXPECT_EQ(table.set(2, kSetSize | kSetMode, &attributes).error(), EFBIG);
  EXPECT_EQ(table.find(2)->attributes().mode, S_IFREG | 0644U);
}

TEST_F(InodeTableTest, AnUnlinkedOpenFileLivesUntilItIsClosed) {
  ASSERT_TRUE(table.add(file_attributes(2)).ok());
  write(2, 1000);
  const std::uint64_t fh = table.open(2, O_RDONLY).take();
  set_links(2, 0);
  EXPECT_EQ(table.orphan_bytes(0), 0U);
  ASSERT_TRUE(table.remove(2).ok());
  EXPECT_EQ(table.find(2), nullptr);
  EXPECT_EQ(table.file(fh)->inode->attributes().size, 1000U);
  ASSERT_TRUE(table.release(fh).ok());
  EXPECT_TRUE(eventually([&] { return held() == 0; }));
  EXPECT_TRUE(eventually([&] { return table.orphan_bytes(-1) == 0; }));
}

TEST_F(InodeTableTest, MemoryIsChargedToTheOwner) {
  const auto used = [&](std::uint32_t uid) {
    JsonWriter json;
    table.quotas().write(json);
    const std::string text = json.finish();
    const std::string key = "\"0:" + std::to_string(uid) + "\": {\"used_bytes\": ";
    const std::size_t at = text.find(key);
    return at == std::string::npos ? 0 : std::stoull(text.substr(at + key.size()));
  };
  gpufs_attributes attributes = file_attributes(2);
  attributes.uid = 1000;
  ASSERT_TRUE(table.add(attributes).ok());
  write(2, 3 * kGranule);
  EXPECT_EQ(used(1000), 3 * kGranule);
  ASSERT_TRUE(table.limit_user(0, 1001, kGranule).ok());
  attributes.uid = 1001;
  ASSERT_TRUE(table.set(2, kSetUid, &attributes).ok());
  EXPECT_EQ(used(1000), 0U);
  EXPECT_EQ(used(1001), 3 * kGranule);
  EXPECT_EQ(table.find(2)->buffer()->write(3 * kGranule, pattern(1, 1)).error(), EDQUOT);
  ASSERT_TRUE(table.limit_user(0, 1001, std::nullopt).ok());
  EXPECT_TRUE(table.find(2)->buffer()->write(3 * kGranule, pattern(1, 1)).ok());
  ASSERT_TRUE(table.remove(2).ok());
  EXPECT_TRUE(eventually([&] { return used(1001) == 0; }));
}

TEST_F(InodeTableTest, DirectoriesPassTheirAccountOn) {
  ASSERT_TRUE(table.add(file_attributes(2, S_IFDIR | 0755)).ok());
  ASSERT_TRUE(table.add(file_attributes(3), 2).ok());
  write(3, kGranule);
  EXPECT_EQ(table.limit_directory(9, 0).error(), ENOENT);
  ASSERT_TRUE(table.limit_directory(2, 3 * kGranule).ok());
  const std::shared_ptr<Account> account = table.find(2)->directory_account();
  EXPECT_EQ(account->used(), 0U);
  ASSERT_TRUE(table.charge_to(3, account).ok());
  ASSERT_TRUE(table.add(file_attributes(4, S_IFDIR | 0755), 2).ok());
  ASSERT_TRUE(table.add(file_attributes(5), 4).ok());
  write(5, kGranule);
  EXPECT_EQ(account->used(), 2 * kGranule);
  EXPECT_EQ(table.find(5)->buffer()->write(0, pattern(3 * kGranule, 1)).error(), EDQUOT);
  ASSERT_TRUE(table.charge_to(5, nullptr).ok());
  EXPECT_EQ(account->used(), kGranule);
  ASSERT_TRUE(table.limit_directory(2, std::nullopt).ok());
  EXPECT_EQ(table.find(2)->directory_account(), nullptr);
}

TEST_F(InodeTableTest, OrphansAreCountedUntilTheyAreFreed) {
  ASSERT_TRUE(table.add(file_attributes(2)).ok());
  write(2, 3 * kGranule);
  EXPECT_EQ(table.orphan_bytes(0), 0U);
  set_links(2, 0);  // the kernel may still hold it
  EXPECT_EQ(table.orphan_bytes(0), 3 * kGranule);
  EXPECT_EQ(table.orphan_bytes(1), 0U);
  EXPECT_EQ(table.orphan_bytes(-1), 3 * kGranule);
  const std::uint64_t fh = table.open(2, O_RDONLY).take();  // through /proc/self/fd
  EXPECT_EQ(table.orphan_bytes(0), 0U);
  ASSERT_TRUE(table.release(fh).ok());
  EXPECT_EQ(table.orphan_bytes(0), 3 * kGranule);
  set_links(2, 1);  // linked again
  EXPECT_EQ(table.orphan_bytes(0), 0U);
  set_links(2, 0);

  frees.close();
  ASSERT_TRUE(table.remove(2).ok());  // returns although freeing takes long
  EXPECT_TRUE(frees.wait_for_visitors(1));
  EXPECT_EQ(table.orphan_bytes(0), 3 * kGranule);
  const std::uint64_t noted = executor.freed_count();
  frees.open();
  EXPECT_TRUE(eventually([&] { return executor.freed_count() == noted + 1; }));
  EXPECT_EQ(table.orphan_bytes(0), 0U);
  EXPECT_EQ(table.counts().orphans, 0U);
}

TEST_F(InodeTableTest, ManyThreads) {
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (std::uint64_t i = 0; i < 300; ++i) {
        const std::uint64_t ino = 10 + (i * 7 + t) % 5;  // several threads on one inode
        static_cast<void>(table.add(file_attributes(ino)));
        Result<std::uint64_t> fh = table.open(ino, O_RDWR);
        if (fh.ok()) {
          const std::shared_ptr<OpenFile> file = table.file(fh.value());
          EXPECT_TRUE(file->inode->buffer()->write(std::uint64_t{100} * t, pattern(100, t)).ok());
          file->inode->was_written(SetIdLoss::kExecutable);
          file->inode->was_read(AccessTimes::kRelative);
        }
        gpufs_attributes attributes{};
        attributes.nlink = i % 2 == 0 ? 0 : 1;
        static_cast<void>(table.set(ino, kSetNlink, &attributes));
        static_cast<void>(table.orphan_bytes(-1));
        if (i % 3 == 0) static_cast<void>(table.remove(ino));
        if (fh.ok()) {
          EXPECT_TRUE(table.release(fh.value()).ok());
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::uint64_t ino = 10; ino < 15; ++ino) static_cast<void>(table.remove(ino));
  EXPECT_TRUE(eventually([&] { return held() == 0; }));
  EXPECT_EQ(table.counts().files, 0U);
  EXPECT_TRUE(eventually([&] { return table.orphan_bytes(-1) == 0; }));
}

}  // namespace
}  // namespace gpufs::fuse
