//===- FilesTest.cpp - files that are there whole or not at all -----------===//
#include "fsdp/Runtime/Files/Files.h"
#include "Support/Fixtures.h"
#include "fsdp/Runtime/Error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <functional>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

namespace fsdp::test {
namespace {

using namespace runtime;
using testing::HasSubstr;
namespace fs = std::filesystem;

class Files : public testing::Test {
protected:
  size_t entries() const {
    return size_t(std::distance(fs::directory_iterator(dir / ""),
                                fs::directory_iterator()));
  }

  /// The message of what `run` throws while files may have `bytes` at most.
  template <typename Error>
  std::string limited(rlim_t bytes, const std::function<void()> &run) {
    rlimit before{};
    getrlimit(RLIMIT_FSIZE, &before);
    rlimit limit{bytes, before.rlim_max};
    auto handler = std::signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    std::string message = "no error";
    try {
      run();
    } catch (const Error &error) {
      message = error.what();
    }
    setrlimit(RLIMIT_FSIZE, &before);
    std::signal(SIGXFSZ, handler);
    return message;
  }

  ScratchDir dir;
};

TEST_F(Files, OutputIsThereAfterTheCommit) {
  for (const char *before : {"", "old"}) {
    if (*before)
      writeText(dir / "f", before);
    {
      OutputFile file(dir / "f");
      file.write("one");
      file.write(" two");
      EXPECT_EQ(fs::exists(dir / "f"), *before != 0);
      file.commit();
    }
    EXPECT_EQ(readText(dir / "f"), "one two");
    EXPECT_EQ(entries(), 1u);
  }
}

TEST_F(Files, OutputWithoutCommitLeavesNothing) {
  writeText(dir / "f", "old");
  {
    OutputFile(dir / "f").write("new");
  }
  {
    OutputFile(dir / "g").write("new");
  }
  EXPECT_EQ(readText(dir / "f"), "old");
  EXPECT_EQ(entries(), 1u);
}

TEST_F(Files, ADeathBeforeTheCommitLeavesNothing) {
  writeText(dir / "f", "old");
  for (int signal : {SIGTERM, SIGKILL}) {
    pid_t child = fork();
    if (child == 0) {
      OutputFile file(dir / "f");
      file.write(std::string(1 << 20, 'x'));
      raise(signal);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == signal);
    EXPECT_EQ(readText(dir / "f"), "old");
    EXPECT_EQ(entries(), 1u);
  }
}

TEST_F(Files, OutputIsRefusedAtTheBeginning) {
  fs::create_directory(dir / "sub");
  for (const char *path : {"none/f", "sub"})
    EXPECT_THROW(OutputFile(dir / path), InputError) << path;
  EXPECT_THROW(OutputFile("/dev/null"), InputError);
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
}

TEST_F(Files, LinksAreReplaced) {
  writeText(dir / "target", "mine");
  fs::create_symlink(dir / "target", dir / "output");
  fs::create_symlink(dir / "target", dir / "lines");
  fs::create_symlink(dir / "absent", dir / "dangling");
  OutputFile output(dir / "output");
  output.write("new");
  output.commit();
  LineFile(dir / "lines").append("{}\n");
  LineFile(dir / "dangling").append("{}\n");
  EXPECT_EQ(readText(dir / "target"), "mine");
  EXPECT_FALSE(fs::exists(dir / "absent"));
  EXPECT_EQ(readText(dir / "output"), "new");
  EXPECT_EQ(readText(dir / "lines"), "{}\n");
  EXPECT_FALSE(fs::is_symlink(dir / "lines"));
  // What is no file has nothing to lose.
  fs::create_symlink("/dev/null", dir / "null");
  LineFile(dir / "null").append("{}\n");
  EXPECT_TRUE(fs::is_symlink(dir / "null"));
}

TEST_F(Files, FileThatCannotGrowKeepsWholeLines) {
  LineFile lines(dir / "lines");
  lines.append("0123456789\n");
  EXPECT_THAT(limited<RunError>(16, [&] { lines.append("0123456789\n"); }),
              HasSubstr("lines: cannot write: File too large"));
  EXPECT_EQ(readText(dir / "lines"), "0123456789\n");
  writeText(dir / "f", "old");
  EXPECT_THAT(limited<RunError>(16,
                                [&] {
                                  OutputFile file(dir / "f");
                                  file.write(std::string(100, 'x'));
                                }),
              HasSubstr("f: cannot write: File too large"));
  EXPECT_EQ(readText(dir / "f"), "old");
  EXPECT_EQ(entries(), 2u);
}

} // namespace
} // namespace fsdp::test
