// The journal: what a new process finds in it, also if the old one was killed in the middle of a transaction.
#include "journal/journal.h"
#include "results.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace gpufs::journal {
namespace {

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

std::map<std::uint64_t, std::string> values(const Journal& journal, std::uint32_t kind) {
  std::map<std::uint64_t, std::string> found;
  journal.each(kind, [&](std::uint64_t id, std::span<const std::byte> value) {
    found.emplace(id, std::string(reinterpret_cast<const char*>(value.data()), value.size()));
  });
  return found;
}

std::unique_ptr<Journal> create() { return testing::must(Journal::create()); }

std::unique_ptr<Journal> restored(const Journal& journal) {
  return testing::must(Journal::restore(UniqueFd(::fcntl(journal.fd(), F_DUPFD_CLOEXEC, 3))));
}

void put(Journal& journal, Key key, const std::string& text) {
  Transaction transaction(journal);
  transaction.put(key, bytes_of(text));
  transaction.commit();
}

using Values = std::map<std::uint64_t, std::string>;

// No file, nor a memfd, becomes larger.
class FileLimit {
 public:
  FileLimit() {
    ::signal(SIGXFSZ, SIG_IGN);
    EXPECT_EQ(::getrlimit(RLIMIT_FSIZE, &before_), 0);
    const rlimit none{0, before_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &none), 0);
  }
  ~FileLimit() {
    EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &before_), 0);
    ::signal(SIGXFSZ, SIG_DFL);
  }

 private:
  rlimit before_{};
};

TEST(Journal, RestoresValues) {
  const auto journal = create();
  put(*journal, {1, 7}, "seven");
  put(*journal, {1, 8}, "");
  put(*journal, {2, 7}, std::string(3000, 'x'));
  put(*journal, {1, 7}, "seven again, and longer than a hundred and twenty-eight bytes: " + std::string(200, '7'));
  {
    Transaction transaction(*journal);
    transaction.remove({1, 8});
    transaction.put({1, 9}, bytes_of("nine"));
    transaction.put({1, 9}, bytes_of("nine at last"));
    transaction.remove({1, 10});
    transaction.commit();
  }
  const Values expected = values(*journal, 1);
  EXPECT_EQ(expected.size(), 2U);
  EXPECT_EQ(expected.at(9), "nine at last");
  const auto second = restored(*journal);
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(values(*second, 1), expected);
  EXPECT_EQ(values(*second, 2).at(7), std::string(3000, 'x'));
  EXPECT_EQ(second->bytes(), journal->bytes());
}

TEST(Journal, ForgetsWhatWasNotCommitted) {
  const auto journal = create();
  put(*journal, {1, 1}, "old");
  const std::uint64_t used = journal->bytes();
  {
    Transaction transaction(*journal);
    transaction.put({1, 1}, bytes_of("new"));
    transaction.put({1, 2}, bytes_of("more"));
    EXPECT_EQ(values(*restored(*journal), 1), (Values{{1, "old"}}));
  }
  EXPECT_EQ(values(*journal, 1), (Values{{1, "old"}}));
  EXPECT_EQ(journal->bytes(), used);
}

TEST(Journal, TheLatestChangeCountsInWhateverOrderTheyAreCommitted) {
  const auto journal = create();
  Transaction early(*journal);
  early.put({1, 1}, bytes_of("early"));
  early.put({1, 2}, bytes_of("early"));
  put(*journal, {1, 1}, "late");
  {
    Transaction removal(*journal);
    removal.remove({1, 2});
    removal.commit();
  }
  early.commit();
  EXPECT_EQ(values(*journal, 1), (Values{{1, "late"}}));
  EXPECT_EQ(values(*restored(*journal), 1), (Values{{1, "late"}}));
}

TEST(Journal, ReusesSpace) {
  const auto journal = create();
  for (int i = 0; i < 100000; ++i) put(*journal, {1, static_cast<std::uint64_t>(i % 10)}, std::string(100, 'x'));
  EXPECT_LE(journal->bytes(), 10 * 256U);
  EXPECT_LE(::lseek(journal->fd(), 0, SEEK_END), 2 << 20);
}

// Memory of the file, in bytes.
std::int64_t held_by(const Journal& journal) {
  struct stat status {};
  EXPECT_EQ(::fstat(journal.fd(), &status), 0);
  return status.st_blocks * 512;
}

TEST(Journal, ReturnsTheMemoryOfEachSize) {
  const auto journal = create();
  for (std::size_t bytes = 64; bytes <= (std::size_t{4} << 20); bytes *= 2) {
    const std::uint64_t count = (std::size_t{16} << 20) / bytes;
    for (std::uint64_t id = 0; id < count; ++id) put(*journal, {1, id}, std::string(bytes, 'x'));
    Transaction change(*journal);
    for (std::uint64_t id = 0; id < count; ++id) change.remove({1, id});
    change.commit();
    EXPECT_LE(held_by(*journal), 8 << 20) << bytes;
  }
  EXPECT_EQ(journal->bytes(), 0U);
  EXPECT_LE(held_by(*restored(*journal)), 8 << 20);
}

TEST(Journal, ValuesOfSparseSegmentsMoveTogether) {
  auto journal = create();
  Values model;
  std::uint64_t last = 0;
  for (const std::size_t bytes : {60, 400, 3000, 30000}) {
    const std::uint64_t count = (std::size_t{16} << 20) / bytes;
    for (std::uint64_t id = 0; id < count; ++id) put(*journal, {1, last + id}, std::string(bytes, 'x'));
    // Of those that lie together only few stay.
    for (std::uint64_t id = 0; id < count; ++id) {
      if (id % 50 == 0) {
        model[last + id] = std::string(bytes, static_cast<char>('a' + id % 26));
        put(*journal, {1, last + id}, model[last + id]);
        continue;
      }
      Transaction change(*journal);
      change.remove({1, last + id});
      change.commit();
    }
    last += count;
  }
  EXPECT_LE(held_by(*journal), static_cast<std::int64_t>(journal->bytes() * 3 / 2) + (8 << 20));
  EXPECT_EQ(values(*journal, 1), model);
  journal = restored(*journal);
  EXPECT_EQ(values(*journal, 1), model);
  put(*journal, {1, last}, std::string(std::size_t{3} << 20, 'y'));  // where smaller ones were
  model[last] = std::string(std::size_t{3} << 20, 'y');
  EXPECT_EQ(values(*restored(*journal), 1), model);
}

TEST(Journal, RefusesOthers) {
  UniqueFd other(::memfd_create("other", MFD_CLOEXEC));
  EXPECT_EQ(Journal::restore(UniqueFd(::dup(other.get()))).error(), EPROTO);
  ASSERT_EQ(::ftruncate(other.get(), 8192), 0);
  EXPECT_EQ(Journal::restore(UniqueFd(::dup(other.get()))).error(), EPROTO);
  const auto journal = create();
  const std::uint32_t version = 99;
  ASSERT_EQ(::pwrite(journal->fd(), &version, sizeof version, 8), 4);
  const Result<std::unique_ptr<Journal>> newer = Journal::restore(UniqueFd(::dup(journal->fd())));
  EXPECT_EQ(newer.error(), EPROTO);
  EXPECT_NE(newer.status().message().find("99"), std::string::npos);
}

TEST(Journal, HasTheStateAfterARandomHistory) {
  auto journal = create();
  std::map<std::uint32_t, Values> model{{1, {}}, {2, {}}};
  std::mt19937 random(1);
  for (int operation = 1; operation <= 100000; ++operation) {
    const std::uint32_t kind = 1 + random() % 2;
    const std::uint64_t id = random() % 500;
    Transaction change(*journal);
    if (random() % 3 == 0) {
      change.remove({kind, id});
      model[kind].erase(id);
    } else {
      const std::string text(random() % 20 == 0 ? random() % 20000 : random() % 300, static_cast<char>(random() % 128));
      change.put({kind, id}, bytes_of(text));
      model[kind][id] = text;
    }
    change.commit();
    if (operation % 5000 != 0) continue;
    journal = restored(*journal);
    ASSERT_NE(journal, nullptr);
    for (const auto& [each, expected] : model) ASSERT_EQ(values(*journal, each), expected) << operation;
  }
}

TEST(Journal, RefusesDamage) {
  const auto journal = create();
  for (std::uint64_t id = 0; id < 300; ++id) put(*journal, {1, id}, std::string(id * 5, 'x'));
  std::vector<char> whole(static_cast<std::size_t>(::lseek(journal->fd(), 0, SEEK_END)));
  ASSERT_EQ(::pread(journal->fd(), whole.data(), whole.size(), 0), static_cast<ssize_t>(whole.size()));
  const auto restore = [](const std::vector<char>& text) {
    UniqueFd copy(::memfd_create("copy", MFD_CLOEXEC));
    EXPECT_EQ(::pwrite(copy.get(), text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
    return Journal::restore(std::move(copy));
  };
  EXPECT_TRUE(restore(whole).ok());
  const std::size_t used = journal->bytes();
  for (const std::size_t left : {std::size_t{0}, std::size_t{10}, std::size_t{4096}, used / 2}) {
    EXPECT_EQ(restore(std::vector<char>(whole.begin(), whole.begin() + static_cast<long>(left))).error(), EPROTO);
  }
  std::mt19937 random(1);
  int refused = 0;
  for (std::size_t at = 0; at < used / 2; at += 8 + 8 * (random() % 100)) {  // headers of blocks, and values
    std::vector<char> damaged = whole;
    const auto word = at % 3 == 0 ? std::uint64_t{random()} << 32 | random() : random() % 300;
    std::memcpy(&damaged[at], &word, sizeof word);
    const Result<std::unique_ptr<Journal>> found = restore(damaged);
    if (found.ok()) {
      EXPECT_LE(values(*found.value(), 1).size(), 300U);  // damage within a value is not seen
    } else {
      EXPECT_TRUE(found.error() == EPROTO || found.error() == ENOTRECOVERABLE) << found.status().message();
      ++refused;
    }
  }
  EXPECT_GT(refused, 0);
}

TEST(Journal, CannotBeRestoredWhileAValueIsMissing) {
  const auto journal = create();
  put(*journal, {1, 1}, std::string(Journal::kMaximumBytes, 'x'));
  EXPECT_TRUE(journal->health().ok());
  put(*journal, {1, 1}, std::string(Journal::kMaximumBytes + 1, 'x'));
  EXPECT_EQ(journal->health().error(), EFBIG);
  EXPECT_EQ(Journal::restore(UniqueFd(::dup(journal->fd()))).error(), ENOTRECOVERABLE);
  put(*journal, {1, 1}, "x");
  EXPECT_OK(journal->health());
  EXPECT_EQ(values(*restored(*journal), 1), (Values{{1, "x"}}));
}

TEST(Journal, IsCompleteOnceThereIsMemoryAgain) {
  const auto journal = create();
  put(*journal, {1, 1}, "before");
  {
    const FileLimit none;
    for (std::uint64_t id = 1; id < 5; ++id) put(*journal, {1, id}, std::string(100'000 * id, 'x'));
    put(*journal, {1, 3}, "small");
    Transaction transaction(*journal);
    transaction.remove({1, 4});
    transaction.commit();
    EXPECT_EQ(journal->health().error(), ENOMEM);
    EXPECT_EQ(Journal::restore(UniqueFd(::dup(journal->fd()))).error(), ENOTRECOVERABLE);
  }
  EXPECT_OK(journal->health());
  const Values expected = {{1, std::string(100'000, 'x')}, {2, std::string(200'000, 'x')}, {3, "small"}};
  EXPECT_EQ(values(*journal, 1), expected);
  EXPECT_EQ(values(*restored(*journal), 1), expected);
}

// Threads of a child change values in pairs, until the child is killed. Each writes a byte to `began` after its first.
[[noreturn]] void change_for_ever(int fd, unsigned seed, int began) {
  Result<std::unique_ptr<Journal>> journal = Journal::restore(UniqueFd(::dup(fd)));
  if (!journal.ok()) ::_exit(1);
  std::vector<std::thread> threads;
  for (std::uint64_t of = 0; of < 3; ++of) {
    threads.emplace_back([&, of] {
      std::mt19937 random(seed * 3 + static_cast<unsigned>(of));
      for (bool first = true;; first = false) {
        const std::uint64_t id = of * 1000 + random() % 1000;
        // In some rounds most are removed, and the others move together.
        const std::string text(random() % (seed % 3 == 0 ? 80 : 700), static_cast<char>('a' + random() % 26));
        Transaction transaction(*journal.value());
        for (const std::uint32_t kind : {1U, 2U}) {
          text.size() < 70 ? transaction.remove({kind, id}) : transaction.put({kind, id}, bytes_of(text));
        }
        transaction.commit();
        if (first && ::write(began, "", 1) != 1) ::_exit(1);
      }
    });
  }
  for (;;) ::pause();
}

TEST(Journal, TransactionsAreWholeWhereverTheProcessIsKilled) {
  const auto journal = create();
  std::mt19937 random(1);
  unsigned with_values = 0;  // rounds after which there were some
  for (unsigned round = 0; round < 100; ++round) {
    int began[2];
    ASSERT_EQ(::pipe2(began, O_CLOEXEC), 0);
    const UniqueFd reader(began[0]);
    UniqueFd writer(began[1]);
    const pid_t child = ::fork();
    if (child == 0) change_for_ever(journal->fd(), round, writer.get());
    writer.reset();
    char byte = 0;
    ASSERT_EQ(::read(reader.get(), &byte, 1), 1);
    ::usleep(static_cast<useconds_t>(random() % 4000));
    ::kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status));
    const auto after = restored(*journal);
    ASSERT_NE(after, nullptr);
    const auto found = values(*after, 1);
    ASSERT_EQ(found, values(*after, 2)) << "round " << round;
    for (const auto& [id, text] : found) ASSERT_EQ(text, std::string(text.size(), text.front()));
    if (!found.empty()) ++with_values;
  }
  EXPECT_GT(with_values, 0U);
}

}  // namespace
}  // namespace gpufs::journal
