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
  Executor executor{Executor::Limits{}};
  Records records{nullptr};
  InodeTable table{contexts, executor, records};
};

TEST_F(InodeTableTest, OrphansAreCountedUntilTheyAreFreed) {
  ASSERT_TRUE(table.add({.attributes = file_attributes(2), .references = 1}).ok());
  write(2, 3 * kGranule);
  EXPECT_EQ(contexts[0]->releases().expected_bytes(), 0U);
  (void)table.set_links(table.find(2), 0);  // the kernel may still hold it
  EXPECT_EQ(contexts[0]->releases().expected_bytes(), 3 * kGranule);
  EXPECT_EQ(contexts[1]->releases().expected_bytes(), 0U);
  EXPECT_EQ(table.counts().orphan_bytes, 3 * kGranule);
  const std::uint64_t fh = table.open(table.find(2), O_RDONLY, nobody).take();  // through /proc/self/fd
  EXPECT_EQ(contexts[0]->releases().expected_bytes(), 0U);
  ASSERT_TRUE(table.release(fh).ok());
  EXPECT_EQ(contexts[0]->releases().expected_bytes(), 3 * kGranule);
  (void)table.set_links(table.find(2), 1);  // linked again
  EXPECT_EQ(contexts[0]->releases().expected_bytes(), 0U);
  (void)table.set_links(table.find(2), 0);

  frees.close();
  ASSERT_TRUE(table.forget(2, 1));  // returns although freeing takes long
  EXPECT_TRUE(frees.await(1));
  EXPECT_EQ(contexts[0]->releases().expected_bytes(), 3 * kGranule);
  const std::uint64_t seen = contexts[0]->releases().count();
  frees.open();
  contexts[0]->releases().wait_for_next(seen, std::chrono::steady_clock::now() + kPatience);
  EXPECT_TRUE(soon([&] { return table.counts().orphans == 0; }));
  EXPECT_EQ(contexts[0]->releases().expected_bytes(), 0U);
  EXPECT_EQ(table.counts().orphans, 0U);
}

TEST_F(InodeTableTest, ARemovedFileThatAProgramHeldIsWaitedFor) {
  const Releases& releases = contexts[0]->releases();
  ASSERT_TRUE(table.add({.attributes = file_attributes(2), .references = 1}).ok());
  write(2, 3 * kGranule);
  ASSERT_TRUE(table.hold(2).ok());
  (void)table.set_links(table.find(2), 0);
  ASSERT_TRUE(table.forget(2, 1));
  EXPECT_TRUE(releases.expected_until());  // the end of the program may have to be noticed yet
  frees.close();
  ASSERT_TRUE(table.release_hold(2));
  EXPECT_TRUE(frees.await(1));
  std::thread opener([&] {
    std::this_thread::sleep_for(50ms);
    frees.open();
  });
  bool enough = false;
  releases.wait_for_expected(std::chrono::steady_clock::now() + kPatience,
                             [&] { return enough = releases.expected_bytes() == 0; });
  EXPECT_TRUE(enough);  // asked after the last release, too
  opener.join();
}

TEST_F(InodeTableTest, TheKernelForgetsItsOwnReferencesAlone) {
  ASSERT_TRUE(table.add({.attributes = file_attributes(2), .references = 2}).ok());
  ASSERT_TRUE(table.hold(2).ok());
  ASSERT_TRUE(table.hold(2).ok());
  (void)table.set_links(table.find(2), 0);
  ASSERT_TRUE(table.forget(2, UINT64_MAX));
  ASSERT_TRUE(table.release_hold(2));
  ASSERT_NE(table.find(2), nullptr);
  ASSERT_TRUE(table.release_hold(2));
  EXPECT_EQ(table.find(2), nullptr);
  EXPECT_FALSE(table.release_hold(2));
  EXPECT_FALSE(table.hold(2).ok());
}

TEST_F(InodeTableTest, ManyThreads) {
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (std::uint64_t i = 0; i < 300; ++i) {
        const std::uint64_t ino = 10 + (i * 7 + t) % 5;  // several threads on one inode
        static_cast<void>(table.add({.attributes = file_attributes(ino)}));
        const std::shared_ptr<Inode> inode = table.find(ino);
        if (!inode) continue;
        const Result<std::uint64_t> fh = table.open(inode, O_RDWR, nobody);
        if (fh.ok()) {
          const std::shared_ptr<OpenFile> file = table.file(fh.value());
          EXPECT_TRUE(file->inode->buffer()->write(std::uint64_t{100} * t, pattern(100, t)).ok());
          file->inode->was_written(SetIdLoss::kExecutable);
          file->inode->was_read(AccessTimes::kRelative);
        }
        static_cast<void>(table.set_links(inode, i % 2 == 0 ? 0 : 1));
        static_cast<void>(table.counts().orphan_bytes);
        if (i % 3 == 0) table.remove_if_unused(inode);
        if (fh.ok()) {
          EXPECT_TRUE(table.release(fh.value()).ok());
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::shared_ptr<Inode>& inode : table.all()) {
    static_cast<void>(table.set_links(inode, 0));
    table.remove_if_unused(inode);
  }
  EXPECT_TRUE(soon([&] { return held() == 0; }));
  EXPECT_EQ(table.counts().files, 0U);
  EXPECT_TRUE(soon([&] { return table.counts().orphan_bytes == 0; }));
}

}  // namespace
}  // namespace gpufs::fuse
