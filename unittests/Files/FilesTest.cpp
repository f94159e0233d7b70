//===- FilesTest.cpp - whole files, read and written ----------------------===//
#include "fsdp/Support/Files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

namespace fsdp::test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::UnorderedElementsAre;

class FilesTest : public testing::Test {
protected:
  FilesTest() {
    std::string name = testing::TempDir() + "fsdp-files-XXXXXX";
    dir = mkdtemp(name.data());
  }
  ~FilesTest() override { fs::remove_all(dir); }

  std::string path(const char *name) const { return dir / name; }
  std::string content(const char *name) const {
    std::ifstream file(dir / name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  std::vector<std::string> names() const {
    std::vector<std::string> result;
    for (const auto &entry : fs::directory_iterator(dir))
      result.push_back(entry.path().filename());
    return result;
  }
  std::string errorOfRead(const std::string &file, uint64_t most = 100) {
    std::string text;
    return readFile(file, most, text, /*waitSeconds=*/0);
  }

  fs::path dir;
};

TEST_F(FilesTest, ReadsWhatWasWritten) {
  std::string bytes("a\0\xff\n", 4), text = "what was there";
  ASSERT_EQ(writeFile(path("f"), bytes), "");
  ASSERT_EQ(readFile(path("f"), 4, text), "");
  EXPECT_EQ(text, bytes);
}

TEST_F(FilesTest, SaysWhyItCannotRead) {
  EXPECT_EQ(errorOfRead(path("none")),
            "cannot be read: No such file or directory");
  EXPECT_EQ(errorOfRead(dir), "cannot be read: Is a directory");
  ASSERT_EQ(writeFile(path("f"), "12345"), "");
  EXPECT_EQ(errorOfRead(path("f"), 4), "expected at most 4 bytes, got more");
  EXPECT_EQ(errorOfRead("/dev/zero"), "expected at most 100 bytes, got more");
  EXPECT_EQ(errorOfRead("/dev/null"), "");
}

TEST_F(FilesTest, ReadsAPipeThatSomebodyWritesTo) {
  std::string name = path("pipe"), text;
  ASSERT_EQ(mkfifo(name.c_str(), 0600), 0);
  std::thread writer([&] {
    std::ofstream pipe(name);
    pipe << std::string(200000, 'x');
  });
  std::string error = readFile(name, 1 << 20, text, /*waitSeconds=*/60);
  writer.join();
  EXPECT_EQ(error, "");
  EXPECT_EQ(text, std::string(200000, 'x'));
}

TEST_F(FilesTest, DoesNotWaitForAWriterForEver) {
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  EXPECT_EQ(errorOfRead(path("pipe")),
            "cannot be read: a pipe that nobody writes to");
}

TEST_F(FilesTest, KeepsTheOldFileWhenTheDiskIsFull) {
  ASSERT_EQ(writeFile(path("f"), "old"), "");
  // A limit on the size of files does what a full disk does.
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  auto *handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit small{1000, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  std::string error = writeFile(path("f"), std::string(2000, 'x'));
  std::string other = writeFile(path("g"), std::string(2000, 'x'));
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(error, "cannot be written: File too large");
  EXPECT_EQ(other, error);
  EXPECT_EQ(content("f"), "old");
  EXPECT_THAT(names(), UnorderedElementsAre("f"));
}

TEST_F(FilesTest, SaysWhyItCannotWrite) {
  EXPECT_EQ(writeFile(path("none/f"), ""),
            "cannot be written: No such file or directory");
  EXPECT_EQ(writeFile(dir, ""), "cannot be written: Is a directory");
  EXPECT_EQ(writeFile("/dev/full", "text"),
            "cannot be written: No space left on device");
}

TEST_F(FilesTest, WritesThroughALinkAndKeepsTheMode) {
  ASSERT_EQ(writeFile(path("f"), "old"), "");
  fs::permissions(path("f"), fs::perms::owner_read | fs::perms::owner_write);
  fs::create_symlink("f", path("link"));
  ASSERT_EQ(writeFile(path("link"), "new"), "");
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_EQ(content("f"), "new");
  EXPECT_EQ(fs::status(path("f")).permissions(),
            fs::perms::owner_read | fs::perms::owner_write);
}

TEST_F(FilesTest, WritesToAnOpenFileInPlace) {
  std::ofstream open(path("f"));
  int file = ::open(path("f").c_str(), O_RDWR);
  ASSERT_EQ(writeFile("/proc/self/fd/" + std::to_string(file), "text"), "");
  std::array<char, 4> bytes{};
  EXPECT_EQ(pread(file, bytes.data(), 4, 0), 4);
  EXPECT_EQ(std::string(bytes.data(), 4), "text");
  close(file);
}

} // namespace
} // namespace fsdp::test
